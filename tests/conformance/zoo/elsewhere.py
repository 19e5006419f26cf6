"""Architectures that stock vLLM cannot run on a CPU, and why.

`python -m tests.conformance ARCH --retry` runs those marked `tried` all the same.
"""

from __future__ import annotations

from tests.conformance.zoo.entry import Entry


def _cannot(architecture: str, reason: str) -> Entry:
    return Entry(architecture, oracle=False, verdict="cannot run", reason=reason, tried=False)


ELSEWHERE = [
    _cannot("Glm5NextForCausalLM", "its module takes sparse latent attention, which vLLM has no CPU backend for"),
    _cannot(
        "HYV4ForCausalLM", "vLLM has it for NVIDIA and AMD GPUs only; a trunk of several residual channels besides"
    ),
    _cannot("InklingForCausalLM", "vLLM has it for NVIDIA and AMD GPUs only"),
    _cannot("InklingForConditionalGeneration", "vLLM has it for NVIDIA and AMD GPUs only"),
    _cannot("MiniMaxM3SparseForCausalLM", "vLLM has it for NVIDIA and AMD GPUs only"),
    _cannot(
        "Qwen4ExpForCausalLM", "vLLM has it for NVIDIA and AMD GPUs only; a trunk of several residual streams besides"
    ),
]
