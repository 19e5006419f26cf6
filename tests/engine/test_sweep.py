"""Sweeps against transformers with hooks, cell by cell; what the engine does meanwhile; killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm import PoolingParams
from vllm.sampling_params import RequestOutputKind

import vllm_weir as weir
from tests.engine.common import changed, directory, tokens
from tests.support.machine import BATCHES, cpu, needs
from tests.support.measure import close_logits, eventually, logit_bound
from tests.support.named import named_llm
from tests.support.patched import Patched
from tests.support.steered import idle, scheduler
from tests.support.zygote import zygote
from vllm_weir.frontend.engine import Engine

pytestmark = pytest.mark.engine("default")
MODES = pytest.mark.parametrize("mode", ["denoise", "noise"])
ORDER = ("resid_pre", "q", "z", "attn_out", "mlp_out", "resid_post")
"""Hook points of a block in the order in which a token meets them."""
HAPPY = "Tom went to the garden. Tom grinned happily, for the garden was lovely. Tom was so"
SAD = "Tom went to the garden. Tom frowned sadly, for the garden was awful. Tom was so"


class Case(NamedTuple):
    """An engine with its reference, a pair of prompts, and the tokens of the metric."""

    llm: Any
    truth: Patched
    clean: list[int]
    corrupt: list[int]
    positions: list[Any]
    layers: int
    width: int
    a: int = 7
    b: int = 11

    def sweep(self, *args: Any, **more: Any) -> weir.Sweep:
        metric = weir.logit_diff(self.a, self.b)
        return weir.sweep(self.llm, self.clean, self.corrupt, *args, **{"metric": metric, "progress": False} | more)

    def ends(self, mode: str) -> tuple[list[int], list[int]]:
        """The prompt that is patched, and the other."""
        return (self.corrupt, self.clean) if mode == "denoise" else (self.clean, self.corrupt)

    def difference(self, logits: torch.Tensor) -> float:
        return float(logits[self.a].double() - logits[self.b].double())

    def close(self, found: float, logits: torch.Tensor) -> bool:
        """Whether the metric is that of the reference's logits; a cell is made of up to three passes."""
        return close_logits(found, self.difference(logits), logits, 3 * self.layers, self.width)

    @property
    def bound(self) -> float:
        """How far two cells may differ that are computed in two ways."""
        sizes = torch.cat([self.truth.run(ids)[0] for ids in (self.clean, self.corrupt)])
        return 2 * logit_bound(sizes, 3 * self.layers, self.width)


@cache
def truth(model: str) -> Patched:
    return Patched(model)


def tiny(root: Path) -> Case:
    clean = tokens(70, 3)
    corrupt = [token if i not in (5, 36, 37) else (token + 90) % 500 for i, token in enumerate(clean)]
    positions: list[Any] = [5, 36, -1, "35:39", [5, 40, 69]]
    return Case(named_llm("default", root), truth(str(directory(root))), clean, corrupt, positions, 4, 192)


def shipped(root: Path) -> Case:
    llm = named_llm("demo", root)
    encode = llm.get_tokenizer().encode
    a, b = (encode(text, add_special_tokens=False)[0] for text in (" happy", " sad"))
    return Case(llm, truth(weir.demo_model()), encode(HAPPY), encode(SAD), [8, -1, "7:20"], 6, 512, a, b)


@pytest.fixture(
    scope="module", params=[tiny, pytest.param(shipped, marks=pytest.mark.thorough)], ids=["tiny", "shipped"]
)
def case(request: pytest.FixtureRequest, root: Path) -> Case:
    return request.param(root)


def expected_positions(entry: Any, length: int) -> list[int]:
    if isinstance(entry, int):
        return [entry % length]
    return list(entry) if isinstance(entry, list) else list(range(*map(int, entry.split(":"))))


