"""The settings of a benchmark run: the model, the sizes, the cases, and the engines' arguments."""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from vllm_weir.bench.cases import CANNOT, CASES, CHAT_ROLES, STEP_CASES, WORKLOADS, SizeKind, can_run

SPARE_TOKENS = 64
"""What an engine for the workloads takes beyond its longest request."""


class BatchSize(BaseModel):
    """The prompts of one call: how many, of how many tokens, and how many tokens each generates.

    Attributes:
        count: number of prompts.
        prompt: tokens of a prompt; of the longest, if their lengths differ.
        generated: tokens that each generates.
        shortest: tokens of the shortest prompt, where lengths are drawn between it and `prompt`.
        shared: tokens at the start of `prompt` that all prompts have in common.
    """

    model_config = ConfigDict(frozen=True)

    kind: SizeKind
    count: int
    prompt: int
    generated: int
    shortest: int | None = None
    shared: int = 0

    @property
    def is_workload(self) -> bool:
        """Whether it is a workload's, and not a batch of steps or a prefill."""
        return self.kind not in ("decode", "prefill")

    @property
    def label(self) -> str:
        """Its name in results, e.g. ``batch 32``, ``prefill 64x1024`` or ``texts 1500x50-600``."""
        if self.kind == "decode":
            return f"batch {self.count}"
        shortest = "" if self.shortest is None else f"{self.shortest}-"
        shared = f"{self.shared}+" if self.shared else ""
        return f"{self.kind} {self.count}x{shared}{shortest}{self.prompt - self.shared}"

    def lengths(self) -> list[int]:
        """Return the tokens of each prompt, the same for every call."""
        if self.shortest is None:
            return [self.prompt] * self.count
        draw = random.Random(0)
        return [draw.randint(self.shortest, self.prompt) for _ in range(self.count)]

    def figure(self, seconds: float) -> float:
        """Return milliseconds a decode step or a workload's call, or thousand prompt tokens a second of a prefill.

        A decode step is the whole call by the number of generated tokens.
        """
        if self.kind == "decode":
            return 1e3 * seconds / self.generated
        if self.kind == "prefill":
            return self.count * self.prompt / seconds / 1e3
        return 1e3 * seconds


class BenchTask(BaseModel):
    """One case of one system at one size."""

    model_config = ConfigDict(frozen=True)

    system: str
    case: str
    size: BatchSize


class WorkloadSizes(BaseModel):
    """How large the workloads are.

    Attributes:
        texts: texts of `extract`, `mean` and their like, of `shortest` to `longest` tokens.
        blocks: blocks that `extract` and `attn_mlp_out` read, at equal distances.
        long: tokens of the prompt of `long` and `long_one`; `medium` of `pattern_long`, `short` of `lens_prompt`.
        chats: chats of `chat_mix`, of `chat_tokens` tokens each behind a system prompt of `system_prompt`.
        ablated: requests of `ablate_everywhere` and of most instruments, of `ablated_tokens` tokens.
        crowd: requests of `steer_everywhere`, as long.
        cells: cells of `sweep`: a prompt of `cell_tokens`, at each token of the first blocks.
        generated: tokens that each chat, and each request of `ablate_everywhere` and its like, generates.
    """

    texts: int = 1500
    shortest: int = 50
    longest: int = 600
    blocks: int = 4
    long: int = 32_000
    medium: int = 2048
    short: int = 512
    chats: int = 128
    system_prompt: int = 2000
    chat_tokens: int = 100
    ablated: int = 64
    ablated_tokens: int = 100
    crowd: int = 256
    cells: int = 1280
    cell_tokens: int = 40
    generated: int = 128

    def of_kind(self, kind: SizeKind) -> BatchSize:
        """Return the prompts of one kind of workload."""
        if kind == "texts":
            return BatchSize(kind=kind, count=self.texts, prompt=self.longest, shortest=self.shortest, generated=1)
        if kind in ("long", "medium", "short"):
            return BatchSize(kind=kind, count=1, prompt=getattr(self, kind), generated=1)
        if kind == "cells":
            return BatchSize(kind=kind, count=self.cells, prompt=self.cell_tokens, generated=1)
        if kind == "chats":
            length = self.system_prompt + self.chat_tokens
            return BatchSize(
                kind=kind, count=self.chats, prompt=length, generated=self.generated, shared=self.system_prompt
            )
        count = {"requests": self.ablated, "crowd": self.crowd}.get(kind, 1)
        return BatchSize(kind=kind, count=count, prompt=self.ablated_tokens, generated=self.generated)


