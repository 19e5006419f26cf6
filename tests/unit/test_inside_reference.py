"""The reference for points inside attention and MLP: rows obey their definitions, edits do what they say.

And the identities of such points: they hold for these rows and for a block made by hand, and see what is wrong with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.conformance.inside import INNER
from tests.conformance.inside_identities import Rows, first_tokens, gathered, neurons, patterns
from tests.support.measure import rel_err
from tests.support.models import INNER_LACKS, INNER_MODELS, make_model
from tests.support.oracle import Oracle

IDS = [(3 * j + j * j) % 500 + 5 for j in range(37)]
N = len(IDS)
SHAPES = {
    "llama": dict(q=(4, 32), k=(2, 32), v=(2, 32), z=(4, 32), mlp_pre=(448,), mlp_post=(448,)),
    "gemma2": dict(q=(4, 32), k=(2, 32), v=(2, 32), z=(4, 32), mlp_pre=(192,), mlp_post=(192,)),
    "qwen3": dict(q=(4, 64), k=(2, 64), v=(2, 64), z=(4, 64), mlp_pre=(192,), mlp_post=(192,)),
    "mixtral": dict(q=(4, 32), k=(2, 32), v=(2, 32), z=(4, 32), router_logits=(8,), expert_weights=(2,)),
    "gpt2": dict(q=(4, 32), k=(4, 32), v=(4, 32), z=(4, 32), mlp_pre=(512,), mlp_post=(512,)),
}
DENSE = ("llama", "gemma2", "qwen3", "gpt2")
ROTARY = ("llama", "gemma2", "qwen3", "mixtral")


@lru_cache(maxsize=8)
def truth(family: str) -> Oracle:
    return Oracle(make_model(family, INNER_MODELS[family]))


@lru_cache(maxsize=8)
def rows_of(family: str) -> dict[tuple[str, int], torch.Tensor]:
    return truth(family).rows(IDS)


def each(family: str) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """(block, its rows by hook point), for every block."""
    rows = rows_of(family)
    for layer, block in enumerate(truth(family).blocks):
        yield block, {hook: value for (hook, at), value in rows.items() if at == layer}


def attention_of(block: Any) -> Any:
    return block.attn if hasattr(block, "attn") else block.self_attn


def repeated(heads: torch.Tensor, count: int) -> torch.Tensor:
    return heads.repeat_interleave(count // heads.shape[1], 1)


@pytest.mark.parametrize("family", INNER_MODELS)
def test_points_and_shapes(family: str) -> None:
    lacks = INNER_LACKS[family]
    for layer, (_, rows) in enumerate(each(family)):
        assert {hook for hook in INNER if hook in rows} == set(INNER) - lacks
        assert all(truth(family).inside.missing(hook, layer) for hook in lacks)
        for hook, shape in SHAPES[family].items():
            assert rows[hook].shape == (N, *shape), hook
        for hook in ("pattern", "attn_scores"):
            assert rows[hook].shape == (N, 4, N)


@pytest.mark.parametrize("family", INNER_MODELS)
def test_watching_changes_nothing(family: str) -> None:
    oracle, rows = truth(family), {}
    plain = oracle.logits(IDS)
    with oracle.inside.watched(rows):
        assert torch.equal(oracle.logits(IDS), plain)
    assert torch.equal(oracle.logits(IDS), plain)


@pytest.mark.parametrize("family", INNER_MODELS)
def test_patterns_and_scores(family: str) -> None:
    scale = {"gemma2": 48, "qwen3": 64}.get(family, 32) ** -0.5
    for layer, (_, rows) in enumerate(each(family)):
        pattern, scores = rows["pattern"], rows["attn_scores"]
        query, key = torch.arange(N)[:, None], torch.arange(N)
        reach = key <= query
        if family == "gemma2" and layer % 2 == 0:
            reach &= query - key < 16
        assert torch.equal(scores.isinf(), ~reach[:, None].expand(-1, 4, -1))
        assert torch.equal(pattern == 0, scores.isinf()) and rel_err(pattern.sum(-1), torch.ones(N, 4)) < 1e-6
        made = scale * torch.einsum("qhd,khd->qhk", rows["q_rot"], repeated(rows["k_rot"], 4))
        if family == "gemma2":
            bent = 3 * torch.tanh(made / 3)
            assert rel_err(bent, made) > 0.1
            made = bent
        assert rel_err(made.masked_fill(scores.isinf(), -torch.inf), scores) < 1e-6


@pytest.mark.parametrize("family", INNER_MODELS)
def test_identities_hold(family: str) -> None:
    """Patterns are the softmax of scores and make z of the values; activations make neurons of the gate."""
    found = errors_of(patterns, rows_of(family)) | errors_of(neurons, rows_of(family))
    assert {"pattern", "attn_scores", "v", "z"} <= set(found) and max(found.values()) < 1e-6
    assert family not in DENSE or {"mlp_pre", "mlp_post"} <= set(found)


@pytest.mark.parametrize("family", ROTARY)
@torch.no_grad()
def test_rotation_keeps_norms_and_position_zero(family: str) -> None:
    for block, rows in each(family):
        for plain, rotated in (("q", "q_rot"), ("k", "k_rot")):
            before = rows[plain]
            if family == "qwen3":
                before = getattr(attention_of(block), f"{plain}_norm")(before)
                assert rel_err(before, rows[plain]) > 0.1
            assert rel_err(rows[rotated][0], before[0]) < 1e-6
            assert rel_err(rows[rotated].norm(dim=-1), before.norm(dim=-1)) < 1e-5
            assert rel_err(rows[rotated], before) > 0.1


def test_without_rotation_they_are_the_projections() -> None:
    for _, rows in each("gpt2"):
        assert torch.equal(rows["q_rot"], rows["q"]) and torch.equal(rows["k_rot"], rows["k"])


@pytest.mark.parametrize("family", INNER_MODELS)
@torch.no_grad()
def test_projections_of_attention(family: str) -> None:
    for block, rows in each(family):
        attention = attention_of(block)
        norm = block.ln_1 if family == "gpt2" else block.input_layernorm
        assert rel_err(norm(rows["resid_pre"]), rows["attn_in"]) < 1e-6
        if family == "gpt2":
            made = attention.c_attn(rows["attn_in"]).split(128, 1)
            out = attention.c_proj(rows["z"].flatten(1))
        else:
            made = [getattr(attention, f"{name}_proj")(rows["attn_in"]) for name in "qkv"]
            out = attention.o_proj(rows["z"].flatten(1))
        for name, value in zip("qkv", made):
            assert rel_err(value, rows[name].flatten(1)) < 1e-6
        if family == "gemma2":
            out = block.post_attention_layernorm(out)
        assert rel_err(out, rows["attn_out"]) < 1e-5


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_neurons(family: str) -> None:
    for block, rows in each(family):
        mlp = block.mlp
        if family == "gpt2":
            norm, up, down = block.ln_2, mlp.c_fc, mlp.c_proj
        else:
            norm = block.pre_feedforward_layernorm if family == "gemma2" else block.post_attention_layernorm
            up, down = mlp.gate_proj, mlp.down_proj
            assert rel_err(mlp.up_proj(rows["mlp_in"]), rows["mlp_pre_linear"]) < 1e-6
        assert rel_err(norm(rows["resid_mid"]), rows["mlp_in"]) < 1e-5
        assert rel_err(up(rows["mlp_in"]), rows["mlp_pre"]) < 1e-6
        out = down(rows["mlp_post"])
        out = block.post_feedforward_layernorm(out) if family == "gemma2" else out
        assert rel_err(out, rows["mlp_out"]) < 1e-5


@torch.no_grad()
def test_routing() -> None:
    used = set()
    for block, rows in each("mixtral"):
        assert rel_err(rows["mlp_in"] @ block.mlp.gate.weight.T, rows["router_logits"]) < 1e-6
        best = rows["router_logits"].softmax(-1).topk(2)
        assert torch.equal(best.indices, rows["expert_ids"])
        assert rel_err(best.values / best.values.sum(-1, keepdim=True), rows["expert_weights"]) < 1e-6
        used |= set(rows["expert_ids"].flatten().tolist())
    assert used == set(range(8))


@contextlib.contextmanager
def changed(parameter: torch.Tensor, index: Any, value: Any) -> Iterator[None]:
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter[index] = value
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def edited(
    oracle: Oracle, at: tuple[str, int], change: Any
) -> tuple[dict[tuple[str, int], torch.Tensor], torch.Tensor]:
    rows: dict[tuple[str, int], torch.Tensor] = {}
    with oracle.inside.watched(rows, lambda hook, layer, value: change(value) if (hook, layer) == at else value):
        return rows, oracle.logits(IDS)


@pytest.mark.parametrize(
    ("family", "hook"),
    [("llama", "z"), ("qwen3", "z"), ("gpt2", "z"), ("llama", "mlp_post"), ("gpt2", "mlp_post")],
)
def test_a_silent_head_or_neuron_is_one_without_its_rows_of_the_matrix(family: str, hook: str) -> None:
    oracle, d_head = truth(family), SHAPES[family]["z"][1]
    few, columns = (2, slice(2 * d_head, 3 * d_head)) if hook == "z" else ([3, 170, 191],) * 2

    def silence(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[:, few] = 0
        return rows

    rows, logits = edited(oracle, (hook, 1), silence)
    assert not rows[hook, 1][:, few].any() and torch.equal(rows[hook, 1][:, 0], rows_of(family)[hook, 1][:, 0])
    part = attention_of(oracle.blocks[1]) if hook == "z" else oracle.blocks[1].mlp
    last = part.c_proj if family == "gpt2" else part.o_proj if hook == "z" else part.down_proj
    plain = oracle.logits(IDS)
    with changed(last.weight, columns if family == "gpt2" else (slice(None), columns), 0):
        assert rel_err(logits, oracle.logits(IDS)) < 1e-6
    assert rel_err(logits, plain) > (1e-2 if hook == "z" else 1e-3)


@pytest.mark.parametrize(("hook", "place"), [("q", 0), ("k", 1), ("v", 2)])
def test_what_is_added_to_a_projection_is_a_bias(hook: str, place: int) -> None:
    oracle = truth("gpt2")
    shift = torch.randn(32, generator=torch.Generator().manual_seed(place))
    bias, mine = oracle.blocks[1].attn.c_attn.bias, slice(128 * place + 32, 128 * place + 64)

    def add(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[:, 1] += shift
        return rows

    rows, logits = edited(oracle, (hook, 1), add)
    # What attention multiplies has it, and the other heads do not.
    if hook != "v":
        assert torch.equal(rows[f"{hook}_rot", 1], rows[hook, 1])
    with changed(bias, mine, bias[mine].detach() + shift):
        assert rel_err(logits, oracle.logits(IDS)) < 1e-6


def test_what_attention_is_given_is_not_the_stream() -> None:
    """An edit of `attn_in` or `mlp_in` reaches that part alone."""
    oracle = truth("llama")
    for hook, first, alone in (("attn_in", "q", "attn_out"), ("mlp_in", "mlp_pre", "mlp_out")):
        rows, logits = edited(oracle, (hook, 1), lambda value: 2 * value)
        assert rel_err(rows[first, 1], 2 * rows_of("llama")[first, 1]) < 1e-6, alone
        assert rel_err(logits, oracle.logits(IDS)) > 1e-2
    for later in ("attn_in", "z"):
        assert torch.equal(rows[later, 1], rows_of("llama")[later, 1])


def test_router_logits_send_tokens_elsewhere() -> None:
    rows, logits = edited(truth("mixtral"), ("router_logits", 1), lambda value: -value)
    assert torch.equal(rows["expert_ids", 1], (-rows_of("mixtral")["router_logits", 1]).topk(2).indices)
    assert rel_err(logits, truth("mixtral").logits(IDS)) > 1e-2


TOKENS, HEADS, KV_HEADS, SIZE, NEURONS = 9, 4, 2, 8, 24


def _rows(seed: int) -> Rows:
    """The rows of a block with normed heads and a gated MLP."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = random(TOKENS, HEADS, SIZE), random(TOKENS, KV_HEADS, SIZE), random(TOKENS, KV_HEADS, SIZE)
    pre, linear = random(TOKENS, NEURONS), random(TOKENS, NEURONS)
    weight = torch.linspace(0.5, 1.5, SIZE)
    q_rot, k_rot = (weight * x / x.pow(2).mean(-1, keepdim=True).sqrt() for x in (q, k))
    q_rot[1:], k_rot[1:] = q_rot[1:].flip(-1), k_rot[1:].flip(-1)  # what rotation does elsewhere is not looked at
    scores = random(TOKENS, HEADS, TOKENS).masked_fill(torch.ones(TOKENS, 1, TOKENS).triu(1) > 0, -torch.inf)
    pattern = scores.softmax(-1)
    z = torch.einsum("qhk,khd->qhd", pattern, v.repeat_interleave(HEADS // KV_HEADS, 1))
    made = dict(q=q, k=k, v=v, q_rot=q_rot, k_rot=k_rot, attn_scores=scores, pattern=pattern, z=z)
    made |= dict(mlp_pre=pre, mlp_pre_linear=linear, mlp_post=functional.silu(pre) * linear)
    return {(hook, 0): value for hook, value in made.items()}


def errors_of(check: Callable[..., None], *rows: Rows) -> dict[str, float]:
    found: dict[str, float] = {}

    def note(error: float, *hooks: str, certain: bool = False) -> None:
        found.update(dict.fromkeys(hooks, error))

    check(*rows, note)
    return found


def test_a_sound_block_obeys_them() -> None:
    first, second = _rows(0), _rows(1)
    found = errors_of(patterns, first) | errors_of(neurons, first) | errors_of(first_tokens, first, second)
    assert set(found) == {hook for hook, _ in first}
    assert max(found.values()) < 1e-5


def test_they_see_what_is_wrong() -> None:
    """Columns in another order, gate and up exchanged, values of another head."""
    for hook in ("q", "k"):
        wrong = [rows | {(hook, 0): rows[hook, 0].roll(1, -1)} for rows in (_rows(0), _rows(1))]
        assert errors_of(first_tokens, *wrong)[hook] > 0.1
    rows = _rows(0)
    exchanged = {("mlp_pre", 0): rows["mlp_pre_linear", 0], ("mlp_pre_linear", 0): rows["mlp_pre", 0]}
    assert errors_of(neurons, rows | exchanged)["mlp_pre"] > 0.1
    assert errors_of(patterns, rows | {("v", 0): rows["v", 0].flip(1)})["v"] > 0.1


def test_columns_of_a_projection() -> None:
    out = torch.randn(TOKENS, 40, generator=torch.Generator().manual_seed(2))
    assert gathered(out[:, [7, 3, 31]], out) == 0
    assert gathered(out[:, [7, 7]], out) == 1
    other = out[:, :8] + 0.1 * out[:, 8:16]
    assert gathered(other, out) > 0.05 and rel_err(other, out[:, :8]) > 0.05