@MODES
def test_cells_are_those_of_transformers_with_hooks(case: Case, mode: str) -> None:
    hooks = ["resid_pre", "attn_out", "mlp_out", "resid_post", "z"]
    found = case.sweep(hooks, positions=case.positions, mode=mode)
    base, source = case.ends(mode)
    assert found.grid.dims == ("hook", "layer", "position")
    assert found.grid.shape == (5, case.layers, len(case.positions))
    for h, hook in enumerate(hooks):
        for layer in range(case.layers):
            for p, entry in enumerate(case.positions):
                at = expected_positions(entry, len(base))
                wanted = case.truth.patch(base, source, (hook, layer), at)
                assert case.close(found.grid[h, layer, p], wanted), (hook, layer, entry, case.difference(wanted))
    unpatched = [case.truth.run(ids)[0] for ids in (case.clean, case.corrupt)]
    assert all(map(case.close, found.baseline, unpatched))
    assert np.ptp(found.grid.array) > 0.5, "the patches do nothing that could be told"
    assert found.noise_floor <= case.bound


@MODES
def test_heads_are_patched_one_by_one(case: Case, mode: str) -> None:
    found = case.sweep("z", [1, 2], case.positions, "all", mode=mode)
    base, source = case.ends(mode)
    assert found.grid.axes["head"] == (0, 1, 2, 3)
    for n, layer in enumerate((1, 2)):
        for p, entry in enumerate(case.positions):
            for head in range(4):
                at = expected_positions(entry, len(base))
                wanted = case.truth.patch(base, source, ("z", layer), at, head)
                assert case.close(found.grid[0, n, p, head], wanted), (layer, entry, head, case.difference(wanted))
    assert np.ptp(found.grid.array) > 2 * case.bound


PATHS = {
    "head to the stream": ("z", [0, 1], [2], ("resid_post", 3), ("attn_out", "mlp_out")),
    "MLP to queries": ("mlp_out", [0, 1], None, ("q", 3), ("attn_out", "mlp_out")),
    "stream to attention": ("resid_pre", [1], None, ("attn_out", 3), ("attn_out", "mlp_out")),
    "through MLPs": ("z", [0, 1], [1, 3], ("resid_pre", 3), ("attn_out",)),
}


@MODES
@pytest.mark.parametrize("name", PATHS)
def test_paths(case: Case, name: str, mode: str) -> None:
    hook, layers, heads, to, freeze = PATHS[name]
    found = case.sweep(hook, layers, case.positions, heads, to=to, freeze=freeze, mode=mode)
    base, source = case.ends(mode)
    sizes = set()
    for n, layer in enumerate(layers):
        for p, entry in enumerate(case.positions):
            for k, head in enumerate(heads or [None]):
                at = expected_positions(entry, len(base))
                held = between((hook, layer), to, freeze)
                wanted = case.truth.path(base, source, (hook, layer), at, head, to, held)
                cell = found.grid[0, n, p] if heads is None else found.grid[0, n, p, k]
                assert case.close(cell, wanted), (layer, entry, head, cell, case.difference(wanted))
                sizes.add(case.difference(wanted))
    assert max(sizes) - min(sizes) > 2 * case.bound
    assert found.noise_floor <= case.bound


def between(sender: tuple[str, int], to: tuple[str, int], freeze: tuple[str, ...]) -> list[tuple[str, int]]:
    """What is held: all that a token meets between the two, without the attention that has the sender in it."""
    every = [(hook, layer) for layer in range(4) for hook in ORDER]
    inside = every[every.index(sender) + 1 : every.index(to)]
    return [site for site in inside if site[0] in freeze and (sender[0] != "z" or site != ("attn_out", sender[1]))]


@pytest.mark.parametrize("case", [tiny], indirect=True, ids=["tiny"])  # one head of the other's is lost in rounding
def test_path_to_heads(case: Case) -> None:
    """All heads of a receiver are the receiver, and one of them is not."""
    whole = case.sweep("attn_out", 0, [-1, 5], to=("z", 2))
    every = case.sweep("attn_out", 0, [-1, 5], to=("z", 2, range(4)))
    one = case.sweep("attn_out", 0, [-1, 5], to=("z", 2, [1]))
    assert np.abs(whole.grid.array - every.grid.array).max() <= case.bound
    assert np.abs(whole.grid.array - one.grid.array).max() > case.bound


