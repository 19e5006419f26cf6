"""Wrappers that hold back the outputs of sequences with probes, before vLLM sees them.

Statistics, log probabilities and the rest of an output travel with it, so nothing is counted that is not delivered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from vllm.v1.engine import EngineCoreOutputs

from vllm_weir.frontend.outputs.held_outputs import HeldOutputs, OutputHolder, Release

READER = "_weir_reader"
"""Attribute of an engine client that holds its `OutputReader`."""


class StoppableDetokenizer:
    """A sequence's detokenizer that lets a probe end the sequence as a stop string would.

    So vLLM sets the finish reason and aborts the request in the engine; the last token keeps its text. A stop string
    that the last token completes is named rather than the probe.
    """

    def __init__(self, inner: Any, held: HeldOutputs) -> None:
        self._inner, self._held = inner, held

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        stop = self._inner.update(new_token_ids, stop_terminated)
        ends_at = self._held.ends_at
        if stop is None and ends_at is not None and self._inner.num_output_tokens() >= ends_at:
            return self._held.stop_reason
        return stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Origin(NamedTuple):
    """Where an output came from; outputs of one source are processed together."""

    engine: int
    weights: str | None
    """The version of the weights; older versions of vLLM do not say."""


class OutputReader:
    """What an engine client reads from its engines, as vLLM gets it."""

    def __init__(self, holder: OutputHolder) -> None:
        self._holder = holder
        self._ready: deque[Any] = deque()
        """``EngineCoreOutputs`` to be returned."""
        self._reading: asyncio.Future[Any] | None = None

    def read(self, get: Callable[[], Any]) -> Any:
        """Return the next outputs, which `get` waits for; block while outputs of one step wait for their scores."""
        if not self._ready:
            self._ready.extend(self._taken(get(), wait=True))
        return self._ready.popleft()

    async def read_async(self, get: Callable[[], Awaitable[Any]]) -> Any:
        """Return the next outputs, which `get` waits for, or some whose scores have arrived, whichever come first."""
        while not self._ready:
            if self._reading is None and not self._holder.behind:
                self._ready.extend(self._taken(await get()))
            else:
                await self._read_or_look(get)
        return self._ready.popleft()

    async def _read_or_look(self, get: Callable[[], Awaitable[Any]]) -> None:
        """Wait for the next outputs or for the time to look for scores again."""
        reading = self._reading = self._reading or asyncio.ensure_future(get())
        try:
            await asyncio.wait({reading}, timeout=self._holder.pause)
        except asyncio.CancelledError:
            self._reading = None
            reading.cancel()
            raise
        if reading.done():
            self._reading = None
            self._ready.extend(self._taken(reading.result()))
        else:
            self._ready.extend(_as_outputs(_by_source(self._holder.release())))

    def _taken(self, outputs: Any, wait: bool = False) -> list[Any]:
        """Take in what an engine has put out, and return what vLLM gets now; `wait`: for these outputs' scores."""
        holder = self._holder
        if not len(holder):
            return [outputs]
        source = _Origin(outputs.engine_index, getattr(outputs, "weight_version", None))
        plain, touched = [], {}
        for output in outputs.outputs:
            held = holder.find(output.request_id)
            if held is None:
                plain.append(output)
            else:
                held.add((source, output), output.new_token_ids, output.finish_reason is not None)
                touched[output.request_id] = held
        if not touched and not holder.behind:
            return [outputs]
        if wait:
            holder.wait(touched.values())
        released = _by_source(holder.release(touched.values(), expired=wait))
        outputs.outputs = plain + released.pop(source, [])
        return [*_as_outputs(released), outputs]


def _by_source(released: Iterable[Release]) -> dict[_Origin, list[Any]]:
    groups: dict[_Origin, list[Any]] = {}
    for one in released:
        source, output = one.output
        if one.cut:
            _cut(output, one.tokens)
        groups.setdefault(source, []).append(output)
    return groups


def _as_outputs(groups: dict[_Origin, list[Any]]) -> list[Any]:
    """Return ``EngineCoreOutputs`` of outputs that come later than the others of their step."""
    out = []
    for source, outputs in groups.items():
        later = EngineCoreOutputs(engine_index=source.engine, outputs=outputs)
        if source.weights is not None:
            later.weight_version = source.weights
        out.append(later)
    return out


def _cut(output: Any, tokens: int) -> None:
    """Drop all but an output's first `tokens` tokens, and with them the engine's reason to finish."""
    dropped = len(output.new_token_ids) - tokens
    output.new_token_ids = output.new_token_ids[:tokens]
    output.finish_reason = output.stop_reason = None
    for name in ("new_logprobs", "new_sampling_mask"):  # older versions of vLLM lack the second
        value = getattr(output, name, None)
        if value is not None:
            setattr(output, name, value.slice_request(0, tokens))
    if getattr(output, "routed_experts", None) is not None:
        output.routed_experts = output.routed_experts[:-dropped]


def get_output(original: Callable[..., Any], _status: Any) -> Callable[..., Any]:
    """Wrap ``get_output`` of a client that blocks."""

    def wrapper(self: Any) -> Any:
        reader: OutputReader | None = getattr(self, READER, None)
        return original(self) if reader is None else reader.read(lambda: original(self))

    return wrapper


def get_output_async(original: Callable[..., Any], _status: Any) -> Callable[..., Any]:
    """Wrap ``get_output_async``."""

    async def wrapper(self: Any) -> Any:
        reader: OutputReader | None = getattr(self, READER, None)
        return await (original(self) if reader is None else reader.read_async(lambda: original(self)))

    return wrapper
