"""Processes of a server that ask each other: over long paths, of the dead, of the busy, and of those that fail."""

from __future__ import annotations

import asyncio
import socket

import pytest

from vllm_weir.errors import WeirError
from vllm_weir.server.errors import PeerUnanswered
from vllm_weir.server.shared.peers import Peers


def test_a_directory_that_takes_no_sockets_is_told_of(tmp_path):
    async def go():
        peers = Peers(tmp_path, doubled, "no/such")
        try:
            await peers.open()
        finally:
            await peers.close()

    with pytest.raises(WeirError, match="WEIR_SERVE_DIRECTORY"):
        asyncio.run(go())


async def doubled(question):
    return {"twice": question["x"] * 2}


def within(tmp_path, *answers, ask, seconds=60.0):
    """What the first of some processes is told by all others."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir(exist_ok=True)

    async def go():
        peers = [Peers(folder, answer, str(k)) for k, answer in enumerate(answers)]
        try:
            for one in peers:
                await one.open()
            return await peers[0].ask(ask, seconds)
        finally:
            for one in peers:
                await one.close()

    return asyncio.run(go())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_others_answer(tmp_path, n):
    assert within(tmp_path, *[doubled] * n, ask={"x": 3}) == [{"twice": 6}] * (n - 1)


def test_a_large_question(tmp_path):
    assert within(tmp_path, doubled, doubled, ask={"x": "é" * (1 << 20)}) == [{"twice": "é" * (2 << 20)}]


def test_the_dead_are_passed_over(tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        import os

        fd = os.open(folder, os.O_RDONLY)
        dead.bind(f"/proc/self/fd/{fd}/9.sock")
        os.close(fd)
    assert (folder / "9.sock").exists()
    assert within(tmp_path, doubled, doubled, ask={"x": 1}) == [{"twice": 2}]


def test_who_does_not_answer_is_told_of(tmp_path, caplog):
    async def late(_question):
        await asyncio.Event().wait()

    async def fails(_question):
        raise RuntimeError("no")

    with pytest.raises(PeerUnanswered, match="too busy"):
        within(tmp_path, doubled, doubled, late, ask={"x": 1}, seconds=0.2)
    with pytest.raises(PeerUnanswered, match="failed to answer"):
        within(tmp_path, doubled, fails, ask={"x": 1})
    assert "RuntimeError" in caplog.text, "its log says why"
