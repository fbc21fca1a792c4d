// The picture: the layout of the page, and how layers are drawn.

const GUTTER = 12; // between the strip of the whole run and the rows: room for the step numbers
const NARROW_PX = 1; // a narrower bar shares its pixel with others
const MICRO_BATCH = /^(?:forward|backward) (\d+)/i; // shown as its number where the name does not fit; as in bars.py
const HINT =
  "Point at a bar for its details; click to keep them open. Drag to zoom in, Shift+drag to move. The wheel zooms after a click into " +
  "the picture, or with Ctrl. Keys: ← → + −. Double-click or Esc: whole run. Click a rank’s name to show only that rank.";

function element(tag, name, parent, text = "") {
  const made = Object.assign(document.createElement(tag), { className: name, textContent: text });
  parent?.append(made);
  return made;
}

export class Picture {
  constructor(host, about) {
    this.about = about;
    this.allRows = about.rows.map((_, row) => row); // a rank has one row, or one each for its GPU and its CPU
    this.whole = { start: 0, end: about.duration };
    this.view = this.home = { start: about.begin, end: about.end }; // what is shown first
    this.behind = null; // the recorded run, if this is another one
    this.isolated = null; // the only rank that is shown; null: all
    this.base = this.fine = this.pointed = null; // the whole run, a part in more detail, the bar under the pointer
    this.build(host);
  }

