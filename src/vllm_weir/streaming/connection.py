"""`Connection`: frames of JSON and raw bytes between the two ends of a stream of rows, which share a token."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from vllm_weir.errors import WeirError, brief

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 20
"""Bytes of a frame's JSON; rows follow it as they are, or are in shared memory."""
VERSION = 1
HANDSHAKE_SECONDS = 10.0


class Connection:
    """One connection. A frame is the length of its JSON in four bytes, then the JSON, an object.

    Over a Unix socket a frame may bring the descriptor of a piece of memory.

    Attributes:
        local: Whether both ends are on one machine, so that they can share memory.
        start: Of a client's connection: the number of the stream's first batch.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.start = sock, 0
        self.local = sock.family == socket.AF_UNIX

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a frame, and the descriptor with it."""
        text = json.dumps(message).encode()
        data = _LENGTH.pack(len(text)) + text
        if fd is not None:
            sent = socket.send_fds(self.socket, [data], [fd])
            data = data[sent:]
        self.socket.sendall(data)

    def send_file(self, fd: int, offset: int, count: int) -> None:
        """Send bytes of a file, which the kernel reads."""
        while count:
            sent = os.sendfile(self.socket.fileno(), fd, offset, count)
            offset, count = offset + sent, count - sent

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Return a frame and its descriptor, which is the caller's to close; EOFError if the other end is gone."""
        length, fd = self._receive_prefix()
        try:
            if length > MAX_FRAME:
                raise WeirError(f"a frame of {length} bytes came; the other end is no stream of rows", "address")
            data = bytearray(length)
            self.receive_into(memoryview(data))
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):
            raise WeirError("a frame came that is not JSON; the other end is no stream of rows", "address") from None
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        return message, fd

    def _receive_prefix(self) -> tuple[int, int | None]:
        data, found = b"", []
        while len(data) < _LENGTH.size:
            if self.local:
                part, fds, _, _ = socket.recv_fds(self.socket, _LENGTH.size - len(data), 1, socket.MSG_CMSG_CLOEXEC)
                found += fds
            else:
                part = self.socket.recv(_LENGTH.size - len(data))
            if not part:
                raise EOFError("the other end is gone")
            data += part
        return _LENGTH.unpack(data)[0], found[0] if found else None

    def receive_into(self, view: memoryview) -> None:
        """Fill the view with the bytes that come."""
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError("the other end is gone")
            view = view[count:]

    def close(self) -> None:
        """Close the connection; a thread that waits for it in another call then returns."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def accept(sock: socket.socket, token: str, start: int) -> Connection:
    """Return the connection of a client that knows the token, and is told the number of the first batch.

    Raises:
        WeirError: If it does not.
        OSError: If it does not answer in time.
    """
    sock.settimeout(HANDSHAKE_SECONDS)
    connection, nonce = Connection(sock), secrets.token_hex(16)
    connection.send({"weir": VERSION, "nonce": nonce})
    answer, _ = connection.receive()
    if not hmac.compare_digest(str(answer.get("proof", "")), _proof(token, nonce)):
        connection.send({"error": "the token is not that of the stream", "field": "token"})
        raise WeirError("the token is not that of the stream", "token")
    connection.send({"start": start})
    _keep(sock)
    return connection


def connect(address: str, token: str, seconds: float) -> Connection:
    """Return a connection to a stream, which may begin up to so many seconds later.

    Raises:
        WeirError: If it cannot be reached, is no stream of rows, or does not take the token.
    """
    family, place = parse_address(address)
    deadline = time.monotonic() + seconds
    while True:
        sock = socket.socket(family)
        try:
            sock.settimeout(max(1.0, min(HANDSHAKE_SECONDS, seconds)))
            sock.connect(place)
            break
        except OSError as e:
            sock.close()
            if time.monotonic() > deadline:
                raise WeirError(
                    f"there is no stream of rows at {address} ({e}); is its engine running?", "address"
                ) from e
        time.sleep(0.1)
    connection = Connection(sock)
    try:
        hello, _ = connection.receive()
        if hello.get("weir") != VERSION:
            raise WeirError(f"{address} is no stream of rows that this version reads", "address")
        connection.send({"proof": _proof(token, str(hello.get("nonce")))})
        connection.start = int(raise_error(connection.receive()[0])["start"])
    except (OSError, EOFError) as e:
        connection.close()
        raise WeirError(f"{address} ended the connection ({e})", "address") from e
    except WeirError:
        connection.close()
        raise
    _keep(sock)
    return connection


def raise_error(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message; raise the WeirError that it tells of, if it does."""
    if "error" in message:
        raise WeirError(str(message["error"]), str(message.get("field", "")))
    return message


def parse_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """Return family and address of ``tcp://HOST:PORT`` or of a path, for a socket."""
    if not isinstance(address, str) or not address:
        raise WeirError(f"expected tcp://HOST:PORT or the path of a socket, got {brief(address)}", "address")
    if not address.startswith("tcp://"):
        if "://" in address or len(os.fsencode(address)) > 107:
            raise WeirError(f"expected tcp://HOST:PORT or a path of up to 107 bytes, got {brief(address)}", "address")
        return socket.AF_UNIX, address
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise WeirError(f"expected tcp://HOST:PORT, got {brief(address)}", "address")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), "sha256").hexdigest()


def _keep(sock: socket.socket) -> None:
    """Wait for the other end as long as it is there."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