class EngineChoice(BaseModel):
    """Which engine a system starts: for steps or for workloads, and which cases it is timed on.

    Attributes:
        layers: blocks whose activations the engine extracts, for systems that fix them at the start; else empty.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["steps", "workloads"] = "steps"
    layers: tuple[int, ...] = ()


class BenchPlan(BaseModel):
    """All settings of a run; it travels to the worker processes as JSON.

    Attributes:
        model: directory; `model_name` is what the result says.
        dummy: random weights, drawn by name after the start, instead of a checkpoint's.
        layers, width, vocab: of the model.
        cuda: whether the engines run on a GPU.
        max_model_len: longest request of the engines for steps.
        context: longest request that the model takes.
        tokens, prompt_tokens: of the decode cases, per request.
        prefill: (prompts, tokens each), or None.
        workloads: sizes of the workloads.
        d_sae: features of the autoencoder that is read and whose features are set.
        repeats, warmups: runs of every case, timed and before.
        least_seconds: short calls are repeated until they have taken so long, up to ten times `repeats`.
        case_seconds: no case takes longer, warm-ups included.
        run_seconds: no case is begun later, and none under way is waited for; rows are compared after that.
        interleave: stock's and Weir's engines live together and take turns.
        startups: fresh processes in which the start is timed.
        cold: each of them compiles everything, into caches of its own.
        memory_share: ``gpu_memory_utilization`` of each engine.
        lens_path: put before `PYTHONPATH` for vllm-lens; `rivals_path` for the other rivals.
    """

    model: str
    model_name: str
    dummy: bool
    layers: int
    width: int
    vocab: int
    cuda: bool
    dtype: Literal["bfloat16", "float32"]
    eager: bool
    max_model_len: int
    context: int = 131_072
    systems: tuple[str, ...]
    cases: tuple[str, ...]
    batches: tuple[int, ...]
    tokens: int
    prompt_tokens: int = 16
    prefill: tuple[int, int] | None
    workloads: WorkloadSizes = WorkloadSizes()
    d_sae: int = 32_768
    repeats: int
    warmups: int
    least_seconds: float = 0.0
    case_seconds: float
    run_seconds: float | None = None
    start_seconds: float = 400.0
    interleave: bool = True
    startups: int = 1
    cold: bool = True
    memory_share: float = 0.42
    weir_config: dict[str, Any] = {}
    lens_path: str | None = None
    rivals_path: str | None = None

    @property
    def steered_layer(self) -> int:
        """The block that `steer_one` steers: 15 of 32."""
        return max(0, self.layers // 2 - 1)

    @property
    def few_layers(self) -> tuple[int, ...]:
        """The blocks that `extract` reads."""
        count = min(self.workloads.blocks, self.layers)
        return tuple(self.layers * k // count for k in range(count))

    @property
    def named_workloads(self) -> tuple[str, ...]:
        return tuple(case for case in self.cases if case in WORKLOADS)

    @property
    def has_steps(self) -> bool:
        """Whether engines for steps are needed: `idle` alone needs none beside workloads."""
        return any(case not in WORKLOADS and case != "idle" for case in self.cases) or not self.named_workloads

    def captured_layers(self, case: str) -> tuple[int, ...]:
        if case == "extract":
            return self.few_layers
        return (self.layers // 2,) if case == "long_one" else tuple(range(self.layers))

    def wanted(self, case: str, size: BatchSize, request: int, prompt: int) -> tuple[int, int, int] | None:
        """Return the shape [blocks, rows, width] that a request's rows must have; None if it asks for no rows."""
        rows = {"last_mixed": 1, "capture_last_all_layers": 1, "mean": 1}.get(case, prompt)
        width = self.width
        if case == "capture_all_all_layers":
            rows = prompt + size.generated - 1
        elif case == "chat_mix":
            role = CHAT_ROLES[request % len(CHAT_ROLES)]
            if role not in ("capture", "project", "steer and capture"):
                return None
            rows = 1 if role == "capture" else size.generated
            width = 2 if role == "project" else width
        return len(self.captured_layers(case)), rows, width

    def sizes(self) -> list[BatchSize]:
        """Return the sizes of the step cases: decode by batch, then the prefill."""
        out = [
            BatchSize(kind="decode", count=n, prompt=self.prompt_tokens, generated=self.tokens) for n in self.batches
        ]
        if self.prefill is not None:
            out.append(BatchSize(kind="prefill", count=self.prefill[0], prompt=self.prefill[1], generated=1))
        return out

    def workload_sizes(self) -> list[BatchSize]:
        kinds = dict.fromkeys(WORKLOADS[case] for case in self.named_workloads)
        return [self.workloads.of_kind(kind) for kind in kinds]

    def tasks(self, system: str) -> list[BenchTask]:
        """Return a system's timed tasks on its engine for steps, cases outside, captures last."""
        cases = [case for case in STEP_CASES if case in self.cases and can_run(system, case)]
        if system == "stock":
            cases = ["idle"]  # every ratio needs it
        return [BenchTask(system=system, case=c, size=s) for c in cases for s in self.sizes()]

    def workload_tasks(self, system: str) -> list[BenchTask]:
        """Return a system's timed tasks on its engine for workloads, size by size.

        `idle` comes last of a size, so that the first call of another case is not preceded by a warm-up of the engine.
        """
        out = []
        for size in self.workload_sizes():
            cases = [case for case in self.named_workloads if WORKLOADS[case] == size.kind]
            if system == "stock" or "idle" in self.cases:
                cases.append("idle")
            out += [BenchTask(system=system, case=case, size=size) for case in cases if can_run(system, case)]
        return out

    def cannot(self, system: str) -> dict[str, str]:
        return {case: CANNOT[system][case] for case in CASES if case in self.cases and case in CANNOT[system]}

    def engine(self, kind: str = "steps") -> dict[str, Any]:
        """Return arguments of ``vllm.LLM``, the same for every system.

        Engines for steps have no prefix cache; those for workloads have vLLM's defaults.
        """
        out: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": self.eager,
            "seed": 0,
            "disable_log_stats": True,
        }
        if self.dummy:
            out["load_format"] = "dummy"
        if self.cuda:
            out["gpu_memory_utilization"] = self.memory_share
        else:
            out |= {"kv_cache_memory_bytes": 256 << 20, "block_size": 32}
        if kind == "workloads":
            longest = max(size.prompt + size.generated for size in self.workload_sizes())
            return out | {"max_model_len": min(longest + SPARE_TOKENS, self.context)}
        widest = max([*self.batches, self.prefill[0] if self.prefill else 1])
        out |= {"max_model_len": self.max_model_len, "enable_prefix_caching": False}
        if self.cuda:
            return out | {"max_num_batched_tokens": 8192, "max_num_seqs": max(256, widest)}
        return out | {"max_num_seqs": max(32, widest)}

    def prompts(self, size: BatchSize, call: str = "") -> list[list[int]]:
        """Return the prompts' token ids, the same for every system; no two prompts are alike.

        `size`: how many, and how long; `call`: names a call: another call has other tokens behind what all prompts
        share, so that a prefix cache spares no call what it would not spare another.
        """
        draw = random.Random(f"{size.kind} {size.count} {size.prompt}{call}")
        first = min(10, self.vocab // 2)  # the lowest ids are special tokens
        start = random.Random("shared")
        shared = [start.randrange(first, self.vocab) for _ in range(size.shared)]
        return [shared + [draw.randrange(first, self.vocab) for _ in range(n - size.shared)] for n in size.lengths()]
