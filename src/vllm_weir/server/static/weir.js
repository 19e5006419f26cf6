// A chat with the served model, its tokens coloured by a probe; see docs/guides/page.md.

import { colour, fillTable, format, magnitude } from "./heatmap.js";
import { bodyOf, fillHeads, fillNeurons, read, servedBlocks } from "./inside.js";
import { addGate, addProbeScores, askProbe, chosenProbe, paintProbe, showProbes, ungated } from "./probes.js";
import { encode, events, fromBase64, safetensors } from "./rows.js";

const base = location.pathname.replace(/\/weir\/?$/, "");
const $ = (id) => document.getElementById(id);
const state = { model: "", layers: [], inside: {}, vectors: new Map(), messages: [], chat: true, stop: null, open: null };

async function call(path, body, method = body ? "POST" : "GET", signal = undefined) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch(base + path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = typeof error === "string" ? error : [error.param, error.message].filter(Boolean).join(": ");
  } catch { /* not JSON: show the text itself */ }
  throw new Error(`${response.status}: ${message}`);
}

function showError(error) {
  $("error").textContent = error ? String(error.message || error) : "";
  $("error").hidden = !error;
}

async function connect() {
  showError(null);
  try {
    const models = await (await call("/v1/models")).json();
    const info = await (await call("/v1/weir/info")).json();
    state.model = models.data[0].id;
    state.width = info.d_model;
    const firstTime = !state.layers.length;
    state.layers = info.sites.filter((s) => s.hook === "resid_post" && s.served).map((s) => s.layer);
    state.inside = servedBlocks(info.sites);
    $("model").textContent = `${state.model}, ${info.num_layers} blocks of width ${info.d_model}`;
    const middle = state.layers[Math.floor(state.layers.length / 2)];
    for (const id of ["probe-layer", "new-layer", "inside-layer"]) {
      $(id).max = info.num_layers - 1;
      if (firstTime) $(id).value = middle;
    }
    const named = await (await call("/v1/vectors")).json();
    for (const { name, shape, layers, refs } of named.vectors) {
      if (layers.length) addVector(name, (layer) => ({ ref: refs[nearest(layers, layer)] }));
      else if (shape.length === 1) addVector(name, () => ({ ref: name }));
    }
    showVectors();
    showProbes((await (await call("/v1/probes")).json()).probes);
  } catch (error) {
    $("model").textContent = "not connected";
    showError(error);
  }
}

/** Add a vector, or replace it and keep its slider. wire: a function from a block to its wire form. */
function addVector(name, wire) {
  state.vectors.set(name, { ...state.vectors.get(name), wire });
}

/** Return the index in `layers` of the block nearest to `layer`. */
function nearest(layers, layer) {
  return layers.reduce((best, l, i) => (Math.abs(l - layer) < Math.abs(layers[best] - layer) ? i : best), 0);
}

function showVectors() {
  const chosen = $("probe").value;
  $("probe").replaceChildren(new Option("nothing", ""), ...[...state.vectors.keys()].map((n) => new Option(n, n)));
  $("probe").value = state.vectors.has(chosen) ? chosen : [...state.vectors.keys()].at(-1) ?? "";
  $("no-sliders").hidden = state.vectors.size > 0;
  for (const [name, vector] of state.vectors) if (!vector.slider) $("sliders").append((vector.slider = slider(name)));
}

function slider(name) {
  const box = document.createElement("div");
  box.className = "slider";
  const label = document.createElement("label"), output = document.createElement("output");
  const scale = Object.assign(document.createElement("input"), { type: "range", min: -20, max: 20, step: 0.5, value: 0 });
  const layer = Object.assign(document.createElement("input"), { type: "number", min: 0, value: $("probe-layer").value });
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

function interventions() {
  return [...state.vectors].flatMap(([name, { wire, slider: box }]) => {
    const scale = Number(box.querySelector("[type=range]").value);
    const layers = [Number(box.querySelector("[type=number]").value)];
    return scale ? [{ op: "add", vector: wire(layers[0]), layers, scale, hook: "resid_post" }] : [];
  });
}

/** Return the request's `weir` object, with what a probe of the server asks. */
function weirFields(byProbe) {
  const probe = state.vectors.get($("probe").value);
  const weir = { v: 1, interventions: interventions() };
  if (probe) {
    weir.capture = [{ hook: "resid_post", layers: state.layers, positions: "sampled", project: probe.wire(Number($("probe-layer").value)) }];
    weir.response = { stream: true };
  }
  return askProbe(weir, byProbe);
}

/** Return the route and the body of the next request. */
function request(byProbe) {
  const common = {
    model: state.model, stream: true, return_token_ids: true, temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value), weir: weirFields(byProbe),
  };
  const messages = state.messages.map(({ role, text }) => ({ role, content: text }));
  if (state.chat) return ["/v1/chat/completions", { ...common, messages, logprobs: true, top_logprobs: 0 }];
  return ["/v1/completions", { ...common, prompt: messages.map((m) => m.content).join(""), logprobs: 0 }];
}