@needs(cpu(BATCHES))
def test_clean_into_clean_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every run is computed whole and by itself, so that the engine's arithmetic is the same in all."""
    stream = Engine.stream
    monkeypatch.setattr(Engine, "stream", lambda self, requests: stream(self, requests, in_flight=1))
    hooks = ["resid_pre", "attn_out", "mlp_out", "resid_post", "z"]
    sampling = weir.SamplingParams(
        max_tokens=1, temperature=0, logprob_token_ids=[case.a, case.b], skip_reading_prefix_cache=True
    )

    def difference(out: Any) -> float:
        assert out.num_cached_tokens == 0
        found = out.outputs[0].logprobs[0]
        return found[case.a].logprob - found[case.b].logprob

    given: dict[str, Any] = {"metric": difference, "sampling": sampling, "progress": False}
    found = weir.sweep(case.llm, case.clean, case.clean, hooks, positions=case.positions, **given)
    heads = weir.sweep(case.llm, case.clean, case.clean, "z", 1, case.positions, "all", **given)
    assert found.noise_floor == heads.noise_floor == 0.0
    assert found.baseline.clean == found.baseline.corrupt
    assert (found.grid.array == found.baseline.clean).all() and (heads.grid.array == found.baseline.clean).all()
    with pytest.raises(weir.WeirError, match="the same metric") as error:
        found.normalised  # noqa: B018
    assert error.value.field == "metric"


@pytest.mark.parametrize("case", [tiny], indirect=True, ids=["tiny"])  # the other's prompt fills no block
def test_cells_take_what_lies_before_them_from_the_cache(case: Case) -> None:
    at = [0, 31, 32, 63, 64, 69]
    cached = case.sweep("resid_post", [0, 3], at, metric=lambda out: out.num_cached_tokens)
    wanted = [0, 0, 32, 32, 64, 64]
    assert cached.grid.array.tolist() == [[wanted, wanted]]


