// A chat with the served model, its tokens coloured by a probe; see docs/guides/page.md.

import { FeatureSliders, described, enterFeatures, featuresOf, fillFeatures, listed } from "./features.js";
import { colour, fillTable, format, magnitude } from "./heatmap.js";
import { bodyOf, fillHeads, fillNeurons, read, servedBlocks } from "./inside.js";
import { addTexts, enterLens, fillReading, lensOf, readingLines, showLenses, textsBody } from "./lens.js";
import { addGate, addProbeScores, askProbe, chosenProbe, ownScores, paintProbe, showProbes, ungated } from "./probes.js";
import { encode, events, fromBase64, safetensors, visibleParts } from "./rows.js";
import { fromFragment, toFragment } from "./share.js";
import { Vectors, describedAdd } from "./vectors.js";
import { EXAMPLES, UNKNOWN, isUnknown, shortName, unknownWords } from "./words.js";

const base = location.pathname.replace(/\/weir\/?$/, "");
const $ = (id) => document.getElementById(id);
const state = { model: "", layers: [], inside: {}, saes: new Map(), lenses: {}, texts: new Map(), messages: [], chat: true, stop: null, open: null, linked: true };
/** Inputs whose values a link carries. */
const SHARED = ["probe", "probe-layer", "by-probe", "gate-side", "gate-threshold", "sae", "lens", "temperature", "max-tokens", "seed"];
const vectors = new Vectors({ select: $("probe"), box: $("sliders"), hint: $("no-sliders"), layer: $("probe-layer") });
const featureSliders = new FeatureSliders($("feature-sliders"), () => ($("no-features").hidden = featureSliders.chosen.size > 0));

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
    $("model").title = state.model;
    $("model").textContent = `${shortName(state.model)}, ${info.num_layers} blocks of width ${info.d_model}`;
    const middle = state.layers[Math.floor(state.layers.length / 2)];
    for (const id of ["probe-layer", "new-layer", "inside-layer"]) {
      $(id).max = info.num_layers - 1;
      if (firstTime) $(id).value = middle;
    }
    const named = await (await call("/v1/vectors")).json();
    named.vectors.forEach((one) => vectors.addNamed(one));
    vectors.show();
    const { saes } = await (await call("/v1/saes")).json();
    showSAEs(await Promise.all(saes.map(async ({ name }) => (await call(`/v1/saes/${encodeURIComponent(name)}`)).json())));
    state.lenses = showLenses($("lens"), (await (await call("/v1/lenses")).json()).lenses, state.layers);
    showProbes((await (await call("/v1/probes")).json()).probes);
    showExamples(info.examples.length ? info.examples : EXAMPLES);
  } catch (error) {
    $("model").textContent = "not connected";
    showError(error);
    return;
  }
  try {
    if (state.linked) applyLink();
  } catch (error) {
    showError(error);
  }
}

function showSAEs(loaded) {
  const saes = loaded.filter(({ layers }) => !layers?.length); // a cross-layer transcoder has features at several blocks
  const chosen = $("sae").value;
  state.saes = new Map(saes.map((sae) => [sae.name, sae]));
  $("sae").replaceChildren(new Option("none", ""), ...saes.map(({ name, hook, layer }) => new Option(`${name} (${hook} of block ${layer})`, name)));
  $("sae").value = state.saes.has(chosen) ? chosen : saes[0]?.name ?? "";
  $("features").hidden = !saes.length;
  featureSliders.keep([...state.saes.keys()]);
}

function showExamples(texts) {
  // Leaving the key's field connects again, while a button is being pressed: it has to stay to be clicked.
  if ([...$("try").children].map((button) => button.textContent).join("\n") === texts.join("\n")) return;
  $("try").replaceChildren(...texts.map((text) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", () => state.stop || send(text));
    return button;
  }));
}

/** Return what a link carries. */
function shared() {
  const last = state.messages.findLast(({ role }) => role === "user");
  const features = featureSliders.interventions().map(({ name, feature, value }) => ({ sae: name, feature, value }));
  return { text: $("text").value || last?.text || "", vectors: vectors.moved(), made: vectors.made(), features,
    inputs: SHARED.map((id) => ({ id, value: $(id).value })) };
}

async function share() {
  const fragment = toFragment(shared());
  fromFragment(fragment); // a text that is too long is an error here, not where the link is opened
  history.replaceState(null, "", fragment);
  await navigator.clipboard?.writeText(location.href); // pages without TLS have no clipboard; the address bar has the link
  $("share").textContent = navigator.clipboard ? "Link copied" : "Link in address bar";
}