async function openStream(byProbe, signal) {
  try {
    return await call(...request(byProbe), "POST", signal);
  } catch (error) {
    if (!state.chat || !/chat.template/i.test(error.message)) throw error;
    state.chat = false; // a base model without a chat template continues the text
    return call(...request(byProbe), "POST", signal);
  }
}

async function send(text) {
  showError(null);
  const message = { role: "user", text };
  state.messages.push(message);
  showMessage(message);
  const control = new AbortController();
  const reply = { role: "assistant", text: "", tokens: [], ids: [], promptIds: [], scored: 0, probe: $("probe").value, steer: interventions(), byProbe: chosenProbe() };
  setBusy(control);
  try {
    const response = await openStream(reply.byProbe, control.signal);
    state.messages.push(reply);
    showMessage(reply);
    for await (const event of events(response)) addEvent(reply, event);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
    if (state.messages.at(-1) === message) { // no answer: put the text back into the input
      state.messages.pop().element.remove();
      $("text").value = text;
    }
  } finally {
    setBusy(null);
  }
}

function addEvent(reply, event) {
  if (event.error) throw new Error(event.error.message ?? event.error);
  for (const choice of event.choices ?? []) {
    reply.promptIds = event.prompt_token_ids ?? choice.prompt_token_ids ?? reply.promptIds;
    reply.ids.push(...(choice.token_ids ?? []));
    const texts = choice.logprobs?.content?.map((t) => t.token) ?? choice.logprobs?.tokens;
    const delta = choice.delta?.content ?? choice.text ?? "";
    reply.text += delta;
    for (const [i, text] of visibleParts(texts ?? (delta ? [delta] : []), delta).entries()) addToken(reply, text, texts?.[i] ?? text);
    if (choice.weir?.scores?.sites) addScores(reply, choice.weir.scores, Boolean(choice.weir.receipt));
    if (choice.weir?.scores && reply.byProbe) addProbeScores(reply.byProbe, choice.weir.scores);
    if (choice.weir?.receipt) finish(reply, choice.weir.receipt);
    if (reply.byProbe) paint(reply);
  }
  $("messages").scrollTop = $("messages").scrollHeight;
}

/** Return what each token of a chunk adds to its text: special tokens and partial characters add nothing. */
function visibleParts(tokens, delta) {
  let rest = delta;
  const parts = tokens.map((token) => {
    const part = rest.startsWith(token) ? token : "";
    rest = rest.slice(part.length);
    return part;
  });
  if (parts.length) parts[parts.length - 1] += rest;
  return parts;
}

function addToken(reply, text, name) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  const index = reply.tokens.push({ text: name, scores: {}, span }) - 1;
  span.addEventListener("click", () => showMap(reply, index));
  reply.body.append(span);
}

function addScores(reply, scores, complete) {
  const start = complete ? 0 : reply.scored;
  const sites = Object.entries(scores.sites);
  for (const [site, rows] of sites) {
    const layer = Number(site.split(".").at(-1));
    rows.forEach((row, i) => { if (reply.tokens[start + i]) reply.tokens[start + i].scores[layer] = row[0] ?? NaN; });
  }
  reply.scored = start + (sites[0]?.[1].length ?? 0);
  paint(reply);
}

function finish(reply, receipt) {
  const steered = reply.steer.map((s) => `${s.vector.ref ?? "a vector made on this page"} × ${s.scale} at block ${s.layers[0]}`);
  const note = document.createElement("span");
  note.className = "note";
  note.textContent = `${reply.tokens.length} tokens` + (steered.length ? `, steered by ${steered.join(", ")}` : "") + addGate(reply.byProbe, receipt);
  note.title = JSON.stringify(receipt, null, 1);
  reply.element.append(note);
}

function paint(reply) {
  if (reply.byProbe) {
    [$("low").textContent, $("high").textContent] = paintProbe(reply.byProbe, reply.tokens, reply.promptIds.length);
    return;
  }
  if (!reply.probe) return;
  const layer = Number($("probe-layer").value);
  const max = magnitude(reply.tokens.map((t) => t.scores[layer]));
  for (const token of reply.tokens) {
    const score = token.scores[layer];
    token.span.style.backgroundColor = colour(score, max);
    if (score === undefined) continue;
    token.span.dataset.score = score;
    token.span.title = `${reply.probe} at block ${layer}: ${format(score)}`;
  }
  $("low").textContent = max ? format(-max) : "";
  $("high").textContent = max ? format(max) : "";
}