def test_the_engine_never_runs_dry(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first cell and the last to be submitted it has more requests than fit a batch, also on a path."""
    engine, seen, sent, batch = case.llm.llm_engine, [], [], 8
    core = scheduler(case.llm)
    most = "max_num_active_reqs" if hasattr(core, "max_num_active_reqs") else "max_num_running_reqs"
    monkeypatch.setattr(core, most, batch)
    monkeypatch.setattr(engine.vllm_config.scheduler_config, "max_num_seqs", batch)
    step, add = engine.step, engine.add_request
    monkeypatch.setattr(
        engine, "step", lambda: (seen.append((len(sent), engine.get_num_unfinished_requests())), step())[1]
    )
    monkeypatch.setattr(engine, "add_request", lambda *a, **k: (sent.append(a), add(*a, **k))[1])
    pair = [case.clean, [*case.clean[:-1], 9]], [case.corrupt, [*case.corrupt[:-1], 9]]
    found = weir.sweep(
        case.llm, *pair, ["resid_post", "mlp_out"], metric=weir.logit_diff([7, 8], [11, 12]), progress=False,
        positions=list(range(0, len(case.clean) - 1, 2)),
    )  # fmt: skip
    assert len(sent) == 2 * (2 + found.grid.array.size + 2 * case.layers)
    # Up to then only the unpatched runs of the first two pairs are there.
    busy = [unfinished for done, unfinished in seen if 4 < done < len(sent)]
    assert len(busy) > 20 and min(busy) >= 64 - batch


def test_pairs_are_averaged(case: Case) -> None:
    other = [case.corrupt[0], *case.clean[1:]], [*case.corrupt]
    one = case.sweep("resid_post", [0, 2], case.positions)
    two = weir.sweep(
        case.llm, *other, "resid_post", [0, 2], case.positions, metric=weir.logit_diff(3, 4), progress=False
    )
    both = weir.sweep(
        case.llm, [case.clean, other[0]], [case.corrupt, other[1]], "resid_post", [0, 2], case.positions,
        metric=weir.logit_diff([case.a, 3], [case.b, 4]), progress=False,
    )  # fmt: skip
    assert both.by_pair.dims == ("pair", "hook", "layer", "position")
    for k, single in enumerate((one, two)):
        assert np.abs(both.by_pair[k] - single.grid.array).max() <= case.bound
    assert (both.grid.array == both.by_pair.array.mean(0)).all()
    assert both.baseline.clean == pytest.approx((one.baseline.clean + two.baseline.clean) / 2, abs=case.bound)


def test_metrics_on_logits_and_on_text(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    on_logits = weir.on_logits(lambda logits: logits[case.a] - logits[case.b])
    with pytest.raises(weir.WeirError, match="max_logprobs=-1"):
        case.sweep("resid_post", metric=on_logits)
    monkeypatch.setattr(case.llm.model_config, "max_logprobs", -1)
    at = {"layers": [0, 3], "positions": case.positions}
    fast = case.sweep("resid_post", **at)
    slow = case.sweep("resid_post", **at, metric=on_logits)
    assert np.abs(fast.grid.array - slow.grid.array).max() <= case.bound
    sizes = case.sweep("resid_post", **at, metric=weir.on_logits(len))
    assert (sizes.grid.array == case.llm.model_config.get_vocab_size()).all()
    sampling = weir.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    texts: list[str] = []
    counted = case.sweep(
        "resid_post", **at, sampling=sampling,
        metric=lambda out: texts.append(out.outputs[0].text) or len(out.outputs[0].token_ids),
    )  # fmt: skip
    assert (counted.grid.array == 3).all() and all(texts) and len(set(texts)) > 1
    kind = RequestOutputKind.DELTA  # of no use here: a metric is given the whole output
    sampling = weir.SamplingParams(n=2, max_tokens=3, temperature=1, seed=4, ignore_eos=True, output_kind=kind)
    tokens = lambda out: sum(len(completion.token_ids) for completion in out.outputs) + len(out.outputs) / 8
    drawn = case.sweep("resid_post", **at, sampling=sampling, metric=tokens)
    assert (drawn.grid.array == 6.25).all() and drawn.baseline == (6.25, 6.25)


def test_prompts_of_different_lengths_correspond_where_positions_say_so(case: Case) -> None:
    longer = [case.clean[0], *case.clean]
    found = weir.sweep(
        case.llm, longer, case.corrupt, "resid_post", 2, [-1, "last_prompt", "-3:"],
        metric=weir.logit_diff(case.a, case.b), progress=False,
    )  # fmt: skip
    end = len(case.corrupt)
    rows = case.truth.rows(longer, ("resid_post", 2), [len(longer) - 1])
    wanted = case.truth.run(case.corrupt, {("resid_post", 2): rows._replace(positions=[end - 1])})[0]
    assert case.close(found.grid[0, 0, 0], wanted) and case.close(found.grid[0, 0, 1], wanted)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "both"}, "mode"),
    "hook": ({"hooks": "resid"}, "hooks"),
    "read-only hook": ({"hooks": "pattern"}, "hooks"),
    "hook twice": ({"hooks": ["z", "attn.hook_z"]}, "hooks"),
    "no hook": ({"hooks": []}, "hooks"),
    "no such hook here": ({"hooks": "router_logits"}, "hooks"),
    "layer": ({"layers": 99}, "layers"),
    "position": ({"positions": [3, 700]}, "positions[1]"),
    "no heads": ({"heads": [0]}, "heads"),
    "head": ({"hooks": "z", "heads": [4]}, "heads"),
    "token": ({"metric": weir.logit_diff(1, 10**6)}, "metric.b"),
    "token that the model does not know": ({"metric": weir.logit_diff(1, " zebra")}, "metric.b"),
    "one token twice": ({"metric": weir.logit_diff(7, [7])}, "metric.b"),
    "sampling of another kind": ({"metric": len, "sampling": PoolingParams()}, "sampling"),
    "sampling that captures": (
        {"metric": len, "sampling": weir.params(weir.SamplingParams(), capture=weir.Capture())},
        "sampling",
    ),
    "sampling that steers": (
        {"metric": len, "sampling": weir.params(weir.SamplingParams(), interventions=weir.Add([1.0] * 128, 1))},
        "sampling",
    ),
    "sampling in other keys": (
        {"metric": len, "sampling": weir.SamplingParams(extra_args={"output_residual_stream": [1]})},
        "sampling",
    ),
    "receiver's layer": ({"to": ("resid_post", 99)}, "to"),
    "receiver's heads": ({"to": ("z", 3, [9])}, "to"),
    "freeze without a path": ({"freeze": "mlp_out"}, "freeze"),
    "receiver before": ({"to": ("resid_pre", 1), "layers": [0, 2]}, "layers"),
    "lengths": ({"corrupt": [1, 2, 3]}, "positions"),
    "prompts": ({"corrupt": [[1, 2], [3, 4]]}, "corrupt"),
    "vocabulary": ({"corrupt": [10**6] * 70}, "corrupt"),
    "length": ({"corrupt": [5] * 400}, "corrupt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(case: Case, name: str) -> None:
    change, field = REFUSED[name]
    given: dict[str, Any] = {"clean": case.clean, "corrupt": case.corrupt, "metric": weir.logit_diff(1, 2)} | change
    with pytest.raises(weir.WeirError) as error:
        weir.sweep(case.llm, progress=False, **given)
    assert error.value.field == field, str(error.value)
    assert not case.llm.llm_engine.has_unfinished_requests()


def test_an_error_of_the_metric_leaves_nothing_behind(case: Case) -> None:
    calls: list[Any] = []

    def fails(out: Any) -> Any:
        calls.append(out)
        if len(calls) == 9:
            raise ZeroDivisionError("mine")
        return "text" if len(calls) == 30 else 1

    with pytest.raises(ZeroDivisionError, match="mine"):
        case.sweep(metric=fails)
    assert not case.llm.llm_engine.has_unfinished_requests() and idle(case.llm)
    with pytest.raises(weir.WeirError, match="return one number") as error:
        case.sweep(metric=fails)
    assert error.value.field == "metric"
    assert not case.llm.llm_engine.has_unfinished_requests() and idle(case.llm)


def test_other_requests_of_the_engine_are_not_lost(case: Case) -> None:
    case.llm.enqueue([{"prompt_token_ids": case.clean}], weir.SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(weir.WeirError, match="unfinished") as error:
        case.sweep()
    assert error.value.field == "llm"
    assert len(case.llm.wait_for_completion(use_tqdm=False)) == 1


def test_a_checkpoint_goes_on_where_it_was(case: Case, tmp_path: Path) -> None:
    """Interrupted by the metric after some cells: the next call asks for the others alone."""
    file, scored = tmp_path / "cells", [0]
    whole = case.sweep("mlp_out", positions=case.positions)

    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.sweep("mlp_out", positions=case.positions, checkpoint=file, progress=interrupt)
    first = keys(file)
    reports: list[tuple[int, int]] = []
    again = case.sweep("mlp_out", positions=case.positions, checkpoint=file, progress=lambda *n: reports.append(n))
    total = 2 + whole.grid.array.size + case.layers
    assert sorted(keys(file)) == list(range(total)) and keys(file)[: len(first)] == first
    assert reports[0] == (len(first), total) and reports[-1] == (total, total)
    assert len(reports) == 1 + total - len(first), scored
    assert np.abs(again.grid.array - whole.grid.array).max() <= case.bound
    with pytest.raises(weir.WeirError, match="another sweep") as error:
        case.sweep("mlp_out", positions=case.positions, checkpoint=file, mode="noise")
    assert error.value.field == "checkpoint"
    done = file.read_bytes()
    vector = np.ones(case.llm.model_config.get_hidden_size())
    for everybody in (weir.Add(vector, 1, hook="resid_mid"), weir.Hook(lambda rows, ctx: 2 * rows, args={"w": vector})):
        weir.set_global(case.llm, everybody)
        try:
            with pytest.raises(weir.WeirError) as error:
                case.sweep("mlp_out", positions=case.positions, checkpoint=file)
            assert error.value.field == "checkpoint"
        finally:
            weir.clear_global(case.llm)
    third = case.sweep("mlp_out", positions=case.positions, checkpoint=file)
    assert (third.grid.array == again.grid.array).all() and file.read_bytes() == done


def test_a_checkpoint_belongs_to_the_weights_that_are_loaded(root: Path, tmp_path: Path) -> None:
    """Not to a folder: new weights in place make another sweep, with cells of its own and no twin in the folder."""
    case, other = tiny(root), changed(root)
    llm, grid = case.llm, ("resid_post", [1, 3], [36, -1])

    def reload(path: Path) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        llm.reset_prefix_cache()

    def refused() -> None:
        with pytest.raises(weir.WeirError, match="another sweep: the weights") as error:
            case.sweep(*grid, checkpoint=tmp_path / "old")
        assert error.value.field == "checkpoint"

    old, before = case.sweep(*grid, checkpoint=tmp_path / "old"), weir.engine(llm).weights()
    try:
        reload(other)
        refused()
        fresh, theirs = case.sweep(*grid, checkpoint=tmp_path / "new"), truth(str(other))
        for n, layer in enumerate(grid[1]):
            for p, position in enumerate((36, len(case.clean) - 1)):
                wanted = theirs.patch(case.corrupt, case.clean, ("resid_post", layer), [position])
                assert case.close(fresh.grid[0, n, p], wanted)
        assert np.abs(fresh.grid.array - old.grid.array).max() > 10 * case.bound
        with pytest.raises(weir.WeirError, match="other weights than those that it loaded") as error:
            weir.attribute(llm, case.clean, case.corrupt, metric=weir.logit_diff(case.a, case.b))
        assert error.value.field == "model"
        copied = shutil.copytree(directory(root), tmp_path / "copy")
        reload(copied)
        assert weir.engine(llm).weights() == before, "the name of a folder does not count"
        llm.apply_model(halve_one)
        refused()
    finally:
        reload(directory(root))
    again = case.sweep(*grid, checkpoint=tmp_path / "old", progress=lambda done, total: done == total or pytest.fail())
    assert (again.grid.array == old.grid.array).all()
    assert weir.attribute(llm, case.clean, case.corrupt, metric=weir.logit_diff(case.a, case.b), top_k=1).top


def halve_one(model: Any) -> None:
    model.model.layers[2].input_layernorm.weight.data[17] *= 0.5


def keys(file: Path) -> list[int]:
    return [int(line.split()[0]) for line in file.read_text().splitlines()[1:]]


COMMAND = [
    "-m", "vllm_weir.cli", "sweep", weir.demo_model(), "--clean", HAPPY, "--corrupt", SAD, "--answer", " happy",
    "--wrong", " sad", "--hook", "resid_post,attn_out", "--layers", "0,2,5", "--quiet", "--json", "--plot", "map.html",
    "--out", "sweep.npz", "-e", "dtype=float32", "-e", "max_model_len=256", "-e", "enforce_eager=true",
    "-e", f"kv_cache_memory_bytes={64 << 20}", "-e", "max_num_seqs=4",
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(900)
@needs(cpu("the command takes a whole GPU"))
def test_the_command_killed_and_run_again(root: Path, tmp_path: Path) -> None:
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    file = tmp_path / "cells"
    command = [*COMMAND, "--checkpoint", str(file)]
    before: list[int] = []
    for kill in range(2):
        kill_after(len(before) + 10, command, env, tmp_path, file)
        now = [int(line.split()[0]) for line in lines(file)[1:]]
        assert len(now) >= len(before) + 10 and now[: len(before)] == before
        before = now
        if not kill:  # as if killed within a write
            file.write_bytes(file.read_bytes() + b"77 0x1.8p+")
    (tmp_path / "zygote").mkdir()
    done = zygote().run(command, env, tmp_path, tmp_path / "zygote")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    count = 2 + np.size(found["grid"]) + 6
    assert keys(file)[: len(before)] == before
    assert Counter(keys(file)) == Counter(range(count))
    result = weir.Sweep.load(tmp_path / "sweep.npz")
    assert result.grid.array.tolist() == found["grid"] and found["files"] == ["sweep.npz", "map.html"]
    page = (tmp_path / "map.html").read_text()
    assert page.count("<svg") == 2 and "http-equiv" not in page and "<script" not in page
    case = shipped(root)
    whole = case.sweep(["resid_post", "attn_out"], [0, 2, 5])
    assert np.abs(whole.grid.array - result.grid.array).max() <= case.bound


def lines(file: Path) -> list[bytes]:
    """Whole lines."""
    return file.read_bytes().split(b"\n")[:-1]


def kill_after(cells: int, command: list[str], env: dict[str, str], folder: Path, file: Path) -> None:
    """Run the command, and kill it once the checkpoint has so many cells."""
    child = zygote().start(command, env, folder, folder / "out", folder / "err")
    eventually(lambda: child.poll() is not None or (file.exists() and len(lines(file)) > cells), True, 300)
    assert child.poll() is None, (folder / "err").read_text()[-3000:]
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
