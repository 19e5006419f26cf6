"""Framing of what workers send to the caller's process, and of the vectors they fetch from it. msgpack, no pickle."""

from __future__ import annotations

import msgspec


class Piece(msgspec.Struct, array_like=True):
    """Rows of one request: ``len(positions) / 4`` tokens times ``len(columns)`` rows, row-major, from row `start`."""

    request_id: str
    columns: list[int]
    positions: bytes
    start: int


class Span(msgspec.Struct, array_like=True):
    """Positions (int32) of one request at which the interventions `moves` (their indices) were applied."""

    request_id: str
    moves: list[int]
    positions: bytes


class Header(msgspec.Struct, array_like=True):
    """What the payload beside it holds, what was steered, or which requests failed and why."""

    token: str
    d_model: int
    dtype: str
    pieces: list[Piece] = []
    spans: list[Span] = []
    failures: dict[str, str] = {}


class Wanted(msgspec.Struct, array_like=True):
    """A worker asks for vectors by digest; the answer is their float32 bytes, one frame each, empty if unknown."""

    token: str
    digests: list[str]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Header).decode
decode_wanted = msgspec.msgpack.Decoder(Wanted).decode


def split_reply(reply: str) -> tuple[str, str, str]:
    """Address for rows, address for vectors, and token of a reply address."""
    rows, vectors, token = reply.split("\t")
    return rows, vectors, token