/** Set the page as the link says with which it was opened; nothing is asked of the model until somebody sends. */
function applyLink() {
  state.linked = false;
  const link = fromFragment(location.hash), missing = [];
  if (!link) return;
  for (const { name, ...made } of link.made) if (!vectors.has(name)) vectors.add(name, { made });
  vectors.show();
  for (const one of link.vectors) if (!vectors.move(one)) missing.push(`the vector ${one.name}`);
  for (const { sae: name, feature, value } of link.features) {
    const sae = state.saes.get(name);
    if (feature < sae?.d_sae) featureSliders.choose(sae, feature, value);
    else missing.push(`feature ${feature} of ${name}`);
  }
  for (const { id, value } of link.inputs) {
    const input = SHARED.includes(id) ? $(id) : {}, before = input.value;
    input.value = value;
    if (SHARED.includes(id) && input.value === value && input.checkValidity()) continue;
    input.value = before;
    missing.push(`${id} ${value}`);
  }
  $("text").value = link.text;
  if (missing.length) throw new Error(`This server lacks what the link sets: ${missing.join(", ")}. All else is set.`);
}

/** Return what the sliders ask for. */
function interventions() {
  return [...vectors.interventions(), ...featureSliders.interventions()];
}

/** Return the request's `weir` object for a reply, with what a probe of the server asks. */
function weirFields(reply) {
  const probe = vectors.chosen;
  const weir = { v: 1, interventions: reply.steer };
  if (probe) {
    weir.capture = [{ hook: "resid_post", layers: state.layers, positions: "sampled", project: probe.wire(Number($("probe-layer").value)) }];
  }
  if ($("sae").value) weir.features = featuresOf($("sae").value);
  if (reply.lens) weir.lens = lensOf(reply.lens, state.lenses);
  if (weir.capture || weir.features || weir.lens) weir.response = { stream: true };
  return askProbe(weir, reply.byProbe);
}

/** Return the route and the body of the request for a reply. */
function request(reply) {
  const common = {
    model: state.model, stream: true, return_token_ids: true, temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value), seed: Number($("seed").value), weir: weirFields(reply),
  };
  const messages = state.messages.map(({ role, text }) => ({ role, content: text }));
  if (state.chat) return ["/v1/chat/completions", { ...common, messages, logprobs: true, top_logprobs: 0 }];
  return ["/v1/completions", { ...common, prompt: messages.map((m) => m.content).join(""), logprobs: 0 }];
}

async function openStream(reply, signal) {
  try {
    return await call(...request(reply), "POST", signal);
  } catch (error) {
    if (!state.chat || !/chat.template/i.test(error.message)) throw error;
    state.chat = false; // a base model without a chat template continues the text
    return call(...request(reply), "POST", signal);
  }
}

/** Answer the chat: steered as the sliders are, and unsteered beside it if that is chosen. Return whether there is an answer. */
async function answer() {
  showError(null);
  const control = new AbortController(), turn = { role: "assistant", get text() { return this.replies.at(-1).text; } };
  setBusy(control);
  try {
    await Promise.all(vectors.made(true).map(make));
    const steer = interventions(), ways = steer.length && $("both").checked ? [[], steer] : [steer];
    turn.replies = ways.map((steer) => ({ turn, steer, text: "", tokens: [], ids: [], promptIds: [], scored: 0, featured: 0, read: 0,
      probe: $("probe").value, sae: $("sae").value, lens: $("lens").value, byProbe: chosenProbe() }));
    const responses = await Promise.all(turn.replies.map((reply) => openStream(reply, control.signal)));
    state.messages.push(turn);
    showTurn(turn);
    await Promise.all(turn.replies.map(async (reply, i) => {
      for await (const event of events(responses[i])) addEvent(reply, event);
    }));
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
    control.abort(); // what answers beside it
  } finally {
    setBusy(null);
  }
  return Boolean(turn.element);
}

async function send(text) {
  const message = { role: "user", text };
  state.messages.push(message);
  showMessage(message);
  tellUnknown(message.element, text).catch(showError);
  if (await answer() || state.messages.at(-1) !== message) return;
  state.messages.pop().element.remove(); // no answer: put the text back into the input
  $("text").value = text;
}

/** Answer the last message once more, in place of the reply that is there. */
async function again() {
  const before = state.messages.pop();
  before.element.remove();
  if (state.open?.reply.turn === before) closeMap();
  if (await answer() || state.messages.at(-1)?.role !== "user") return;
  state.messages.push(before);
  $("messages").append(before.element);
  setBusy(null);
}

