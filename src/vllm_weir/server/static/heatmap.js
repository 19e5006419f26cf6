// Colours of scores, and the table of scores by block and token.

/** Tokens shown on either side of the chosen one. */
const REACH = 16;

/** Return the colour of a score: blue above zero, red below, at full strength for a magnitude of `max`. */
export function colour(score, max) {
  if (!Number.isFinite(score) || !(max > 0)) return "transparent";
  const alpha = (0.75 * Math.min(1, Math.abs(score) / max)).toFixed(3);
  return score > 0 ? `rgba(29, 99, 184, ${alpha})` : `rgba(214, 40, 40, ${alpha})`;
}

/** Return the largest magnitude among scores. */
export function magnitude(scores) {
  return scores.reduce((max, s) => (Number.isFinite(s) ? Math.max(max, Math.abs(s)) : max), 0);
}

/** Fill `table` with the scores of every block at the tokens around index `chosen`.
 *  tokens: [{text, scores: {block: score}}]. */
export function fillTable(table, tokens, chosen, layers) {
  const first = Math.max(0, chosen - REACH), shown = tokens.slice(first, chosen + REACH + 1);
  const max = magnitude(shown.flatMap((t) => layers.map((l) => t.scores[l])));
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  head.append(cell("th", "block"));
  shown.forEach((t, i) => head.append(cell("th", visibleText(t.text), first + i === chosen)));
  const body = table.createTBody();
  for (const layer of [...layers].reverse()) {
    const row = body.insertRow();
    row.append(cell("th", String(layer)));
    shown.forEach((t, i) => {
      const score = t.scores[layer], td = cell("td", "", first + i === chosen);
      td.style.backgroundColor = colour(score, max);
      td.dataset.layer = layer;
      td.dataset.token = first + i;
      td.dataset.score = score;
      td.title = `block ${layer}, ${visibleText(t.text)}: ${format(score)}`;
      row.append(td);
    });
  }
}

export function format(score) {
  return Number.isFinite(score) ? score.toPrecision(4) : "no score";
}

export function visibleText(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

export function cell(tag, text, chosen = false) {
  const element = document.createElement(tag);
  element.textContent = text;
  element.classList.toggle("chosen", chosen);
  return element;
}
