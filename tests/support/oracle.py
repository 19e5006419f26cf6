"""The reference: the same model in HuggingFace transformers; fp32, eager attention, no cache, one sequence a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.inside import Inside
from tests.conformance.oracle import Oracle as Points

Site = tuple[str, int]


def find_blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder blocks: the one ModuleList with `num_hidden_layers` entries."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise AssertionError(f"{len(lists)} module lists have {count} entries: cannot tell the decoder blocks")
    return lists[0]


class Oracle:
    """A model directory, loaded as the truth."""

    def __init__(self, model_dir: str | Path) -> None:
        self.model_dir = model_dir
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.blocks = find_blocks(self.model)
        self.num_layers = len(self.blocks)
        self.hidden_size: int = self.model.config.get_text_config().hidden_size
        self._remembered = functools.lru_cache(maxsize=16)(self._rows)

    @functools.cached_property
    def points(self) -> Points:
        """The points inside blocks, read off the additions that transformers makes."""
        return Points(self.model_dir)

    @functools.cached_property
    def inside(self) -> Inside:
        """The points inside attention and MLP of `model`."""
        return Inside(self.model, self.blocks, self.hidden_size)

    def rows(self, token_ids: Sequence[int], sites: Iterable[Site] | None = None) -> dict[Site, torch.Tensor]:
        """Every point of every layer over `token_ids` [n]: {(hook, layer): [n, ...]}; of `sites` at least those.

        A row is [d] in the stream, [heads, d_head] or [d_mlp] inside a block; scores and patterns are
        [n, heads, n], -inf and 0 where a key is out of reach.
        What enters and leaves each block is taken separately, so that their identity stays a thing to test; it alone
        takes a quarter of the time. The tensors are remembered, and must not be written to.
        """
        ends_alone = sites is not None and {hook for hook, _ in sites} <= {"resid_pre", "resid_post"}
        return dict(self._remembered(tuple(token_ids), ends_alone))

    @torch.no_grad()
    def _rows(self, token_ids: tuple[int, ...], ends_alone: bool) -> dict[Site, torch.Tensor]:
        ends = self._ends(token_ids)
        return ends if ends_alone else self.points.points(token_ids)[0] | ends

    @torch.no_grad()
    def _ends(self, token_ids: Sequence[int]) -> dict[Site, torch.Tensor]:
        found: dict[Site, torch.Tensor] = {}
        handles = []
        for layer, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(_take_input(found, layer), with_kwargs=True))
            handles.append(block.register_forward_hook(_take_output(found, layer)))
        try:
            self._forward(token_ids)
        finally:
            for handle in handles:
                handle.remove()
        return found

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[n, vocab]: row p predicts token p + 1."""
        return self._forward(token_ids)

    @torch.no_grad()
    def greedy(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The n tokens that follow, each the argmax; end-of-sequence does not stop it (`ignore_eos=True`)."""
        ids = list(prompt_ids)
        for _ in range(n):
            ids.append(int(self._forward(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        # No cache: each call is one plain pass, with nothing carried over from another.
        return self.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def _take_input(found: dict[Site, torch.Tensor], layer: int) -> Any:
    def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        found["resid_pre", layer] = hidden[0].detach().clone()

    return hook


def _take_output(found: dict[Site, torch.Tensor], layer: int) -> Any:
    def hook(_module: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # transformers 5: a tensor in most models
        if hidden.ndim != 3:
            raise AssertionError(f"block {layer} gave {hidden.ndim} dimensions, not [batch, tokens, width]")
        found["resid_post", layer] = hidden[0].detach().clone()

    return hook
