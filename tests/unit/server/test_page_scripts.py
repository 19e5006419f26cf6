"""The scripts of the page that need no server, run by Node.js: what they ask, and make of rows, features and scores."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import urllib.parse
from importlib.resources import files

import pytest
import torch

import vllm_weir as weir
from tests.support import machine
from vllm_weir import Activations, Site
from vllm_weir.server.routes.page import FILES

pytestmark = machine.needs(machine.node)
STATIC = files("vllm_weir.server") / "static"
HEADS, TOKENS, D_MLP = 3, 7, 40
DOCUMENT = """
class Element {
  constructor(tag) {
    Object.assign(this, { tag, style: {}, dataset: {}, children: [], textContent: "", chosen: false, on: {} });
  }
  addEventListener(name, act) { this.on[name] = act; }
  setAttribute(name, value) { this[name] = value; }
  remove() { this.gone = true; }
  get classList() { return { toggle: (_, on) => { this.chosen = on; } }; }
  append(...some) { this.children.push(...some); }
  replaceChildren(...some) { this.children = some; }
  made(tag) { const one = new Element(tag); this.children.push(one); return one; }
  createTHead() { return this.made("thead"); }
  createTBody() { return this.made("tbody"); }
  insertRow() { return this.made("tr"); }
}
globalThis.document = { createElement: (tag) => new Element(tag) };
"""


def run(tmp_path, script: str):
    """What a script prints as JSON; it can import the page's modules."""
    for name, _ in FILES.values():
        if name.endswith(".js"):
            (tmp_path / name).write_bytes((STATIC / name).read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "test.js").write_text(DOCUMENT + script)
    done = subprocess.run(
        [machine.node_program(), "test.js"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def choice(dtype: torch.dtype):
    """A choice of /v1/completions with echo, and the rows in it."""
    pattern = torch.rand(1, HEADS, TOKENS, generator=torch.Generator().manual_seed(1)).to(dtype)
    neurons = torch.randn(1, D_MLP, generator=torch.Generator().manual_seed(2)).to(dtype)
    at = {Site("pattern", 2): torch.tensor([TOKENS - 1]), Site("mlp_post", 2): torch.tensor([TOKENS - 1])}
    data = Activations(dict(zip(at, (pattern, neurons), strict=True)), at, at).to_bytes()
    tokens = [f"t{k}" for k in range(TOKENS)] + ["new"]
    answer = {"logprobs": {"tokens": tokens}, "weir": {"activations": {"b64": base64.b64encode(data).decode()}}}
    return answer, pattern[0].float(), neurons[0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_and_neurons_of_an_answer(tmp_path, dtype):
    answer, pattern, neurons = choice(dtype)
    found = run(tmp_path, f"""
        import {{ fillHeads, fillNeurons, read }} from "./inside.js";
        const found = await read({json.dumps(answer)}, {TOKENS}, null);
        const table = document.createElement("table"), list = document.createElement("ol");
        fillHeads(table, found.pattern, found.texts);
        fillNeurons(list, found.neurons);
        console.log(JSON.stringify({{ table, list }}));
    """)  # fmt: skip
    head, body = found["table"]["children"]
    names = [cell["textContent"] for cell in head["children"][0]["children"]]
    assert names == ["head", "strongest keys", *(f"t{k}" for k in range(TOKENS))]
    rows = body["children"]
    assert [row["children"][0]["textContent"] for row in rows] == ["0", "1", "2"]
    weights = [[cell["dataset"]["weight"] for cell in row["children"][2:]] for row in rows]
    assert torch.equal(torch.tensor(weights), pattern)
    for row, weights in zip(rows, pattern, strict=True):
        top = [k for k in weights.argsort(descending=True)[:3].tolist() if weights[k] >= 0.05]
        assert row["children"][1]["textContent"] == ", ".join(f"t{k} {weights[k]:.2f}" for k in top)
    assert [cell["chosen"] for cell in rows[0]["children"]] == [False] * (TOKENS + 1) + [True]
    shade = rows[1]["children"][4]["style"]["backgroundColor"]
    assert shade == f"rgba(29, 99, 184, {0.75 * float(pattern[1, 2]):.3f})"
    strongest = neurons.abs().argsort(descending=True)[:12].tolist()
    listed = [(item["dataset"]["neuron"], item["dataset"]["value"]) for item in found["list"]["children"]]
    assert listed == [(k, pytest.approx(float(neurons[k]), rel=1e-6)) for k in strongest]


def test_long_texts_show_the_last_tokens(tmp_path):
    found = run(tmp_path, """
        import { fillHeads } from "./inside.js";
        const table = document.createElement("table"), count = 300;
        fillHeads(table, [Float32Array.from({ length: count }, (_, k) => k)], Array(count).fill("t"));
        console.log(JSON.stringify(table));
    """)  # fmt: skip
    cells = found["children"][1]["children"][0]["children"][2:]
    assert [cells[0]["dataset"]["key"], cells[-1]["dataset"]["key"], len(cells)] == [44, 299, 256]
    assert cells[0]["dataset"]["weight"] == 44


def test_what_is_asked(tmp_path):
    """Only points that are served, at the last of the tokens, steered as the reply was."""
    sites = [
        {"hook": hook, "layer": layer, "served": (hook, layer) != ("pattern", 1)}
        for hook in ("resid_post", "pattern", "mlp_post")
        for layer in (0, 1)
    ]
    served, body = run(tmp_path, f"""
        import {{ bodyOf, servedBlocks }} from "./inside.js";
        const served = servedBlocks({json.dumps(sites)});
        const lists = Object.fromEntries(Object.entries(served).map(([hook, layers]) => [hook, [...layers]]));
        console.log(JSON.stringify([lists, bodyOf("m", [5, 6, 7], ["pattern", "mlp_post"], 1, [{{ op: "add" }}])]));
    """)  # fmt: skip
    assert served == {"pattern": [0], "mlp_post": [0, 1]}
    assert body["prompt"] == [5, 6, 7] and body["max_tokens"] == 1 and body["echo"] and body["logprobs"] == 0
    assert body["weir"]["interventions"] == [{"op": "add"}]
    assert body["weir"]["capture"] == [
        {"hook": "pattern", "layers": [1], "positions": [2]},
        {"hook": "mlp_post", "layers": [1], "positions": [2]},
    ]


def test_refused_rows_are_an_error(tmp_path):
    answer = {"logprobs": {"tokens": []}, "weir": {"activations": {"error": "no room"}}}
    why = run(tmp_path, f"""
        import {{ read }} from "./inside.js";
        await read({json.dumps(answer)}, 0, null).catch((e) => console.log(JSON.stringify(e.message)));
    """)  # fmt: skip
    assert why == "no room"


def test_features_of_tokens(tmp_path):
    """Chunks follow each other, the last one has all once more; features that are not active are left out."""
    chunks = [
        {"ids": [[7, 3], [3, 7]], "values": [[2.0, 0.5], [4.0, 0.0]]},
        {"ids": [[1, 0]], "values": [[0.25, None]]},
    ]
    found = run(tmp_path, f"""
        import {{ enterFeatures, featuresOf, fillFeatures, listed }} from "./features.js";
        const tokens = [{{}}, {{}}, {{}}], again = [{{}}, {{}}, {{}}], list = document.createElement("ol"), chosen = [];
        let next = 0;
        for (const chunk of {json.dumps(chunks)}) next = enterFeatures(tokens, chunk, next);
        enterFeatures(again, {{ ids: [[5], [6], [7], [8]], values: [[1], [1], [1], [1]] }}, 0);
        const mood = {{ name: "mood", labels: {{ 7: "<b>happy</b>" }} }};
        fillFeatures(list, mood, tokens[0].features, (...args) => chosen.push(args));
        list.children[1].children[0].on.click();
        const lines = [[mood, 0], [mood], [{{ name: "gone" }}, 1]]
          .map(([sae, i]) => listed(sae, tokens[i]?.features ?? []));
        console.log(JSON.stringify({{ tokens, again, next, list, chosen, lines, asked: featuresOf("mood") }}));
    """)  # fmt: skip
    assert [token["features"] for token in found["tokens"]] == [[[7, 2], [3, 0.5]], [[3, 4]], [[1, 0.25]]]
    assert found["next"] == 3 and [token["features"][0][0] for token in found["again"]] == [5, 6, 7]
    buttons = [item["children"][0] for item in found["list"]["children"]]
    assert [(one["dataset"]["feature"], one["dataset"]["value"]) for one in buttons] == [(7, 2), (3, 0.5)]
    assert [one["textContent"] for one in buttons] == ["7 <b>happy</b>: 2.000", "3: 0.5000"]
    assert buttons[1]["style"]["backgroundColor"] == f"rgba(29, 99, 184, {0.75 * 0.25:.3f})"
    assert found["chosen"] == [[3, 0.5]]
    assert found["lines"] == [
        "mood: 7 <b>happy</b> (2.000), 3 (0.5000)",
        "mood: no feature is active",
        "gone: 3 (4.000)",
    ]
    assert found["asked"] == [{"name": "mood", "top_k": 8, "positions": "sampled"}]
    assert weir.Features.from_json(found["asked"][0]).positions.kind == "sampled"


def test_readings_of_a_lens(tmp_path):
    """By chunks; the texts of its tokens are asked for once, and are no markup."""
    first = {"1": {"token_ids": [[7, 3], [3, 9]], "logprobs": [[-0.5, -2.0], [-0.25, None]]}}
    first["4"] = {"token_ids": [[7, 8], [7, 8]], "logprobs": [[-0.125, -3.0], [-0.125, -3.0]]}
    second = {"1": {"token_ids": [[1, 2]], "logprobs": [[-1.0, -1.5]]}}
    found = run(tmp_path, f"""
        import {{ addTexts, enterLens, fillReading, lensOf, readingLines, showLenses, textsBody }} from "./lens.js";
        globalThis.Option = class {{ constructor(text, value) {{ Object.assign(this, {{ text, value }}); }} }};
        const tokens = [{{}}, {{}}, {{}}], table = document.createElement("table"), texts = new Map(), asked = [];
        const next = enterLens(tokens, {json.dumps(second)}, enterLens(tokens, {json.dumps(first)}, 0));
        const textsOf = async (ids) => (asked.push(ids), [...ids.map((id) => `<b>${{id}}`), "made after the prompt"]);
        for (const {{ reading }} of [tokens[0], tokens[0], tokens[1]]) await addTexts(texts, reading, textsOf);
        const many = Object.fromEntries([...Array(80).keys()].map((layer) => [layer, [[7, 0.5]]]));
        fillReading(table, tokens[0].reading, texts, 3);
        const select = document.createElement("select");
        select.value = "name:gone";
        const blocks = showLenses(select, [{{ name: "j", kind: "jacobian", layers: [0, 1, 9] }}], [0, 1, 2, 3]);
        const lines = tokens.slice(0, 2).map((token) => readingLines(token.reading, texts));
        console.log(JSON.stringify({{ tokens, next, asked, table, lines,
          many: readingLines(many, texts).length, last: readingLines(many, texts)[0], blocks, chosen: select.value,
          lenses: ["logit", "name:j"].map((one) => lensOf(one, blocks)), body: textsBody("m", [4, 5]) }}));
    """)  # fmt: skip
    assert found["next"] == 3 and list(found["tokens"][2]["reading"]) == ["1"]
    assert [id for id, _ in found["tokens"][1]["reading"]["1"]] == [3, 9]
    assert found["tokens"][0]["reading"]["4"][0] == [7, pytest.approx(math.exp(-0.125))]
    assert found["asked"] == [[7, 3, 8], [9]]
    assert found["lines"][0] == ["block 4: <b>7 (88.2%)", "block 1: <b>7 (60.7%)"]
    assert found["many"] == 16 and found["last"] == "block 79: <b>7 (50.0%)"
    rows = found["table"]["children"][0]["children"]
    assert [[one["textContent"] for one in row["children"]] for row in rows] == [
        ["4", "<b>7", "<b>8"],
        ["1", "<b>7", "<b>3"],
    ]
    assert found["blocks"] == {"logit": [0, 1, 2, 3], "name:j": [0, 1, 3]} and found["chosen"] == ""
    assert found["lenses"][0] == {"kind": "logit", "layers": [0, 1, 2, 3], "top_k": 5, "positions": "sampled"}
    assert weir.Lens.from_json(found["lenses"][1]).name == "j"
    assert found["body"]["prompt"] == [4, 5] and found["body"]["echo"] is True


def test_sliders_of_features(tmp_path):
    """Each sets what its number says; the range widens."""
    steps = run(
        tmp_path,
        """
        import { FeatureSliders, described } from "./features.js";
        const box = document.createElement("div"), steps = [];
        const sliders = new FeatureSliders(box, () => steps.push(sliders.chosen.size));
        const mood = { name: "mood", labels: { 12: "sad" } };
        sliders.choose(mood, 12, 6.629);
        sliders.choose(mood, 12, 1);
        sliders.choose({ name: "other" }, 3, 5);
        const [first, second] = box.children.map((row) => row.children[1].children);
        steps.push(sliders.interventions(), [first[0].min, first[0].max]);
        first[0].value = -2.5; first[0].on.input();
        second[1].value = "40"; second[1].on.input();
        steps.push(sliders.interventions(), [second[0].min, second[0].max, second[0].value]);
        steps.push(sliders.interventions().map((one) => described(one, one.name === "mood" ? mood : undefined)));
        first[2].on.click();
        steps.push(sliders.interventions(), box.children[0].gone);
        sliders.keep(["mood"]);
        steps.push(sliders.interventions());
        console.log(JSON.stringify(steps));
    """,
    )
    mood, other = (
        {"op": "set_feature", "name": "mood", "feature": 12},
        {"op": "set_feature", "name": "other", "feature": 3},
    )
    raised = other | {"value": 40}
    assert steps == [
        *(1, 2),
        *([mood | {"value": 6.629}, other | {"value": 5}], [-14, 14]),
        *([mood | {"value": -2.5}, raised], [-80, 80, 40]),
        ["feature 12 sad of mood = -2.5", "feature 3 of other = 40"],
        *(1, [raised], True),
        *(0, []),
    ]
    for one in (mood | {"value": -2.5}, raised):
        assert weir.SetFeature.from_json(one).to_json() == one


# ---- vectors, links and words ---------------------------------------------------------------------------------------

VECTORS = """
globalThis.Option = class { constructor(label, value) { Object.assign(this, { label, value }); } };
const { UNITS, Vectors, describedAdd } = await import("./vectors.js");
const box = document.createElement("div"), select = { value: "", replaceChildren() {} };
const vectors = new Vectors({ select, box, hint: {}, layer: { value: 3 } });
vectors.addNamed({ name: "mood", shape: [8], layers: [], refs: ["mood"], norms: [5.5] });
vectors.addNamed({ name: "unit", shape: [2, 8], layers: [1, 4], refs: ["unit[1]", "unit[4]"], norms: [1.0000001, 1] });
vectors.add("mine", { made: { plus: "a", minus: "b", layer: 2 } });
vectors.show();
"""


def test_units_of_sliders(tmp_path):
    """A direction of length 1 says nothing of strength, so its slider counts in norms of rows."""
    steps = run(tmp_path, VECTORS + """
        const steps = [vectors.moved(), vectors.made(true)], slider = vectors.byName.get("mood").slider;
        const shown = [...vectors.byName.values()].map((one) => one.slider);
        steps.push(shown.map(({ unit, scale }) => [unit.value, scale.min, scale.max]));
        slider.scale.value = "1.5"; slider.scale.on.input();
        steps.push(vectors.move({ name: "unit", scale: -0.5, unit: "row", layer: 5 }), vectors.move({ name: "gone" }));
        steps.push(vectors.moved(), vectors.interventions(), vectors.interventions().map(describedAdd));
        vectors.add("mine", { wire: () => ({ b64: "AA==" }), norm: 2, made: { plus: "a", minus: "b", layer: 2 } });
        steps.push(vectors.made(true), vectors.made(), box.children.length);
        slider.unit.value = "row"; slider.unit.on.change();
        steps.push(vectors.moved().map(({ name }) => name));
        console.log(JSON.stringify(steps));
    """)  # fmt: skip
    mine = {"name": "mine", "plus": "a", "minus": "b", "layer": 2}
    moved = [
        {"name": "mood", "scale": 1.5, "unit": "vector", "layer": 3},
        {"name": "unit", "scale": -0.5, "unit": "row", "layer": 5},
    ]
    adds = [
        {"op": "add", "vector": {"ref": "mood"}, "layers": [3], "scale": 1.5, "hook": "resid_post"},
        {"op": "add", "vector": {"ref": "unit[4]"}, "layers": [5], "scale": -0.5, "hook": "resid_post"},
    ]
    adds[1]["norm_match"] = True
    assert steps == [
        *([], [mine], [["vector", -4, 4], ["row", -2, 2], ["vector", -4, 4]]),
        *(True, False, moved, adds),
        ["mood × 1.5 at block 3", "unit[4] × -0.5 of each row's norm at block 5"],
        *([], [mine], 3),
        ["unit"],
    ]


LINK = {
    "text": "Tell me a <b>story</b>. 100 % #1",
    "vectors": [{"name": "mood", "scale": -1.25, "unit": "row", "layer": 3}],
    "made": [{"name": "mine", "plus": "a", "minus": "b", "layer": 2}],
    "features": [{"sae": "demo", "feature": 100, "value": -8.125}],
    "inputs": [{"id": "seed", "value": "3"}],
}


def linked(tmp_path, *fragments):
    """What the page makes of links: what they carry, or the error."""
    return run(tmp_path, f"""
        import {{ fromFragment }} from "./share.js";
        const read = (one) => {{ try {{ return fromFragment(one); }} catch (e) {{ return e.message; }} }};
        console.log(JSON.stringify({json.dumps(fragments)}.map(read)));
    """)  # fmt: skip


def test_a_link_carries_what_is_set(tmp_path):
    (fragment,) = run(tmp_path, f"""
        import {{ toFragment }} from "./share.js";
        console.log(JSON.stringify([toFragment({json.dumps(LINK)})]));
    """)  # fmt: skip
    assert re.fullmatch(r"#[\w.%!~*'()-]+", fragment)
    assert linked(tmp_path, fragment, "", "#") == [LINK, None, None]


def test_links_that_others_wrote_are_read_or_refused(tmp_path):
    def of(kind, **change):
        return LINK | {kind: [LINK[kind][0] | change]}

    wrong = [
        *("x", 3, None, [], {}, LINK | {"text": 3}, LINK | {"text": "x" * 8193}),
        *(LINK | {"vectors": {}}, LINK | {"vectors": [None]}, LINK | {"made": LINK["made"] * 65}),
        *(of("vectors", unit="toString"), of("vectors", scale="1"), of("vectors", layer=-1), of("vectors", name={})),
        *(of("features", feature=1.5), of("features", value=None), of("inputs", value=3), of("made", plus=None)),
    ]
    fragments = [f"#{urllib.parse.quote(json.dumps(one))}" for one in wrong] + ["#%", "#%7B", "#weir"]
    assert set(linked(tmp_path, *fragments)) == {"The link's settings are damaged: copy it again."}


@pytest.mark.parametrize(
    ("text", "tokens", "words"),
    [
        ("Tell me of a spaceship.", ["Tell", " me", " of", " a", "<unk>", "."], ["spaceship"]),
        ("laser ships", ["<unk>", "<unk>"], ["laser", "ships"]),
        ("Anna has 7 dogs", ["Anna", "<unk>", " dogs"], ["has", "7"]),
        ("Anna & Tom", ["Anna", " Tom"], ["&"]),
        ("Tell me", ["Tell", " me"], []),
        ("Überall Äpfel", ["Ã", "ľber", "all", "ĠÃ", "Ħ", "pfel"], []),
        ("Hello there", ["▁Hello", "▁there"], []),
        ("the cat saw the dog", ["▁the", "▁cat", "▁saw", "▁the", "<unk>"], ["dog"]),
        ("", [], []),
    ],
)
def test_words_that_the_model_does_not_have(tmp_path, text, tokens, words):
    found = run(tmp_path, f"""
        import {{ unknownWords }} from "./words.js";
        console.log(JSON.stringify(unknownWords({json.dumps(text)}, {json.dumps(tokens)})));
    """)  # fmt: skip
    assert found == words


def test_short_names_of_models(tmp_path):
    names = {
        "demo": "demo",
        "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
        "/data/models/llama/": "llama",
        "/site-packages/vllm_weir/demo/model": "demo/model",
        "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2": "Qwen3-0.6B",
        "/": "/",
    }
    found = run(tmp_path, f"""
        import {{ shortName }} from "./words.js";
        console.log(JSON.stringify({json.dumps(list(names))}.map(shortName)));
    """)  # fmt: skip
    assert found == list(names.values())


def test_nothing_from_outside_becomes_markup():
    for name, _ in FILES.values():
        text = (STATIC / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name


# ---- probes ---------------------------------------------------------------------------------------------------------

PAGE = """
const controls = { "by-probe": { value: "", replaceChildren(...some) { this.options = some; } },
  "gate-side": { value: "" }, "gate-threshold": { value: "0.5" }, probes: { hidden: true } };
document.getElementById = (id) => controls[id];
globalThis.Option = class { constructor(label, value) { Object.assign(this, { label, value }); } };
const span = () => ({ style: {}, dataset: {}, classes: {}, classList: { toggle(name, on) { this.on = on; } } });
const { addGate, addProbeScores, askProbe, chosenProbe, ownScores, paintProbe, showProbes, ungated } =
  await import("./probes.js");
const { magnitude } = await import("./heatmap.js");
"""
PROBES = [
    {"name": "mood", "outputs": 1, "activation": "sigmoid"},
    {"name": "topic", "outputs": 3, "activation": "none"},
]


def page(tmp_path, script: str):
    """As `run`, with the controls of probes."""
    return run(tmp_path, f"{PAGE}\nshowProbes({json.dumps(PROBES)});\n{script}")


def test_each_output_can_be_chosen(tmp_path):
    labels, chosen = page(tmp_path, """
        controls["by-probe"].value = "topic[2]";
        const { name, output, share, gate } = chosenProbe();
        console.log(JSON.stringify([controls["by-probe"].options.map((o) => o.value), { name, output, share, gate }]));
    """)  # fmt: skip
    assert labels == ["", "mood", "topic[0]", "topic[1]", "topic[2]"]
    assert chosen == {"name": "topic", "output": 2, "share": False, "gate": None}


ADD = {"op": "add", "vector": {"ref": "v"}, "layers": [2], "scale": 3}


@pytest.mark.parametrize(
    ("label", "side", "when"),
    [
        ("", "above", None),
        ("mood", "", None),
        ("mood", "above", {"probe": "mood", "above": 0.5}),
        ("topic[2]", "below", {"probe": "topic", "below": 0.5, "output": 2}),
    ],
)
def test_what_is_asked_of_probes(tmp_path, label, side, when):
    asked = page(tmp_path, f"""
        controls["by-probe"].value = "{label}";
        controls["gate-side"].value = "{side}";
        const weir = {{ v: 1, interventions: [{json.dumps(ADD)}, {json.dumps(ADD)}] }};
        console.log(JSON.stringify(askProbe(weir, chosenProbe())));
    """)  # fmt: skip
    gated = ADD if when is None else ADD | {"when": when}
    probes = {"probes": [label.split("[")[0]], "response": {"stream": True}} if label else {}
    assert asked == {"v": 1, "interventions": [gated, gated]} | probes


def test_the_receipt_says_where_a_gate_fired(tmp_path):
    """For a token's attention and neurons, the text is computed again and steered at the same positions."""
    gate = {"probe": "mood", "fired": 4, "of": 12, "spans": [[3, 6], [8, 9]]}
    note, none, again, before, plain = page(tmp_path, f"""
        controls["by-probe"].value = "mood";
        const without = chosenProbe();
        controls["gate-side"].value = "below";
        const probe = chosenProbe(), add = {json.dumps(ADD)}, receipt = {{ gates: [null, {json.dumps(gate)}] }};
        const notes = [addGate(probe, receipt), addGate(without, receipt)];
        const again = [[probe, 5], [probe, 3], [without, 5]].map(([one, count]) => ungated([add], one, count));
        console.log(JSON.stringify([...notes, ...again]));
    """)  # fmt: skip
    assert note == ", mood below 0.5 at 4 of 12 positions" and none == ""
    assert again == [ADD | {"positions": [3, 4]}] and before == [] and plain == [ADD]


def test_tokens_are_coloured_by_their_own_position(tmp_path):
    spans, scale = page(tmp_path, """
        controls["by-probe"].value = "mood";
        controls["gate-side"].value = "above";
        const probe = chosenProbe(), tokens = [span(), span(), span()].map((span) => ({ span }));
        addProbeScores(probe, { mood: { positions: [4, 5, 6], values: [[0.9], [0.25], [0.75]] } });
        addGate(probe, { gates: [{ fired: 2, of: 9, spans: [[4, 5], [6, 7]] }] });
        const scale = paintProbe(probe, tokens, 5);
        const shown = tokens.map(({ span: s }) => [s.style.backgroundColor, s.dataset.score, s.classList.on]);
        console.log(JSON.stringify([shown, scale]));
    """)  # fmt: skip
    assert spans == [
        ["rgba(214, 40, 40, 0.375)", 0.25, False],
        ["rgba(29, 99, 184, 0.375)", 0.75, True],
        ["transparent", None, False],
    ]
    assert scale == ["0", "1"]


def test_raw_scores_are_coloured_by_the_largest(tmp_path):
    """Which may be that of the reply beside it."""
    alone, beside = page(tmp_path, """
        controls["by-probe"].value = "topic[1]";
        const probe = chosenProbe(), tokens = [span(), span()].map((span) => ({ span }));
        addProbeScores(probe, { topic: { positions: [2, 3], values: [[9, -4, 9], [9, 2, null]] } });
        const painted = [magnitude(ownScores(probe, tokens, 2)), 8].map((largest) => (
          [paintProbe(probe, tokens, 2, largest), tokens.map((t) => t.span.style.backgroundColor)]));
        console.log(JSON.stringify(painted));
    """)  # fmt: skip
    assert alone == [["-4.000", "4.000"], ["rgba(214, 40, 40, 0.750)", "rgba(29, 99, 184, 0.375)"]]
    assert beside == [["-8.000", "8.000"], ["rgba(214, 40, 40, 0.375)", "rgba(29, 99, 184, 0.188)"]]
