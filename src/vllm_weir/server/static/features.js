// Features of sparse autoencoders: those of each token, and sliders that set some in the next reply.

import { colour, format, magnitude } from "./heatmap.js";

/** Features to read for each token. */
const TOP = 8;
/** The least range of a slider, on either side of zero. */
const REACH = 10;

/** Return what a request asks for to read an autoencoder's features, at the positions that tokens are sampled from. */
export function featuresOf(name) {
  return [{ name, top_k: TOP, positions: "sampled" }];
}

/** Enter a chunk's features {ids, values} into tokens from index `start` on; return the index after the last.
 *  A token gets [[feature, activation], ...], the active ones, strongest first. */
export function enterFeatures(tokens, found, start) {
  found.ids.forEach((ids, i) => {
    const active = ids.map((id, k) => [id, found.values[i][k]]).filter(([, value]) => value > 0);
    if (tokens[start + i]) tokens[start + i].features = active;
  });
  return start + found.ids.length;
}

/** Return a feature's number, and what it stands for if the autoencoder {labels} says that. */
export function called(sae, feature) {
  return `${feature} ${sae?.labels?.[feature] ?? ""}`.trim();
}

/** Return a token's features as one line. */
export function listed(sae, features) {
  return `${sae.name}: ${features.map(([id, value]) => `${called(sae, id)} (${format(value)})`).join(", ") || "no feature is active"}`;
}

/** Fill a list with a button for each feature of a token; choose(feature, activation) is called by a click. */
export function fillFeatures(list, sae, features, choose) {
  list.replaceChildren();
  const max = magnitude(features.map(([, value]) => value));
  for (const [feature, value] of features) {
    const item = document.createElement("li"), button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: `${called(sae, feature)}: ${format(value)}`, title: `set feature ${feature}` });
    button.style.backgroundColor = colour(value, max);
    Object.assign(button.dataset, { feature, value });
    button.addEventListener("click", () => choose(feature, Number(value.toPrecision(4))));
    item.append(button);
    list.append(item);
  }
}

/** Return what an intervention of `FeatureSliders` does, in words. */
export function described({ name, feature, value }, sae) {
  return `feature ${called(sae, feature)} of ${name} = ${value}`;
}

/** The features that are set in the next reply, each with a slider in the element `box`. */
export class FeatureSliders {
  constructor(box, changed = () => {}) {
    Object.assign(this, { box, changed, chosen: new Map() });
  }

  /** Choose a feature of an autoencoder {name, labels}, at first set to `value`; once chosen, it stays as it is. */
  choose(sae, feature, value = 0) {
    const key = `${sae.name}/${feature}`;
    if (this.chosen.has(key)) return;
    const element = this.slider(key, `feature ${called(sae, feature)} of ${sae.name}`, value);
    this.chosen.set(key, { ...element, name: sae.name, feature });
    this.box.append(element.row);
    this.changed();
  }

  /** Let go of a feature. */
  drop(key) {
    this.chosen.get(key)?.row.remove();
    this.chosen.delete(key);
    this.changed();
  }

  /** Let go of features of all autoencoders but these. */
  keep(names) {
    for (const [key, { name }] of [...this.chosen]) if (!names.includes(name)) this.drop(key);
  }

  interventions() {
    return [...this.chosen.values()].map(({ name, feature, number }) => (
      { op: "set_feature", name, feature, value: Number(number.value) }));
  }

  slider(key, text, value) {
    const row = document.createElement("div"), label = document.createElement("label"), line = document.createElement("div");
    const range = Object.assign(document.createElement("input"), { type: "range", step: 0.25 });
    const number = Object.assign(document.createElement("input"), { type: "number", step: "any" });
    const drop = Object.assign(document.createElement("button"), { type: "button", textContent: "×", title: "leave this feature as it is" });
    const show = (shown) => {
      const reach = Math.max(REACH, Number(range.max) || 0, Math.ceil(2 * Math.abs(shown)));
      Object.assign(range, { min: -reach, max: reach });
      range.value = shown;
    };
    number.value = value;
    show(value);
    range.addEventListener("input", () => (number.value = range.value));
    number.addEventListener("input", () => show(Number(number.value)));
    drop.addEventListener("click", () => this.drop(key));
    range.dataset.setFeature = key;
    number.dataset.valueOf = key;
    drop.dataset.drop = key;
    range.setAttribute("aria-label", `slider of ${text}`);
    number.setAttribute("aria-label", `value of ${text}`);
    row.className = "slider";
    line.className = "row with-button";
    label.append(`${text} =`);
    line.append(range, number, drop);
    row.append(label, line);
    return { row, number };
  }
}
