// Pointer, wheel and keys, and the tooltip beside the pointer.

const CLICK_PX = 4; // a pointer that moved less was not dragged

class Input {
  constructor(explorer) {
    this.explorer = explorer;
    this.tip = element("div", "labkit-tip", explorer.root);
    this.tip.setAttribute("role", "status");
    this.tip.setAttribute("aria-live", "polite");
    this.drag = null; // its start and purpose
    this.pinned = false; // whether the tooltip stays
    this.listeners = new AbortController();
    const { plot, root } = explorer;
    const on = (target, type, act, more = {}) => target.addEventListener(type, act, { signal: this.listeners.signal, ...more });
    on(plot, "pointerdown", (event) => this.press(event));
    on(plot, "pointermove", (event) => (this.drag ? this.continueDrag(event) : this.pinned || this.showTip(event)));
    on(plot, "pointerup", (event) => this.release(event));
    on(plot, "pointercancel", () => this.release(null));
    on(plot, "pointerleave", () => this.drag || this.pinned || this.hideTip());
    on(plot, "dblclick", () => explorer.look(0, explorer.about.duration));
    on(plot, "wheel", (event) => this.wheel(event), { passive: false });
    on(root, "keydown", (event) => this.key(event));
    explorer.about.rows.forEach(({ rank }, row) => {
      on(explorer.buttons[row], "click", () => explorer.isolate(explorer.isolated == rank ? null : rank));
    });
  }

  remove() {
    this.listeners.abort();
  }

  // Tooltip

  showTip(event) {
    const { explorer, tip } = this;
    this.last = event;
    const [x, y] = this.positionOf(event);
    const found = explorer.at(x, y);
    const before = explorer.pointed;
    if (!found) return this.hideTip();
    explorer.pointed = found;
    if (found.number !== before?.number || found.layer !== before?.layer) explorer.draw();
    const lines = found.layer ? barInWords(found, explorer.about) : crowdInWords(found, explorer.about);
    if (tip.innerText != lines.join("\n")) tip.replaceChildren(...lines.map((line, i) => element(i ? "div" : "strong", "", null, line)));
    tip.classList.add("labkit-visible");
    const [box, root] = [explorer.plot.getBoundingClientRect(), explorer.root.getBoundingClientRect()];
    const [left, top] = [box.left - root.left + x, box.top - root.top + y];
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(left + 14 + wide > root.width ? left - 14 - wide : left + 14, 0)}px`;
    tip.style.top = `${top + 16 + high > root.height ? Math.max(top - 10 - high, 0) : top + 16}px`;
  }

  /** The bar under the pointer may change while the pointer rests: data arrives from the kernel, or the page is resized. */
  updateTip() {
    if (!this.pinned && this.explorer.pointed) this.showTip(this.last);
  }

  hideTip() {
    this.pinned = false;
    this.tip.classList.remove("labkit-visible", "labkit-pinned");
    this.tip.replaceChildren();
    if (this.explorer.pointed) {
      this.explorer.pointed = null;
      this.explorer.draw();
    }
  }

  // Pointer

  positionOf(event) {
    const box = this.explorer.plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  press(event) {
    if (event.button) return;
    const { explorer } = this;
    const [x, y] = this.positionOf(event);
    const how = y <= explorer.stripHigh ? "strip" : event.shiftKey ? "move" : "select";
    this.drag = { x, view: explorer.view, how, moved: false };
    explorer.plot.focus({ preventScroll: true });
    explorer.plot.setPointerCapture(event.pointerId);
    event.preventDefault(); // else the drag would select text
  }

  continueDrag(event) {
    const { drag, explorer } = this;
    const [x] = this.positionOf(event);
    drag.moved ||= Math.abs(x - drag.x) >= CLICK_PX;
    if (!drag.moved) return;
    if (drag.how == "select") {
      this.hideTip();
      explorer.select(Math.min(x, drag.x), Math.max(x, drag.x));
    } else {
      const length = drag.view.end - drag.view.start;
      const perPixel = (drag.how == "strip" ? explorer.about.duration : -length) / explorer.width;
      const start = drag.view.start + (x - drag.x) * perPixel;
      explorer.look(start, start + length);
    }
  }

  release(event) {
    const { drag, explorer } = this;
    this.drag = null;
    explorer.select(0, 0);
    if (!drag || !event) return;
    const [x] = this.positionOf(event);
    if (drag.moved && drag.how == "select") {
      explorer.look(...[Math.min(x, drag.x), Math.max(x, drag.x)].map((at) => explorer.moment(at)));
    } else if (!drag.moved && drag.how == "strip") {
      const [middle, half] = [(x / explorer.width) * explorer.about.duration, (drag.view.end - drag.view.start) / 2];
      explorer.look(middle - half, middle + half);
    } else if (!drag.moved) {
      this.hideTip();
      this.showTip(event);
      this.pinned = Boolean(explorer.pointed);
      this.tip.classList.toggle("labkit-pinned", this.pinned);
    }
  }

  /** The wheel scrolls the page, and zooms after a click into the picture or with Ctrl. */
  wheel(event) {
    const { explorer } = this;
    if (!event.ctrlKey && !event.metaKey && document.activeElement != explorer.plot) return;
    event.preventDefault();
    const px = event.deltaMode ? 16 : 1; // lines, or pixels
    const [across, along] = [event.deltaX * px, event.deltaY * px];
    if (Math.abs(across) > Math.abs(along) || event.shiftKey) explorer.move((across || along) / explorer.width);
    else explorer.zoom(1.0015 ** Math.max(Math.min(along, 300), -300), explorer.moment(this.positionOf(event)[0]));
  }

  // Keys

  key(event) {
    const { explorer } = this;
    const acts = {
      ArrowLeft: () => explorer.move(-0.2),
      ArrowRight: () => explorer.move(0.2),
      "+": () => explorer.zoom(0.5),
      "=": () => explorer.zoom(0.5),
      "-": () => explorer.zoom(2),
      Escape: () => (this.pinned ? this.hideTip() : explorer.look(0, explorer.about.duration)),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in acts)) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }
}
