"""Framing of what workers send to the caller's process: a msgpack header and the rows' raw bytes. No pickle."""

from __future__ import annotations

import msgspec


class Piece(msgspec.Struct, array_like=True):
    """Rows of one request: ``len(positions) / 4`` tokens times ``len(columns)`` rows, row-major, from row `start`."""

    request_id: str
    columns: list[int]
    positions: bytes
    start: int


class Header(msgspec.Struct, array_like=True):
    """What the payload beside it holds, or which requests failed and why."""

    token: str
    d_model: int
    dtype: str
    pieces: list[Piece]
    failures: dict[str, str] = {}


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Header).decode


def split_reply(reply: str) -> tuple[str, str]:
    """Socket address and token of a reply address."""
    address, _, token = reply.rpartition("#")
    return address, token
