"""A crowd of mixed requests with speculative decoding: whether every row is right, and what captures cost.

PYTHONPATH=src python3 bench/speculative.py --out bench/results/speculative_h100.json
PYTHONPATH=src python3 bench/speculative.py --tiny     # the same on a small model, also on a CPU
PYTHONPATH=src python3 bench/speculative.py --method draft_model

Three engines stand beside each other, each in a process of its own (Llama-3.1-8B shapes, random weights whose drafts
are mostly accepted): stock vLLM and Weir with drafts, and Weir without.

* Cost: the crowd with nothing asked, on stock and on Weir, and capturing, take turns; the clock stops once every row
  and score is there as a tensor. Captures change no token, so all three have the same drafts to verify: how many were
  made and accepted is read from vLLM's counters. With `--points between` all that is read lies between blocks, where
  vLLM's runner V1, which n-gram drafts need, has points without being told to.
* Rows: the mixed crowd, which also steers, runs with drafts. Its prompts and generated tokens then are the prompts of
  the engine without drafts, one kind of request at a time, with the same interventions at the same positions. A row is
  wrong if it is further from that than `SLACK` times what the engine's own rows differ by (or 1e-5 of the largest): if
  all kinds run in one batch, and if its own tokens come one by one and in one prompt, whose kernels round otherwise. A
  token is wrong if the engine without drafts finds another one likelier by a margin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sampler
from crowd import (
    HOOKS,
    KINDS,
    UNSTEERED,
    delivered,
    fill_cyclic,
    fill_drafter,
    make_prompts,
    params_of,
    write_checkpoint,
)

TINY = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048, "torch_dtype": "float32", "rope_scaling": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""What differs from the 8B shapes."""
SYSTEMS = ("stock", "weir", "reference")
TIMED = (("stock", "plain"), ("weir", "plain"), ("weir", "capture"), ("weir", "mixed"))
SLACK = 2.0
FLOOR = 1e-5
MARGIN = 0.25
"""Of log probabilities."""
COUNTERS = ("num_draft_tokens", "num_accepted_tokens")


