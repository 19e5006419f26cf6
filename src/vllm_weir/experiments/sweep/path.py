"""Path patching: what is read and patched at the end of a path, and what is held still between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import MODEL_HOOKS, Site, normalise_hook, place_of, refuse_read_only
from vllm_weir.schema.row_parts import RowPart
from vllm_weir.schema.scalars import is_int, plain

FREEZABLE = ("attn_out", "mlp_out")
"""What the two parts of a block add to the stream: with both held still, only the stream carries a change on."""
_INTO = {
    "attn_out": frozenset({"attn_in", "q", "k", "v", "z"}),
    "mlp_out": frozenset({"mlp_in", "router_logits", "mlp_post"}),
}
"""Hook points inside each part; a change there leaves the block through the part itself."""


@dataclass(frozen=True)
class Receiver:
    """The end of a path.

    Attributes:
        site: where it is.
        heads: the heads that receive; None for the whole row.
    """

    site: Site
    heads: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, to: Any, field: str = "to") -> Receiver:
        """Parse ``(hook, layer)`` or ``(hook, layer, heads)``; WeirError for other forms, or what cannot be changed."""
        if isinstance(to, str) and to in MODEL_HOOKS:
            to = (to, 0)
        if isinstance(to, str) or not isinstance(to, Sequence) or len(to) not in (2, 3) or not is_int(plain(to[1])):
            raise WeirError(f"expected (hook, layer) or (hook, layer, heads), got {brief(to, 80)}", field)
        hook, layer = normalise_hook(to[0], field), int(plain(to[1]))
        refuse_read_only(hook, field)
        if layer < 0:
            raise WeirError(f"block {layer} does not exist: blocks count from 0", field)
        heads = RowPart.parse(hook, to[2] if len(to) == 3 else None, None, field).heads
        return cls(Site(hook, layer), None if heads is None else tuple(heads))

    def to_json(self) -> list[Any]:
        return [*self.site] if self.heads is None else [*self.site, list(self.heads)]

    def __str__(self) -> str:
        return f"{self.site}" if self.heads is None else f"{self.site} heads {', '.join(map(str, self.heads))}"


def parse_path(to: Any, freeze: Any) -> tuple[Receiver | None, tuple[str, ...]]:
    """Return the end of a path, None for no path, and what is held still on it; raise WeirError naming the argument."""
    if to is not None:
        return Receiver.parse(to), parse_freeze(FREEZABLE if freeze is None else freeze)
    if freeze is not None:
        raise WeirError("it is what a path holds still; give the path's receiver (to), or leave it out", "freeze")
    return None, ()


def parse_freeze(freeze: Any, field: str = "freeze") -> tuple[str, ...]:
    names = [freeze] if isinstance(freeze, str) else list(freeze)
    hooks = [normalise_hook(name, field) for name in names]
    for hook in hooks:
        if hook not in FREEZABLE:
            raise WeirError(f"{hook} cannot be held still; choose from {', '.join(FREEZABLE)}", field)
    return tuple(hook for hook in FREEZABLE if hook in hooks)


def precedes(sender: Site, receiver: Site) -> bool:
    """Return whether a token meets one site before the other."""
    return place_of(sender) < place_of(receiver)


def frozen_sites(sender: Site, receiver: Site, freeze: Sequence[str], num_layers: int) -> tuple[Site, ...]:
    """Return the sites between sender and receiver that are held at the base run's rows.

    The part that the sender lies inside is not among them: through it the change leaves the block.
    """
    between = (Site(hook, layer) for layer in range(num_layers) for hook in freeze)
    return tuple(
        site
        for site in between
        if precedes(sender, site)
        and precedes(site, receiver)
        and not (site.layer == sender.layer and sender.hook in _INTO[site.hook])
    )
