"""What a request asks of the routers of a mixture of experts, and how their choices lie in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import is_int, parse_flag, plain, right_words
from vllm_weir.schema.hooks import ROUTING, Site

WEIGHT_BYTES = 4
"""A weight travels as the bytes of a float32."""
NOT_REPORTED = "the workers have not reported the model's routers"
NO_EXPERTS = "this model has no experts to choose from"


@right_words
@dataclass(frozen=True)
class Routing:
    """The experts that the model's routers choose, for ``out.outputs[0].routed_experts``.

    Args:
        weights: whether ``out.outputs[0].routing_weights`` has what the experts' outputs are multiplied by, too.
        prompt_start: the first position; the rows of those before it are left out, and may come from the prefix cache.
    """

    weights: bool = False
    prompt_start: int = 0

    def __post_init__(self) -> None:
        parse_flag(self.weights, "weights", "routing")
        start = plain(self.prompt_start)
        if not is_int(start) or start < 0:
            raise WeirError("a position is a whole number from 0 on", "routing.prompt_start")

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {"weights": self.weights, "prompt_start": int(self.prompt_start)}


class RoutedBlocks(NamedTuple):
    """Blocks of one worker that choose experts, and how the choices of one token lie in a row.

    The row is [blocks, top_k, bytes of the expert's number and of its weight], each byte one value, which every
    dtype of a model represents exactly.

    Attributes:
        blocks: ascending.
        experts: of a block; a number beyond 255 takes two bytes.
        top_k: experts of a token.
    """

    blocks: tuple[int, ...]
    experts: int
    top_k: int

    @property
    def site(self) -> Site:
        """The site whose tap reads the row: at the last of the routers."""
        return Site(ROUTING, self.blocks[-1])

    @property
    def id_bytes(self) -> int:
        return 1 if self.experts <= 256 else 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a row before it is flattened."""
        return len(self.blocks), self.top_k, self.id_bytes + WEIGHT_BYTES

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Return the experts [n, blocks, top_k] of uint8 rows [n, values], uint8 or uint16."""
        found = rows.reshape(-1, *self.shape)[..., : self.id_bytes]
        return np.ascontiguousarray(found).view("<u1" if self.id_bytes == 1 else "<u2")[..., 0]

    def weights(self, rows: np.ndarray) -> np.ndarray:
        """Return the weights float32 [n, blocks, top_k] of uint8 rows [n, values]."""
        return np.ascontiguousarray(rows.reshape(-1, *self.shape)[..., self.id_bytes :]).view("<f4")[..., 0]


class RoutedExperts(NamedTuple):
    """The experts of consecutive positions.

    Attributes:
        ids: [positions, blocks of the model, top_k], uint8 or, above 256 experts, uint16; 0 at dense blocks.
        weights: float32 likewise; None if not asked for.
    """

    ids: np.ndarray
    weights: np.ndarray | None


@dataclass(frozen=True)
class ModelRouting:
    """The routers of a model.

    Attributes:
        stages: those of each pipeline stage that has any.
        num_layers: blocks of the model.
        refused: why routing is not served; "" if it is.
    """

    stages: tuple[RoutedBlocks, ...] = ()
    num_layers: int = 0
    refused: str = field(default=NOT_REPORTED)

    @classmethod
    def merge(cls, reports: Iterable[Mapping[str, Any]], num_layers: int) -> ModelRouting:
        """Combine the reports of all workers; tensor-parallel ones have the same routers."""
        told = [report.get("routers", {"refused": NOT_REPORTED}) for report in reports]
        refused = next((one["refused"] for one in told if one.get("refused")), "")
        found = {RoutedBlocks(tuple(one["blocks"]), one["experts"], one["top_k"]) for one in told if one.get("blocks")}
        stages = tuple(sorted(found))
        if not refused and len({(one.experts, one.top_k) for one in stages}) > 1:
            refused = "its blocks have different numbers of experts, or choose different numbers of them"
        refused = refused or ("" if stages else NO_EXPERTS)
        return cls(refused=refused) if refused else cls(stages, num_layers, "")

    def joined(self, rows: Mapping[Site, np.ndarray], weights: bool) -> RoutedExperts:
        """Return the choices of all blocks, given each stage's rows of the same positions as uint8 [n, values]."""
        first = self.stages[0]
        shape = len(rows[first.site]), self.num_layers, first.top_k
        ids = np.zeros(shape, np.uint8 if first.id_bytes == 1 else np.uint16)
        found = np.zeros(shape, np.float32) if weights else None
        for stage in self.stages:
            ids[:, list(stage.blocks)] = stage.ids(rows[stage.site])
            if found is not None:
                found[:, list(stage.blocks)] = stage.weights(rows[stage.site])
        return RoutedExperts(ids, found)
