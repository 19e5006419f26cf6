"""The engine that reads texts: a stock ``vllm.LLM``, asked for the same rows of every prompt."""

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
from vllm_weir.schema.compression import ITEMSIZE, header_bytes
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.batch import Batch
from vllm_weir.util.parent_death import children_that_end_with_us


@dataclass(frozen=True)
class PromptRows:
    """What the engine made of one prompt. `rows`: one batch a site, whose request id is still empty."""

    rows: list[Batch]
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str


class ExtractionEngine(Protocol):
    """What a run needs of an engine.

    Attributes:
        limit: most tokens of a prompt.
        row_bytes: bytes of rows that a token gives, at most.
    """

    limit: int
    row_bytes: int

    def encode(self, values: Sequence[str | list[dict[str, Any]]]) -> list[list[int] | WeirError]:
        """The tokens of texts and chats; in the place of one that has none, why."""
        ...

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        """The rows of prompts, in their order."""
        ...

    def close(self) -> None:
        """Stop it."""
        ...


class VllmEngine:
    """Starts vLLM; raises WeirError if it does not serve what is wanted."""

    def __init__(self, wanted: RunSpec) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM, SamplingParams

        from vllm_weir.api import params
        from vllm_weir.frontend.lookup import frontend_of

        # Nothing is read from the prefix cache (a captured prompt is computed whole), so nothing is kept in it.
        options = {"enable_prefix_caching": False, "disable_log_stats": True} | wanted.engine
        with children_without_sigint(), children_that_end_with_us():
            try:
                self.llm = LLM(model=wanted.model, **options)
            except TypeError as e:
                raise WeirError(f"vLLM refuses an option: {e}", "engine") from e
        capabilities = frontend_of(self.llm).require_capabilities()
        capture = wanted.capture
        layers = capture.resolve_layers(capabilities.num_layers)
        for layer in layers:
            if why := capabilities.sites.get(Site(capture.hook, layer), "the model has no such point"):
                raise WeirError(f"{capture.hook}[{layer}] cannot be captured: {why}", "hook")
        dtype = capture.dtype or capabilities.dtype
        width = capabilities.d_model * ITEMSIZE[dtype]
        if capture.compress is not None:
            width = header_bytes(capture.compress.header(capabilities.d_model, dtype))
        self.row_bytes = width * len(layers)
        self.limit = self.llm.model_config.max_model_len - wanted.max_tokens
        self.params = params(SamplingParams(max_tokens=wanted.max_tokens, temperature=0), capture=capture)
        self.tokenizer = self.llm.get_tokenizer()

    def encode(self, values: Sequence[str | list[dict[str, Any]]]) -> list[list[int] | WeirError]:
        texts = [_encodable(value if isinstance(value, str) else self._chat(value)) for value in values]
        out: list[list[int] | WeirError] = [text if isinstance(text, WeirError) else [] for text in texts]
        for chat in (False, True):
            # A chat's template has put the special tokens in.
            mine = [i for i, v in enumerate(values) if isinstance(v, list) == chat and isinstance(texts[i], str)]
            if mine:
                found = self.tokenizer([texts[i] for i in mine], add_special_tokens=not chat)["input_ids"]
                for i, ids in zip(mine, found, strict=True):
                    out[i] = list(ids)
        return out

    def _chat(self, messages: list[dict[str, Any]]) -> str | WeirError:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
            )
        except (TemplateError, ValueError, TypeError, KeyError) as e:
            return WeirError(f"the chat template refuses it: {str(e)[:160]}")

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        outs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], self.params, use_tqdm=False)
        return [_reading(out) for out in outs]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _encodable(text: str | WeirError) -> str | WeirError:
    """A text that tokenizers take: JSON may hold half of a surrogate pair, on which a whole batch would fail."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as e:
        return WeirError(f"character {e.start} of the text is half of a surrogate pair")
    return text


def _reading(out: Any) -> PromptRows:
    done, acts = out.outputs[0], out.activations
    if acts is None or not out.receipt.complete or out.receipt.dropped:
        raise WeirError(f"the rows of request {out.request_id} are not complete; see the settings host_bytes, overflow")
    rows = []
    for site in acts.sites:
        records, header = acts.compressed(site) if acts.is_compressed else (acts[site], None)
        at = acts.positions_of(*site), acts.token_ids_of(*site)
        rows.append(Batch("", site.hook, site.layer, *at, records, header))
    return PromptRows(rows, len(out.prompt_token_ids), len(done.token_ids), str(done.finish_reason))


@contextlib.contextmanager
def children_without_sigint() -> Iterator[None]:
    """Processes that are started inside do not see Ctrl-C, which a terminal sends to all: this one decides.

    A thread that takes the signal meanwhile keeps Ctrl-C working here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would unblock the signal
    over = threading.Event()
    taker = threading.Thread(target=over.wait, name="weir-sigint", daemon=True)
    taker.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
