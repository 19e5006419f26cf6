"""The page's script for probes: what it asks, the colours of scores, and where a gate fired, run by Node.js."""

from __future__ import annotations

import json

import pytest

from tests.support import machine
from tests.unit.server.test_page_scripts import run

pytestmark = machine.needs(machine.node)
PAGE = """
const controls = { "by-probe": { value: "", replaceChildren(...some) { this.options = some; } },
  "gate-side": { value: "" }, "gate-threshold": { value: "0.5" }, probes: { hidden: true } };
document.getElementById = (id) => controls[id];
globalThis.Option = class { constructor(label, value) { Object.assign(this, { label, value }); } };
const span = () => ({ style: {}, dataset: {}, classes: {}, classList: { toggle(name, on) { this.on = on; } } });
const { addGate, addProbeScores, askProbe, chosenProbe, paintProbe, showProbes, ungated } = await import("./probes.js");
"""
PROBES = [
    {"name": "mood", "outputs": 1, "activation": "sigmoid"},
    {"name": "topic", "outputs": 3, "activation": "none"},
]


def page(tmp_path, script: str):
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
def test_what_is_asked(tmp_path, label, side, when):
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
        ["rgba(29, 99, 184, 0.375)", 0.25, False],
        ["rgba(214, 40, 40, 0.375)", 0.75, True],
        ["transparent", None, False],
    ]
    assert scale == ["0", "1"]


def test_raw_scores_are_coloured_by_the_largest(tmp_path):
    colours, scale = page(tmp_path, """
        controls["by-probe"].value = "topic[1]";
        const probe = chosenProbe(), tokens = [span(), span()].map((span) => ({ span }));
        addProbeScores(probe, { topic: { positions: [2, 3], values: [[9, -4, 9], [9, 2, null]] } });
        const scale = paintProbe(probe, tokens, 2);
        console.log(JSON.stringify([tokens.map((t) => t.span.style.backgroundColor), scale]));
    """)  # fmt: skip
    assert colours == ["rgba(29, 99, 184, 0.750)", "rgba(214, 40, 40, 0.375)"]
    assert scale == ["-4.000", "4.000"]
