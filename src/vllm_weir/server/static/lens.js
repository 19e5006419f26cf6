// What a lens reads at each token: the likeliest next tokens by block.

import { cell, colour, visibleText } from "./heatmap.js";

/** Tokens to read at each block. */
const TOP = 5;
/** Blocks that a note names. */
const NAMED = 16;
/** Tokens whose texts are asked for at once. */
const AT_ONCE = 100;

/** Fill the list of lenses: none, the logit lens, and those that the server has named. Their blocks are kept in it. */
export function showLenses(select, lenses, layers) {
  const chosen = select.value;
  const last = Math.max(...layers);
  const blocks = { logit: layers };
  for (const lens of lenses) blocks[`name:${lens.name}`] = [...new Set([...lens.layers, last])].filter((l) => layers.includes(l));
  select.replaceChildren(new Option("none", ""), new Option("logit lens", "logit"),
    ...lenses.map(({ name, kind }) => new Option(`${name} (${kind})`, `name:${name}`)));
  select.value = chosen in blocks ? chosen : "";
  return blocks;
}

/** Return what a request asks for to read a lens, at the positions that tokens are sampled from. */
export function lensOf(choice, blocks) {
  const which = choice === "logit" ? { kind: "logit" } : { name: choice.slice("name:".length) };
  return { ...which, layers: blocks[choice], top_k: TOP, positions: "sampled" };
}

/** Enter a chunk's lens {block: {token_ids, logprobs}} into tokens from index `start` on; return the index after the last.
 *  A token gets {block: [[id, probability], ...]}, the likeliest first. */
export function enterLens(tokens, found, start) {
  let end = start;
  for (const [layer, { token_ids: ids, logprobs }] of Object.entries(found)) {
    ids.forEach((row, i) => {
      const token = tokens[start + i];
      if (token) (token.reading ??= {})[layer] = row.map((id, k) => [id, Math.exp(logprobs[i][k] ?? NaN)]);
    });
    end = Math.max(end, start + ids.length);
  }
  return end;
}

/** Return the blocks of a reading, the last one first. */
function blocksOf(reading) {
  return Object.keys(reading).map(Number).sort((a, b) => b - a);
}

/** Add to a Map of texts by id those of a reading that it lacks; textsOf(ids) returns texts. */
export async function addTexts(texts, reading, textsOf) {
  const ids = [...new Set(Object.values(reading).flat().map(([id]) => id))].filter((id) => !texts.has(id));
  for (let first = 0; first < ids.length; first += AT_ONCE) {
    const some = ids.slice(first, first + AT_ONCE), found = await textsOf(some);
    some.forEach((id, i) => texts.set(id, found[i]));
  }
}

/** Return the body of a request that gives the texts of tokens, as those of its prompt. */
export function textsBody(model, ids) {
  return { model, prompt: ids, max_tokens: 1, temperature: 0, echo: true, logprobs: 0 };
}

function percent(probability) {
  return Number.isFinite(probability) ? `${(100 * probability).toPrecision(3)}%` : "no number";
}

function textOf(texts, id) {
  return visibleText(texts.get(id) ?? `token ${id}`);
}

/** Return a reading as lines, the likeliest token of each block; of many blocks some, the last one among them. */
export function readingLines(reading, texts) {
  const blocks = blocksOf(reading), step = Math.ceil(blocks.length / NAMED);
  return blocks.filter((_, i) => i % step === 0).map((layer) => {
    const [id, probability] = reading[layer][0];
    return `block ${layer}: ${textOf(texts, id).trim()} (${percent(probability)})`;
  });
}

/** Fill `table` with a row for each block: its likeliest tokens, coloured by probability; `sampled` is marked. */
export function fillReading(table, reading, texts, sampled) {
  table.replaceChildren();
  const body = table.createTBody();
  for (const layer of blocksOf(reading)) {
    const row = body.insertRow();
    row.append(cell("th", String(layer)));
    for (const [id, probability] of reading[layer]) {
      const text = textOf(texts, id), td = cell("td", text, id === sampled);
      td.style.backgroundColor = colour(probability, 1);
      Object.assign(td.dataset, { layer, id, probability });
      td.title = `block ${layer}, ${text}: ${percent(probability)}`;
      row.append(td);
    }
  }
}
