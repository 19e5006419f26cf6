"""The engine of a run: a plain ``vllm.LLM`` with the same capture for every prompt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_weir.errors import WeirError
from vllm_weir.extraction.run_spec import RunSpec
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compression import Compression, header_bytes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.row_shapes import row_width
from vllm_weir.storage.batch import Batch
from vllm_weir.util.parent_death import children_that_end_with_us


@dataclass(frozen=True)
class PromptRows:
    """The output for one prompt; `rows`: a batch for each site, with an empty request id."""

    rows: list[Batch]
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str


class ExtractionEngine(Protocol):
    """The methods and attributes of an engine that a run uses.

    Attributes:
        limit: Most tokens of a prompt.
        row_bytes: Most bytes of rows that a token gives.
    """

    limit: int
    row_bytes: int

    def encode(self, values: Sequence[str | list[dict[str, Any]]]) -> list[list[int] | WeirError]:
        """Return the tokens of each text or chat, or an error for one that has none."""
        ...

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        """Return the rows of each prompt."""
        ...

    def close(self) -> None:
        """Stop the engine."""
        ...


class VllmEngine:
    """vLLM as the engine of a run; raises WeirError if it cannot capture what the run extracts."""

    def __init__(self, spec: RunSpec) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM, SamplingParams

        from vllm_weir.api import params
        from vllm_weir.frontend.lookup import frontend_of

        # A captured prompt is computed whole, so the prefix cache would never be used.
        options = {"enable_prefix_caching": False, "disable_log_stats": True} | spec.engine
        with children_without_sigint(), children_that_end_with_us():
            try:
                self.llm = LLM(model=spec.model, **options)
            except TypeError as e:
                raise WeirError(f"vLLM refuses an option: {e}", "engine") from e
        capabilities = frontend_of(self.llm).require_capabilities()
        capture = spec.capture
        layers = capture.resolve_layers(capabilities.num_layers)
        for layer in layers:
            reason = capabilities.sites.get(Site(capture.hook, layer), "the model has no such point")
            if reason:
                raise WeirError(f"{capture.hook}[{layer}] cannot be captured: {reason}", "hook")
        dtype = capture.dtype or capabilities.dtype
        widths = [row_width(capabilities.shape(Site(capture.hook, layer))) for layer in layers]
        self.row_bytes = sum(_record_bytes(capture, width, dtype) for width in widths)
        self.limit = self.llm.model_config.max_model_len - spec.max_tokens
        self.params = params(SamplingParams(max_tokens=spec.max_tokens, temperature=0), capture=capture)
        self.tokenizer = self.llm.get_tokenizer()

    def encode(self, values: Sequence[str | list[dict[str, Any]]]) -> list[list[int] | WeirError]:
        """Return the tokens of each text or chat, or an error for one that has none."""
        texts = [_encodable(value if isinstance(value, str) else self._chat_text(value)) for value in values]
        encoded: list[list[int] | WeirError] = [text if isinstance(text, WeirError) else [] for text in texts]
        for is_chat in (False, True):
            chosen = [i for i, v in enumerate(values) if isinstance(v, list) == is_chat and isinstance(texts[i], str)]
            if chosen:
                # The template of a chat has already added the special tokens.
                ids = self.tokenizer([texts[i] for i in chosen], add_special_tokens=not is_chat)["input_ids"]
                for i, tokens in zip(chosen, ids, strict=True):
                    encoded[i] = list(tokens)
        return encoded

    def _chat_text(self, messages: list[dict[str, Any]]) -> str | WeirError:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
            )
        except (TemplateError, ValueError, TypeError, KeyError) as e:
            return WeirError(f"the chat template refuses it: {str(e)[:160]}")

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        """Return the rows of each prompt."""
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], self.params, use_tqdm=False)
        return [_prompt_rows(output) for output in outputs]

    def close(self) -> None:
        """Shut down the engine core."""
        self.llm.llm_engine.engine_core.shutdown()


def _record_bytes(capture: Capture, width: int, dtype: str) -> int:
    """Return the bytes of a row of so many values, of which the capture may pick some."""
    if capture.hook == "expert_ids":
        dtype = "int64"
    return header_bytes((capture.compress or Compression()).header(width, dtype))


def _encodable(text: str | WeirError) -> str | WeirError:
    """Return the text, or an error if UTF-8 cannot encode it (its whole batch would fail)."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as e:
        return WeirError(f"character {e.start} of the text is half of a surrogate pair")
    return text


def _prompt_rows(output: Any) -> PromptRows:
    completion, acts = output.outputs[0], output.activations
    if acts is None or not output.receipt.complete or output.receipt.dropped:
        raise WeirError(
            f"the rows of request {output.request_id} are not complete; see the settings host_bytes, overflow"
        )
    rows = []
    for site in acts.sites:
        records, header = acts.compressed(site) if acts.is_compressed else (acts[site], None)
        positions, token_ids = acts.positions_of(*site), acts.token_ids_of(*site)
        rows.append(Batch("", site.hook, site.layer, positions, token_ids, records, header))
    return PromptRows(rows, len(output.prompt_token_ids), len(completion.token_ids), str(completion.finish_reason))


@contextlib.contextmanager
def children_without_sigint() -> Iterator[None]:
    """Block SIGINT in processes that are started inside: a terminal sends Ctrl-C to all of them.

    Child processes inherit the mask of this thread. Another thread, without the mask, receives the
    signal meanwhile, so that Ctrl-C keeps working here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it later would unblock the signal
    done = threading.Event()
    receiver = threading.Thread(target=done.wait, name="weir-sigint", daemon=True)
    receiver.start()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        done.set()
