"""Slows Weir down by hand, with this folder on PYTHONPATH: its part of a step takes `WEIR_TEST_SLOWER` ms longer."""

import functools
import os
import time
from types import ModuleType

from vllm_weir.guard.import_hook import when_imported


def _slow(module: ModuleType) -> None:
    plan_step = module.Steps.plan_step

    @functools.wraps(plan_step)
    def slower(*args, **kwargs):
        time.sleep(float(os.environ["WEIR_TEST_SLOWER"]) / 1e3)
        return plan_step(*args, **kwargs)

    module.Steps.plan_step = slower


when_imported("vllm_weir.worker.steps", _slow)
