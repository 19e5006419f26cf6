"""Functions of users, and the same functions in the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import vllm_weir as weir


def probe_and_steer(rows: Any, ctx: Any) -> Any:
    """A nonlinear probe decides how much is added."""
    w = ctx.args["w"]
    return rows + ctx.args["scale"] * torch.relu(rows @ w)[:, None] * w, {"probe": rows @ w}


def clamp_norm(rows: Any, ctx: Any) -> Any:
    norms = rows.norm(dim=1, keepdim=True)
    return rows * (ctx.args["most"] / norms).clamp(max=1.0), {"norm": norms[:, 0]}


def smoothed(rows: Any, ctx: Any) -> Any:
    """A value head with a moving average, which each position goes on from."""
    out, said = rows.clone(), []
    for k in range(len(rows)):
        ctx.state = 0.5 * ctx.state + 0.5 * (rows[k] @ ctx.args["w"])
        out[k] += ctx.state * ctx.args["w"]
        said.append(ctx.state.clone())
    ctx.saved["last"] = ctx.state
    return out, {"smoothed": torch.cat(said)}


def without_top(rows: Any, ctx: Any) -> Any:
    """The neurons that fire most are silenced."""
    top = rows.topk(ctx.args["k"], dim=1).indices
    return rows.scatter(1, top, 0.0)


def mixed(rows: Any, ctx: Any) -> Any:
    return rows @ ctx.args["matrix"]


def reconstructed(rows: Any, ctx: Any) -> Any:
    """A gated autoencoder."""
    before = rows @ ctx.args["encoder"]
    acts = (before > 0.1) * torch.relu(before)
    return acts @ ctx.args["decoder"] + 0.5 * rows, {"active": (acts > 0).sum(1)}


def cases(d: int, d_mlp: int, d_z: int) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions with the rest of a `weir.Hook`'s arguments."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[0] ** 0.5
    return [
        (probe_and_steer, {"hook": "resid_post", "layers": [1, 2], "args": {"w": 2 * draw(d), "scale": 3.0}}),
        (clamp_norm, {"hook": "resid_pre", "layers": 2, "args": {"most": 9.0}}),
        (smoothed, {"hook": "resid_post", "layers": 0, "args": {"w": draw(d)}, "state": (1,), "positions": "3:"}),
        (without_top, {"hook": "mlp_post", "layers": "all", "args": {"k": 8}}),
        (mixed, {"hook": "z", "layers": [1], "args": {"matrix": 2 * draw(d_z, d_z)}, "positions": "generated"}),
        (
            reconstructed,
            {"hook": "resid_post", "layers": [3], "args": {"encoder": draw(d, 64), "decoder": draw(64, d)}},
        ),
    ]


class Applied:
    """What a hook does in a `SteeredOracle`: the function is given all selected rows at once.

    `values` is what it gave at the last block.
    """

    vectors: dict[str, Any] = {}  # noqa: RUF012 - as of an intervention
    heads = neurons = None
    numbers, per_layer = "", False

    def __init__(self, function: Callable[..., Any], hook: weir.Hook, given: dict[str, Any]) -> None:
        self._function, self._given = function, given
        self.values: dict[str, torch.Tensor] = {}
        self.hook, self.layers, self.positions = hook.hook, hook.layers, hook.positions

    def changed(self, rows: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(self._given.get("state", ()))
        returned = self._function(rows, SimpleNamespace(args=self._given.get("args"), state=state, saved={}))
        new, values = returned if isinstance(returned, tuple) else (returned, {})
        self.values.update(values)
        return rows if new is None else new


def both(function: Callable[..., Any], given: dict[str, Any]) -> tuple[weir.Hook, Applied]:
    """A hook, and the same in the reference."""
    hook = weir.Hook(function, **given)
    return hook, Applied(function, hook, given)
