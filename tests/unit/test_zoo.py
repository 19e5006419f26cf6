"""The conformance suite leaves no architecture out, and its representatives show every kind of block."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.conformance.representatives import REPRESENTATIVES
from tests.conformance.verdict import CANNOT
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.backend import BACKEND


def test_every_architecture_of_the_registry_has_an_entry() -> None:
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    extras = {entry.architecture for entry in BACKEND}
    assert not extras & set(_TEXT_GENERATION_MODELS)
    assert set(ZOO) - extras == set(_TEXT_GENERATION_MODELS)


def test_every_text_model_of_the_transformers_backend_has_an_entry() -> None:
    import transformers
    from vllm.model_executor.models.registry import _TRANSFORMERS_SUPPORTED_MODELS

    causal = {a for a in _TRANSFORMERS_SUPPORTED_MODELS if a.endswith("ForCausalLM") and hasattr(transformers, a)}
    assert {entry.architecture for entry in BACKEND} == causal


def test_what_cannot_be_run_says_why() -> None:
    for entry in ZOO.values():
        assert bool(entry.verdict) == bool(entry.reason), entry.architecture
        assert entry.verdict in ("", CANNOT)


def test_representatives_are_in_the_zoo_and_run() -> None:
    for architecture in REPRESENTATIVES:
        assert not ZOO[architecture].verdict, architecture
