"""`stream_rows`: the rows of requests that an engine runs, for a trainer that reads them meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.engine import Engine
from vllm_weir.streaming.batch_writer import BatchWriter
from vllm_weir.streaming.batches import Cursor, Tensors
from vllm_weir.streaming.dataset import StreamedRows
from vllm_weir.streaming.sender import RowSender

logger = logging.getLogger(__name__)


def stream_rows(
    llm: Any,
    requests: Iterable[tuple[Any, Any]],
    *,
    batch_size: int | None = 4096,
    address: str | None = None,
    token: str | None = None,
    ahead_bytes: int = 1 << 30,
    start: Cursor | tuple[int, int, int] = (0, 0, 0),
    in_flight: int | None = None,
    checkpoints: bool = False,
) -> EngineRows:
    """Run requests, and stream their rows to a trainer, in this process or another one.

    A thread drives the engine, which must have no other requests until the stream has ended. The
    returned dataset is for a trainer in this process; one in another process makes
    ``weir.StreamedRows(rows.address, rows.token)``. Rows of requests are joined in the order of the
    requests, in whichever order these finish.

    While `ahead_bytes` of batches wait for the trainer, no further request is taken from `requests`;
    those under way finish.

    Args:
        llm: ``vllm.LLM``, ``LLMEngine`` or Weir's drop-in class.
        requests: (prompt, params), as for `Engine.stream`, with params that capture rows to
            memory, each of the same sites and positions; compressed ones are decoded.
        batch_size: Rows of a batch; the last one may have fewer. None for a batch for each request
            that has rows.
        address: Where clients connect: ``tcp://HOST:PORT`` (port 0 for any free one) or the path of
            a socket; None for a socket in a new folder of this user's.
        token: What clients must know; None for a new random one. Whoever has it can read the rows.
        ahead_bytes: Bytes of batches that are kept in memory.
        start: With the cursor of a trainer whose engine has died, and the same requests: what comes
            next. Requests before it are taken from `requests`, and not run.
        in_flight: As for `Engine.stream`.
        checkpoints: As for `StreamedRows`, of the returned one.

    Returns:
        The dataset. Use it in a ``with`` statement, or `close` it.

    Raises:
        WeirError: For a wrong argument, naming it. What fails later is raised where the trainer reads.
    """
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise WeirError(f"expected a number of rows, at least 1, got {brief(batch_size)}", "batch_size")
    if not (isinstance(start, (tuple, list)) and len(start) == 3 and all(type(n) is int and n >= 0 for n in start)):
        raise WeirError(f"expected the cursor of a batch, got {brief(start)}", "start")
    engine = Engine(llm)
    sender = RowSender(address, token, ahead_bytes, Cursor(*start))
    try:
        source = _Source(engine, requests, sender, BatchWriter(sender, batch_size, Cursor(*start)), in_flight)
    except BaseException:
        sender.close()
        raise
    return EngineRows(sender, source, Cursor(*start), checkpoints)


class EngineRows(StreamedRows):
    """A stream of an engine of this process. Made by `stream_rows`; pickled, it is a `StreamedRows`."""

    def __init__(self, sender: RowSender, source: _Source, start: Cursor, checkpoints: bool) -> None:
        super().__init__(sender.address, sender.token, start, checkpoints=checkpoints)
        self._sender, self._source = sender, source
        source.thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the last batch is acknowledged; return whether that came in time.

        Raises:
            WeirError: If a request failed.
        """
        read = self._sender.wait_until_read(seconds)
        if self._source.error is not None:
            raise self._source.error
        return read

    def close(self) -> None:
        """Abort the requests under way, and forget the batches that were not read."""
        self._source.stop.set()
        self._sender.finish("the stream was closed before all of it was read")
        self._source.thread.join()
        self._sender.close()

    def __enter__(self) -> EngineRows:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        state = {**self.__dict__}
        del state["_sender"], state["_source"]
        return _streamed, (state,)


def _streamed(state: dict[str, Any]) -> StreamedRows:
    rows = StreamedRows.__new__(StreamedRows)
    rows.__dict__.update(state)
    return rows


class _Source:
    """The thread that runs the requests.

    Attributes:
        error: What ended them.
    """

    def __init__(
        self, engine: Engine, requests: Iterable[Any], sender: RowSender, batches: BatchWriter, in_flight: int | None
    ) -> None:
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._sender, self._batches, self._under_way = sender, batches, 0
        self._outputs = engine.stream(self._supply(requests, batches.request), in_flight)
        self.thread = threading.Thread(target=self._run, name="weir-stream", daemon=True)

    def _supply(self, requests: Iterable[Any], first: int) -> Iterator[tuple[Any, Any, int] | None]:
        """Yield requests with their numbers, while there is room for their rows."""
        for number, (prompt, params) in enumerate(islice(requests, first, None), first):
            while not self._sender.has_room:
                if self._under_way:
                    yield None  # the engine goes on with what it has
                else:
                    self._sender.wait_for_room()
            if self.stop.is_set():
                return
            self._under_way += 1
            yield prompt, params, number

    def _run(self) -> None:
        """Run the requests, and write their rows in order."""
        finished: dict[int, Tensors] = {}
        try:
            for number, output in self._outputs:
                self._under_way -= 1
                finished[number] = tensors_of(output)
                while self._batches.request in finished:
                    self._batches.add(finished.pop(self._batches.request))
                if self.stop.is_set():
                    self._outputs.close()  # aborts the others
                    return
            self._batches.flush()
            self._sender.finish()
        except Exception as e:  # noqa: BLE001 - raised where the rows are read, and by `wait`
            self.error = e
            logger.error("the stream of rows at %s has failed: %s", self._sender.address, e)
            self._sender.finish(f"a request failed: {e}")


def tensors_of(output: Any) -> Tensors:
    """Return the rows of an output, its positions and token ids; raise WeirError if they are none for a stream."""
    if len(output.outputs) != 1:
        raise WeirError("a stream takes requests with one completion; ask for n=1", "requests")
    acts = output.outputs[0].activations
    if acts is None:
        raise WeirError("a request captures nothing to memory; give its params a capture", "requests")
    if not output.receipt.complete or output.receipt.dropped:
        raise WeirError(
            f"the rows of request {output.request_id} are not complete; see the settings host_bytes, overflow",
            "requests",
        )
    rows = {f"{site.hook}.{site.layer}": acts[site] for site in acts.sites}
    return rows | {"positions": acts.positions, "token_ids": acts.token_ids}
