// Probes that the server keeps: what is asked of them, the colours of their scores, and where a gate fired.

import { colour, format, magnitude } from "./heatmap.js";

const $ = (id) => document.getElementById(id);
let choices = [];

/** Fill the page's list with the probes of GET /v1/probes, one entry for each output. */
export function showProbes(probes) {
  const chosen = $("by-probe").value;
  choices = probes.flatMap(({ name, outputs, activation }) => Array.from({ length: outputs }, (_, output) => (
    { name, output, label: outputs > 1 ? `${name}[${output}]` : name, share: activation !== "none" })));
  $("by-probe").replaceChildren(new Option("nothing", ""), ...choices.map(({ label }) => new Option(label, label)));
  $("by-probe").value = choices.some(({ label }) => label === chosen) ? chosen : "";
  $("probes").hidden = !choices.length;
}

/** Return the probe and the gate that the page has now, null without a probe. */
export function chosenProbe() {
  const probe = choices.find(({ label }) => label === $("by-probe").value);
  const side = $("gate-side").value, threshold = Number($("gate-threshold").value);
  return probe ? { ...probe, gate: side ? { side, threshold } : null, scores: new Map(), fired: [] } : null;
}

/** Add what a probe asks to a request's `weir` object: its scores, and the gate of every intervention. */
export function askProbe(weir, probe) {
  if (!probe) return weir;
  const when = probe.gate && { probe: probe.name, [probe.gate.side]: probe.gate.threshold, ...(probe.output && { output: probe.output }) };
  const interventions = weir.interventions.map((one) => (when ? { ...one, when } : one));
  return { ...weir, interventions, probes: [probe.name], response: { stream: true } };
}

/** Take in the scores of an event: {name: {positions, values}}. */
export function addProbeScores(probe, scores) {
  const found = scores[probe.name];
  found?.positions.forEach((position, i) => probe.scores.set(position, found.values[i][probe.output] ?? NaN));
}

/** Take in where the gate fired, from a reply's receipt, and return what its note says of it. */
export function addGate(probe, receipt) {
  const gate = probe?.gate && receipt.gates?.find(Boolean);
  if (!gate) return "";
  probe.fired = gate.spans.flatMap(([first, end]) => Array.from({ length: end - first }, (_, i) => first + i));
  return `, ${probe.label} ${probe.gate.side} ${probe.gate.threshold} at ${gate.fired} of ${gate.of} positions`;
}

/** Return the scores of a reply's tokens: those of their own positions. */
export function ownScores(probe, tokens, promptLength) {
  return tokens.map((_, i) => probe.scores.get(promptLength + i));
}

/** Colour a reply's tokens by their scores, the largest of which is `largest`, and underline where the gate fired. */
export function paintProbe(probe, tokens, promptLength, largest) {
  const own = ownScores(probe, tokens, promptLength), max = probe.share ? 1 : largest;
  const fired = new Set(probe.fired);
  tokens.forEach(({ span }, i) => {
    const score = own[i], open = fired.has(promptLength + i);
    span.style.backgroundColor = colour(probe.share ? 2 * score - 1 : score, max);
    span.classList.toggle("fired", open);
    if (score === undefined) return;
    span.dataset.score = score;
    span.title = `${probe.label}: ${format(score)}${open ? ", the gate fired" : ""}`;
  });
  return probe.share ? ["0", "1"] : max ? [format(-max), format(max)] : ["", ""];
}

/** Return a reply's interventions for its tokens computed again: where the gate fired, without the gate. */
export function ungated(interventions, probe, count) {
  if (!probe?.gate) return interventions;
  const positions = probe.fired.filter((position) => position < count);
  return positions.length ? interventions.map((one) => ({ ...one, positions })) : [];
}
