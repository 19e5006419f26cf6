"""Adapters of other systems for `weir bench`, which finds them here in a checkout; the package has stock and Weir."""

from __future__ import annotations

from bench.systems.hotwire import HotwireSystem
from bench.systems.interp_engine import InterpEngineSystem
from bench.systems.native import ExtractHiddenStatesSystem
from bench.systems.nnsight import NnsightSystem
from bench.systems.transformers_hooks import TransformersSystem
from bench.systems.vllm_lens import VllmLensSystem
from vllm_weir.bench.systems.stock import StockSystem

RIVALS: tuple[type[StockSystem], ...] = (
    VllmLensSystem,
    ExtractHiddenStatesSystem,
    NnsightSystem,
    InterpEngineSystem,
    HotwireSystem,
    TransformersSystem,
)
