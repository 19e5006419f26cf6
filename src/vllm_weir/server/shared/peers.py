"""Questions to the server's other API-server processes, over sockets in their shared directory."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.server.errors import PeerUnanswered

AnswerQuestion = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Peers:
    """This process among those that share a directory.

    Args:
        folder: The directory of the sockets. Only its owner may access it: their data is trusted.
        answer: Returns the answer to another process's question.
        name: The name of this process's socket.
    """

    def __init__(self, folder: Path, answer: AnswerQuestion, name: str) -> None:
        # A socket's address is limited in length; through a descriptor, the path may be long.
        self._path = folder
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._answer = answer
        self._own = f"{name}.sock"
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._address(self._own))
        except OSError as e:
            why = f"no socket can be created in {self._path} ({e.strerror or e})"
            raise WeirError(f"{why}; name a directory of a local disk in WEIR_SERVE_DIRECTORY", "serve") from e

    async def ask(self, question: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Return the other processes' answers.

        Raises:
            PeerUnanswered: If a running process has not answered after so many seconds.
        """
        others = [name for name in os.listdir(self._folder) if name.endswith(".sock") and name != self._own]
        try:
            async with asyncio.timeout(seconds):
                answers = await asyncio.gather(*(self._ask_one(name, question) for name in others))
        except TimeoutError:
            raise PeerUnanswered(
                "one of the server's processes is too busy to answer; send the request again"
            ) from None
        return [answer for answer in answers if answer is not None]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        os.close(self._folder)

    def _address(self, name: str) -> str:
        return f"/proc/self/fd/{self._folder}/{name}"

    async def _ask_one(self, name: str, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return one process's answer, None if the process has ended."""
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
            raise PeerUnanswered("one of the server's processes failed to answer; see its log")
        return json.loads(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = json.loads(await reader.read())
            writer.write(json.dumps(await self._answer(question)).encode())
            await writer.drain()
        except ConnectionError:
            pass  # the process that asked has ended
        finally:
            writer.close()