function showMap(reply, index) {
  state.open = { reply, index };
  for (const { span } of state.messages.flatMap((m) => m.tokens ?? [])) span.classList.remove("chosen");
  reply.tokens[index].span.classList.add("chosen");
  $("map").hidden = false;
  showInside().catch(showError);
  if (!reply.probe) {
    $("map-title").textContent = "No vector was selected for this reply. Select one and send the message again.";
    $("map-table").replaceChildren();
    return;
  }
  $("map-title").textContent = `Scores of ${reply.probe} by block and token`;
  fillTable($("map-table"), reply.tokens, index, state.layers);
}

/** Show the heads and the neurons of the token that is open, at the chosen block. */
async function showInside() {
  const { open } = state, layer = Number($("inside-layer").value);
  const ids = [...open.reply.promptIds, ...open.reply.ids.slice(0, open.index)];
  const hooks = Object.keys(state.inside).filter((hook) => state.inside[hook].has(layer));
  // Without the ids of the tokens, their text could be split into others.
  $("inside").hidden = !open.reply.promptIds.length || !Object.values(state.inside).some((layers) => layers.size);
  if ($("inside").hidden) return;
  const show = (found) => {
    fillHeads($("heads-table"), found.pattern, found.texts);
    fillNeurons($("neurons"), found.neurons);
  };
  show({ pattern: [], texts: [] });
  $("inside-note").textContent = hooks.length ? "reading" : "are not served: weir sites says why";
  const asked = (state.asked = {}); // what is read for another token or block is not shown
  if (!hooks.length) return;
  try {
    const body = bodyOf(state.model, ids, hooks, layer, ungated(open.reply.steer, open.reply.byProbe, ids.length));
    const { choices } = await (await call("/v1/completions", body)).json();
    const found = await read(choices[0], ids.length, async (url) => (await call(url)).arrayBuffer());
    if (state.asked === asked) show(found);
  } finally {
    if (state.asked === asked) $("inside-note").textContent = "";
  }
}

function showMessage(message) {
  const element = document.createElement("li"), who = document.createElement("span"), body = document.createElement("span");
  element.className = message.role;
  who.className = "who";
  who.textContent = message.role === "user" ? "you" : "model";
  body.textContent = message.text;
  element.append(who, body);
  Object.assign(message, { element, body });
  $("messages").append(element);
  $("messages").scrollTop = $("messages").scrollHeight;
}

function setBusy(control) {
  state.stop = control;
  $("send").disabled = Boolean(control);
  $("stop").hidden = !control;
}

/** Return the mean of a text's rows at one block, a Float32Array. */
async function meanRow(text, layer) {
  const body = {
    model: state.model, prompt: text, max_tokens: 1,
    weir: { v: 1, capture: [{ hook: "resid_post", layers: [layer], positions: "prompt", reduce: "mean" }],
      response: { inline_bytes: 1 << 20 } },
  };
  const rows = (await (await call("/v1/completions", body)).json()).choices[0].weir.activations;
  if (rows.error) throw new Error(rows.error);
  const buffer = rows.b64 ? fromBase64(rows.b64) : await (await call(rows.url)).arrayBuffer();
  return Object.values(safetensors(buffer)).find((v) => v.length === state.width);
}

async function makeVector() {
  showError(null);
  const name = $("new-name").value.trim(), layer = Number($("new-layer").value);
  if (!name || state.vectors.has(name)) throw new Error(name ? `There is already a vector named ${name}.` : "Give the vector a name.");
  if (!$("new-plus").value || !$("new-minus").value) throw new Error("Fill in both texts.");
  const plus = await meanRow($("new-plus").value, layer), minus = await meanRow($("new-minus").value, layer);
  const difference = plus.map((v, i) => v - minus[i]), length = Math.hypot(...difference);
  if (!(length > 0)) throw new Error("Both texts have the same mean row; choose others.");
  const wire = encode(difference.map((v) => v / length));
  addVector(name, () => wire);
  showVectors();
  $("probe").value = name;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (!text.trim() || state.stop) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", () => state.stop?.abort());
$("clear").addEventListener("click", () => {
  state.stop?.abort();
  state.messages = [];
  $("messages").replaceChildren();
  $("map").hidden = true;
});
$("map-close").addEventListener("click", () => ($("map").hidden = true));
$("inside-layer").addEventListener("change", () => state.open && showInside().catch(showError));
$("probe-layer").addEventListener("input", () => state.messages.filter((m) => m.tokens).forEach(paint));
$("new-make").addEventListener("click", () => makeVector().catch(showError));
$("key").addEventListener("change", connect);
connect();
