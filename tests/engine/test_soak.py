"""Full capture at batch 64, on and on: memory of worker and caller stays where it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, prompts, sampling
from tests.support.engines import get_llm

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))


def resident() -> int:
    """Bytes of this process that are its own, and shared ones that it has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def test_memory_is_flat(root):
    """Outputs of one turn are dropped in the next, so two turns' rows are the most that is ever alive."""
    llm = get_llm(directory(root), additional_config={"weir": {"host_bytes": 64 << 20}})
    params = weir.params(sampling(24), capture=weir.Capture("resid_post"))
    samples, rows, outs = [], 0, []
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        outs = llm.generate(prompts([8 + k % 40 for k in range(64)]), params, use_tqdm=False)
        rows += sum(len(out.activations[site]) for out in outs for site in out.activations.sites)
        samples.append(resident())
    del outs
    quarter = len(samples) // 4
    assert quarter, "too slow a machine for this many seconds"
    early, late = sorted(samples[quarter : 2 * quarter]), sorted(samples[-quarter:])
    grown = late[len(late) // 2] - early[len(early) // 2]
    print(
        f"\n{rows:,} rows, {len(samples)} turns in {SECONDS:.0f} s: "
        f"{samples[0] >> 20} MiB, then {grown / 2**20:+.1f} MiB"
    )
    assert grown < 16 << 20
    assert_nothing_is_held(llm)