/** Note below an element which words of texts the model does not have. */
async function tellUnknown(element, ...texts) {
  const found = await Promise.all(texts.map(async (prompt) => {
    const body = { model: state.model, prompt, add_special_tokens: false, return_token_strs: true };
    return unknownWords(prompt, (await (await call("/tokenize", body)).json()).token_strs);
  }));
  const words = [...new Set(found.flat())].map((word) => `“${word}”`);
  if (words.length) element.append(noteOf(`This model does not know ${words.join(", ")}. ${UNKNOWN}`, "unread"));
}

function noteOf(text, className = "note") {
  return Object.assign(document.createElement("span"), { className, textContent: text });
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
    if (choice.weir?.features) addFeatures(reply, choice.weir.features, Boolean(choice.weir.receipt));
    if (choice.weir?.lens) addReadings(reply, choice.weir.lens, Boolean(choice.weir.receipt));
    if (choice.weir?.receipt) finish(reply, choice.weir.receipt);
    if (reply.byProbe) paint(reply.turn);
  }
  $("messages").scrollTop = $("messages").scrollHeight;
}

function addToken(reply, text, name) {
  const span = document.createElement("span");
  span.className = isUnknown(name) ? "token unknown" : "token";
  span.textContent = text;
  const index = reply.tokens.push({ text: name, scores: {}, span }) - 1;
  span.addEventListener("click", () => showMap(reply, index));
  span.addEventListener("pointerenter", () => nameReading(reply, index).catch(showError));
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
  paint(reply.turn);
}

function addFeatures(reply, features, complete) {
  reply.featured = enterFeatures(reply.tokens, features[reply.sae], complete ? 0 : reply.featured);
  reply.tokens.forEach((token) => label(reply, token));
  if (state.open?.reply === reply) showFeatures();
}

function addReadings(reply, lens, complete) {
  reply.read = enterLens(reply.tokens, lens, complete ? 0 : reply.read);
  if (state.open?.reply === reply) showReading().catch(showError);
}

/** Fetch the texts of what a lens reads at a token, and show them under the pointer. */
async function nameReading(reply, index) {
  const token = reply.tokens[index];
  if (!token.reading || token.named === reply.read) return;
  const read = reply.read;
  await addTexts(state.texts, token.reading, async (ids) => {
    const { choices } = await (await call("/v1/completions", textsBody(state.model, ids))).json();
    return choices[0].logprobs.tokens;
  });
  token.named = read;
  label(reply, token);
}

function finish(reply, receipt) {
  const steered = reply.steer.map((one) => (one.op === "add" ? describedAdd(one) : described(one, state.saes.get(one.name))));
  const note = noteOf(`${reply.tokens.length} tokens` + (steered.length ? `, steered by ${steered.join(", ")}` : "") + addGate(reply.byProbe, receipt));
  note.title = JSON.stringify(receipt, null, 1);
  reply.element.append(note);
}

/** Colour the replies of a turn, on one scale for those that stand side by side. */
function paint({ replies }) {
  const layer = Number($("probe-layer").value);
  const max = magnitude(replies.flatMap(({ byProbe, tokens, promptIds }) => (
    byProbe ? ownScores(byProbe, tokens, promptIds.length) : tokens.map((t) => t.scores[layer]))));
  for (const reply of replies) {
    if (reply.byProbe) {
      [$("low").textContent, $("high").textContent] = paintProbe(reply.byProbe, reply.tokens, reply.promptIds.length, max);
    } else if (reply.probe) {
      for (const token of reply.tokens) {
        const score = token.scores[layer];
        token.span.style.backgroundColor = colour(score, max);
        if (score !== undefined) token.span.dataset.score = score;
        label(reply, token);
      }
      [$("low").textContent, $("high").textContent] = max ? [format(-max), format(max)] : ["", ""];
    }
  }
}

/** Set what is shown of a token under the pointer: its score, and its features. */
function label(reply, token) {
  const layer = Number($("probe-layer").value), score = token.scores[layer];
  const lines = score === undefined ? [] : [`${reply.probe} at block ${layer}: ${format(score)}`];
  if (token.features) lines.push(listed(state.saes.get(reply.sae) ?? { name: reply.sae }, token.features));
  if (token.named !== undefined) lines.push(...readingLines(token.reading, state.texts));
  if (isUnknown(token.text)) lines.push(UNKNOWN);
  token.span.title = lines.join("\n");
}

function showMap(reply, index) {
  state.open = { reply, index };
  for (const span of document.querySelectorAll(".token.chosen")) span.classList.remove("chosen");
  reply.tokens[index].span.classList.add("chosen");
  $("map").hidden = false;
  showFeatures();
  showReading().catch(showError);
  showInside().catch(showError);
  if (!reply.probe) {
    $("map-title").textContent = "No vector was selected for this reply. Select one and send the message again.";
    $("map-table").replaceChildren();
    return;
  }
  $("map-title").textContent = `Scores of ${reply.probe} by block and token`;
  fillTable($("map-table"), reply.tokens, index, state.layers);
}

