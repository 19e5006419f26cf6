"""Where the points inside a block of a transformers model are: modules, and columns of what they are given or give."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests.conformance.attention import Attended
from tests.support.measure import rel_err

ATTENTION = ("attn_in", "q", "k", "v", "q_rot", "k_rot", "attn_scores", "pattern", "z")
MLP = ("mlp_in", "mlp_pre", "mlp_pre_linear", "mlp_post")
ROUTING = ("router_logits", "expert_ids", "expert_weights")
INNER = (*ATTENTION, "mlp_in", *ROUTING, *MLP[1:])
"""In the order in which a token meets them."""
STEERABLE = ("attn_in", "q", "k", "v", "z", "mlp_in", "router_logits", "mlp_post")

_OUT = ("o_proj", "out_proj", "dense", "c_proj")
_PACKED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
_DOWN = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "fc_out", "w2", "output_linear")
_GATE = ("gate_proj", "w1")
_UP = ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "fc_in")
_GATE_UP = ("gate_up_proj", "input_linear")


class Tap(NamedTuple):
    """Columns of a module's input (side "in") or output ("out") that are a point's row, in the row's shape."""

    module: torch.nn.Module
    side: str
    hook: str
    columns: torch.Tensor


@dataclass
class Block:
    """What a block has inside.

    Attributes:
        router: the weight [experts, d] whose product with the stream is `router_logits`.
        experts: the module that is given ids and weights; Llama 4's is given rows already weighted.
        missing: hook point -> why there is none.
    """

    taps: list[Tap] = field(default_factory=list)
    attends: bool = False
    router: torch.nn.Parameter | None = None
    experts: torch.nn.Module | None = None
    top_k: int = 0
    missing: dict[str, str] = field(default_factory=dict)


def find_attention(
    found: Block, module: torch.nn.Module, seen: Attended, outputs: dict[int, torch.Tensor], width: int
) -> None:
    """The taps of a block's attention."""
    (heads, d_head), kv_heads = seen.q.shape[1:], seen.k.shape[1]
    out = _child(module, _OUT)
    if out is None:
        found.missing |= dict.fromkeys(ATTENTION, f"{type(module).__name__} has no output projection of a known name")
        return
    found.attends = True
    d_v = seen.v.shape[-1] if seen.v is not None else d_head
    found.taps.append(Tap(out, "in", "z", torch.arange(heads * d_v).view(heads, d_v)))
    first = next(m for m in module.modules() if id(m) in outputs and m is not module)
    if _width_in(first) in (None, width):
        found.taps.append(Tap(module, "in", "attn_in", torch.arange(width)))
    packed = _child(module, _PACKED)
    if packed is not None:
        for hook, columns in zip("qkv", _unpack(outputs[id(packed)], seen, heads, kv_heads, d_head)):
            found.taps.append(Tap(packed, "out", hook, columns))
    elif _child(module, ("kv_b_proj",)) is not None:
        _latent(found, module, outputs, heads, d_head, d_v)
    else:
        for hook, count, size in (("q", heads, d_head), ("k", kv_heads, d_head), ("v", kv_heads, d_v)):
            own = _child(module, (f"{hook}_proj",))
            if own is not None and id(own) in outputs:
                # Wider than the heads: each has a gate beside it.
                columns = torch.arange(outputs[id(own)].shape[-1]).view(count, -1)[:, :size]
                found.taps.append(Tap(own, "out", hook, columns))


