// Colours, and the table of blocks by tokens.

const REACH = 16;

/** A score as a colour: red above zero, blue below, as strong as it is large beside `most`. */
export function colour(score, most) {
  if (!Number.isFinite(score) || !(most > 0)) return "transparent";
  const alpha = (0.75 * Math.min(1, Math.abs(score) / most)).toFixed(3);
  return score > 0 ? `rgba(214, 40, 40, ${alpha})` : `rgba(29, 99, 184, ${alpha})`;
}

/** The largest magnitude among scores. */
export function magnitude(scores) {
  return scores.reduce((most, s) => (Number.isFinite(s) ? Math.max(most, Math.abs(s)) : most), 0);
}

/** Fill `table` with the scores of every block at the tokens around `chosen`. tokens: [{text, scores: {block: score}}]. */
export function fill(table, tokens, chosen, layers) {
  const from = Math.max(0, chosen - REACH), shown = tokens.slice(from, chosen + REACH + 1);
  const most = magnitude(shown.flatMap((t) => layers.map((l) => t.scores[l])));
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  head.append(cell("th", "block"));
  shown.forEach((t, i) => head.append(cell("th", visible(t.text), from + i === chosen)));
  const body = table.createTBody();
  for (const layer of [...layers].reverse()) {
    const row = body.insertRow();
    row.append(cell("th", String(layer)));
    shown.forEach((t, i) => {
      const score = t.scores[layer], td = cell("td", "", from + i === chosen);
      td.style.backgroundColor = colour(score, most);
      td.dataset.layer = layer;
      td.dataset.token = from + i;
      td.dataset.score = score;
      td.title = `block ${layer}, ${visible(t.text)}: ${format(score)}`;
      row.append(td);
    });
  }
}

export function format(score) {
  return Number.isFinite(score) ? score.toPrecision(4) : "no score";
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

function cell(kind, text, chosen = false) {
  const out = document.createElement(kind);
  out.textContent = text;
  out.classList.toggle("chosen", chosen);
  return out;
}
