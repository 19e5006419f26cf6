"""What a run of `weir extract` does: rows, or features of an autoencoder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.adapter import Adapter
from vllm_weir.extraction.source import TextSource
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import NamedPath
from vllm_weir.sae.saelens import to_cfg
from vllm_weir.sae.transfer import digest_of
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.features import Features
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.selectors import check_reached
from vllm_weir.schema.sinks import RAGGED_HOOKS
from vllm_weir.storage.features.dataset import FeatureInfo
from vllm_weir.storage.object_store import ObjectStore

DEFAULT_TOP_K = 32


@dataclass(frozen=True)
class FeatureSpec:
    """Features of an autoencoder at the positions of a run. Made by `parse`."""

    info: FeatureInfo  # what is written beside the features
    source: SAE | NamedPath = field(compare=False)  # the autoencoder, or how each worker loads it
    asked: Features  # the features that each request asks for; its positions are those of the run

    @classmethod
    def parse(cls, sae: Any, top_k: Any, ids: Any, model: str, positions: Any) -> FeatureSpec:
        """Load an autoencoder and check what is asked of it, as for `extract`; raise WeirError naming the option."""
        source = _source(sae)
        with_weights = load_source(source)
        if with_weights.layers:
            raise WeirError(
                "a cross-layer transcoder has features at several blocks; give one of them, "
                "weir.SAE.load(path).block(layer)",
                "sae",
            )
        name = source.name or os.path.basename(os.path.normpath(with_weights.name)) or "sae"
        d_sae = with_weights.d_sae
        if top_k is None and ids is None:
            top_k = min(DEFAULT_TOP_K, d_sae)
        try:
            asked = Features(name, top_k, ids, positions, path="")
        except WeirError as e:
            option = e.field.lstrip(".")
            raise WeirError(e.message, "sae" if option == "name" else option) from None
        if asked.top_k is not None and asked.top_k > d_sae:
            raise WeirError(f"{name!r} has {d_sae} features, got {asked.top_k}", "top_k")
        if asked.ids is not None and max(asked.ids) >= d_sae:
            raise WeirError(f"{name!r} has features 0 to {d_sae - 1}, got {max(asked.ids)}", "ids")
        dtype = str(with_weights.dtype).removeprefix("torch.")
        cfg = to_cfg(with_weights.config, dtype, with_weights.d_in, d_sae, with_weights.d_out)
        info = FeatureInfo(
            name, with_weights.site, d_sae, cfg, digest_of(with_weights), model, asked.top_k, asked.ids
        )  # fmt: skip
        return cls(info, source, asked)

    @property
    def site(self) -> Site:
        return self.info.site

    def load(self) -> SAE:
        """Load the autoencoder; raise WeirError if it is no longer the one that was checked."""
        sae = load_source(self.source)
        if isinstance(self.source, NamedPath) and digest_of(sae) != self.info.digest:
            raise WeirError(f"{self.source.path} has changed since the run began", "sae")
        return sae

    def identity(self) -> dict[str, Any]:
        """Return what determines the features, as plain JSON data."""
        info = self.info
        return {
            "sae": {"name": info.sae, "digest": info.digest}, "top_k": info.top_k,
            "ids": None if info.ids is None else list(info.ids),
        }  # fmt: skip


def load_source(source: SAE | NamedPath) -> SAE:
    if isinstance(source, SAE):
        return source
    try:
        return SAE.load(source.path, site=source.site, name=source.name)
    except WeirError as e:
        raise WeirError(f"{source.path}: {e}", "sae") from None


def _source(sae: Any) -> SAE | NamedPath:
    """Return the autoencoder or its path, under the name that is given with it."""
    if isinstance(sae, SAE):
        return sae
    if isinstance(sae, NamedPath):
        return sae
    if isinstance(sae, str) and "=" in sae:
        return NamedPath.parse(sae, "sae")
    if isinstance(sae, (str, os.PathLike)):
        return NamedPath("", os.fspath(sae))
    if isinstance(sae, Mapping):
        if len(sae) != 1:
            raise WeirError(f"a run extracts the features of one autoencoder, got {len(sae)}; run once for each", "sae")
        ((name, one),) = sae.items()
        if not isinstance(name, str) or not name:
            raise WeirError(f"an autoencoder's name is a text, got {brief(name)!r}", "sae")
        if isinstance(one, SAE):
            return one.renamed(name)
        if isinstance(one, (str, os.PathLike)):
            return NamedPath(name, os.fspath(one))
        sae = one
    raise WeirError(f"expected an SAE, the path of one, or {{name: either}}, got {type(sae).__name__}", "sae")


RUN, SKIPPED = "extract.json", "skipped.jsonl"
"""Files beside the rows: the identity of the run, and the records that it skipped."""
FORMAT, VERSION = "weir-extract", 1
WEIGHTS = "loaded_weights"
"""Field of a run's identity with the fingerprint of the weights that its engine has; known once that has started.
Runs of earlier versions have none."""
PROMPTS = Capture(positions="prompt")
CAPTURED = ("hook", "layers", "positions", "dtype", "reduce", "compress", "heads", "neurons")
"""Fields of a capture that runs may choose."""
SPEED_OPTIONS = frozenset(
    {
        "block_size", "disable_log_stats", "distributed_executor_backend", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "use_tqdm_on_load",
    }
)  # fmt: skip
"""Engine options that may change when a run is resumed: they affect its speed, not its rows."""


@dataclass(frozen=True)
class RunSpec:
    """What is extracted from every record."""

    model: str  # As for vLLM
    capture: Capture = PROMPTS  # the rows of each record
    max_tokens: int = 1  # Tokens that each request generates, greedily; vLLM needs at least one
    max_length: int | None = None  # Prompts are cut to this many tokens; None refuses longer ones than the engine takes
    engine: dict[str, Any] = field(default_factory=dict)  # Options of ``vllm.LLM``
    features: FeatureSpec | None = None  # Features to extract in place of rows, at the hook point of their autoencoder
    lora: Adapter | None = None  # Adapter under which records are read

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise WeirError("expected a directory or hub id", "model")
        for name in ("max_tokens", "max_length"):
            value = getattr(self, name)
            if not (value is None and name == "max_length") and (type(value) is not int or value < 1):
                raise WeirError(f"expected a number of tokens, at least 1, got {brief(value)}", name)
        if not isinstance(self.engine, dict) or "model" in self.engine:
            raise WeirError("expected a dict of options of vllm.LLM, without the model", "engine")
        try:
            json.dumps(self.engine)
        except (TypeError, ValueError):
            raise WeirError("expected plain JSON data", "engine") from None
        if self.capture.hook in RAGGED_HOOKS:
            raise WeirError(
                f"rows of {self.capture.hook} have a value for each key, so they have no fixed width and no dataset "
                "takes them; capture them with a request, and save its activations",
                "hook",
            )
        positions = self.capture.positions
        if positions.kind == "generated":  # what it selects does not depend on the text
            check_reached(((positions, "positions"),), 1, self.max_tokens, self.max_tokens)

    def reaches(self, prompt_len: int) -> bool:
        """Return whether a prompt of this many tokens can give a row."""
        return self.capture.positions.reaches(prompt_len, prompt_len + self.max_tokens - 1)

    def identity(self, source: TextSource) -> dict[str, Any]:
        """Return everything that determines the rows, as plain JSON data."""
        capture = self.capture.to_json()
        captured = {name: capture.get(name) for name in CAPTURED}
        # As it is read back from the file: tuples become lists, and keys strings.
        engine = json.loads(json.dumps({k: v for k, v in sorted(self.engine.items()) if k not in SPEED_OPTIONS}))
        return {
            "format": FORMAT, "version": VERSION, "source": source.digest, "column": source.column,
            "model": self.model, **captured,
            "max_tokens": self.max_tokens, "max_length": self.max_length,
            "engine": engine, **({} if self.features is None else self.features.identity()),
            "lora": None if self.lora is None else self.lora.digest,
        }  # fmt: skip


def request_id(source: TextSource, index: int) -> str:
    """Return the id of a record's request: the same in every run, and sorted as the records."""
    return f"{index:010d}-{source.digest[:12]}"


