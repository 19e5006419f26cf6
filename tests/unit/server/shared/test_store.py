"""What servers of one model share in a folder or a bucket: no lost change, names and results of each known to all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.machine import needs, object_store
from tests.support.measure import eventually
from tests.support.s3 import s3_environment, s3_server
from tests.unit.admin_app import FACTS, LAYERS, D, Server, Workers
from tests.unit.server.shared.test_result_files import SIZE, acts
from tests.unit.server.shared.test_state_files import plain, with_always, with_module, with_vector, without
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import SAEConfig
from vllm_weir.schema.hooks import Site
from vllm_weir.server import hooks, lenses, saes, store
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.shared import store_state
from vllm_weir.server.shared.store import Store, check_url
from vllm_weir.server.shared.store_results import StoreResults
from vllm_weir.server.shared.store_state import StoreState

MODEL = {"served_model_name": "m", "num_layers": LAYERS, "d_model": D}
KINDS = ["folder", pytest.param("s3", marks=needs(object_store))]


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with s3_server("names") as options, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(options).items():
            patch.setenv(name, value)
        yield {}


@pytest.fixture(params=KINDS)
def url(request, tmp_path) -> str:
    if request.param == "folder":
        return check_url(str(tmp_path / "store"))
    request.getfixturevalue("bucket")
    return f"s3://names/{uuid.uuid4()}"


def state_of(url: str, folder: Path, arrive=lambda _: lambda: None) -> StoreState:
    """A state that looks for news only when it is told to."""
    state = StoreState(Store(url), folder)
    state._stopped.set()
    state.start(MODEL, arrive)
    return state


def test_every_change_is_seen_by_the_others_and_by_newcomers(url, tmp_path):
    users = [state_of(url, tmp_path) for _ in range(2)]
    model = RegistryContents()
    edits = [with_vector("a", 1), with_module("m", 2), with_always(3), with_vector("b", 4), without("a")]
    for k, edit in enumerate(edits):
        users[k % 2].change(edit)
        model = edit(model)
        for user in users:
            user.refresh()
            assert plain(user.read()) == plain(model) and user.read().generation == k + 1
        assert plain(state_of(url, tmp_path).read()) == plain(model)
    known = users[0].read()
    users[0].refresh()
    assert users[0].read() is known and users[0].change(lambda contents: contents) is known


def _counted(contents: RegistryContents) -> RegistryContents:
    count = contents.vectors["n"].directions[None].array[0] if "n" in contents.vectors else 0
    return with_vector("n", float(count) + 1)(contents)


def _count(url: str, folder: Path, times: int) -> None:
    state = state_of(url, folder)
    for _ in range(times):
        state.change(_counted)


def race(start: str, url: str, folder, processes: int, changes: int) -> None:
    """Have processes, started in this way, each change the store so often, and expect every change in it."""
    context = multiprocessing.get_context(start)
    racing = [context.Process(target=_count, args=(url, folder / str(k), changes)) for k in range(processes)]
    for process in racing:
        process.start()
    for process in racing:
        process.join(300)
        assert process.exitcode == 0
    contents, total = state_of(url, folder).read(), processes * changes
    assert contents.generation == total and contents.vectors["n"].directions[None].array[0] == total


@pytest.mark.thorough
def test_a_thousand_races_lose_no_change(tmp_path):
    url = check_url(str(tmp_path / "store"))
    race("fork", url, tmp_path, processes=4, changes=250)


@needs(object_store)
def test_races_on_s3_lose_no_change(bucket, tmp_path):
    url = f"s3://names/{uuid.uuid4()}"
    race("spawn", url, tmp_path, processes=2, changes=15)  # a fork would share connections


def test_a_file_is_created_once(url):
    store = Store(url)
    assert store.create("states/1", b"ours") and not store.create("states/1", b"theirs")
    assert store.read("states/1") == b"ours" and set(store.files("states")) == {"states/1"}
    assert store.remove("states/1") and not store.remove("states/1")
    with pytest.raises(FileNotFoundError):
        store.read("states/1")


def test_the_store_of_another_model_is_refused(url, tmp_path):
    state_of(url, tmp_path)
    state_of(url, tmp_path)
    with pytest.raises(WeirError, match=r"names of another model \(served_model_name 'm' and not 'n'"):
        StoreState(Store(url), tmp_path).start(MODEL | {"served_model_name": "n"}, lambda _: lambda: None)


def test_who_was_away_for_long_begins_with_the_newest(url, tmp_path, monkeypatch):
    """Old generations are gone by then, so that the next one is not there though there are newer ones."""
    monkeypatch.setattr(store_state, "_TIDIED", 4)
    monkeypatch.setattr(store_state, "KEPT", -10.0)
    away, other = state_of(url, tmp_path), state_of(url, tmp_path)
    for k in range(1, 9):
        other.change(with_vector("a", k))
    files = Store(url).files("")
    assert sum(name.startswith("states/") for name in files) == 1
    assert sum(name.startswith("files/") for name in files) == 2
    away._checked -= store_state.FRESH + 1
    assert away.change(with_vector("b", 1)).generation == 9 and set(away.read().vectors) == {"a", "b"}


def test_a_change_that_took_long_does_not_make_an_old_generation_again(url, tmp_path, monkeypatch):
    """It was there and is gone by then, so that a store would create it."""
    monkeypatch.setattr(store_state, "_TIDIED", 4)
    monkeypatch.setattr(store_state, "KEPT", -10.0)
    slow, other = state_of(url, tmp_path), state_of(url, tmp_path)
    edited = []

    def edit(contents):
        if not edited:
            for k in range(1, 9):
                other.change(with_vector("a", k))
            slow._checked -= store_state.FRESH + 1
        edited.append(contents.generation)
        return with_vector("b", 1)(contents)

    assert slow.change(edit).generation == 9 and edited == [0, 8] and set(slow.read().vectors) == {"a", "b"}


def test_who_loses_a_race_changes_what_the_winner_made(url, tmp_path):
    loser, winner = state_of(url, tmp_path), state_of(url, tmp_path)
    edited = []

    def edit(contents):
        if not edited:
            winner.change(with_vector("a", 1))
        edited.append(contents.generation)
        return with_vector("b", 1)(contents)

    assert loser.change(edit).generation == 2 and edited == [0, 1]
    winner.refresh()
    assert set(winner.read().vectors) == {"a", "b"}


@needs(object_store)
def test_a_folder_whose_first_file_is_made_meanwhile_is_empty(bucket, monkeypatch):
    """s3fs finds no file, looks for one of the folder's name, and finds the folder."""
    made = Store(f"s3://names/{uuid.uuid4()}")
    listed = made._fs._lsdir

    async def late(*args, **kwargs):
        found = await listed(*args, **kwargs)
        await made._fs._pipe_file(made._path("f/first"), b"1")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(made._fs, "_lsdir", late)
        assert made.files("f") == {}
    assert set(made.files("f")) == {"f/first"}


