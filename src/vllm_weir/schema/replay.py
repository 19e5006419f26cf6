"""`Replay`: experts that a request makes the model's routers choose, and how they travel."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import is_int, plain, refuse_unknown_keys, right_words
from vllm_weir.schema.routing import ModelRouting, Routing
from vllm_weir.schema.vectors import as_array

MAX_BYTES = 64 << 20
"""Of the array of a `Replay`, and of the .npy file in which it comes."""
FIELD = "routing.array"


@right_words
@dataclass(frozen=True, eq=False)
class Replay(Routing):
    """Experts that the model's routers are made to choose; what they have chosen comes back, as for `Routing`.

    The weights of the experts are those that the router gives them in this very pass. At positions that the array
    does not cover, the router chooses.

    Args:
        array: whole numbers [positions, blocks of the model, top_k]: the experts, as the checkpoint counts them, and 0
            at blocks without experts; such as an earlier ``out.outputs[0].routed_experts``.
        start: the position of ``array[0]``.
        weights: see `Routing`.
        prompt_start: see `Routing`.
    """

    weights: bool = field(default=False, kw_only=True)
    prompt_start: int = field(default=0, kw_only=True)
    array: Any
    start: int = field(default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        start = plain(self.start)
        if not is_int(start) or start < 0:
            raise WeirError("a position is a whole number from 0 on", "routing.start")
        object.__setattr__(self, "array", _checked(_array_of(self.array)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Replay)
            and Routing.to_json(self) == Routing.to_json(other)
            and self.start == other.start
            and np.array_equal(self.array, other.array)
        )

    def __hash__(self) -> int:
        return hash((self.weights, self.prompt_start, self.start, self.array.shape))

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, with the array as the base64 of an .npy file."""
        file = io.BytesIO()
        np.save(file, self.array, allow_pickle=False)
        return super().to_json() | {"start": int(self.start), "array": base64.b64encode(file.getvalue()).decode()}

    def rows(self, model: ModelRouting) -> ReplayRows:
        """Return the experts as they travel.

        Raises:
            WeirError: if the model's routers cannot choose them.
        """
        array, first = self.array, model.stages[0]
        blocks = sorted(block for stage in model.stages for block in stage.blocks)
        wanted = model.num_layers, first.top_k
        if array.shape[1:] != wanted:
            raise WeirError(
                f"expected [positions, {wanted[0]} blocks, {wanted[1]} experts], got {list(array.shape)}", FIELD
            )
        dense = np.setdiff1d(np.arange(model.num_layers), blocks)
        chosen = array[:, blocks]
        in_order = np.sort(chosen, -1)
        _refuse_any(array[:, dense] != 0, dense, self.start, "is not 0, and the block has no experts")
        _refuse_any(chosen >= first.experts, blocks, self.start, f"is none of the experts 0..{first.experts - 1}")
        _refuse_any(in_order[..., 1:] == in_order[..., :-1], blocks, self.start, "occurs twice")
        narrow = array.astype("<u1" if first.id_bytes == 1 else "<u2")
        return ReplayRows(int(self.start), array.shape, narrow.tobytes())


def _refuse_any(wrong: np.ndarray, blocks: Any, start: int, what: str) -> None:
    if wrong.any():
        position, block, _ = np.argwhere(wrong)[0].tolist()
        raise WeirError(f"at position {start + position}, block {blocks[block]}, an expert {what}", FIELD)


def _array_of(given: Any) -> np.ndarray:
    """Return what is given as an array: an array, tensor, nested list, or the base64 of an .npy file."""
    if isinstance(given, str):
        return _from_npy(given)
    if hasattr(given, "detach") and not given.is_floating_point():
        return given.detach().cpu().numpy()
    return as_array(given, FIELD)


