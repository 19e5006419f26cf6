"""The reference for multimodal models: transformers over a prompt with its images and sounds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.oracle import Oracle, Take


class MediaOracle(Oracle):
    """A multimodal model directory, loaded as the truth.

    Args:
        model_dir: the directory.
        ignored: what the passes are not given although the processor makes it.
        from_zero: whether positions begin at 0 although the model's own begin at 1.

    Attributes:
        processor: transformers' processor.
        given: what the passes are given besides token ids, as the processor made it; empty for text.
    """

    def __init__(self, model_dir: str | Path, ignored: Sequence[str] = (), from_zero: bool = False) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(model_dir)
        self.given: dict[str, torch.Tensor] = {}
        self._from_zero = from_zero
        self._left_out = {"input_ids", "attention_mask", *ignored}
        super().__init__(model_dir)

    def prompt(self, text: str, **media: Any) -> list[int]:
        """Take up a prompt and its media (as the processor is given them); return its token ids, expanded."""
        tokenizer = self.processor.tokenizer  # a processor may insist on an item
        made = self.processor(text=text, **media, return_tensors="pt") if media else tokenizer(text)
        ids = torch.as_tensor(made["input_ids"]).flatten().tolist()
        self.given = {k: _float32(v) for k, v in made.items() if k not in self._left_out} if media else {}
        return ids

    def _load(self, model_dir: str | Path) -> Any:
        from transformers import AutoModelForMultimodalLM

        return AutoModelForMultimodalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        # What marks the tokens of the prompt is 0 at generated ones.
        given = {
            name: torch.nn.functional.pad(v, (0, len(ids) - v.shape[1])) if name.endswith("type_ids") else v
            for name, v in self.given.items()
        }
        if self._from_zero:
            given["position_ids"] = torch.arange(len(ids))[None]
        return self.model(input_ids=torch.tensor([list(ids)]), use_cache=False, **given).logits[0]

    def _watch_embed(self, stack: contextlib.ExitStack, ends: dict[str, torch.Tensor], taken: Take) -> None:
        owner = next(m for m in self.model.modules() if any(child is self.blocks for child in m.children()))

        def merged(_module: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
            """Take the embeddings once those of images have joined them."""
            return args, {**kwargs, "inputs_embeds": taken("embed", kwargs["inputs_embeds"], self.embed_scale)}

        stack.callback(owner.register_forward_pre_hook(merged, with_kwargs=True).remove)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
