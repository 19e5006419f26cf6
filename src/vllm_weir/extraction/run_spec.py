"""What a run extracts, and the file that holds a dataset of activations to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.extraction.source import TextSource
from vllm_weir.frontend.admission.reachable import check_reached
from vllm_weir.schema.capture import Capture
from vllm_weir.storage.object_store import ObjectStore

RUN, SKIPPED = "extract.json", "skipped.jsonl"
"""Files beside the rows: what the run is, and the records that it could not take."""
FORMAT, VERSION = "weir-extract", 1
HARMLESS = frozenset(
    {
        "block_size", "disable_log_stats", "distributed_executor_backend", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "use_tqdm_on_load",
    }
)  # fmt: skip
"""Engine options that a run may change when it goes on: they decide how fast it is, not what the rows are."""


@dataclass(frozen=True)
class RunSpec:
    """What is taken of every record.

    Args:
        model: as vLLM takes it.
        hook, layers, positions, compress, reduce, dtype: as for `Capture`.
        max_tokens: tokens that each request generates, greedily; one is vLLM's least.
        max_length: prompts are cut to so many tokens; None refuses what is too long.
        engine: options of ``vllm.LLM``.
    """

    model: str
    hook: str = "resid_post"
    layers: Any = "all"
    positions: Any = "prompt"
    compress: Any = None
    reduce: str | None = None
    dtype: Any = None
    max_tokens: int = 1
    max_length: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise WeirError("a directory or hub id", "model")
        for name in ("max_tokens", "max_length"):
            value = getattr(self, name)
            if not (value is None and name == "max_length") and (type(value) is not int or value < 1):
                raise WeirError(f"a number of tokens, at least 1, got {brief(value)}", name)
        if not isinstance(self.engine, dict) or "model" in self.engine:
            raise WeirError("options of vllm.LLM by name; the model is given apart", "engine")
        try:
            json.dumps(self.engine)
        except (TypeError, ValueError):
            raise WeirError("plain JSON data", "engine") from None
        positions = self.capture.positions
        if positions.kind == "generated":  # what it selects does not depend on the text
            check_reached(((positions, "positions"),), 1, self.max_tokens, self.max_tokens)

    @property
    def capture(self) -> Capture:
        """What each request asks of Weir."""
        try:
            return Capture(
                self.hook, self.layers, self.positions, dtype=self.dtype, reduce=self.reduce, compress=self.compress
            )
        except WeirError as e:
            raise WeirError(e.message, e.field.removeprefix("capture.")) from None

    def reaches(self, prompt_len: int) -> bool:
        """Whether the request of a prompt of so many tokens can have a row that is wanted."""
        return self.capture.positions.reaches(prompt_len, prompt_len + self.max_tokens - 1)

    def identity(self, source: TextSource) -> dict[str, Any]:
        """All that decides what the rows are, as plain JSON data."""
        capture = self.capture.to_json()
        asked = {name: capture.get(name) for name in ("hook", "layers", "positions", "dtype", "reduce", "compress")}
        # As it is read back when the run goes on: tuples are lists there, and all keys texts.
        engine = json.loads(json.dumps({k: v for k, v in sorted(self.engine.items()) if k not in HARMLESS}))
        return {
            "format": FORMAT, "version": VERSION, "source": source.digest, "column": source.column,
            "model": self.model, **asked, "max_tokens": self.max_tokens, "max_length": self.max_length,
            "engine": engine,
        }  # fmt: skip


def request_id(source: TextSource, index: int) -> str:
    """The id of a record's request: the same in every run over the same texts. Ids sort as the records do."""
    return f"{index:010d}-{source.digest[:12]}"


def check_run(store: ObjectStore, identity: dict[str, Any]) -> bool:
    """Whether the run of this identity was begun in a folder.

    Raises:
        WeirError: if another one was; it names the first field that differs.
    """
    if RUN not in store.names():
        return False
    data = store.read(RUN)
    try:
        found = json.loads(data)
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise store.error(RUN, "does not say which run this is") from None
    for name, wanted in identity.items():
        if found.get(name) != wanted:
            raise WeirError(
                f"{store.url} was begun with {_short(found.get(name))}, this run has {_short(wanted)}; "
                "choose another place, or run with the same",
                name,
            )
    return True


def begin_run(store: ObjectStore, identity: dict[str, Any], empty: bool) -> None:
    """Hold a folder to this run; `empty`: whether no request is in it yet."""
    if check_run(store, identity):
        return
    if not empty:
        raise WeirError(f"{store.url} holds activations that `weir extract` did not write; choose another place", "out")
    store.put(RUN, (json.dumps(identity, indent=1) + "\n").encode())


def read_skipped(store: ObjectStore) -> dict[int, str]:
    """Records that earlier runs could not take: index -> reason."""
    if SKIPPED not in store.names():
        return {}
    data = store.read(SKIPPED)
    try:
        entries = [json.loads(line) for line in data.splitlines()]
        return {int(entry["record"]): str(entry["reason"]) for entry in entries}
    except (ValueError, KeyError, TypeError):
        raise store.error(SKIPPED, "is damaged; delete it, and the run finds those records again") from None


def write_skipped(store: ObjectStore, skipped: dict[int, str]) -> None:
    """Keep the list of records that could not be taken."""
    if skipped and skipped != read_skipped(store):
        store.put(SKIPPED, b"".join(_lines(skipped)))


def _lines(skipped: dict[int, str]) -> Iterator[bytes]:
    for index in sorted(skipped):
        yield json.dumps({"record": index, "reason": skipped[index]}).encode() + b"\n"


def _short(value: Any) -> str:
    return brief(json.dumps(value), 80)
