// Brings the timelines of a page to life: the explorer's own scripts, with the data that the page contains in place of a kernel.

/** Answers each query with the saved data of the whole run. */
class SavedModel {
  constructor({ about, header, buffers }) {
    this.about = about;
    this.header = header;
    this.buffers = buffers;
    this.answered = null;
  }

  get() {
    return this.about;
  }

  on(_, answered) {
    this.answered = answered;
  }

  off() {
    this.answered = null;
  }

  send(query) {
    queueMicrotask(() => this.answered?.({ ...query, ...this.header }, this.buffers));
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

async function revive(place) {
  const saved = JSON.parse(place.querySelector("script").textContent);
  const buffers = await Promise.all(saved.buffers.map(unpacked));
  const holder = document.createElement("div");
  labkitExplorer.render({ model: new SavedModel({ ...saved, buffers }), el: holder });
  place.querySelector("img").replaceWith(holder);
}

for (const place of document.querySelectorAll(".labkit-explorable")) revive(place);
