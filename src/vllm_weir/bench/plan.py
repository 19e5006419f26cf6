"""What one benchmark run does: the model, the sizes, the cases, and the engine's arguments."""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SYSTEMS = ("stock", "weir", "vllm-lens", "native")
CASES = (
    "idle",
    "steer_one",
    "steer_all_distinct",
    "capture_last_all_layers",
    "capture_all_all_layers",
    "capture_rp8",
    "startup",
)
OPTIONAL = ("capture_rp8",)
"""Cases that run only when they are named."""
PACKED = {"method": "rp8", "k": 64}
"""How `capture_rp8` compresses."""
CAPTURES = ("capture_last_all_layers", "capture_all_all_layers")
STEERS = ("steer_one", "steer_all_distinct")
ABLE: dict[str, tuple[str, ...]] = {
    "stock": ("idle", "startup"),
    "weir": CASES,
    "vllm-lens": tuple(c for c in CASES if c != "capture_rp8"),
    "native": (*CAPTURES, "startup"),
}
"""Cases that a system can do at all. Native engines have no idle: they extract for every request."""


class BatchSize(BaseModel):
    """How many prompts of how many tokens, and how many tokens each generates."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["decode", "prefill"]
    count: int
    prompt: int
    generated: int

    @property
    def label(self) -> str:
        """``batch 32`` or ``prefill 64x1024``."""
        return f"batch {self.count}" if self.kind == "decode" else f"prefill {self.count}x{self.prompt}"

    def rows(self, case: str) -> int:
        """Rows a site has to deliver for one request."""
        return 1 if case == "capture_last_all_layers" else self.prompt + self.generated - 1

    def figure(self, seconds: float) -> float:
        """Milliseconds a decode step (the whole call / generated tokens), or thousand prompt tokens a second."""
        if self.kind == "decode":
            return 1e3 * seconds / self.generated
        return self.count * self.prompt / seconds / 1e3


class BenchTask(BaseModel):
    """One case of one system at one size."""

    model_config = ConfigDict(frozen=True)

    system: str
    case: str
    size: BatchSize


class BenchPlan(BaseModel):
    """All settings of a run; travels to the worker processes as JSON.

    Attributes:
        model: directory; `model_name` is what the result says.
        dummy: random weights, drawn by name after the start, instead of a checkpoint's.
        layers, width, vocab: of the model.
        cuda: whether the engines run on a GPU.
        tokens, prompt_tokens: of the decode cases, per request.
        prefill: (prompts, tokens each), or None.
        repeats, warmups: runs of every case, timed and before.
        case_seconds: no case takes longer, warm-ups included.
        run_seconds: no case is begun later, and none under way is waited for; rows are compared after that.
        interleave: stock's and Weir's engines live together and take turns.
        startups: fresh processes in which the start is timed.
        cold: each of them compiles everything, into caches of its own.
        memory_share: ``gpu_memory_utilization`` of each engine.
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
    systems: tuple[str, ...]
    cases: tuple[str, ...]
    batches: tuple[int, ...]
    tokens: int
    prompt_tokens: int = 16
    prefill: tuple[int, int] | None
    repeats: int
    warmups: int
    case_seconds: float
    run_seconds: float | None = None
    start_seconds: float = 400.0
    interleave: bool = True
    startups: int = 1
    cold: bool = True
    memory_share: float = 0.42
    weir_config: dict[str, Any] = {}
    lens_path: str | None = None

    @property
    def steered_layer(self) -> int:
        """The block that `steer_one` steers: 15 of 32."""
        return max(0, self.layers // 2 - 1)

    def sizes(self) -> list[BatchSize]:
        """Decode by batch, then prefill."""
        out = [
            BatchSize(kind="decode", count=n, prompt=self.prompt_tokens, generated=self.tokens) for n in self.batches
        ]
        if self.prefill is not None:
            out.append(BatchSize(kind="prefill", count=self.prefill[0], prompt=self.prefill[1], generated=1))
        return out

    def tasks(self, system: str) -> list[BenchTask]:
        """A system's timed tasks, cases outside, captures last."""
        cases = [c for c in CASES if c in self.cases and c in ABLE[system] and c != "startup"]
        if system == "stock":
            cases = ["idle"]  # every ratio needs it
        return [BenchTask(system=system, case=c, size=s) for c in cases for s in self.sizes()]

    def engine(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``, the same for every system."""
        widest = max([*self.batches, self.prefill[0] if self.prefill else 1])
        out: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "enforce_eager": self.eager,
            "seed": 0,
            "disable_log_stats": True,
        }
        if self.dummy:
            out["load_format"] = "dummy"
        if self.cuda:
            return out | {
                "gpu_memory_utilization": self.memory_share,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": max(256, widest),
            }
        return out | {"kv_cache_memory_bytes": 256 << 20, "block_size": 32, "max_num_seqs": max(32, widest)}

    def prompts(self, size: BatchSize) -> list[list[int]]:
        """Token ids of the prompts, the same for every system; no two prompts are alike."""
        draw = random.Random(f"{size.kind} {size.count} {size.prompt}")
        first = min(10, self.vocab // 2)  # the lowest ids are special tokens
        return [[draw.randrange(first, self.vocab) for _ in range(size.prompt)] for _ in range(size.count)]
