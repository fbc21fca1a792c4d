// The explorer: a picture whose view can be changed, and which queries the kernel for missing data.

const SHORTEST_NS = 100; // the shortest view
const REST_MS = 60; // query once the view has not changed for this long

export class Explorer extends Picture {
  /** `host` shows the picture once the first answer is there; `arrived` is called at that moment, `moved` with those to moves. */
  constructor(model, host, arrived = () => {}, moved = () => {}, changed = null) {
    super(host, changed?.about ?? model.get("about"));
    this.model = model;
    this.arrived = arrived;
    this.moved = moved;
    this.querying = false;
    this.input = new Input(this);
    this.onAnswer = (header, buffers) => this.answer(header, buffers);
    model.on("msg:custom", this.onAnswer);
    this.sizes = new ResizeObserver(() => this.redraw());
    this.sizes.observe(this.plot);
    this.listeners = new AbortController();
    this.followTheme();
    if (!changed) return this.query(true);
    Object.assign(this, { base: changed.layer, behind: changed.behind, isolated: changed.isolated });
    this.view.end = this.view.start + this.longest;
    this.root.classList.remove("labkit-unseen");
    this.home = this.view;
    if (changed.zoomed) this.look(changed.zoomed.start, changed.zoomed.end);
    else this.redraw();
  }

  remove() {
    this.model.off("msg:custom", this.onAnswer);
    this.input.remove();
    this.sizes.disconnect();
    this.themes.disconnect();
    this.listeners.abort();
    clearTimeout(this.later);
    this.root.remove();
  }

  /** Redraw in the theme's text colour. A theme changes by style sheets and attributes that come and go in any order. */
  followTheme() {
    const update = () => this.base && getComputedStyle(this.root).color != this.ink && this.draw();
    const soon = () => requestAnimationFrame(update);
    this.themes = new MutationObserver(soon);
    const attributes = ["class", "data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-id"];
    this.themes.observe(document.body, { attributeFilter: attributes });
    this.themes.observe(document.documentElement, { attributeFilter: ["data-theme"] }); // static pages
    this.themes.observe(document.head, { childList: true });
    document.addEventListener("load", soon, { capture: true, signal: this.listeners.signal });
  }

  // The view

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
    this.isolated = rank;
    this.fine = null;
    this.changed();
  }

  changed() {
    this.input.hideTip();
    this.redraw();
  }

  redraw() {
    this.place();
    this.draw();
    this.refine();
    this.input.updateTip();
  }

  // Queries and answers

  /** Query the kernel for missing detail, once the view has come to rest. */
  refine() {
    clearTimeout(this.later);
    if (this.lacksDetail() && !this.querying) this.later = setTimeout(() => this.query(false), REST_MS);
  }

  lacksDetail() {
    const good = (layer) => layer && layer.start <= this.view.start && layer.end >= Math.min(this.view.end, this.whole.end) &&
      (layer.complete || layer.columnNs <= 1.1 * this.nsPerPixel);
    return this.base && !this.base.complete && !good(this.base) && !good(this.fine);
  }

  query(whole) {
    const { start, end } = whole ? this.whole : this.view;
    const margin = whole ? 0 : (end - start) / 2; // so that moving a little needs no query
    const pixels = Math.max(this.width, 100) * Math.min(window.devicePixelRatio || 1, 2);
    const [rank, columns] = [whole ? null : this.isolated, Math.round(pixels * (whole ? 1 : 2))];
    this.model.send({ whole, rank, columns, start: start - margin, end: end + margin });
    this.wait(true);
  }

  /** Remember that an answer is due; the style sheet says so if it takes long, since the kernel is busy. */
  wait(querying) {
    this.querying = querying;
    this.root.classList.toggle("labkit-querying", querying);
  }

  /** The kernel sends each answer to all pages: what another one asked for is drawn where it fits. */
  answer(header, buffers) {
    if (header.stops) return this.moved(header, buffers);
    this.wait(false);
    const covers = header.start <= this.view.start && header.end >= Math.min(this.view.end, this.whole.end);
    if (header.whole && !this.base) {
      this.base = new Layer(header, buffers);
      this.root.classList.remove("labkit-unseen");
      this.arrived();
    } else if (!header.whole && covers && header.rank == this.isolated) {
      this.fine = new Layer(header, buffers);
    }
    this.redraw();
  }
}

/** Cover the widget's image with the explorer, while the kernel is alive. Notebooks draw outputs late, or again. */
function initialize({ model }) {
  const covers = new Map(); // by image
  const search = () => {
    for (const image of document.getElementsByClassName(model.get("about").image)) {
      if (covers.has(image)) continue;
      covers.set(image, new Controls(model, image.parentElement, () => (image.style.display = "none")));
    }
  };
  const observer = new MutationObserver(search);
  observer.observe(document.body, { childList: true, subtree: true });
  search();
  const uncover = () => {
    observer.disconnect();
    for (const [image, controls] of covers) {
      controls.remove();
      image.style.display = "";
    }
    covers.clear();
  };
  model.on("comm_live_update", uncover); // the kernel was restarted or shut down
  return uncover;
}

/** In front ends that provide an element for the widget. */
function render({ model, el }) {
  const controls = new Controls(model, el);
  return () => controls.remove();
}

export default { initialize, render };