def test_a_store_that_cannot_be_written_changes_nothing(url, tmp_path, monkeypatch):
    state = state_of(url, tmp_path)
    known = state.change(with_vector("a", 1))

    def refuse(*_):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(state._store, "create", refuse)
    with pytest.raises(StateNotSaved, match="nothing was changed"):
        state.change(with_vector("b", 1))
    assert state.read() is known


def test_news_that_cannot_be_used_yet_wait(tmp_path, caplog):
    """A server goes on with what it had, says so once, and catches up."""
    url, broken = check_url(str(tmp_path / "store")), [True]

    def arrive(contents):
        if contents.vectors and broken[0]:
            raise OSError("no room")
        return lambda: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_state, "PERIOD", 0.01)
        patch.setattr(store_state, "PATIENCE", 0.01)
        ours, other = StoreState(Store(url), tmp_path), state_of(url, tmp_path)
        ours.start(MODEL, arrive)
        other.change(with_vector("a", 1))
        eventually(lambda: "no room" in caplog.text, True, 60)
        time.sleep(0.1)
        assert not ours.read().vectors and caplog.text.count("no room") == 1
        broken[0] = False
        eventually(lambda: set(ours.read().vectors), {"a"}, 60)
        ours.close()


def test_results_of_one_are_read_from_another(url, tmp_path):
    servers = [Server(tmp_path, key, store=url) for key in (1, 2)]
    kept = servers[0].keep(acts(value=2.5), SIZE)
    with servers[1].spool.open(kept["id"]) as file:
        assert file.read() == acts(value=2.5).to_bytes()
    assert servers[1].spool.delete(kept["id"]) and not servers[0].spool.delete(kept["id"])
    assert servers[0].spool.open(kept["id"]) is None and servers[0].spool.open("../names") is None


