"""The engine of a run: a plain ``vllm.LLM`` that is asked the same of every prompt."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.extraction.feature_writer import FeatureBatch
from vllm_weir.extraction.run_spec import FeatureSpec, RunSpec
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compression import Compression, header_bytes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import row_width
from vllm_weir.storage.batch import Batch
from vllm_weir.storage.features.parts import RecordFeatures
from vllm_weir.util.start_llm import start_llm
from vllm_weir.util.token_texts import chat_text, warn_of_unknown

PIECE_BYTES = 2 << 30
"""Bytes of rows that the engine computes at a time, while at most as many are being written."""
PIECES_AHEAD = 16
"""Pieces of a batch that an engine has at once, so that it never waits for the next one. The smaller
they are, the less is left to be written when the engine has done the last one."""


@dataclass(frozen=True)
class PromptRows:
    """The output for one prompt.

    Attributes:
        rows: A `Batch` for each site, or a `FeatureBatch`, with an empty request id.
        prompt_tokens, generated_tokens: Their numbers.
        finish_reason: vLLM's.
    """

    rows: Sequence[Any]
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str


class ExtractionEngine(Protocol):
    """The methods and attributes of an engine that a run uses.

    Attributes:
        limit: Most tokens of a prompt.
        row_bytes: Most bytes of rows that a token gives.
        weights: Fingerprint of its weights; None if they cannot be read.
    """

    limit: int
    row_bytes: int
    weights: str | None

    def encode(self, values: Sequence[str | list[int] | list[dict[str, Any]]]) -> list[list[int] | WeirError]:
        """Return the tokens of each text or chat, or an error for one that has none."""
        ...

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]: ...

    def close(self) -> None: ...


@runtime_checkable
class ReadAheadEngine(ExtractionEngine, Protocol):
    """An engine that takes pieces of a batch before it has done the ones before them."""

    def read_ahead(self, pieces: Iterator[Sequence[list[int]]]) -> Generator[list[PromptRows], None, None]:
        """Yield the rows of each piece's prompts, in order; if closed, drop what is under way.

        An engine has up to PIECES_AHEAD pieces at once, and no more than one if their rows would
        take more than PIECE_BYTES.
        """
        ...


class VllmEngine:
    """vLLM as the engine of a run; raises WeirError if it cannot give what the run extracts."""

    _warned = False
    """Whether it was said that texts hold words that the tokenizer does not know."""
    _options: Mapping[str, Any] = MappingProxyType({})
    """Further ones of `Engine.stream`."""

    def __init__(self, spec: RunSpec) -> None:
        from vllm import SamplingParams

        from vllm_weir import api

        # A captured prompt is computed whole, so the prefix cache would never be used.
        adapted = {} if spec.lora is None else spec.lora.engine_options
        options = {"enable_prefix_caching": False} | adapted | spec.engine
        self.llm = start_llm(spec.model, options)
        self.engine = api.engine(self.llm)
        capabilities = self.engine.capabilities
        if spec.lora is not None:
            self._options = spec.lora.load(self.engine)
        self.weights: str | None
        try:
            self.weights = self.engine.weights()
        except WeirError as e:
            warnings.warn(f"a run that goes on will not notice other weights: {e.message}", stacklevel=2)
            self.weights = None
        self.reading: CaptureReading | FeatureReading
        if spec.features is None:
            self.reading = CaptureReading(spec.capture, capabilities)
        else:
            self.reading = FeatureReading(spec.features, self.llm)
        self.row_bytes = self.reading.row_bytes
        self.limit = self.engine.model.max_model_len - spec.max_tokens
        # Without texts of the outputs, this thread leaves the tokenizer to the one that encodes prompts.
        sampling = SamplingParams(max_tokens=spec.max_tokens, temperature=0, detokenize=False)
        self.params = api.params(sampling, **self.reading.asked)
        self.params.skip_clone = True  # nobody changes them
        self.tokenizer = self.llm.get_tokenizer()

    def encode(self, values: Sequence[str | list[int] | list[dict[str, Any]]]) -> list[list[int] | WeirError]:
        """Return the tokens of each text or chat, or an error for one that has none."""
        texts = [self._text(value) for value in values]
        encoded: list[list[int] | WeirError] = [[] if isinstance(text, str) else text for text in texts]
        for is_chat in (False, True):
            chosen = [i for i, v in enumerate(values) if isinstance(v, list) == is_chat and isinstance(texts[i], str)]
            if chosen:
                # The template of a chat has already added the special tokens.
                ids = self.tokenizer([texts[i] for i in chosen], add_special_tokens=not is_chat)["input_ids"]
                for i, tokens in zip(chosen, ids, strict=True):
                    encoded[i] = list(tokens)
                if not self._warned:
                    self._warned = warn_of_unknown(self.tokenizer, [str(texts[i]) for i in chosen], ids)
        return encoded

    def _text(self, value: Any) -> str | list[int] | WeirError:
        """Return what is to be encoded, or tokens if that is what a record has."""
        if isinstance(value, list) and isinstance(value[0], int):
            size = self.engine.model.get_vocab_size()
            return value if max(value) < size else WeirError(f"token {max(value)} does not exist: there are {size}")
        return _encodable(value if isinstance(value, str) else self._chat_text(value))

    def _chat_text(self, messages: list[dict[str, Any]]) -> str | WeirError:
        try:
            return chat_text(self.tokenizer, messages)
        except WeirError as e:
            return e

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        (rows,) = self.read_ahead(iter([prompts]))
        return rows

    def read_ahead(self, pieces: Iterator[Sequence[list[int]]]) -> Generator[list[PromptRows], None, None]:
        """Yield the rows of each piece's prompts, in order; see `ReadAheadEngine`."""
        under_way: deque[tuple[int, int, dict[int, Any]]] = deque()
        """Of each piece how many tokens and prompts it has, and the outputs that are there."""

        def requests() -> Iterator[tuple[list[int], Any, tuple[dict[int, Any], int]] | None]:
            for prompts in pieces:
                tokens, outputs = sum(map(len, prompts)), dict[int, Any]()
                while not self._has_room([tokens, *(of_piece for of_piece, _, _ in under_way)]):
                    yield None
                under_way.append((tokens, len(prompts), outputs))
                yield from ((ids, self.params, (outputs, number)) for number, ids in enumerate(prompts))

        # `_has_room` says how many requests are under way.
        with contextlib.closing(self.engine.stream(requests(), in_flight=sys.maxsize, **self._options)) as stream:
            for (outputs, number), output in stream:
                outputs[number] = output
                while under_way and len(under_way[0][2]) == under_way[0][1]:
                    _, count, done = under_way.popleft()
                    yield [self._prompt_rows(done[k]) for k in range(count)]

    def _has_room(self, tokens: Sequence[int]) -> bool:
        """Return whether pieces of so many tokens can be computed at once; one can."""
        return len(tokens) == 1 or (len(tokens) <= PIECES_AHEAD and sum(tokens) * self.row_bytes <= PIECE_BYTES)

    def _prompt_rows(self, output: Any) -> PromptRows:
        completion = output.outputs[0]
        rows = self.reading.rows(output)
        return PromptRows(rows, len(output.prompt_token_ids), len(completion.token_ids), str(completion.finish_reason))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _encodable(text: str | WeirError) -> str | WeirError:
    """Return the text, or an error if UTF-8 cannot encode it (its whole batch would fail)."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as e:
        return WeirError(f"character {e.start} of the text is half of a surrogate pair")
    return text


ACTIVE_BYTES = 8 + 32
"""Bytes of one feature of a row while it is under way: on the bus, and as tensors of an output."""


class CaptureReading:
    """Rows of a capture; raises WeirError if the engine cannot capture them.

    Attributes:
        asked: Arguments of `weir.params` for each request.
        row_bytes: Most bytes of rows that a token gives.
    """

    def __init__(self, capture: Capture, capabilities: Any) -> None:
        layers = capture.resolve_layers(capabilities.num_layers)
        for layer in layers:
            reason = capabilities.sites.get(Site(capture.hook, layer), "the model has no such point")
            if reason:
                raise WeirError(f"{capture.hook}[{layer}] cannot be captured: {reason}", "hook")
        dtype = capture.dtype or capabilities.dtype
        widths = [row_width(capabilities.shape(Site(capture.hook, layer))) for layer in layers]
        self.asked: dict[str, Any] = {"capture": capture}
        self.row_bytes = sum(_record_bytes(capture, width, dtype) for width in widths)

    def rows(self, output: Any) -> list[Batch]:
        """Return what is written of an output: a batch for each site, with an empty request id."""
        acts = output.activations
        _check_complete(output, acts)
        rows = []
        for site in acts.sites:
            records, header = acts.compressed(site) if acts.is_compressed else (acts[site], None)
            positions, token_ids = acts.positions_of(*site), acts.token_ids_of(*site)
            rows.append(Batch("", site.hook, site.layer, positions, token_ids, records, header))
        return rows


class FeatureReading:
    """Features of an autoencoder, which is loaded onto the engine's workers; attributes as of `CaptureReading`."""

    def __init__(self, spec: FeatureSpec, llm: Any) -> None:
        from vllm_weir.api import load_sae

        self._name = spec.info.sae
        try:
            load_sae(llm, self._name, spec.load())
        except WeirError as e:
            raise WeirError(str(e) if e.field.startswith("sae.") else e.message, "sae") from None
        self.asked: dict[str, Any] = {"features": spec.asked}
        self.row_bytes = ACTIVE_BYTES * (spec.asked.top_k or len(spec.asked.ids))

    def rows(self, output: Any) -> list[FeatureBatch]:
        _check_complete(output, output.features)
        found = output.features[self._name]
        prompt = output.prompt_token_ids
        tokens = np.array([*prompt, *output.outputs[0].token_ids], np.int64)
        positions, ids, values = (array.cpu().numpy() for array in (found.positions, found.ids, found.values))
        active = values != 0
        offsets = np.concatenate([[0], np.cumsum(active.sum(1))]).astype(np.int64)
        features = RecordFeatures(
            -1, positions, tokens[positions], positions >= len(prompt), offsets, ids[active], values[active]
        )
        return [FeatureBatch("", features)]


def _check_complete(output: Any, read: Any) -> None:
    if read is None or not output.receipt.complete or output.receipt.dropped:
        raise WeirError(
            f"the rows of request {output.request_id} are not complete; see the settings host_bytes, overflow"
        )


def _record_bytes(capture: Capture, width: int, dtype: str) -> int:
    """Return the bytes of a row of so many values, of which the capture may pick some."""
    if capture.hook == "expert_ids":
        dtype = "int64"
    return header_bytes((capture.compress or Compression()).header(width, dtype))