  build(host) {
    const { about } = this;
    const count = about.rows.length;
    this.root = element("div", "labkit-explorer labkit-unseen", host);
    const head = element("div", "labkit-head", this.root);
    element("strong", "labkit-title", head, about.title);
    this.where = element("span", "labkit-where", head);
    const body = element("div", "labkit-body", this.root);
    this.names = element("div", "labkit-names", body);
    const longest = about.rows.map((row) => row.name).reduce((a, b) => (b.length > a.length ? b : a));
    element("span", "labkit-widest", this.names, longest).ariaHidden = "true"; // gives the column its width
    this.stripName = element("span", "labkit-strip-name", this.names, "whole run");
    this.buttons = about.rows.map(({ name, rank }) => {
      const button = element("button", "labkit-rank", this.names, name);
      return Object.assign(button, { type: "button", title: `show only ${about.ranks[rank]}; click again for all ranks` });
    });
    this.plot = element("div", "labkit-plot", body);
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "application");
    const keys = "arrow keys move, plus and minus zoom, Escape shows the whole run";
    this.plot.setAttribute("aria-label", `timeline of ${about.title}: ${keys}`);
    // Turns off JupyterLab's own keys, such as "a" for a new cell, while one of these elements has the focus.
    for (const focused of [this.plot, ...this.buttons]) focused.dataset.lmSuppressShortcuts = "true";
    this.canvas = element("canvas", "", this.plot);
    this.selection = element("div", "labkit-selection", this.plot);
    this.axis = element("div", "labkit-axis", this.plot);
    this.unit = element("div", "labkit-unit", this.root);
    this.legend = element("div", "labkit-legend", this.root);
    element("div", "labkit-hint", this.root, HINT);
    this.stripHigh = Math.min(Math.max(5 * count, 14), 40);
    this.top = this.stripHigh + GUTTER + 4;
    this.rowsHigh = count * Math.min(Math.max(Math.round(220 / count), 16), 56);
    this.place();
  }

  /** The rows that are shown. */
  get shown() {
    return this.allRows.filter((row) => this.isolated == null || this.about.rows[row].rank == this.isolated);
  }

  get rowHigh() {
    return Math.min(this.rowsHigh / this.shown.length, 130);
  }

  get width() {
    return this.plot.clientWidth;
  }

  get nsPerPixel() {
    return (this.view.end - this.view.start) / Math.max(this.width, 1);
  }

  /** Place the ranks' names beside their rows. */
  place() {
    const shown = this.shown;
    this.buttons.forEach((button, row) => {
      const place = shown.indexOf(row);
      button.hidden = place < 0;
      button.setAttribute("aria-pressed", String(this.isolated != null && place >= 0));
      button.style.top = `${this.top + (place + 0.5) * this.rowHigh}px`;
    });
    this.high = this.top + shown.length * this.rowHigh;
    this.names.style.height = `${this.high}px`;
    this.stripName.style.top = `${this.stripHigh / 2}px`;
    this.axis.style.top = `${this.high}px`;
    this.plot.style.height = `${this.high + 20}px`;
  }

  /** Show which part of the run is in view. */
  showWindow() {
    const { view, about } = this;
    const length = view.end - view.start;
    const part = `${timeInWords(length)} of it, from ${momentInWords(view.start, length, about.duration)}`;
    this.where.textContent = length < 0.999 * about.duration ? `  ·  ${part}` : "";
  }

  draw() {
    const { canvas, width, high } = this;
    if (!this.base || !width) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(this.root);
    this.ink = style.color;
    this.font = style.fontFamily;
    this.paper = style.getPropertyValue("--labkit-paper");
    this.fills = this.about.styles.map((look) => fillOf(pen, look));
    const { whole, view, base, fine, allRows } = this;
    this.rows(pen, base, whole, allRows, 0, this.stripHigh / allRows.length, false);
    this.frame(pen);
    this.mixed = false;
    this.visible = new Set(); // the styles that are drawn in the rows
    pen.save();
    pen.beginPath();
    pen.rect(0, this.stripHigh + 3, width, high);
    pen.clip();
    const x = (ns) => ((ns - view.start) / (view.end - view.start)) * width;
    const [from, to] = fine ? [x(fine.start), x(fine.end)] : [0, 0];
    const last = this.before(pen, x);
    const part = (layer, a, b) =>
      this.clipped(pen, a, Math.min(b, last), () => this.rows(pen, layer, view, this.shown, this.top, this.rowHigh, true));
    part(base, 0, Math.max(from, 0));
    part(fine, Math.max(from, 0), to);
    part(base, to, width);
    this.path(pen, x);
    this.ends(pen, x);
    this.clipped(pen, 0, last, () => this.numbers(pen, fine && from <= 0 && to >= width ? fine : base, x));
    this.outline(pen, x);
    pen.restore();
    this.drawAxis();
    this.drawLegend();
    this.showWindow();
  }

  /** How long the steps take that are shown first, before or after the change. */
  get longest() {
    return Math.max(...[this.about, this.behind].map((run) => (run ? run.end - run.begin : 0)));
  }

  /** Whether the view is within these steps. */
  get compares() {
    return this.view.start >= this.about.begin - 1 && this.view.end <= this.about.begin + this.longest + 1;
  }

  /** Draw the recorded run, pale, each step from the same start; return where the changed steps end. */
  before(pen, x) {
    const { behind, about, view } = this;
    if (!behind || !this.compares) return this.width;
    const by = about.begin - behind.begin;
    pen.globalAlpha = 0.35;
    this.clipped(pen, x(about.begin), x(behind.end + by), () =>
      this.rows(pen, behind.layer, { start: view.start - by, end: view.end - by }, this.shown, this.top, this.rowHigh, false));
    pen.globalAlpha = 1;
    return x(about.end);
  }

  /** The critical path: light in a dark outline, as in the figure. */
  path(pen, x) {
    if (!this.about.path?.length || this.isolated != null) return;
    pen.beginPath();
    for (const [rank, travels, start, end] of this.about.path) {
      const row = this.about.rows.findIndex((one) => one.rank == rank);
      for (const ns of [start, end]) pen.lineTo(x(ns), this.top + (row + (travels ? 0.88 : 0.58)) * this.rowHigh);
    }
    pen.lineJoin = "round";
    for (const [colour, wide] of [["#16191F", 3.8], ["#F4F5F7", 1.8]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = wide;
      pen.stroke();
    }
  }

  clipped(pen, from, to, draw) {
    if (to <= from || to <= 0 || from >= this.width) return;
    pen.save();
    pen.beginPath();
    pen.rect(from, 0, to - from, this.high);
    pen.clip();
    draw();
    pen.restore();
  }

  rows(pen, layer, view, shown, top, rowHigh, large) {
    const scale = this.width / (view.end - view.start);
    pen.imageSmoothingEnabled = false;
    shown.forEach((row, place) => {
      layer.lanes.get(row)?.forEach((lane, number) => {
        const [above, height] = this.about.lanes[number];
        const [y, h] = [top + (place + above) * rowHigh, height * rowHigh];
        const mixes = layer.mixes(lane, 1 / scale);
        if (mixes) {
          this.mixed = true;
          const x = (layer.start - view.start) * scale;
          pen.drawImage(layer.image, 0, lane.mixed, layer.columns, 1, x, y, (layer.end - layer.start) * scale, h);
        }
        if (mixes && large) layer.styles.forEach((style) => this.visible.add(style));
        const wide = []; // the bars with room for a caption, and where they are
        for (let i = layer.firstAfter(lane, view.start); i < lane.last && layer.edges[2 * i] < view.end; i++) {
          if (large) this.visible.add(layer.marks[6 * i]);
          const x = Math.max((layer.edges[2 * i] - view.start) * scale, -9);
          const w = Math.min((layer.edges[2 * i + 1] - view.start) * scale, this.width + 9) - x;
          if (mixes && w < NARROW_PX) continue;
          const style = layer.marks[6 * i];
          if (large && this.behind) {
            pen.fillStyle = this.paper; // else the recorded run would shine through
            pen.fillRect(x, y, w, h);
          }
          pen.fillStyle = this.fills[style];
          pen.fillRect(x, y, Math.max(w > 4 ? w - 0.7 : w, 0.6), h);
          if (large && w > 9 && h > 10) wide.push({ bar: layer.bar(i, row), x, w });
        }
        const named = captioned(wide.map(({ bar }) => bar), scale);
        for (const { bar, x, w } of wide) if (named.has(bar)) this.caption(pen, bar, x, y, w, h);
      });
      if (large) this.stepLines(pen, layer.steps.get(row) ?? [], view, scale, top + place * rowHigh, rowHigh);
    });
  }

  caption(pen, bar, x, y, w, h) {
    const style = this.about.styles[bar.style];
    if (!bar.name || bar.style == this.about.communication - 1) return; // no span, no name
    pen.font = `10px ${this.font}`;
    const [left, right] = [Math.max(x, 0), Math.min(x + w, this.width)];
    const room = right - left - 4;
    const moves = bar.bytes && !style.hatch && bar.style >= this.about.communication && bar.style < this.about.communication + 2;
    const name = bar.axis ? `${bar.name} ${bar.axis}` : bar.name;
    const texts = moves ? [`${name} ${bytesInWords(bar.bytes)}`, name] : [name];
    if (bar.axis) texts.push(bar.axis);
    const number = MICRO_BATCH.exec(bar.name);
    if (number) texts.push(number[1]);
    let text = texts.find((t) => pen.measureText(t).width <= room);
    if (!text && room > 48) {
      text = name;
      while (pen.measureText(`${text}…`).width > room) text = text.slice(0, -1);
      text += "…";
    }
    if (!text) return;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    if (style.hatch) {
      const wide = pen.measureText(text).width + 4;
      pen.globalAlpha = 0.75;
      pen.fillStyle = this.paper;
      pen.fillRect((left + right - wide) / 2, y + h / 2 - 6, wide, 12);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = style.ink == "page" ? this.ink : this.about.inks[style.ink];
    pen.fillText(text, (left + right) / 2, y + h / 2 + 0.5);
  }

  stepLines(pen, edges, view, scale, y, high) {
    const shown = edges.filter((ns) => ns >= view.start && ns <= view.end);
    if (shown.length > this.width / 6) return;
    pen.fillStyle = this.ink;
    pen.globalAlpha = 0.45; // the bars matter more
    for (const ns of shown) pen.fillRect((ns - view.start) * scale - 0.5, y + 1, 1, high - 2);
    pen.globalAlpha = 1;
  }

  /** Crosses where ranks failed, and lines where all were replaced. */
  ends(pen, x) {
    const seen = (ns) => ns >= this.view.start && ns <= this.view.end;
    const restarts = this.about.restarts.filter(seen);
    const ends = this.about.ends.filter(([, end]) => seen(end));
    pen.setLineDash([5, 3]);
    pen.strokeStyle = this.ink;
    pen.lineWidth = 1.5;
    for (const ns of restarts) {
      pen.beginPath();
      pen.moveTo(x(ns), this.top);
      pen.lineTo(x(ns), this.high);
      pen.stroke();
    }
    pen.setLineDash([]);
    this.marks = new Set(restarts.length ? [`┆ ${this.about.restarted}`] : []);
    this.shown.forEach((row, place) => {
      for (const [rank, end] of ends) {
        if (rank != this.about.rows[row].rank) continue;
        this.marks.add(`✕ ${this.about.ended}`);
        cross(pen, x(end), this.top + (place + 0.5) * this.rowHigh, this.ink, this.paper);
      }
    });
  }

  /** The step numbers above the first row. */
  numbers(pen, layer, x) {
    pen.font = `10px ${this.font}`;
    pen.textAlign = "center";
    pen.textBaseline = "bottom";
    pen.fillStyle = this.ink;
    for (let i = 0; i < layer.numbers.length; i += 4) {
      const [row, number, start, end] = layer.numbers.subarray(i, i + 4);
      if (row != this.shown[0]) continue; // each rank has steps of its own
      const [from, to] = [Math.max(x(start), 0), Math.min(x(end), this.width)];
      if (to - from > 45) pen.fillText(`step ${number}`, (from + to) / 2, this.top);
    }
  }

  /** Frames around the strip, and around the part of it that the rows show. */
  frame(pen) {
    const { start, end } = this.view;
    const x = (start / this.about.duration) * this.width;
    const w = Math.max(((end - start) / this.about.duration) * this.width, 2);
    pen.strokeStyle = this.ink;
    pen.globalAlpha = 0.3;
    pen.strokeRect(0.5, 0.5, this.width - 1, this.stripHigh);
    pen.globalAlpha = 1;
    pen.lineWidth = 1.5;
    if (w < this.width - 1) pen.strokeRect(x + 0.5, 0.75, w - 1, this.stripHigh);
  }

  /** Outline the bar under the pointer, and the other ranks' bars of the same operation. */
  outline(pen, x) {
    if (!this.pointed?.layer) return;
    const { layer, number, operation } = this.pointed;
    pen.strokeStyle = this.ink;
    this.shown.forEach((row, place) => {
      layer.lanes.get(row)?.forEach((lane, which) => {
        const [above, height] = this.about.lanes[which];
        for (let i = layer.firstAfter(lane, this.view.start); i < lane.last && layer.edges[2 * i] < this.view.end; i++) {
          if (i != number && (operation < 0 || layer.marks[6 * i + 4] != operation)) continue;
          pen.lineWidth = i == number ? 2 : 1;
          const [from, to] = [x(layer.edges[2 * i]), x(layer.edges[2 * i + 1])];
          pen.strokeRect(from, this.top + (place + above) * this.rowHigh, Math.max(to - from - 0.7, 1), height * this.rowHigh);
        }
      });
    });
  }

  drawAxis() {
    const step = this.about.zoomed && this.compares;
    const zero = (this.about.zero = step ? this.about.begin : 0); // of the tooltips' times, too
    const [unit, length] = unitOf(step ? this.view.end - this.view.start : this.about.duration);
    const [from, to] = [(this.view.start - zero) / length, (this.view.end - zero) / length];
    const marks = ticks(from, to, Math.max(Math.floor(this.width / 110), 2));
    this.axis.replaceChildren(...marks.at.map((value) => {
      const mark = element("span", "labkit-tick", null, value.toFixed(marks.decimals));
      mark.style.left = `${((value - from) / (to - from)) * this.width}px`;
      return mark;
    }));
    const mixed = this.mixed ? "   (where bars are narrower than a pixel, their colours mix)" : "";
    this.unit.textContent = `time since the start of the ${step ? "step" : "run"} [${unit}]${mixed}`;
  }

  /** Two lines: the visible styles of the upper lane, and those of the lower lane. */
  drawLegend() {
    const { about } = this;
    const visible = about.styles.map((_, number) => number).filter((number) => this.visible.has(number));
    const key = `${visible} ${[...this.marks]} ${this.ink}`;
    if (key == this.explained) return;
    this.explained = key;
    const high = 10;
    const lines = [(n) => n < about.communication, (n) => n >= about.communication].map((mine) => {
      const line = element("div", "", null);
      for (const number of visible.filter(mine)) {
        const entry = element("span", "labkit-entry", line);
        const swatch = element("canvas", "", entry);
        const ratio = window.devicePixelRatio || 1;
        Object.assign(swatch, { width: 16 * ratio, height: high * ratio });
        Object.assign(swatch.style, { width: "16px", height: `${high}px` });
        const pen = swatch.getContext("2d");
        pen.scale(ratio, ratio);
        pen.fillStyle = fillOf(pen, about.styles[number]);
        pen.fillRect(0, 0, 16, high);
        entry.append(about.styles[number].legend);
      }
      return line;
    });
    for (const mark of this.marks) element("span", "labkit-entry", lines[0], mark);
    if (about.path?.length) element("span", "labkit-entry", lines[1], "line: critical path");
    if (this.behind) element("span", "labkit-entry", lines[1], "pale: before the change");
    this.legend.replaceChildren(...lines);
  }

  // Positions

  moment(x) {
    return this.view.start + x * this.nsPerPixel;
  }

  /** Mark the part of the plot that is being selected. */
  select(from, to) {
    const [left, width, top, height] = [from, to - from, this.top, this.high - this.top].map((px) => `${px}px`);
    Object.assign(this.selection.style, { display: to > from ? "block" : "none", left, width, top, height });
  }

  /** What is drawn at a position of the plot: a bar, a crowd of bars narrower than a pixel, or null. */
  at(x, y) {
    const place = Math.floor((y - this.top) / this.rowHigh);
    const row = this.shown[place];
    if (row === undefined || !this.base) return null;
    const within = (y - this.top) / this.rowHigh - place;
    const which = this.about.lanes.findIndex(([above, height]) => within >= above && within <= above + height);
    const ns = this.moment(x);
    const layer = this.fine && ns >= this.fine.start && ns <= this.fine.end ? this.fine : this.base;
    const lane = layer.lanes.get(row)?.[which];
    if (!lane) return null;
    const near = this.nsPerPixel / 2;
    const first = layer.firstAfter(lane, ns - near);
    let after = first; // the bars from `first` to here touch the pixel
    while (after < lane.last && layer.edges[2 * after] < ns + near) after++;
    const exact = layer.firstAfter(lane, ns);
    const number = exact < after && layer.edges[2 * exact] <= ns ? exact : first;
    const wide = number < after && layer.edges[2 * number + 1] - layer.edges[2 * number] >= NARROW_PX * this.nsPerPixel;
    if (wide || (lane.complete && after - first == 1)) return layer.bar(number, row);
    if (lane.complete) {
      return after == first ? null : { row, count: after - first, most: layer.marks[6 * number], length: this.nsPerPixel };
    }
    return layer.crowd(lane, row, ns);
  }
}

function cross(pen, x, y, ink, paper) {
  for (const [colour, width] of [[paper, 5], [ink, 2.4]]) { // the wide one sets it off from the bars
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    for (const side of [-5, 5]) {
      pen.moveTo(x + side, y - 5);
      pen.lineTo(x - side, y + 5);
    }
    pen.stroke();
  }
}

function fillOf(pen, style) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(style.colour.slice(i, i + 2), 16));
  const paper = `rgba(${r}, ${g}, ${b}, ${style.alpha})`;
  if (!style.hatch) return paper;
  const ratio = window.devicePixelRatio || 1;
  const size = Math.round(6 * ratio);
  const tile = Object.assign(document.createElement("canvas"), { width: size, height: size });
  const brush = tile.getContext("2d");
  brush.fillStyle = paper;
  brush.fillRect(0, 0, size, size);
  if (style.hatch.includes(".")) {
    brush.fillStyle = style.colour;
    for (const [x, y] of [[0.25, 0.25], [0.75, 0.75]]) {
      brush.beginPath();
      brush.arc(x * size, y * size, 0.16 * size, 0, 2 * Math.PI);
      brush.fill();
    }
    return scaledPattern(pen, tile, ratio);
  }
  brush.strokeStyle = style.colour;
  brush.lineWidth = 1.1 * ratio;
  for (const shift of [-size, 0, size]) {
    brush.beginPath();
    brush.moveTo(shift - size / 2, size * 1.5);
    brush.lineTo(shift + size * 1.5, -size / 2);
    if (style.hatch.includes("x")) {
      brush.moveTo(shift - size / 2, -size / 2);
      brush.lineTo(shift + size * 1.5, size * 1.5);
    }
    brush.stroke();
  }
  return scaledPattern(pen, tile, ratio);
}

function scaledPattern(pen, tile, ratio) {
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
