// The vectors that the page knows: those that the server keeps under names, and those made in the page.

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

  /** Add a vector, or replace it and keep its slider. wire: a function from a block to its wire form. */
  add(name, wire) {
    this.byName.set(name, { ...this.byName.get(name), wire });
  }

  /** Add one that the server keeps, as GET /v1/vectors tells of it. */
  addNamed({ name, shape, layers, refs }) {
    if (layers.length) this.add(name, (layer) => ({ ref: refs[nearest(layers, layer)] }));
    else if (shape.length === 1) this.add(name, () => ({ ref: name }));
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
    for (const [name, vector] of this.byName) if (!vector.slider) this.box.append((vector.slider = this.slider(name)));
  }

  interventions() {
    return [...this.byName].flatMap(([, { wire, slider: box }]) => {
      const scale = Number(box.querySelector("[type=range]").value);
      const layers = [Number(box.querySelector("[type=number]").value)];
      return scale ? [{ op: "add", vector: wire(layers[0]), layers, scale, hook: "resid_post" }] : [];
    });
  }

  slider(name) {
    const box = document.createElement("div");
    box.className = "slider";
    const label = document.createElement("label"), output = document.createElement("output");
    const scale = Object.assign(document.createElement("input"), { type: "range", min: -20, max: 20, step: 0.5, value: 0 });
    const layer = Object.assign(document.createElement("input"), { type: "number", min: 0, value: this.layer.value });
    scale.dataset.steer = name;
    layer.dataset.layerOf = name;
    scale.setAttribute("aria-label", `strength of ${name}`);
    layer.setAttribute("aria-label", `block of ${name}`);
    layer.title = "block";
    const showScale = () => (output.textContent = ` × ${scale.value}`);
    scale.addEventListener("input", showScale);
    showScale();
    label.append(name, output);
    const row = document.createElement("div");
    row.className = "row";
    row.append(scale, layer);
    box.append(label, row);
    return box;
  }
}

/** Return what an intervention of `Vectors` does, in words. */
export function describedAdd({ vector, scale, layers }) {
  return `${vector.ref ?? "a vector made on this page"} × ${scale} at block ${layers[0]}`;
}
