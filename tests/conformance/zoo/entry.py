"""One architecture of the zoo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tests.conformance.zoo.build import COMMON

EXACT = 1e-5
LOOSE = 1e-4
COARSE = 2e-2
"""Bounds on max|delta| / max|ref|: routed experts and latent attention sum in an order of their own, bfloat16 rounds
to 8 bits: by 4e-3 of a tensor, of which an identity has three."""


@dataclass(frozen=True)
class Entry:
    """How to make a tiny model of an architecture, or why there is none.

    Attributes:
        architecture: the name in `config.json`, vLLM's registry's.
        model_type: the configuration class's; with `oracle`, one that transformers has a causal model for.
        config: fields of the configuration on top of `COMMON`; a value of DROP there removes the common one.
        config_json: fields written into `config.json` after the model was made, for vLLM alone to see.
        oracle: whether transformers runs the same weights.
        identities: whether they are checked all the same.
        bound: largest max|delta| / max|ref| of a captured or steered row.
        zero: ends of the names of weights that are left at zero.
        rename: parts of the checkpoint's names -> what this vLLM calls them.
        engine: arguments of `vllm.LLM` on top of the runner's.
        apart: why vLLM and transformers do not compute the same here, so that identities have to do.
        apart_bound: their bound then, if it is wider than `bound`.
        dtype: of weights and stream.
        verdict: a verdict that no run can change, with its `reason`, for what has no model here.
        variant: its name among the architecture's entries; "" for the first one.
        differs: what is other than in the first one, in a few words; "" in that.
        tried: whether `reason` was found by running the architecture; False: by reading its source.
    """

    architecture: str
    model_type: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    config_json: dict[str, Any] = field(default_factory=dict)
    oracle: bool = True
    identities: bool = False
    bound: float = EXACT
    zero: tuple[str, ...] = ()
    rename: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    apart: str = ""
    apart_bound: float = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    verdict: Literal["", "refused", "cannot run"] = ""
    reason: str = ""
    tried: bool = True
    variant: str = ""
    differs: str = ""

    @property
    def name(self) -> str:
        """What it is called in the zoo."""
        return f"{self.architecture}:{self.variant}" if self.variant else self.architecture

    def fields(self) -> dict[str, Any]:
        """The configuration's fields."""
        drop = {name for name, value in self.config.items() if value is DROP}
        return {k: v for k, v in (COMMON | self.config).items() if k not in drop}


class _Drop:
    """A field of `COMMON` that the configuration goes without."""


DROP: Any = _Drop()