class Served:
    """One engine; its public methods are the commands of the measuring process."""

    def __init__(self, given: argparse.Namespace) -> None:
        from vllm import LLM

        self.given = given
        self.config = json.loads((Path(given.model) / "config.json").read_text())
        drafts: dict[str, Any] = {"method": given.method, "num_speculative_tokens": given.drafts}
        if given.method.startswith("ngram"):
            drafts |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        else:
            drafts["model"] = given.model if given.draft_model is None else given.draft_model
        options: dict[str, Any] = {} if given.engine == "reference" else {"speculative_config": drafts}
        if given.tiny:
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": 128 << 20}
        else:
            options |= {"kv_cache_memory_bytes": 6 << 30, "load_format": "dummy"}
        self.llm = LLM(
            given.model, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=given.requests,
            enable_prefix_caching=False, disable_log_stats=False, seed=0,
            gpu_memory_utilization=given.memory, **options,
        )  # fmt: skip
        if not given.tiny:
            self.llm.apply_model(fill_cyclic)
            if "speculative_config" in options:
                self.llm.collective_rpc(fill_drafter)
        longest = 48 if given.tiny else 256
        self.prompts = make_prompts(given.requests, longest, self.config["vocab_size"])
        self.kinds = list(itertools.islice(itertools.cycle(KINDS[given.points]), given.requests))

    def _counters(self) -> dict[str, int]:
        found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in self.llm.get_metrics()}
        return {name: int(found[name].value) if name in found else 0 for name in COUNTERS}

    def _params(self, crowd: str) -> list[Any]:
        return params_of(self.kinds, self.config, self.given.tokens, crowd)

    def _generate(self, params: list[Any]) -> list[Any]:
        prompts = [{"prompt_token_ids": ids} for ids in self.prompts]
        return self.llm.generate(prompts, params, use_tqdm=False)

    def time(self, crowd: str) -> dict[str, Any]:
        """Run the crowd: seconds until all is delivered, drafts, and the tokens of requests that do not steer."""
        before, params = self._counters(), self._params(crowd)
        began = time.perf_counter()
        outs = self._generate(params)
        generated = time.perf_counter() - began
        rows = sum(len(one) for out in outs for one in delivered(out).values())
        seconds = time.perf_counter() - began
        counted = {name: n - before[name] for name, n in self._counters().items()}
        tokens = [
            list(out.outputs[0].token_ids) for out, kind in zip(outs, self.kinds, strict=True) if kind in UNSTEERED
        ]
        return {"seconds": seconds, "generated": generated, "rows": rows, "tokens": tokens, **counted}

    def profile(self, crowd: str) -> dict[str, Any]:
        """Run the crowd five times, sampled in both processes."""
        params = self._params(crowd)
        sampler.start()
        self.llm.collective_rpc(sampler.start)
        for _ in range(5):
            [delivered(out) for out in self._generate(params)]
        (engine,) = self.llm.collective_rpc(sampler.stop)
        return {"caller": sampler.stop(), "engine": engine}

    def keep(self, path: str) -> dict[str, Any]:
        """Run the mixed crowd, and write its tokens, rows and scores to a file."""
        import torch

        kept = []
        for ids, out in zip(self.prompts, self._generate(self._params("mixed")), strict=True):
            tensors = {name: tensor.clone() for name, tensor in delivered(out).items()}
            kept.append({"prompt": len(ids), "ids": [*ids, *out.outputs[0].token_ids], "tensors": tensors})
        torch.save(kept, path)
        return {}

    def compare(self, path: str) -> dict[str, Any]:
        """Compare what `keep` has written with this engine's."""
        import torch

        kept = torch.load(path, weights_only=False)
        alone: dict[int, Any] = {}
        for kind in KINDS[self.given.points]:
            alone |= self._forced(kept, [n for n in range(len(kept)) if self.kinds[n] == kind])
        every = list(range(len(kept)))
        free = self._generate(self._params("mixed"))
        own = [
            {"prompt": len(ids), "ids": [*ids, *out.outputs[0].token_ids]}
            for ids, out in zip(self.prompts, free, strict=True)
        ]
        pairs = [(alone, self._forced(kept, every)), (self._forced(own, every), dict(enumerate(free)))]
        noise = dict.fromkeys(self.kinds, FLOOR / SLACK)
        for n, (expected, other) in itertools.product(every, pairs):
            twin = delivered(other[n])
            for name, tensor in delivered(expected[n]).items():
                noise[self.kinds[n]] = max(noise[self.kinds[n]], *_distances(twin[name], tensor).tolist())
        places: dict[str, dict[str, Any]] = {}
        for n, out in alone.items():
            expected, kind = delivered(out), self.kinds[n]
            assert expected.keys() == kept[n]["tensors"].keys(), (n, kind)
            for name, tensor in kept[n]["tensors"].items():
                bound = SLACK * noise[kind]
                place = places.setdefault(
                    f"{kind}: {name}", {"rows": 0, "wrong": 0, "apart": 0, "worst": 0.0, "bound": bound}
                )
                far = _distances(tensor, expected[name])
                place["rows"] += len(far)
                place["wrong"] += int((~(far <= bound)).sum())
                place["worst"] = max(place["worst"], float(far.max()))
                place["apart"] += int((_distances(expected[name][1:], expected[name][:-1]) > bound).sum())
        found: dict[str, Any] = {key: sum(of[key] for of in places.values()) for key in ("rows", "wrong", "apart")}
        found |= {"places": places}
        same = [list(out.outputs[0].token_ids) == kept[n]["ids"][kept[n]["prompt"] :] for n, out in enumerate(free)]
        return found | _tokens(kept, alone) | {"same_as_without_drafts": sum(same), "requests": len(kept)}

    def _forced(self, kept: Any, numbers: list[int]) -> dict[int, Any]:
        """Outputs of requests whose prompts are what was generated, too."""
        lens = [kept[n]["prompt"] for n in numbers]
        kinds = [self.kinds[n] for n in numbers]
        params = params_of(kinds, self.config, 1, "mixed", lens, logprobs=2, prompt_logprobs=2)
        prompts = [{"prompt_token_ids": kept[n]["ids"][:-1]} for n in numbers]
        return dict(zip(numbers, self.llm.generate(prompts, params, use_tqdm=False), strict=True))