def record_of(request_id: str) -> int:
    return int(request_id.partition("-")[0])


def check_run(store: ObjectStore, identity: dict[str, Any]) -> bool:
    """Return whether the run with this identity was begun in a folder."""
    if RUN not in store.names():
        return False
    data = store.read(RUN)
    try:
        found = json.loads(data)
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise store.error(RUN, "does not describe a run of weir extract") from None
    for name, wanted in identity.items():
        if name == WEIGHTS and found.get(name, wanted) != wanted:
            raise WeirError(
                f"{store.url} was begun with other weights of {_short(identity['model'])}; choose another place",
                "model",
            )
        if name != WEIGHTS and found.get(name) != wanted:
            raise WeirError(
                f"{store.url} was begun with {_short(found.get(name))}, this run has {_short(wanted)}; "
                "choose another place, or run with the same",
                name,
            )
    return True


def begin_run(store: ObjectStore, identity: dict[str, Any], empty: bool) -> None:
    """Write the identity of a run to a folder; `empty`: whether the folder has no request."""
    if check_run(store, identity):
        return
    if not empty:
        raise WeirError(f"{store.url} holds activations that `weir extract` did not write; choose another place", "out")
    store.put(RUN, (json.dumps(identity, indent=1) + "\n").encode())


def read_skipped(store: ObjectStore) -> dict[int, str]:
    """Return the records that earlier runs skipped: index -> reason."""
    if SKIPPED not in store.names():
        return {}
    data = store.read(SKIPPED)
    try:
        entries = [json.loads(line) for line in data.splitlines()]
        return {int(entry["record"]): str(entry["reason"]) for entry in entries}
    except (ValueError, KeyError, TypeError):
        raise store.error(SKIPPED, "is damaged; delete it, and the run finds those records again") from None


def write_skipped(store: ObjectStore, skipped: dict[int, str]) -> None:
    if skipped and skipped != read_skipped(store):
        store.put(SKIPPED, b"".join(_lines(skipped)))


def _lines(skipped: dict[int, str]) -> Iterator[bytes]:
    for index in sorted(skipped):
        yield json.dumps({"record": index, "reason": skipped[index]}).encode() + b"\n"


def _short(value: Any) -> str:
    return brief(json.dumps(value), 80)


@dataclass
class RecordCounts:
    """Counts of what was done.

    Attributes:
        requests, rows, tokens, bytes: Written; bytes of the rows as they are stored.
        held: Records that the dataset already had.
        truncated: Requests whose prompt was cut.
        skipped: Record -> why it was skipped.
    """

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    held: int = 0
    truncated: int = 0
    skipped: dict[int, str] = field(default_factory=dict)

    def add(self, other: RecordCounts) -> None:
        for name in ("requests", "rows", "tokens", "bytes", "held", "truncated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped |= other.skipped

    @property
    def records(self) -> int:
        return self.requests + self.held + len(self.skipped)
