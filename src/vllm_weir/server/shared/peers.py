"""Questions to the server's other API-server processes, over sockets in the directory that they share."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.server.errors import PeerUnanswered

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Peers:
    """One process among those that share a directory.

    Args:
        folder: for its owner only: what comes out of its sockets is trusted.
        answer: makes the answer to another's question.
        name: which of the processes this is.
    """

    def __init__(self, folder: Path, answer: Answer, name: str) -> None:
        # Addresses of sockets are short; through a descriptor the directory's path may be long.
        self._path = folder
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._answer = answer
        self._own = f"{name}.sock"
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Be there for others' questions; raises WeirError if the directory takes no sockets."""
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._address(self._own))
        except OSError as e:
            why = f"no socket can be made in {self._path} ({e.strerror or e})"
            raise WeirError(f"{why}; name a directory of a local disk in WEIR_SERVE_DIRECTORY", "serve") from e

    async def ask(self, question: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """The other processes' answers.

        Raises:
            Unanswered: if one that lives has not answered after so many seconds.
        """
        others = [name for name in os.listdir(self._folder) if name.endswith(".sock") and name != self._own]
        try:
            async with asyncio.timeout(seconds):
                found = await asyncio.gather(*(self._put(name, question) for name in others))
        except TimeoutError:
            raise PeerUnanswered("one of the server's processes is too busy to answer; send it again") from None
        return [one for one in found if one is not None]

    async def close(self) -> None:
        """Be there no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        os.close(self._folder)

    def _address(self, name: str) -> str:
        return f"/proc/self/fd/{self._folder}/{name}"

    async def _put(self, name: str, question: dict[str, Any]) -> dict[str, Any] | None:
        """One process's answer; None if it is no more."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._address(name))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        try:
            writer.write(json.dumps(question).encode())
            writer.write_eof()
            data = await reader.read()
        except ConnectionError:
            data = b""
        finally:
            writer.close()
        if not data:
            raise PeerUnanswered("one of the server's processes has failed to answer; its log says why")
        return json.loads(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = json.loads(await reader.read())
            writer.write(json.dumps(await self._answer(question)).encode())
            await writer.drain()
        except ConnectionError:
            pass  # who asked is gone, and with it whoever waited for the answer
        finally:
            writer.close()