def _distances(got: Any, expected: Any) -> Any:
    """Each row's largest difference, over the largest entry of all rows; infinite where it is not a number."""
    if got.shape != expected.shape:
        raise AssertionError(f"{tuple(got.shape)} rows, not {tuple(expected.shape)}")
    got, expected = got.flatten(1).double(), expected.flatten(1).double()
    return ((got - expected).abs().amax(1) / expected.abs().max()).nan_to_num(float("inf"))


def _tokens(kept: Any, alone: Mapping[int, Any]) -> dict[str, int]:
    """Count the generated tokens, and those than which another is likelier by more than `MARGIN`."""
    checked = wrong = 0
    for n, out in alone.items():
        ids, first = kept[n]["ids"], kept[n]["prompt"]
        choices = [*out.prompt_logprobs[first:], out.outputs[0].logprobs[0]]
        for token, choice in zip(ids[first:], choices, strict=True):
            best = max(one.logprob for one in choice.values())
            checked += 1
            wrong += token not in choice or best - choice[token].logprob > MARGIN
    return {"tokens": checked, "wrong_tokens": wrong}


def serve(given: argparse.Namespace) -> None:
    """Read commands from standard input, and write an answer to each to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    served = Served(given)
    print(json.dumps({"ready": given.engine}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(served, command.pop("do"))(**command)), file=answers, flush=True)


class Engine:
    """A system's process."""

    def __init__(self, name: str, given: argparse.Namespace, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        environ = dict(os.environ) | {
            "VLLM_PLUGINS": "" if name == "stock" else "weir",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if given.points == "all":
            # On a GPU, vLLM's runner V1 (n-gram drafts) has the points between blocks alone, unless it is told.
            environ["WEIR_HOOKS"] = ",".join(HOOKS)
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", name, "--model", given.model]
        environ["TORCHDYNAMO_DISABLE"] = "1" if given.tiny else environ.get("TORCHDYNAMO_DISABLE", "0")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, env=environ,
            start_new_session=True,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-4000:]}")
        return json.loads(line)

    def kill(self) -> None:
        """End the process and those that its engine has started, which hold the device's memory."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | command) + "\n")
        self.process.stdin.flush()
        return self.answer()


def measure(engines: Mapping[str, Engine], repeats: int) -> dict[str, Any]:
    """Time every crowd `repeats` times, in turn; two rounds before do not count."""
    found: dict[str, list[dict[str, Any]]] = {f"{system}, {crowd}": [] for system, crowd in TIMED}
    for turn in range(-2, repeats):
        for system, crowd in TIMED[:: 1 if turn % 2 else -1]:
            answer = engines[system].ask("time", crowd=crowd)
            if turn >= 0:
                found[f"{system}, {crowd}"].append(answer)
        print(f"round {turn + 1} of {repeats}", file=sys.stderr, flush=True)
    stock, ours = found["stock, plain"], found["weir, plain"]
    out: dict[str, Any] = {}
    for name, of in found.items():
        seconds = [one["seconds"] for one in of]
        ratios = {
            "over_stock": [mine / other["seconds"] for mine, other in zip(seconds, stock, strict=True)],
            "over_plain": [mine / other["seconds"] for mine, other in zip(seconds, ours, strict=True)],
        }
        counted = {counter: sorted({one[counter] for one in of}) for counter in COUNTERS}
        same = {json.dumps(one["tokens"]) for one in of} == {json.dumps(one["tokens"]) for one in stock}
        out[name] = {
            "seconds": seconds,
            "generated": [one["generated"] for one in of],
            "rows": of[0]["rows"],
            **ratios,
            **counted,
            "same_tokens_as_stock": same,
        }
    return out


def table(result: Mapping[str, Any]) -> str:
    """The result as lines of text."""
    lines = [
        f"{'':16s} {'ms':>9s} {'generate':>9s}  {'over stock':22s} {'over plain on Weir':22s} {'rows':>9s}  "
        "drafts, accepted"
    ]

    def spread(ratios: list[float]) -> str:
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"

    for name, of in result["time"].items():
        drafted, accepted = (of[counter] for counter in COUNTERS)
        milliseconds = [statistics.median(of[clock]) * 1e3 for clock in ("seconds", "generated")]
        rate = f"{drafted[0]}, {accepted[0]} ({accepted[0] / max(1, drafted[0]):.3f})"
        lines.append(
            f"{name:16s} {milliseconds[0]:9.1f} {milliseconds[1]:9.1f}  "
            f"{spread(of['over_stock']):22s} {spread(of['over_plain']):22s} {of['rows']:9d}  {rate}"
            f"{'' if of['same_tokens_as_stock'] else '  (other tokens than stock)'}"
        )
    rows = result["rows"]
    lines += [
        f"  {name}: {of['wrong']} of {of['rows']} wrong, worst {of['worst']:.1e}, bound {of['bound']:.1e}, "
        f"{of['apart'] / of['rows']:.2f} further from the next"
        for name, of in rows["places"].items()
    ]
    lines += [
        f"wrong rows: {rows['wrong']} of {rows['rows']}, of which {rows['apart']} are further from the next position's "
        "than the bound",
        f"wrong tokens: {rows['wrong_tokens']} of {rows['tokens']}; requests with the tokens that they get without "
        f"drafts: {rows['same_as_without_drafts']} of {rows['requests']}",
    ]
    return "\n".join(lines)


def problems(result: Mapping[str, Any]) -> list[str]:
    """Say what does not hold."""
    found = []
    rows, plain = result["rows"], result["time"]["stock, plain"]
    if rows["wrong"] or rows["wrong_tokens"]:
        found.append("rows or tokens are wrong")
    if rows["apart"] < rows["rows"] / 2:
        found.append("most rows are within the bound of the next position's: this run shows nothing")
    if not 0 < min(plain["num_accepted_tokens"]) < min(plain["num_draft_tokens"]):
        found.append("drafts were all accepted, or all rejected: this run shows nothing")
    for name in ("weir, plain", "weir, capture"):
        for counter in COUNTERS:
            if result["time"][name][counter] != plain[counter]:
                found.append(f"{name}: {counter} {result['time'][name][counter]}, stock {plain[counter]}")
    return found


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from vllm_weir.bench.reference import LLAMA_8B, make_model

    given.model = make_model(folder / "model", LLAMA_8B | (TINY if given.tiny else {}))
    if given.tiny:
        write_checkpoint(given.model)
    engines: dict[str, Engine] = {}
    try:
        for name in SYSTEMS:
            engines[name] = Engine(name, given, folder)
            print(engines[name].answer(), file=sys.stderr, flush=True)
        engines["weir"].ask("keep", path=str(folder / "rows.pt"))
        rows = engines["reference"].ask("compare", path=str(folder / "rows.pt"))
        timing = measure(engines, given.repeats)
        profile = {crowd: engines["weir"].ask("profile", crowd=crowd) for crowd in ("plain", "capture")}
    finally:
        for engine in engines.values():
            engine.kill()
    settings = {name: getattr(given, name) for name in ("method", "drafts", "points", "requests", "tokens", "tiny")}
    return {"settings": settings, "time": timing, "rows": rows, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ngram", help="of speculation: ngram, ngram_gpu or draft_model")
    parser.add_argument("--draft-model", help="a folder with a config.json; default: the target's shapes")
    parser.add_argument("--points", choices=KINDS, default="all", help="that requests read: all, or between blocks")
    parser.add_argument("--drafts", type=int, default=3, help="tokens that are drafted at a time")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=0, help="tokens that are generated; default: 128, tiny: 24")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory for each engine")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.tokens = given.tokens or (24 if given.tiny else 128)
    if given.engine:
        serve(given)
        return
    with tempfile.TemporaryDirectory(prefix="weir-speculative-") as folder:
        result = run(given, Path(folder))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if found := problems(result):
        sys.exit("; ".join(found))


if __name__ == "__main__":
    main()
