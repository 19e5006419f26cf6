"""`Given` and `Found`: what a caller says about a file, and what a reader found in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import set_fields
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.scalars import is_int, plain

BLOCKS, HIDDEN_STATES = "blocks", "hidden_states"


@dataclass(frozen=True)
class Given:
    """What a caller says about a file that does not say it itself.

    Args:
        layers: block of the one vector, or of each of several, in their order; None if not given.
        hook: hook point; None if not given.
        numbering: how layers are counted, in the file and in `layers`: ``"blocks"`` or
            ``"hidden_states"``; None if not given.
    """

    layers: Any = None
    hook: Any = None
    numbering: Any = None

    def __post_init__(self) -> None:
        if self.hook is not None:
            set_fields(self, hook=normalise_hook(self.hook, "hook"))
        if self.numbering not in (None, BLOCKS, HIDDEN_STATES):
            raise WeirError(f"choose {BLOCKS!r} or {HIDDEN_STATES!r}, got {brief(self.numbering)!r}", "numbering")
        if self.layers is None:
            return
        layers = plain(self.layers)
        layers = [plain(layer) for layer in layers] if isinstance(layers, Iterable) else [layers]
        if not layers or not all(is_int(layer) and layer >= 0 for layer in layers):
            raise WeirError("expected the index of a block, or several, counted from 0", "layers")
        set_fields(self, layers=tuple(map(int, layers)))

    def refuse_layers(self, source: str) -> None:
        """Raise WeirError if layers or their numbering were given for a file that says them itself."""
        if self.layers is not None:
            raise WeirError(f"{source} says which blocks its vectors are for; leave it out, and use .only()", "layers")
        if self.numbering == HIDDEN_STATES:
            raise WeirError(f"{source} counts blocks; leave it out", "numbering")

    def hook_or(self, said: str | None, default: str, source: str) -> str:
        """Return the hook point that the file says, the caller gave, or the default; refuse two that differ."""
        if said is not None and self.hook is not None and said != self.hook:
            raise WeirError(f"{source} says {said}", "hook")
        return said or self.hook or default


@dataclass(frozen=True)
class Found:
    """What was found in a file: the fields of `Directions`."""

    hook: str
    vectors: Mapping[int, Any]
    method: str
    convention: str
    details: Mapping[str, Any] = field(default_factory=dict)
    auc_by_layer: Mapping[int, float] | None = None
    bias: Mapping[int, float] | None = None
    head: int | None = None
