"""What the processes of one server share: whole states, no lost change, and nothing older than what was answered."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.properties import examples
from vllm_weir.frontend.admission.vector_registry import NamedVector, RegistryContents
from vllm_weir.schema.interventions import Add, Clamp
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.shared.state_files import SharedState
from vllm_weir.util import atomic_write

NAMES = st.sampled_from(["a", "b", "c"])


def vector(value: float, width: int = 4) -> Vector:
    return Vector.parse(np.full(width, value), "vector")


def plain(contents: RegistryContents) -> dict:
    """What contents say, comparable."""
    return {
        "vectors": {
            n: {layer: v.array.tolist() for layer, v in named.directions.items()}
            for n, named in contents.vectors.items()
        },
        "modules": {n: [i.to_json() for i in m] for n, m in contents.modules.items()},
        "always": [i.to_json() for i in contents.always],
        "tiers": contents.tiers,
    }


def with_vector(name: str, value: float):
    return lambda c: replace(c, vectors={**c.vectors, name: NamedVector({None: vector(value), 3: vector(-value)})})


def without(name: str):
    return lambda c: replace(c, vectors={n: v for n, v in c.vectors.items() if n != name})


def with_module(name: str, value: float):
    made = (Add(vector(value), [1, 2], 0.5, positions="prompt"), Clamp(vector(1 + value), 0, min=-1.0))
    return lambda c: replace(c, modules={**c.modules, name: made})


def with_always(value: float):
    return lambda c: replace(c, always=(Add(vector(value), 1),), tiers=1)


class Readers(RuleBasedStateMachine):
    """Several users of one directory agree with a model of it after every change, whoever made it."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.path = self.folder / str(time.monotonic_ns())
        self.users = [SharedState(self.path) for _ in range(3)]
        self.model = RegistryContents()

    def _change(self, who: int, edit) -> None:
        before = self.users[who].read().generation
        after = self.users[who].change(edit)
        self.model = edit(self.model)
        assert after.generation == before + 1 or after.generation > before

    @rule(who=st.integers(0, 2), name=NAMES, value=st.integers(1, 5))
    def put(self, who, name, value):
        self._change(who, with_vector(name, value))

    @rule(who=st.integers(0, 2), name=NAMES)
    def remove(self, who, name):
        self._change(who, without(name))

    @rule(who=st.integers(0, 2), name=NAMES, value=st.integers(1, 5))
    def register(self, who, name, value):
        self._change(who, with_module(name, value))

    @rule(who=st.integers(0, 2), value=st.integers(1, 5))
    def steer(self, who, value):
        self._change(who, with_always(value))

    @rule(who=st.integers(0, 2))
    def refuse(self, who):
        def edit(_contents):
            raise KeyError("no")

        with pytest.raises(KeyError):
            self.users[who].change(edit)

    @rule(who=st.integers(0, 2))
    def look(self, who):
        assert self.users[who].read() is self.users[who].read()

    @rule()
    def newcomer(self):
        self.users[0] = SharedState(self.path)

    @invariant()
    def all_agree(self):
        for user in self.users:
            assert plain(user.read()) == plain(self.model)
        kept = {v.digest for n in self.model.vectors.values() for v in n.directions.values()}
        for one in (*(i for m in self.model.modules.values() for i in m), *self.model.always):
            kept |= {getattr(one, name).digest for name in one.vectors}
        assert {f.stem for f in self.path.glob("*.safetensors")} == kept and not list(self.path.glob("*.tmp"))


def test_every_user_sees_every_change(tmp_path):
    Readers.folder = tmp_path
    run_state_machine_as_test(Readers, settings=examples(25, stateful_step_count=20))


def _count(folder: str, name: str, times: int, start) -> None:
    shared = SharedState(folder)
    start.wait(300)  # for all of them: who watches sees something
    for k in range(times):
        shared.change(
            lambda c: replace(
                c,
                vectors={**c.vectors, name: NamedVector({None: vector(k + 1, 2048)})},  # noqa: B023
                modules={**c.modules, "sum": (Add(vector(1 + _total(c)), 0),)},
            )
        )


def _total(contents: RegistryContents) -> float:
    return float(contents.modules["sum"][0].vector.array[0]) if "sum" in contents.modules else 0.0


def _watch(folder: str, start, stop, errors) -> None:
    shared, last, looks = SharedState(folder), 0, 0
    start.wait(300)  # for all of them: who watches sees something
    while not stop.is_set():
        contents = shared.read()
        looks += 1
        values = [n.directions[None].array for n in contents.vectors.values()]
        if any(len(set(v.tolist())) != 1 for v in values):
            errors.put("a torn vector")
        if contents.generation < last:
            errors.put("an older state after a newer one")
        if sum(float(v[0]) for v in values) != _total(contents):
            errors.put("two changes mixed, or one lost")
        last = contents.generation
    errors.put(looks)


