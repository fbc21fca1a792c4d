// The explorer: a picture whose view can be changed, and which asks the kernel for what it lacks then.

const SHORTEST_NS = 100; // of what is shown
const REST_MS = 60; // a view that has not changed for so long is worth asking for
const PATIENCE_MS = 1500; // then the page says that the kernel is busy, and no longer waits before it asks again

class Explorer extends Picture {
  /** `host` gets the picture once there is something in it; `arrived` is called then. */
  constructor(model, host, arrived = () => {}) {
    super(host, model.get("about"));
    this.model = model;
    this.arrived = arrived;
    this.questions = new Map(); // by a number of their own: whether about the whole, and which rank was alone
    this.asking = false;
    this.hands = new Hands(this);
    this.onAnswer = (said, buffers) => this.answer(said, buffers);
    model.on("msg:custom", this.onAnswer);
    this.sizes = new ResizeObserver(() => this.redraw());
    this.sizes.observe(this.plot);
    this.listeners = new AbortController();
    this.watchTheme();
    this.ask(true);
  }

  remove() {
    this.model.off("msg:custom", this.onAnswer);
    this.hands.remove();
    this.sizes.disconnect();
    this.themes.disconnect();
    this.listeners.abort();
    clearTimeout(this.later);
    clearTimeout(this.patience);
    this.root.remove();
  }

  /** The canvas has the theme's ink. A theme comes as style sheets that are loaded and removed, and as attributes, in any order. */
  watchTheme() {
    const look = () => this.base && getComputedStyle(this.root).color != this.ink && this.draw();
    const soon = () => requestAnimationFrame(look);
    this.themes = new MutationObserver(soon);
    const attributes = ["class", "data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-id"];
    this.themes.observe(document.body, { attributeFilter: attributes });
    this.themes.observe(document.head, { childList: true });
    document.addEventListener("load", soon, { capture: true, signal: this.listeners.signal });
  }

  // What is looked at

  look(start, end) {
    const length = Math.min(Math.max(end - start, SHORTEST_NS), this.about.duration);
    const from = Math.min(Math.max((start + end - length) / 2, 0), this.about.duration - length);
    this.view = { start: from, end: from + length };
    this.changed();
  }

  zoom(factor, at = (this.view.start + this.view.end) / 2) {
    const { start, end } = this.view;
    const length = Math.min(Math.max((end - start) * factor, SHORTEST_NS), this.about.duration);
    const share = (at - start) / (end - start);
    this.look(at - share * length, at + (1 - share) * length);
  }

  move(share) {
    const by = share * (this.view.end - this.view.start);
    this.look(this.view.start + by, this.view.end + by);
  }

  isolate(rank) {
    this.alone = rank;
    this.fine = null;
    this.changed();
  }

  changed() {
    this.hands.forget();
    this.redraw();
  }

  redraw() {
    this.place();
    this.draw();
    this.refine();
    this.hands.again();
  }

  // Questions and answers

  /** Ask for what the picture lacks, once the view has come to rest. */
  refine() {
    clearTimeout(this.later);
    if (this.lacks() && !this.asking) this.later = setTimeout(() => this.ask(false), REST_MS);
  }

  lacks() {
    const good = (layer) => layer && layer.start <= this.view.start && layer.end >= this.view.end &&
      (layer.complete || layer.columnNs <= 1.1 * this.nsPerPixel);
    return this.base && !this.base.complete && !good(this.base) && !good(this.fine);
  }

  ask(whole) {
    const { start, end } = whole ? this.whole : this.view;
    const margin = whole ? 0 : (end - start) / 2; // a little more, so that moving on needs no answer
    const pixels = Math.max(this.width, 100) * Math.min(window.devicePixelRatio || 1, 2);
    const asked = `${Math.random()}`; // other pages of the same kernel get the answer as well
    this.questions.set(asked, { whole, rank: this.alone });
    const [rank, columns] = [whole ? null : this.alone, Math.round(pixels * (whole ? 1 : 2))];
    this.model.send({ asked, start: start - margin, end: end + margin, rank, columns });
    this.asking = true;
    clearTimeout(this.patience);
    this.patience = setTimeout(() => {
      this.asking = false;
      this.say("  ·  finer bars follow when the kernel has time");
    }, PATIENCE_MS);
  }

  answer(said, buffers) {
    const question = this.questions.get(said.asked);
    if (!question) return;
    this.questions.delete(said.asked);
    this.asking = false;
    clearTimeout(this.patience);
    if (question.whole) {
      this.base = new Layer(said, buffers);
      this.root.classList.remove("labkit-unseen");
      this.arrived();
      this.drawLegend();
    } else if (question.rank == this.alone) {
      this.fine = new Layer(said, buffers);
    }
    this.redraw();
  }
}
