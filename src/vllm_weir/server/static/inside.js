// What happens inside one block at a token: the attention of its heads, and its strongest neurons.

import { cell, colour, format, magnitude, visibleText } from "./heatmap.js";
import { fromBase64, safetensors } from "./rows.js";

/** The most keys to show: the last ones before the token. */
const KEYS = 256;
/** Neurons to list. */
const NEURONS = 12;
/** Keys to name of each head, and the least weight of one. */
const STRONGEST = 3, LEAST = 0.05;
/** Hook points to read. */
const HOOKS = ["pattern", "mlp_post"];

/** Return {hook: Set of blocks} of the points that are served, from the server's list of sites. */
export function servedBlocks(sites) {
  return Object.fromEntries(HOOKS.map((hook) => [hook, new Set(sites.filter((s) => s.hook === hook && s.served).map((s) => s.layer))]));
}

/** Return the body of a request that computes these tokens once more and reads the last one's rows. */
export function bodyOf(model, ids, hooks, layer, interventions) {
  const capture = hooks.map((hook) => ({ hook, layers: [layer], positions: [ids.length - 1] }));
  return {
    model, prompt: ids, max_tokens: 1, temperature: 0, echo: true, logprobs: 0,
    weir: { v: 1, interventions, capture, response: { inline_bytes: 1 << 24 } },
  };
}

/** Read a choice's rows: {texts: texts of the prompt's tokens, pattern: [heads][keys], neurons: values}. */
export async function read(choice, count, fetchRows) {
  const rows = choice.weir.activations;
  if (rows.error) throw new Error(rows.error);
  const tensors = safetensors(rows.b64 ? fromBase64(rows.b64) : await fetchRows(rows.url));
  const named = (hook) => tensors[Object.keys(tensors).find((name) => name.startsWith(`${hook}.`))];
  const pattern = named("pattern"), heads = pattern?.shape[1] ?? 0;
  const keys = heads ? pattern.length / heads : 0;
  return {
    texts: choice.logprobs.tokens.slice(0, count),
    pattern: Array.from({ length: heads }, (_, h) => pattern.subarray(h * keys, (h + 1) * keys)),
    neurons: named("mlp_post"),
  };
}

/** Fill `table` with a row for each head: how much the token attends to each token up to itself. */
export function fillHeads(table, pattern, texts) {
  table.replaceChildren();
  if (!pattern.length) return;
  const first = Math.max(0, texts.length - KEYS), last = texts.length - 1;
  const head = table.createTHead().insertRow();
  head.append(cell("th", "head"), keysCell("strongest keys"));
  texts.slice(first).forEach((text, i) => head.append(cell("th", visibleText(text), first + i === last)));
  const body = table.createTBody();
  pattern.forEach((weights, h) => {
    const row = body.insertRow();
    row.append(cell("th", String(h)), keysCell(strongestKeys(weights.subarray(0, texts.length), texts)));
    weights.subarray(first, texts.length).forEach((weight, i) => {
      const td = cell("td", "", first + i === last);
      td.style.backgroundColor = colour(weight, 1);
      Object.assign(td.dataset, { head: h, key: first + i, weight });
      td.title = `head ${h}, ${visibleText(texts[first + i])}: ${format(weight)}`;
      row.append(td);
    });
  });
}

function keysCell(text) {
  return Object.assign(cell("th", text), { className: "keys" });
}

function strongestKeys(weights, texts) {
  const keys = strongest(weights, STRONGEST).filter(([, weight]) => weight >= LEAST);
  return keys.map(([key, weight]) => `${visibleText(texts[key]).trim()} ${weight.toFixed(2)}`).join(", ");
}

/** Return the `count` values of largest magnitude with their indices, [[index, value]], strongest first. */
export function strongest(values, count = NEURONS) {
  return [...values.entries()].sort(([, a], [, b]) => Math.abs(b) - Math.abs(a)).slice(0, count);
}

/** Fill a list with the strongest neurons, coloured as scores are. */
export function fillNeurons(list, values) {
  list.replaceChildren();
  const found = values ? strongest(values) : [], max = magnitude(found.map(([, value]) => value));
  for (const [index, value] of found) {
    const item = document.createElement("li");
    item.textContent = `${index}: ${format(value)}`;
    item.style.backgroundColor = colour(value, max);
    Object.assign(item.dataset, { neuron: index, value });
    list.append(item);
  }
}
