// The vectors that the page knows: those that the server keeps under names, and those made in the page.

import { format } from "./heatmap.js";

/** What a slider's number multiplies: the vector itself, or the vector rescaled to the row that it is added to. */
export const UNITS = {
  vector: { label: "× vector", reach: 4, step: 0.25, fields: {}, said: (scale) => `× ${scale}` },
  row: { label: "× row", reach: 2, step: 0.05, fields: { norm_match: true }, said: (scale) => `× ${scale} of each row's norm` },
};

/** Return the index in `layers` of the block nearest to `layer`. */
export function nearest(layers, layer) {
  return layers.reduce((best, l, i) => (Math.abs(l - layer) < Math.abs(layers[best] - layer) ? i : best), 0);
}

/** Vectors by name, each with a slider. select: the list to choose one for colours from; box: where the sliders go;
 *  hint: shown while there is none; layer: the input that has the first block of a slider. */
export class Vectors {
  constructor({ select, box, hint, layer }) {
    Object.assign(this, { select, box, hint, layer, byName: new Map() });
  }

  /** Add a vector, or replace it and keep its slider.
   *  wire: a function from a block to its wire form; norm: its length; made: the texts {plus, minus} and the block
   *  {layer} that it is made of, which may come before its wire form. */
  add(name, { wire, norm, made }) {
    this.byName.set(name, { ...this.byName.get(name), wire, norm, made });
  }

  /** Add one that the server keeps, as GET /v1/vectors tells of it. */
  addNamed({ name, shape, layers, refs, norms: [norm] }) {
    if (layers.length) this.add(name, { wire: (layer) => ({ ref: refs[nearest(layers, layer)] }), norm });
    else if (shape.length === 1) this.add(name, { wire: () => ({ ref: name }), norm });
  }

  has(name) {
    return this.byName.has(name);
  }

  /** The vector that colours tokens; undefined if none does. */
  get chosen() {
    return this.byName.get(this.select.value);
  }

  /** Bring the list and the sliders up to date. */
  show() {
    const before = this.select.value, names = [...this.byName.keys()];
    this.select.replaceChildren(new Option("nothing", ""), ...names.map((n) => new Option(n, n)));
    this.select.value = this.has(before) ? before : names.at(-1) ?? "";
    this.hint.hidden = names.length > 0;
    for (const [name, vector] of this.byName) if (!vector.slider) this.box.append((vector.slider = this.slider(name, vector)).box);
  }

  /** Return {name, plus, minus, layer} of vectors made in the page. unmade: only of those without a wire form. */
  made(unmade = false) {
    return [...this.byName].flatMap(([name, { made, wire }]) => (made && !(unmade && wire) ? [{ name, ...made }] : []));
  }

  /** Return {name, scale, unit, layer} of every slider that is not at zero. */
  moved() {
    return [...this.byName].flatMap(([name, { slider: { scale, unit, layer } }]) => (
      Number(scale.value) ? [{ name, scale: Number(scale.value), unit: unit.value, layer: Number(layer.value) }] : []));
  }

  /** Set the slider of `moved`; return whether there is such a vector. */
  move({ name, scale, unit, layer }) {
    const slider = this.byName.get(name)?.slider;
    slider?.set(scale, unit, layer);
    return Boolean(slider);
  }

  interventions() {
    return this.moved().map(({ name, scale, unit, layer }) => (
      { op: "add", vector: this.byName.get(name).wire(layer), layers: [layer], scale, hook: "resid_post", ...UNITS[unit].fields }));
  }

  slider(name, { norm }) {
    const box = document.createElement("div");
    box.className = "slider";
    const label = document.createElement("label"), output = document.createElement("output");
    const scale = Object.assign(document.createElement("input"), { type: "range" });
    const unit = document.createElement("select");
    unit.append(...Object.entries(UNITS).map(([value, { label }]) => new Option(label, value)));
    const layer = Object.assign(document.createElement("input"), { type: "number", min: 0, value: this.layer.value });
    scale.dataset.steer = name;
    layer.dataset.layerOf = name;
    scale.setAttribute("aria-label", `strength of ${name}`);
    layer.setAttribute("aria-label", `block of ${name}`);
    layer.title = "block";
    unit.dataset.unitOf = name;
    unit.setAttribute("aria-label", `unit of ${name}`);
    if (norm) unit.title = `the vector's own norm is ${format(norm)}`;
    const showScale = () => (output.textContent = ` ${UNITS[unit.value].said(scale.value)}`);
    const set = (value, chosen, block) => {
      const { reach, step } = UNITS[chosen];
      unit.value = chosen;
      layer.value = block;
      Object.assign(scale, { min: -reach, max: reach, step });
      scale.value = value;
      showScale();
    };
    scale.addEventListener("input", showScale);
    unit.addEventListener("change", () => set(0, unit.value, layer.value));
    set(0, Math.abs(norm - 1) < 0.01 ? "row" : "vector", layer.value); // a direction of length 1 says nothing of strength
    label.append(name, output);
    const row = document.createElement("div");
    row.className = "row";
    row.append(scale, unit, layer);
    box.append(label, row);
    return { box, scale, unit, layer, set };
  }
}

/** Return what an intervention of `Vectors` does, in words. */
export function describedAdd({ vector, scale, layers, norm_match: matched }) {
  return `${vector.ref ?? "a vector made on this page"} ${UNITS[matched ? "row" : "vector"].said(scale)} at block ${layers[0]}`;
}
