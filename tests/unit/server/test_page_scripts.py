"""The scripts of the page that need no server: what they make of an answer's rows, run by Node.js."""

from __future__ import annotations

import base64
import json
import subprocess
from importlib.resources import files

import pytest
import torch

from tests.support import machine
from vllm_weir import Activations, Site
from vllm_weir.server.routes.page import FILES

pytestmark = machine.needs(machine.node)
STATIC = files("vllm_weir.server") / "static"
HEADS, TOKENS, D_MLP = 3, 7, 40
DOCUMENT = """
class Element {
  constructor(tag) {
    Object.assign(this, { tag, style: {}, dataset: {}, children: [], textContent: "", chosen: false });
  }
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
        [machine.node_program(), "test.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
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
    assert names == ["head", *(f"t{k}" for k in range(TOKENS))]
    rows = body["children"]
    assert [row["children"][0]["textContent"] for row in rows] == ["0", "1", "2"]
    weights = [[cell["dataset"]["weight"] for cell in row["children"][1:]] for row in rows]
    assert torch.equal(torch.tensor(weights), pattern)
    assert [cell["chosen"] for cell in rows[0]["children"]] == [False] * TOKENS + [True]
    shade = rows[1]["children"][3]["style"]["backgroundColor"]
    assert shade == f"rgba(214, 40, 40, {0.75 * float(pattern[1, 2]):.3f})"
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
    cells = found["children"][1]["children"][0]["children"][1:]
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
