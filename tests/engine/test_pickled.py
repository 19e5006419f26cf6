"""Outputs that another process (of Ray's, of multiprocessing's) unpickles have their rows and receipt there."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cloudpickle
import pytest

import vllm_weir as weir
from tests.engine.common import directory, prompts, sampling
from tests.engine.read_pickled import look
from tests.support.engines import get_llm
from tests.support.zygote import ROOT

pytestmark = pytest.mark.engine


@pytest.fixture
def outputs(root):
    """One with rows, one without."""
    asked = weir.params(sampling(4), capture=weir.Capture("resid_post", [0, 2]))
    return get_llm(directory(root)).generate(prompts([5, 9]), [asked, sampling(4)], use_tqdm=False)


def read_elsewhere(path: Path, what: str, **env: str) -> list:
    script = Path(__file__).with_name("read_pickled.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path), what], env=os.environ | env, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def plain(found: list) -> list:
    return json.loads(json.dumps(found))


def test_copies_and_other_picklers_keep_rows(outputs):
    seen = look(outputs)
    assert seen[0] == seen[1] and len(seen[0][0]) == 2 and seen[2][0] is seen[3][0] is None
    for copied in (
        copy.deepcopy(outputs),
        pickle.loads(pickle.dumps(outputs)),  # noqa: S301
        cloudpickle.loads(cloudpickle.dumps(outputs)),
    ):
        assert look(copied) == seen
        assert copied[0].receipt == outputs[0].receipt


@pytest.mark.parametrize(
    ("what", "env"),
    [("pickle", {"WEIR_DISABLE": "1", "VLLM_PLUGINS": "another"}), ("weir", {})],
    ids=["pickle-alone", "weir-imported"],
)
def test_another_process_sees_what_this_one_sees(outputs, tmp_path, what, env):
    path = tmp_path / "outputs.pkl"
    path.write_bytes(pickle.dumps(outputs))
    assert read_elsewhere(path, what, **env) == plain(look(outputs))


def test_a_plain_output_has_none_where_weir_is_imported(outputs, tmp_path):
    """vLLM's classes are all that its pickle names."""
    path = tmp_path / "outputs.pkl"
    path.write_bytes(pickle.dumps([outputs[1]]))
    assert read_elsewhere(path, "weir") == plain(look([outputs[1]]))


def test_a_spawned_process_gets_them_as_arguments(outputs):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert plain(pool.submit(look, outputs).result(300)) == plain(look(outputs))