def test_processes_lose_no_change_and_see_no_torn_one(tmp_path):
    """Three processes change the state at once, two watch: the parts of each state fit each other."""
    context, times = multiprocessing.get_context("fork"), 40  # to import what this process has takes seconds
    start, stop, errors = context.Barrier(5), context.Event(), context.Queue()
    writers = [context.Process(target=_count, args=(str(tmp_path), n, times, start)) for n in "abc"]
    watchers = [context.Process(target=_watch, args=(str(tmp_path), start, stop, errors)) for _ in range(2)]
    for process in (*writers, *watchers):
        process.start()
    for process in writers:
        process.join(300)
        assert process.exitcode == 0
    stop.set()
    said = [errors.get(timeout=60) for _ in watchers]
    for process in watchers:
        process.join(60)
        assert process.exitcode == 0
    assert errors.empty() and all(isinstance(looks, int) and looks > 0 for looks in said), said
    contents = SharedState(tmp_path).read()
    assert contents.generation == 1 + 3 * times and _total(contents) == 3 * times


def test_an_unchanged_state_costs_one_stat(tmp_path, monkeypatch):
    shared = SharedState(tmp_path)
    shared.change(with_vector("a", 1.0))
    first = shared.read()
    stats = []
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda *a, **k: stats.append(a) or real(*a, **k))
    monkeypatch.setattr(Path, "read_bytes", lambda _self: pytest.fail("read a file"))
    assert all(shared.read() is first for _ in range(10)) and len(stats) == 10


def test_changes_within_one_tick_of_the_clock_are_told_apart(tmp_path):
    """Same size, and soon the same inode: only the generation differs."""
    ours, other = SharedState(tmp_path), SharedState(tmp_path)
    for k in range(60):
        other.change(with_always(float(k % 10)))
        assert ours.read().always[0].vector.array[0] == k % 10


def test_what_a_dead_writer_left_is_cleaned(tmp_path):
    shared = SharedState(tmp_path)
    shared.change(with_vector("a", 1.0))
    (tmp_path / "state.json.tmp").write_text("{")
    (tmp_path / f"{'0' * 32}.safetensors").write_bytes(b"x")
    assert plain(SharedState(tmp_path).read()) == plain(shared.read())
    after = shared.change(with_vector("b", 2.0))
    assert set(after.vectors) == {"a", "b"}
    assert sorted(f.suffix for f in tmp_path.iterdir()) == ["", ".json"] + [".safetensors"] * 4


def test_only_the_owner_reads_it(tmp_path):
    folder = tmp_path / "shared"
    SharedState(folder).change(with_vector("a", 1.0))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o077 for f in folder.iterdir()} == {0}


def test_a_removed_directory_keeps_what_is_known(tmp_path, caplog):
    folder = tmp_path / "shared"
    shared = SharedState(folder)
    known = shared.change(with_always(1.0))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert shared.read() is known and shared.read() is known
    assert len([r for r in caplog.records if "was removed" in r.message]) == 1
    with pytest.raises(StateNotSaved, match="No such file"):
        shared.change(with_always(2.0))


def test_the_state_is_json_without_content(tmp_path):
    SharedState(tmp_path).change(with_module("m", 1.0))
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["generation"] == 2 and "b64" not in json.dumps(state)


@pytest.mark.parametrize("room", [0, 300])
def test_a_change_that_the_disk_refuses_leaves_nothing_behind(tmp_path, monkeypatch, room):
    """Without room for the first file, or for the second: later changes must find the disk as it was."""
    kept = SharedState(tmp_path)
    kept.change(with_vector("a", 1.0))
    files, left, real = sorted(os.listdir(tmp_path)), [room], open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[: left[0]])
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_write, "open", lambda *a, **k: Full(real(*a, **k)), raising=False)
        with pytest.raises(StateNotSaved, match=r"\(No space left on device\)"):
            kept.change(lambda c: replace(c, vectors={"b": NamedVector({None: vector(2.0), 1: vector(3.0, 64)})}))
    assert sorted(os.listdir(tmp_path)) == files
    assert set(kept.read().vectors) == set(SharedState(tmp_path).read().vectors) == {"a"}
    kept.change(with_vector("b", 2.0))
    assert set(SharedState(tmp_path).read().vectors) == {"a", "b"}