def _unpack(
    output: torch.Tensor, seen: Attended, heads: int, kv_heads: int, d_head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The columns of queries, keys and values in a packed projection: all of each, or group by group."""
    each = torch.arange((heads + 2 * kv_heads) * d_head).view(-1, d_head)
    whole = each.split([heads, kv_heads, kv_heads])
    group = heads // kv_heads
    by_group = each.view(kv_heads, group + 2, d_head).split([group, 1, 1], 1)
    layouts = [whole, tuple(columns.flatten(0, 1) for columns in by_group)]
    for q, k, v in layouts:
        # Nothing is rotated at position 0.
        right = rel_err(output[0][q], seen.q[0]) if seen.v is None else rel_err(output[:, v], seen.v)
        if right < 1e-6:
            return q, k, v
    raise AssertionError("queries, keys and values are packed in an order of their own")


def _latent(
    found: Block, module: torch.nn.Module, outputs: dict[int, torch.Tensor], heads: int, d_head: int, d_v: int
) -> None:
    """Latent attention: queries and values are columns of projections; keys are put together from two of them."""
    query, both = _child(module, ("q_b_proj", "q_proj")), _child(module, ("kv_b_proj",))
    assert query is not None and both is not None
    columns = torch.arange(outputs[id(both)].shape[-1]).view(heads, -1)
    found.taps.append(Tap(query, "out", "q", torch.arange(heads * d_head).view(heads, d_head)))
    found.taps.append(Tap(both, "out", "v", columns[:, -d_v:]))
    found.missing["k"] = "latent attention puts its keys together from two projections"


def find_mlp(
    found: Block, block: torch.nn.Module, attention: torch.nn.Module | None, outputs: dict[int, torch.Tensor],
    width: int,
) -> None:  # fmt: skip
    """The taps of a block's MLP, or of its routed experts."""
    mine = set(attention.modules()) if attention is not None else set()
    experts = [m for m in block.modules() if type(m).__name__.endswith("Experts") and hasattr(m, "num_experts")]
    if experts:
        _find_experts(found, block, experts[0], width)
        return
    owners = []
    for module in block.modules():
        down = None if module in mine else _child(module, _DOWN)
        if down is not None and id(down) in outputs and outputs[id(down)].shape[-1] == width and _first(module):
            owners.append((module, down))
    if len(owners) != 1:
        found.missing |= dict.fromkeys(MLP, f"the block has {len(owners)} MLPs")
        return
    owner, down = owners[0]
    d_mlp = _width_in(down)
    both, gate, up = _child(owner, _GATE_UP), _child(owner, _GATE), _child(owner, _UP)
    if owner is block:  # OPT has no module around the two
        found.taps.append(Tap(both or gate or up, "in", "mlp_in", torch.arange(width)))
    else:
        found.taps.append(Tap(owner, "in", "mlp_in", torch.arange(width)))
    found.taps.append(Tap(down, "in", "mlp_post", torch.arange(d_mlp)))
    if both is not None:
        halves = torch.arange(2 * d_mlp).split(d_mlp)
        found.taps += [Tap(both, "out", hook, half) for hook, half in zip(("mlp_pre", "mlp_pre_linear"), halves)]
        return
    found.taps.append(Tap(gate if gate is not None else up, "out", "mlp_pre", torch.arange(d_mlp)))
    if gate is not None and up is not None:
        found.taps.append(Tap(up, "out", "mlp_pre_linear", torch.arange(d_mlp)))
    else:
        found.missing["mlp_pre_linear"] = "the MLP has no gate"


def _find_experts(found: Block, block: torch.nn.Module, experts: torch.nn.Module, width: int) -> None:
    owner = next(m for m in block.modules() if experts in m.children())
    found.missing |= dict.fromkeys(MLP[1:], "the MLP is a mixture of experts")
    if owner is not block:
        found.taps.append(Tap(owner, "in", "mlp_in", torch.arange(width)))
    else:
        found.missing["mlp_in"] = "router and experts are given rows of their own"
    inner = set(experts.modules())
    for module in owner.modules():
        weight = module._parameters.get("weight")
        if module not in inner and weight is not None and tuple(weight.shape) == (experts.num_experts, width):
            found.router, found.experts = weight, experts
    if found.router is not None and len(inspect.signature(experts.forward).parameters) < 3:
        found.top_k = owner.top_k


def _first(module: torch.nn.Module) -> torch.nn.Module | None:
    return _child(module, (*_GATE_UP, *_GATE, *_UP))


def _child(module: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module | None:
    return next((module._modules[name] for name in names if module._modules.get(name) is not None), None)


def _width_in(module: torch.nn.Module) -> int | None:
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    return weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
