// The controls above the picture: each move asks the kernel for the changed run, and a new picture shows it.

class Controls {
  constructor(model, host, arrived) {
    this.model = model;
    this.root = element("div", "labkit-controls", host);
    this.moved = (header, buffers) => this.show(header, buffers);
    this.explorer = new Explorer(model, host, arrived, this.moved);
    this.asked = this.late = false; // whether an answer is due, and whether a control has moved since
  }

  remove() {
    this.explorer.remove();
    this.root.remove();
  }

  /** Show the kernel's answer: the changed run, or why there are no controls. The kernel sends it to all pages. */
  show(header, buffers) {
    if (!this.explorer.base) return; // meant for another page; this one is about to get its own
    if (!header.controls.length) return void (this.root.textContent = header.note);
    if (!this.controls) this.build(header);
    this.wait(false);
    this.draw(header.about, new Layer(header, buffers));
    this.time.textContent = header.said[0];
    this.words.textContent = ` ${header.said[1]}`;
    if (this.late) this.move();
    else this.update(header.stops);
  }

  /** Replace the picture, so that nothing remains of the run before. */
  draw(about, layer) {
    const old = this.explorer;
    this.recorded ??= { layer: old.base, ...this.model.get("about") };
    const isolated = about.ranks.length > old.isolated ? old.isolated : null;
    const zoomed = old.view == old.home ? null : old.view;
    const changed = { about, layer, isolated, zoomed, behind: about.changed ? this.recorded : null };
    this.explorer = new Explorer(this.model, old.root.parentElement, old.arrived, this.moved, changed);
    old.root.replaceWith(this.explorer.root);
    old.remove();
  }

  build({ controls, given }) {
    this.controls = controls.map((control) => {
      const place = element("label", `labkit-control labkit-${control.kind}`, this.root, control.kind == "check" ? "" : control.label);
      const input = element(control.kind == "select" ? "select" : "input", "", place);
      const value = element("output", "", place, control.kind == "check" ? control.label : "");
      if (control.kind == "select") input.append(...control.texts.map((text, stop) => new Option(text, stop)));
      else Object.assign(input, { type: control.kind == "check" ? "checkbox" : "range", max: control.texts.length - 1 });
      if (control.kind == "range") value.style.minWidth = `${0.85 * Math.max(...control.texts.map((text) => text.length))}ch`;
      input.dataset.lmSuppressShortcuts = "true"; // else JupyterLab would take the arrow keys
      input.addEventListener("input", () => {
        this.update({ ...this.stops, [control.name]: Number(control.kind == "check" ? input.checked : input.value) });
        this.move();
      });
      return { ...control, input, value };
    });
    this.reset = Object.assign(element("button", "", this.root, `Reset: ${given.toLowerCase()}`), { type: "button" });
    this.reset.dataset.lmSuppressShortcuts = "true";
    this.reset.addEventListener("click", () => {
      this.update(Object.fromEntries(controls.map(({ name, at }) => [name, at])));
      this.move();
    });
    const status = Object.assign(element("div", "labkit-said", this.root), { role: "status" });
    this.time = element("strong", "", status);
    this.words = element("span", "", status);
  }

  /** Let the controls show these stops. */
  update(stops) {
    this.stops = stops;
    for (const { name, kind, texts, needs, input, value } of this.controls) {
      input.disabled = Object.entries(needs).some(([other, needed]) => stops[other] != needed);
      if (kind == "check") input.checked = Boolean(stops[name]);
      else input.value = stops[name];
      if (kind == "range") input.ariaValueText = value.textContent = texts[stops[name]];
    }
    this.reset.disabled = this.controls.every(({ name, at }) => stops[name] == at);
  }

  /** Ask for the changed run; while an answer is due, only the last move is kept. */
  move() {
    this.late = this.asked;
    if (this.asked) return;
    this.wait(true);
    this.model.send({ stops: this.stops });
  }

  wait(asked) {
    this.asked = asked;
    this.root.classList.toggle("labkit-querying", asked);
  }
}
