// Links that carry what is set on the page: a message, sliders and settings. No key and no reply is in them.

import { UNITS } from "./vectors.js";

/** Characters of a text, and entries of a list. */
const LONGEST = 8192, MOST = 64;
const isText = (value) => typeof value === "string" && value.length <= LONGEST;
const isCount = (value) => Number.isInteger(value) && value >= 0;
const FORMS = {
  vectors: { name: isText, scale: Number.isFinite, unit: (unit) => isText(unit) && Object.hasOwn(UNITS, unit), layer: isCount },
  made: { name: isText, plus: isText, minus: isText, layer: isCount },
  features: { sae: isText, feature: isCount, value: Number.isFinite },
  inputs: { id: isText, value: isText },
};

/** Return the fragment of a link. shared: {text, and a list for each of FORMS}. */
export function toFragment(shared) {
  return `#${encodeURIComponent(JSON.stringify(shared))}`;
}

/** Return what a link carries, null if it carries nothing. Others may have written it: what does not fit is an error. */
export function fromFragment(fragment) {
  if (fragment.length < 2) return null;
  let shared = null;
  try {
    shared = JSON.parse(decodeURIComponent(fragment.slice(1)));
  } catch { /* told below */ }
  const fits = (form) => (one) => Object.entries(form).every(([key, is]) => is(one?.[key]));
  const isList = ([name, form]) => Array.isArray(shared[name]) && shared[name].length <= MOST && shared[name].every(fits(form));
  if (!isText(shared?.text) || !Object.entries(FORMS).every(isList)) throw new Error("The link's settings are damaged: copy it again.");
  return shared;
}
