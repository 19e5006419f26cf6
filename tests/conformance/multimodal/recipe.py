"""What it takes to make one multimodal model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.models import BOS, EOS, PAD, VOCAB

TEXT: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    vocab_size=VOCAB + 64,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
    tie_word_embeddings=False,
)
"""What the language models share."""
TOWER: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
"""What most vision towers share."""

Ids = Mapping[str, int]
"""Special token -> its id."""


@dataclass(frozen=True)
class Recipe:
    """One multimodal model.

    Attributes:
        architecture: its name in vLLM's registry.
        model_type: its name in transformers.
        tokens: special tokens of the tokenizer, in the order of their ids, which begin at `VOCAB`.
        config: the fields of its configuration, given those ids.
        processor: makes transformers' processor of (tokenizer, configuration).
        media: modality -> what stands in a prompt for one item.
        names: attribute of the tokenizer -> special token.
        sizes: (width, height) of test images, pixels.
        rename: parts of names of weights -> what hubs' checkpoints call them, and vLLM expects.
        transposed: parts of names of weights of experts that hubs' checkpoints have transposed.
        engine: further arguments of ``vllm.LLM``.
        mutual: what transformers is given so that tokens of one item see each other, which vLLM's
            attention for CPUs does not let them.
        interleaved: whether the columns of a head's queries and keys, which transformers rotates in
            pairs, come in two halves in vLLM.
        no_media: why vLLM cannot run a prompt with items on a CPU; "" if it can.
        variant: tells recipes of one architecture apart.
        from_zero: whether positions begin at 0 in vLLM, and at 1 in transformers, which turns all queries
            and keys by the same angle.
        one_in_front: whether vLLM puts the only item that a prompt may have in front of it by itself.
    """

    architecture: str
    model_type: str
    tokens: tuple[str, ...]
    config: Callable[[Ids], dict[str, Any]]
    processor: Callable[[Any, Any], Any]
    media: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((56, 56), (56, 56))
    rename: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    mutual: tuple[str, ...] = ()
    interleaved: bool = False
    no_media: str = ""
    variant: str = ""
    from_zero: bool = False
    one_in_front: bool = False

    @property
    def name(self) -> str:
        """Of the recipe; no two have the same."""
        return f"{self.architecture}-{self.variant}" if self.variant else self.architecture

    @property
    def ids(self) -> dict[str, int]:
        """Special token -> its id."""
        return {token: VOCAB + i for i, token in enumerate(self.tokens)}
