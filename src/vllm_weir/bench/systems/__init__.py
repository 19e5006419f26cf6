"""The systems that are timed: how a user of each asks for a case, and how rows come into the user's hands."""

from __future__ import annotations

from vllm_weir.bench.systems.hotwire import HotwireSystem
from vllm_weir.bench.systems.interp_engine import InterpEngineSystem
from vllm_weir.bench.systems.native import ExtractHiddenStatesSystem
from vllm_weir.bench.systems.nnsight import NnsightSystem
from vllm_weir.bench.systems.stock import StockSystem
from vllm_weir.bench.systems.transformers_hooks import TransformersSystem
from vllm_weir.bench.systems.vllm_lens import VllmLensSystem
from vllm_weir.bench.systems.weir import WeirSystem

__all__ = ["BY_NAME", "StockSystem", "WeirSystem"]

BY_NAME: dict[str, type[StockSystem]] = {
    system.name: system
    for system in (
        StockSystem,
        WeirSystem,
        VllmLensSystem,
        ExtractHiddenStatesSystem,
        NnsightSystem,
        InterpEngineSystem,
        HotwireSystem,
        TransformersSystem,
    )
}
