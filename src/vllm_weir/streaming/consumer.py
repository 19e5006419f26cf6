"""The consumer ``stream``: rows of finished requests of any engine, a served one too, for a trainer that reads them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch

from vllm_weir.consumers.base import Consumer, EngineInfo, Finished, Rows
from vllm_weir.errors import WeirError, brief
from vllm_weir.streaming.batch_writer import BatchWriter
from vllm_weir.streaming.batches import Cursor, Tensors
from vllm_weir.streaming.connection import parse_address
from vllm_weir.streaming.sender import RowSender

LAST_SECONDS = 45.0
"""How long an engine that ends waits for the trainer to read the rest."""


class Stream(Consumer):
    """A consumer that hands each finished sequence once to a `StreamedRows` at its address.

    Sequences are numbered as they finish, from 0, which is `RowBatch.requests`; a receipt's ``files`` has the number,
    as ``ADDRESS#NUMBER``. While `ahead_bytes` wait for the trainer, the sink's queue fills, by its policy.

    Args:
        address: ``tcp://HOST:PORT``, or the path of a socket.
        token_file: A file that holds what clients must know; if it does not exist, it is written, for this user alone.
        batch_size: Rows of a batch; None for a batch for each sequence.
        ahead_bytes: As for `stream_rows`.
    """

    required = True

    def __init__(
        self,
        address: str | None = None,
        token_file: str | None = None,
        batch_size: int | None = None,
        ahead_bytes: int = 1 << 30,
        **unknown: Any,
    ) -> None:
        super().__init__(**unknown)
        for name, text in (("address", address), ("token_file", token_file)):
            if not isinstance(text, str) or not text:
                raise WeirError(f"expected a text, got {brief(text)}", name)
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise WeirError(f"expected a number of rows, at least 1, got {brief(batch_size)}", "batch_size")
        assert address is not None and token_file is not None
        parse_address(address)
        self._address, self._token_file = address, token_file
        self._batch_size, self._ahead_bytes = batch_size, ahead_bytes
        self._taken: dict[str, Tensors] = {}

    def open(self, engine: EngineInfo) -> None:
        """Listen at the address."""
        self._sender = RowSender(self._address, _token(self._token_file), self._ahead_bytes, Cursor())
        self._writer = BatchWriter(self._sender, self._batch_size, Cursor())

    def take(self, rows: Rows) -> None:
        """Keep one site's rows until the sequence is finished."""
        taken = self._taken.setdefault(rows.request.name, {})
        for name, given in (("positions", rows.positions), ("token_ids", rows.token_ids)):
            if not torch.equal(taken.setdefault(name, given.clone()), given):
                raise WeirError("a stream takes rows of all sites at the same positions; give the captures equal ones")
        taken[f"{rows.site.hook}.{rows.site.layer}"] = rows.decoded().clone()

    def finish(self, request: Finished) -> Sequence[str]:
        """Give the sequence to the trainer, as soon as there is room for it."""
        taken = self._taken.pop(request.name, None)
        if taken is None:
            return ()
        self._sender.wait_for_room()
        number = self._writer.request
        self._writer.add(taken)
        return (f"{self._sender.address}#{number}",)

    def abort(self, request: Finished) -> None:
        """Forget what was taken of a sequence."""
        self._taken.pop(request.name, None)

    def flush(self) -> None:
        """Let the trainer have the rows of a batch that is not full."""
        self._writer.flush()

    def close(self) -> None:
        """End the stream, once the trainer has read it, or takes too long."""
        self._writer.flush()
        self._sender.finish()
        self._sender.wait_until_read(LAST_SECONDS)
        self._sender.close()


def _token(path: str) -> str:
    """Return the token that a file holds; write one if there is no file."""
    try:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            with open(path, encoding="utf-8") as file:
                token = file.read(4096).strip()
        else:
            token = secrets.token_urlsafe(24)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(token)
    except (OSError, UnicodeDecodeError) as e:
        raise WeirError(f"{brief(path, 200)!r} cannot be used: {e}", "token_file") from None
    if not token:
        raise WeirError(f"{brief(path, 200)!r} is empty; write a token into it, or remove it", "token_file")
    return token