def _checked(array: np.ndarray) -> np.ndarray:
    """Return a read-only copy of an array of experts in the smallest dtype."""
    if array.dtype.kind not in "iu":
        raise WeirError(f"experts are whole numbers, got an array of {array.dtype}", FIELD)
    if array.ndim != 3 or not array.size:
        raise WeirError(f"expected [positions, blocks, experts of a token], got {list(array.shape)}", FIELD)
    if array.min() < 0 or array.max() > np.iinfo(np.uint16).max:
        raise WeirError(f"an expert's number is 0..65535, got {array.min()}..{array.max()}", FIELD)
    narrow = array.astype(np.uint8 if array.max() < 256 else np.uint16)
    if narrow.nbytes > MAX_BYTES:
        raise WeirError(f"{narrow.nbytes} bytes, more than the limit of {MAX_BYTES}; replay fewer positions", FIELD)
    narrow.setflags(write=False)
    return narrow


def _from_npy(text: str) -> np.ndarray:
    """Return the array in the base64 of an .npy file, whose header need not be true."""
    if len(text) > 4 * (MAX_BYTES // 3 + 1):
        raise WeirError(f"more than the limit of {MAX_BYTES} bytes; replay fewer positions", FIELD)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WeirError("not valid base64", FIELD) from None
    file, wrong = io.BytesIO(raw), WeirError("not the base64 of an .npy file of version 1 or 2", FIELD)
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise wrong
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = read(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise wrong from None
    if dtype.kind not in "iu":
        raise WeirError(f"experts are whole numbers, got an array of {dtype}", FIELD)
    count = math.prod(shape)
    if count < 0 or count * dtype.itemsize != len(raw) - file.tell():
        raise WeirError(f"{len(raw) - file.tell()} bytes do not make shape {list(shape)[:4]} of {dtype}", FIELD)
    return np.frombuffer(raw, dtype, count, file.tell()).reshape(shape, order="F" if by_column else "C")


def parse_routing(data: object, path: str) -> Routing | None:
    """Parse a `Routing` or `Replay`, the wire form of either, or true; None and false are none."""
    if data is None or data is False:
        return None
    if data is True:
        return Routing()
    if isinstance(data, Routing):
        return data
    if not isinstance(data, Mapping):
        raise WeirError(f"expected true, a Routing, a Replay or the wire form of one, got {type(data).__name__}", path)
    if "array" not in data:
        refuse_unknown_keys(data, ("weights", "prompt_start"), path, "'start' goes with 'array'")
        return Routing(**data)
    refuse_unknown_keys(data, ("weights", "prompt_start", "array", "start"), path)
    if not isinstance(data["array"], (str, np.ndarray)):
        raise WeirError("expected the base64 of an .npy file", f"{path}.array")
    return Replay(**data)


class ReplayRows(msgspec.Struct, array_like=True, frozen=True):
    """The experts of consecutive positions, as they travel to the scheduler and the workers.

    Attributes:
        start: the first position.
        shape: [positions, blocks of the model, top_k].
        data: their bytes, lowest first: one for each expert, or two.
    """

    start: int
    shape: tuple[int, int, int]
    data: bytes

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.shape[0]

    @property
    def ids(self) -> np.ndarray:
        """Unsigned integers of `shape`."""
        return np.frombuffer(self.data, "<u1" if len(self.data) == math.prod(self.shape) else "<u2").reshape(self.shape)

    def until(self, stop: int) -> ReplayRows | None:
        """Return what is left of them before a position; None if nothing is."""
        count = min(self.shape[0], stop - self.start)
        if count == self.shape[0]:
            return self
        kept = self.ids[: max(count, 0)]
        return ReplayRows(self.start, kept.shape, kept.tobytes()) if len(kept) else None

    def of_block(self, start: int, count: int) -> str:
        """Return what tells apart the keys and values of `count` positions; "" if nothing is replayed there."""
        first, end = max(start, self.start), min(start + count, self.stop)
        if first >= end:
            return ""
        rows = self.ids[first - self.start : end - self.start]
        return f"replay {hashlib.sha256(rows.tobytes()).hexdigest()}@{first - start}"
