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
import torch

import vllm_weir as weir
from tests.engine.common import prompts, sampling
from tests.engine.read_pickled import look
from tests.support.zygote import ROOT

pytestmark = pytest.mark.engine("default")


@pytest.fixture
def outputs(llm):
    """One with rows and scores, one without."""
    probe = weir.Probe("p", torch.linspace(-1, 1, 128), layer=1)
    asked = weir.params(sampling(4), capture=weir.Capture("resid_post", [0, 2]), probes=probe)
    return llm.generate(prompts([5, 9]), [asked, sampling(4)], use_tqdm=False)


def plain(found: list) -> list:
    return json.loads(json.dumps(found))


def test_copies_and_other_picklers_keep_rows(outputs):
    seen = look(outputs)
    assert (
        seen[0] == seen[1]
        and len(seen[0][0]) == 2
        and len(seen[0][3]["p"][1]) == 8
        and seen[2][0] is seen[3][0] is None
    )
    for copied in (
        copy.deepcopy(outputs),
        pickle.loads(pickle.dumps(outputs)),  # noqa: S301
        cloudpickle.loads(cloudpickle.dumps(outputs)),
    ):
        assert look(copied) == seen
        assert copied[0].receipt == outputs[0].receipt


@pytest.mark.parametrize(
    ("what", "env"),
    [
        ("pickle", {"WEIR_DISABLE": "1", "VLLM_PLUGINS": "another"}),
        pytest.param("weir", {}, marks=pytest.mark.thorough),
    ],
    ids=["pickle-alone", "weir-imported"],
)
def test_another_process_sees_what_this_one_sees(outputs, tmp_path, what, env):
    """With Weir imported, it reads a plain output alone first, whose pickle names nothing but vLLM's classes."""
    given = [outputs] if what == "pickle" else [[outputs[1]], outputs]
    files = []
    for n, some in enumerate(given):
        files.append(tmp_path / f"{n}.pkl")
        files[-1].write_bytes(pickle.dumps(some))
    command = [sys.executable, str(Path(__file__).with_name("read_pickled.py")), what, *map(str, files)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [plain(look(some)) for some in given]


@pytest.mark.thorough
def test_a_spawned_process_gets_them_as_arguments(outputs):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert plain(pool.submit(look, outputs).result(300)) == plain(look(outputs))
