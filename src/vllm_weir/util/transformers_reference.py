"""The residual stream of a transformers model, as what captured rows are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def blocks_of(network: Any, num_layers: int | None = None) -> torch.nn.ModuleList:
    """Return the blocks of a causal language model of transformers.

    `num_layers`: number of its blocks; by default as its configuration says. Raises ValueError if it does not have
    exactly one stack of so many blocks.
    """
    count = num_layers or network.config.get_text_config().num_hidden_layers
    stacks = [m for m in network.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(f"{len(stacks)} stacks of {count} blocks in {type(network).__name__}")
    return stacks[0]


class TransformersReference:
    """A transformers model whose blocks are read by forward hooks.

    The rows are the blocks' own outputs, because transformers' last ``hidden_states`` come after the
    final norm.

    `num_layers`: number of its blocks; by default as its configuration says. Raises ValueError if it does not have
    exactly one stack of so many blocks.
    """

    def __init__(self, network: Any, num_layers: int | None = None) -> None:
        self.network = network.eval()
        blocks = blocks_of(network, num_layers)
        self._positions: torch.Tensor | None = None
        self._entered = torch.empty(0)
        self._left: list[torch.Tensor] = []
        blocks[0].register_forward_pre_hook(self._keep_entered)
        for block in blocks:
            block.register_forward_hook(self._keep_left)

    @classmethod
    def from_pretrained(cls, model: str, dtype: torch.dtype = torch.float32) -> TransformersReference:
        """Load a model of transformers with eager attention, on the CPU."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        return cls(AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager"))

    def _keep_entered(self, _module: Any, inputs: tuple) -> None:
        self._entered = self._select(inputs[0])

    def _keep_left(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._left.append(self._select(output[0] if isinstance(output, tuple) else output))

    def _select(self, stream: torch.Tensor) -> torch.Tensor:
        return stream[0] if self._positions is None else stream[0][self._positions]

    @torch.no_grad()
    def streams(
        self, token_ids: Sequence[int] | torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one sequence without a cache.

        Args:
            token_ids: [tokens].
            positions: [n] of the rows to keep; by default all.

        Returns:
            ``resid_pre`` of block 0, [n, d], and ``resid_post`` of every block, [layers, n, d].
        """
        device = next(self.network.parameters()).device
        self._left.clear()
        self._positions = None if positions is None else positions.to(device)
        ids = torch.as_tensor(token_ids, device=device)[None]
        self.network.base_model(input_ids=ids, use_cache=False)
        return self._entered, torch.stack(self._left)
