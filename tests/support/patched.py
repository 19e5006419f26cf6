"""Activation and path patching by hooks on transformers: what cells of a sweep are compared with.

For Llama's modules: rows are taken and put where a block's parts are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

Site = tuple[str, int]


class Put(NamedTuple):
    """Rows [n, ...] for n positions; of one head, [n, d_head]."""

    positions: Sequence[int]
    rows: torch.Tensor
    head: int | None = None


class Patched:
    """A Llama of transformers in fp32, with hooks."""

    def __init__(self, model_dir: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.blocks = self.model.model.layers
        self.d_head = self.blocks[0].self_attn.head_dim

    @torch.no_grad()
    def run(
        self, token_ids: Sequence[int], puts: Mapping[Site, Put] | None = None, reads: Iterable[Site] = ()
    ) -> tuple[torch.Tensor, dict[Site, torch.Tensor]]:
        """The logits at the last token, and the rows [n, width] of `reads`, after what is put there."""
        puts, reads, found = puts or {}, set(reads), {}

        def through(site: Site, hidden: torch.Tensor) -> torch.Tensor:
            if site in puts:
                put, hidden = puts[site], hidden.clone()
                columns = (
                    slice(None) if put.head is None else slice(put.head * self.d_head, (put.head + 1) * self.d_head)
                )
                hidden[0, list(put.positions), columns] = put.rows.flatten(1)
            if site in reads:
                found[site] = hidden[0].clone()
            return hidden

        def before(site: Site) -> Any:
            return lambda _m, args: (through(site, args[0]), *args[1:])

        def after(site: Site) -> Any:
            return lambda _m, _a, out: (
                (through(site, out[0]), *out[1:]) if isinstance(out, tuple) else through(site, out)
            )

        with ExitStack() as stack:
            for n, block in enumerate(self.blocks):
                stack.callback(block.register_forward_pre_hook(before(("resid_pre", n))).remove)
                stack.callback(block.self_attn.o_proj.register_forward_pre_hook(before(("z", n))).remove)
                stack.callback(block.self_attn.register_forward_hook(after(("attn_out", n))).remove)
                stack.callback(block.mlp.register_forward_hook(after(("mlp_out", n))).remove)
                stack.callback(block.register_forward_hook(after(("resid_post", n))).remove)
                stack.callback(block.self_attn.q_proj.register_forward_hook(after(("q", n))).remove)
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
        return logits, found

    def patch(
        self, base: Sequence[int], source: Sequence[int], site: Site, positions: Sequence[int], head: int | None = None
    ) -> torch.Tensor:
        """The logits of the base run with the source run's rows."""
        return self.run(base, {site: self.rows(source, site, positions, head)})[0]

    def path(
        self,
        base: Sequence[int],
        source: Sequence[int],
        site: Site,
        positions: Sequence[int],
        head: int | None,
        to: Site,
        held: Sequence[Site],
    ) -> torch.Tensor:
        """The logits of the base run whose receiver has what came to it with `held` at the base run's rows."""
        everywhere = range(len(base))
        puts = {h: self.rows(base, h, everywhere) for h in held}
        _, found = self.run(base, puts | {site: self.rows(source, site, positions, head)}, [to])
        return self.run(base, {to: Put(everywhere, found[to])})[0]

    def rows(self, token_ids: Sequence[int], site: Site, positions: Sequence[int], head: int | None = None) -> Put:
        """What a run has at a site."""
        rows = self._all(tuple(token_ids))[site][list(positions)]
        return Put(positions, rows[:, self._columns(head)], head)

    def _columns(self, head: int | None) -> slice:
        return slice(None) if head is None else slice(head * self.d_head, (head + 1) * self.d_head)

    @lru_cache(maxsize=8)  # noqa: B019
    def _all(self, token_ids: tuple[int, ...]) -> dict[Site, torch.Tensor]:
        hooks = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post", "q")
        return self.run(token_ids, reads=[(hook, n) for hook in hooks for n in range(len(self.blocks))])[1]
