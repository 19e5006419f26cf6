"""What the worker's wrappers set before the model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_weir.patches.registry import PatchStatus
from vllm_weir.patches.worker import init_device


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {"dce": True, "reorder_for_peak_memory": False}), ("cuda", {"dce": True})]
)
def test_operations_stay_in_order_on_a_cpu_before_the_model_is_made(device: str, options: dict[str, bool]) -> None:
    seen = []
    compilation = SimpleNamespace(inductor_compile_config={"dce": True})

    def load_model() -> None:
        seen.append(dict(compilation.inductor_compile_config))
        raise InterruptedError

    worker = SimpleNamespace(
        load_model=load_model,
        model_runner=SimpleNamespace(device=torch.device(device)),
        vllm_config=SimpleNamespace(compilation_config=compilation, model_config=SimpleNamespace(dtype=torch.float32)),
    )
    init_device(lambda _: None, PatchStatus(active=True))(SimpleNamespace(worker=worker))
    with pytest.raises(InterruptedError):
        worker.load_model()
    assert seen == [options]
