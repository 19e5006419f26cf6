"""Stock vLLM over a tiny model, Weir as its plugin, and the few requests that the suite makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance.zoo import Entry
from tests.conformance.zoo.build import VOCAB
from tests.support.machine import has_amx

LENGTHS = (7, 40, 18, 5)
"""Prompts of one batch; the second is longer than the windows of the zoo's models."""
STEERED = 1
"""Which of them is steered; the last one carries no key of Weir's at all."""
GENERATED = 6

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # What tensor cores would shorten to 10 bits is multiplied in full, and no sampler is compiled.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""To be set before vLLM is imported."""

ARGUMENTS: dict[str, Any] = dict(
    dtype="float32",
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    block_size=32,
    enforce_eager=True,
    kv_cache_memory_bytes=64 << 20,
    enable_prefix_caching=False,
    skip_tokenizer_init=True,
    max_logprobs=-1,
    seed=0,
    disable_log_stats=True,
)

ON_GPU: dict[str, Any] = dict(block_size=None, kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.08)
"""In their place there: backends choose the size of cache blocks, and several engines share the device."""


def on_cpu(entry: Entry) -> dict[str, Any]:
    """What its engine needs more there: vLLM prefers AMX's kernels for latent attention, which take bfloat16 alone."""
    if has_amx() and entry.dtype != "bfloat16" and "kv_lora_rank" in entry.config:
        return {"attention_config": {"backend": "CPU_MLA"}}
    return {}


def set_environment() -> None:
    """Before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    if torch.version.cuda is None:
        # No model is compiled here; what else vLLM compiles (a count over the logits) takes longer than the requests.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def device_name() -> str:
    """What vLLM runs on: "cpu", or the name of the GPU."""
    from vllm.platforms import current_platform

    return current_platform.get_device_name().removeprefix("NVIDIA ") if current_platform.is_cuda() else "cpu"


def prompts() -> list[list[int]]:
    """Token ids; no two prompts share a prefix."""
    return [[(7 * i + 3 * j + j * j) % (VOCAB - 10) + 5 for j in range(n)] for i, n in enumerate(LENGTHS)]


@dataclass
class Answer:
    """One finished request.

    Attributes:
        ids: what went through the model: the prompt and what was generated, without the last token.
        made: the generated tokens.
        logprobs: [generated, vocabulary].
        rows: {(hook, layer): [tokens, width]}, where captured.
    """

    ids: list[int]
    made: list[int]
    logprobs: torch.Tensor
    rows: dict[tuple[str, int], torch.Tensor]

    def same(self, other: Answer) -> bool:
        """Whether two answers are the same to the bit."""
        return (
            self.made == other.made
            and torch.equal(self.logprobs, other.logprobs)
            and all(torch.equal(row, other.rows[site]) for site, row in self.rows.items() if site in other.rows)
        )


class Engine:
    """A running `vllm.LLM`."""

    def __init__(self, entry: Entry, model_dir: Path) -> None:
        from vllm import LLM

        on_device = on_cpu(entry) if device_name() == "cpu" else ON_GPU
        arguments = ARGUMENTS | {"model": str(model_dir), "dtype": entry.dtype} | on_device | entry.engine
        if not entry.oracle:
            from tests.conformance.zoo.loader import LOAD_FORMAT

            arguments |= {"load_format": LOAD_FORMAT, "trust_remote_code": True}
        if not arguments["enforce_eager"]:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)  # what stands there for all the others
            os.environ["VLLM_CACHE_ROOT"] = str(model_dir.parent / "cache")
        self.llm = LLM(**arguments)

    @property
    def model_class(self) -> str:
        """The name of vLLM's class."""
        return self.llm.apply_model(_class_name)[0]

    @property
    def gains(self) -> dict[int, float]:
        """Block -> what it multiplies the stream with before it leaves, by the name that Gemma 4 gives it."""
        return self.llm.apply_model(_gains)[0]

    def ask(
        self, sites: Sequence[tuple[str, int]] = (), steer: Sequence[Any] = (), plain: bool = False
    ) -> list[Answer]:
        """The batch, every request capturing `sites`, but the last one; the one that is steered undergoes `steer`.

        With `plain` no request carries a key of Weir's.
        """
        from vllm import SamplingParams

        import vllm_weir as weir

        common = SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1)
        hooks = {hook: [layer for name, layer in sites if name == hook] for hook, _ in sites}
        capture = [weir.Capture(hook, layers=layers) for hook, layers in hooks.items()]
        asked = []
        for i in range(len(LENGTHS)):
            keys = {"capture": capture} | ({"interventions": list(steer)} if i == STEERED and steer else {})
            asked.append(common if plain or i == len(LENGTHS) - 1 else weir.params(common, **keys))
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts()], asked, use_tqdm=False)
        return [_answer(output) for output in outputs]


def _class_name(model: torch.nn.Module) -> str:
    return type(model).__name__


def _gains(model: torch.nn.Module) -> dict[int, float]:
    parts = ((path.split("."), buffer) for path, buffer in model.named_buffers())
    return {int(path[-2]): float(buffer) for path, buffer in parts if path[-1] == "layer_scalar"}


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    made = list(completion.token_ids)
    ids = (list(output.prompt_token_ids) + made)[:-1]
    logprobs = torch.tensor([[step[token].logprob for token in range(len(step))] for step in completion.logprobs])
    rows = {}
    activations = getattr(completion, "activations", None)
    if activations is not None:
        for hook, layer in activations.sites:
            if activations.positions_of(hook, layer).tolist() != list(range(len(ids))):
                raise AssertionError(f"{hook}[{layer}] has not one row for each of {len(ids)} tokens")
            rows[hook, layer] = activations[hook, layer].float().clone()
    return Answer(ids, made, logprobs, rows)