/** Show the features of the token that is open; a click on one gives it a slider. */
function showFeatures() {
  const { reply, index } = state.open, { features } = reply.tokens[index], sae = state.saes.get(reply.sae);
  $("token-features").hidden = !features;
  $("token-features-title").textContent = `Features of ${reply.sae}`;
  fillFeatures($("token-features-list"), sae, features ?? [], (feature, value) => sae && featureSliders.choose(sae, feature, value));
}

/** Show what a lens reads at the token that is open, by block. */
async function showReading() {
  const { open } = state, { reply, index } = open, { reading } = reply.tokens[index];
  $("reading").hidden = !reading;
  if (!reading) return;
  const name = reply.lens === "logit" ? "the logit lens" : reply.lens.slice("name:".length);
  $("reading-title").textContent = `What ${name} reads at ${reply.tokens[index].text.trim() || "this token"}`;
  await nameReading(reply, index);
  if (state.open === open) fillReading($("reading-table"), reading, state.texts, reply.ids[index]);
}

/** Choose the feature of the number that was typed. */
function chooseFeature() {
  showError(null);
  const sae = state.saes.get($("sae").value), text = $("feature-number").value, feature = Number(text);
  if (!sae) throw new Error("Select an autoencoder.");
  if (!text || !Number.isInteger(feature) || feature < 0 || feature >= sae.d_sae) throw new Error(`Features of ${sae.name} are numbers from 0 to ${sae.d_sae - 1}.`);
  featureSliders.choose(sae, feature);
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

function showMessage(message, ...content) {
  const element = document.createElement("li"), who = document.createElement("span");
  element.className = message.role;
  who.className = "who";
  who.textContent = message.role === "user" ? "you" : "model";
  element.append(who, ...(content.length ? content : [message.text]));
  message.element = element;
  $("messages").append(element);
  $("messages").scrollTop = $("messages").scrollHeight;
}

/** Show the replies of a turn, side by side if there are two. */
function showTurn(turn) {
  const ways = document.createElement("div");
  ways.className = "ways";
  for (const reply of turn.replies) {
    const element = document.createElement("div"), body = document.createElement("span"), title = document.createElement("b");
    element.className = "way";
    title.textContent = reply.steer.length ? "steered" : "unsteered";
    if (turn.replies.length > 1) element.append(title);
    element.append(body);
    Object.assign(reply, { element, body });
    ways.append(element);
  }
  showMessage(turn, ways);
}

function setBusy(control) {
  state.stop = control;
  $("send").disabled = Boolean(control);
  $("again").disabled = Boolean(control) || !state.messages.at(-1)?.replies;
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
  const name = $("new-name").value.trim();
  if (!name || vectors.has(name)) throw new Error(name ? `There is already a vector named ${name}.` : "Give the vector a name.");
  if (!$("new-plus").value || !$("new-minus").value) throw new Error("Fill in both texts.");
  $("new-unread").replaceChildren();
  await tellUnknown($("new-unread"), $("new-plus").value, $("new-minus").value);
  await make({ name, plus: $("new-plus").value, minus: $("new-minus").value, layer: Number($("new-layer").value) });
  vectors.show();
  $("probe").value = name;
}

/** Make a vector from two texts: the difference of their mean rows at a block. */
async function make({ name, plus, minus, layer }) {
  const [one, other] = await Promise.all([meanRow(plus, layer), meanRow(minus, layer)]);
  const difference = one.map((v, i) => v - other[i]), norm = Math.hypot(...difference);
  if (!(norm > 0)) throw new Error("Both texts have the same mean row; choose others.");
  const wire = encode(difference);
  vectors.add(name, { wire: () => wire, norm, made: { plus, minus, layer } });
}

function closeMap() {
  state.open = null;
  $("map").hidden = true;
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
  $("again").disabled = true;
  closeMap();
});
$("again").addEventListener("click", again);
$("share").addEventListener("click", () => share().catch(showError));
$("map-close").addEventListener("click", closeMap);
$("inside-layer").addEventListener("change", () => state.open && showInside().catch(showError));
$("probe-layer").addEventListener("input", () => state.messages.filter((m) => m.replies).forEach(paint));
$("new-make").addEventListener("click", () => makeVector().catch(showError));
$("feature-add").addEventListener("click", () => { try { chooseFeature(); } catch (error) { showError(error); } });
$("key").addEventListener("change", connect);
addEventListener("hashchange", () => location.reload());
connect();