@needs(object_store)
def test_results_in_a_bucket_have_a_budget_and_a_lifetime(bucket, tmp_path, monkeypatch):
    results = StoreResults(Store(f"s3://names/{uuid.uuid4()}"), tmp_path, 5000, 60.0)
    ids = [results.put(acts(), SIZE) for _ in range(4)]
    assert 0 < len(results) < 4 and results.used <= 5000
    assert results.open(ids[-1]) is not None and not list(tmp_path.iterdir())
    with pytest.raises(WeirError, match="WEIR_SERVE_SPOOL_BYTES=5000"):
        results.put(acts(rows=40), SIZE * 10)
    with pytest.raises(WeirError, match="ask for less in one request"):
        for _ in range(4):
            ids.append(results.put(acts(), SIZE, keep_ids=ids))
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 61)
    assert results.open(ids[-1]) is None
    results.sweep()
    assert len(results) == results.used == 0


def sae() -> SAE:
    made = {"W_enc": torch.randn(D, 16), "b_enc": torch.zeros(16), "W_dec": torch.randn(16, D), "b_dec": torch.zeros(D)}
    return SAE(SAEConfig(site=Site("resid_post", 1), architecture="standard"), made)


@contextlib.asynccontextmanager
async def serving(folder: Path, key: int, url: str):
    server = Server(folder, key, engine=Workers(1 << 20), facts=replace(FACTS, no_lens=""), store=url)
    await store.load_given(server)
    try:
        yield server
    finally:
        server.names.close()


def test_autoencoders_and_lenses_reach_the_workers_of_the_others(url, tmp_path, monkeypatch, caplog):
    import numpy as np

    monkeypatch.setattr(store_state, "PERIOD", 0.02)
    np.savez(tmp_path / "j.npz", J_0=np.eye(D, dtype=np.float32))

    async def until(seen, wanted):
        for _ in range(3000):
            if seen() == wanted:
                return
            await asyncio.sleep(0.02)
        assert seen() == wanted

    async def run():
        async with serving(tmp_path, 1, url) as one, serving(tmp_path, 2, url) as two:
            given = sae()
            loaded = saes.loading.prepare(one.frontend, "s", given)
            loop = asyncio.get_running_loop()
            assert await one.change(lambda: saes._send(one, loop, loaded))
            await until(lambda: [info.name for info in saes.infos(two)], ["s"])
            assert two.engine_client.loaded == [1, 1]
            two.frontend.names.refresh()
            known = two.frontend.names.saes.find("s", "name").sae
            assert torch.equal(known.tensors["W_dec"], given.tensors["W_dec"])
            await lenses.load_given(one, {"WEIR_SERVE_LENSES": json.dumps({"j": str(tmp_path / "j.npz")})})
            async with serving(tmp_path, 3, url) as late:  # one that was restarted
                assert [info.name for info in saes.infos(late)] == ["s"] and late.engine_client.loaded == [1, 1]
                assert list(late.frontend.names.lenses.infos()) == ["j"]
            assert await saes.unload(two, "s")
            await until(lambda: [server.engine_client.loaded for server in (one, two)], [[0, 0], [0, 0]])
            assert not saes.infos(one)

    asyncio.run(run())


def test_hooks_are_told_by_reference_and_never_imported(url, tmp_path, caplog):
    async def run():
        async with serving(tmp_path, 1, url) as one:
            place = "tests.support.served_hooks:watch"
            await hooks.load_given(one, {"WEIR_SERVE_HOOKS": json.dumps({"watch": place})})
            assert one.names.read().hooks == {"watch": place}
            async with serving(tmp_path, 2, url) as two:
                assert "--weir-hook watch=tests.support.served_hooks:watch" in caplog.text
                assert not two.frontend.names.hooks.names
                with pytest.raises(WeirError, match="other servers of the store have it as"):
                    await hooks.load_given(
                        two, {"WEIR_SERVE_HOOKS": json.dumps({"watch": "tests.support.served_hooks:STEER"})}
                    )

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["ftp://host/x", "s3://", "file://", "gs://bucket/x"])
def test_what_is_no_store_is_refused(wrong):
    with pytest.raises(WeirError, match="expected a folder or s3://BUCKET/FOLDER"):
        store.put_option([wrong], {})


def test_the_option_reaches_the_server_s_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ: dict[str, str] = {}
    store.put_option(["names"], environ)
    assert environ == {"WEIR_SERVE_STORE": f"file://{tmp_path}/names"}
    store.put_option([], environ)
    assert len(environ) == 1
    with pytest.raises(WeirError, match="given twice"):
        store.put_option(["a", "b"], environ)
