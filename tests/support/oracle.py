"""The reference: the same model in HuggingFace transformers; fp32, eager attention, one sequence a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.inside import Inside
from tests.conformance.oracle import ENDS, FIVE
from tests.conformance.oracle import Oracle as Points
from tests.support.remembered import REFERENCES

Site = tuple[str, int]


def find_blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder blocks: the one ModuleList with `num_hidden_layers` entries."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise AssertionError(f"{len(lists)} module lists have {count} entries: cannot tell the decoder blocks")
    return lists[0]


class _Points(Points):
    """The points of a model that is loaded already."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._loaded = model
        super().__init__("")

    def _load(self, _model_dir: str | Path) -> Any:
        return self._loaded


class Oracle:
    """A model directory, loaded as the truth.

    Rows and greedy tokens are remembered (`REFERENCES`): the weights stay as they are once some were asked for, and
    nobody may write to a tensor that was returned.
    """

    def __init__(self, model_dir: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model_dir = model_dir
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.blocks = find_blocks(self.model)
        self.num_layers = len(self.blocks)
        self.hidden_size: int = self.model.config.get_text_config().hidden_size
        self._key = object()  # two references of a directory may differ in their weights

    @functools.cached_property
    def points(self) -> Points:
        """The points inside blocks, read off the additions that transformers makes."""
        return _Points(self.model)

    @functools.cached_property
    def inside(self) -> Inside:
        """The points inside attention and MLP of `model`."""
        return Inside(self.model, self.blocks, self.hidden_size)

    def rows(self, token_ids: Sequence[int], sites: Iterable[Site] | None = None) -> dict[Site, torch.Tensor]:
        """Every point of every layer over `token_ids` [n]: {(hook, layer): [n, ...]}; of `sites` at least those.

        A row is [d] in the stream, [heads, d_head] or [d_mlp] inside a block; scores and patterns are
        [n, heads, n], -inf and 0 where a key is out of reach.
        What enters and leaves each block is taken by hooks of its own, so that their identity stays a thing to test.
        What takes longer is left out where `sites` do not need it: the points between the parts of a block take as long
        as a plain pass, those inside attention and MLP as long again.
        """
        ids, level = tuple(token_ids), _level(sites)
        for enough in reversed(LEVELS[LEVELS.index(level) :]):
            if (found := REFERENCES.get((self._key, enough, ids))) is not None:
                return dict(found)
        found = self._rows(ids, level)
        return dict(REFERENCES.put((self._key, level, ids), found, found.values()))

    @torch.no_grad()
    def _rows(self, token_ids: tuple[int, ...], level: str) -> dict[Site, torch.Tensor]:
        points = self.points if level != "ends" else None  # found by passes of its own
        ends: dict[Site, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                before = block.register_forward_pre_hook(_take_input(ends, layer), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(block.register_forward_hook(_take_output(ends, layer)).remove)
            if points is None:
                self._forward(token_ids)
                return ends
            return points.points(token_ids, inside=level == "inside")[0] | ends

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[n, vocab]: row p predicts token p + 1."""
        return self._forward(token_ids)

    @torch.no_grad()
    def greedy(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The n tokens that follow, each the argmax; end-of-sequence does not stop it (`ignore_eos=True`).

        With transformers' own cache of keys and values; `tests/unit/test_references.py` shows that it changes nothing.
        """
        key = (self._key, "greedy", tuple(prompt_ids))
        made, cache = REFERENCES.get(key) or ([], None)
        made = list(made)
        while len(made) < n:
            given = made[-1:] if cache is not None else [*prompt_ids, *made]
            out = self.model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
            made.append(int(out.logits[0, -1].argmax()))
            cache = out.past_key_values
        REFERENCES.put(key, (tuple(made), None), ())
        return made[:n]

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        # No cache: each call is one plain pass, with nothing carried over from another.
        return self.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


LEVELS = ("ends", "parts", "inside")
"""What a pass reads: what enters and leaves blocks; between their parts, and outside; inside attention and MLP."""


def _level(sites: Iterable[Site] | None) -> str:
    hooks = None if sites is None else {hook for hook, _ in sites}
    if hooks is not None and hooks <= {"resid_pre", "resid_post"}:
        return "ends"
    return "parts" if hooks is not None and hooks <= {*FIVE, *ENDS} else "inside"


def _take_input(found: dict[Site, torch.Tensor], layer: int) -> Any:
    def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        with torch._C.DisableTorchFunction():  # whoever watches the pass does not see this
            found["resid_pre", layer] = hidden[0].detach().clone()

    return hook


def _take_output(found: dict[Site, torch.Tensor], layer: int) -> Any:
    def hook(_module: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # transformers 5: a tensor in most models
        if hidden.ndim != 3:
            raise AssertionError(f"block {layer} gave {hidden.ndim} dimensions, not [batch, tokens, width]")
        with torch._C.DisableTorchFunction():
            found["resid_post", layer] = hidden[0].detach().clone()

    return hook
