"""The workloads of `weir bench` without an engine: sizes, prompts, first calls, groups, refusals, tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.machine import module, needs
from tests.unit.bench.fakes import SIZES, Fake, by_key, plan, result, run_fake, texts, workloads
from vllm_weir.bench import reference
from vllm_weir.bench.cases import CANNOT, CASES, CHAT_ROLES, SETS, SYSTEMS, TITLES, WORKLOADS, can_run
from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice
from vllm_weir.bench.report import COLOURS, as_markdown, columns, draw_chart
from vllm_weir.bench.result import pool
from vllm_weir.bench.runner import Bench
from vllm_weir.bench.systems import instruments, known_systems
from vllm_weir.bench.systems.stock import StockSystem, chosen_rows, shape

TEXTS = SIZES.of_kind("texts")


def test_the_defaults_are_the_ones_that_the_documentation_names() -> None:
    sizes = plan(cases=tuple(WORKLOADS)).workload_sizes()
    assert [size.label for size in sizes] == [
        "texts 1500x50-600", "long 1x32000", "chats 128x2000+100", "single 1x100", "requests 64x100", "crowd 256x100",
        "short 1x512", "medium 1x2048", "cells 1280x40",
    ]  # fmt: skip
    assert sizes[0].figure(2.0) == 2000.0 and all(size.is_workload for size in sizes)


def test_every_case_has_a_title_and_every_system_a_sentence_for_what_it_cannot_do() -> None:
    assert set(TITLES) == set(CASES) and set(CANNOT) == set(SYSTEMS) == set(known_systems()) == set(COLOURS)
    for reasons in CANNOT.values():
        assert set(reasons) <= set(CASES) and all(len(reason) > 20 for reason in reasons.values())
    assert can_run("weir", "chat_mix") and not can_run("native", "chat_mix") and can_run("transformers", "long_one")
    assert not any(can_run(system, case) for system in SYSTEMS for case in SETS["instruments"] if system != "weir")


def test_prompts_differ_between_calls_but_for_what_they_share() -> None:
    given, chats = workloads("mean"), SIZES.of_kind("chats")
    one, other = (given.prompts(TEXTS, call) for call in (" extract 1", " extract 2"))
    assert [len(p) for p in one] == [len(p) for p in other] == TEXTS.lengths()
    assert all(3 <= n <= 9 for n in TEXTS.lengths()) and len(set(TEXTS.lengths())) > 1
    assert one != other and one == workloads("mean", systems=("native",)).prompts(TEXTS, " extract 1")
    one, other = (given.prompts(chats, call) for call in (" chat_mix 1", " chat_mix 2"))
    assert len({tuple(p[:20]) for p in one + other}) == 1
    assert len({tuple(p[20:]) for p in one + other}) == 16 and {len(p) for p in one} == {25}
    size = BatchSize(kind="decode", count=2, prompt=4, generated=3)
    prompts = plan().prompts(size)
    assert prompts == plan(systems=("native",)).prompts(size, "") and prompts[0] != prompts[1]
    assert size.label == "batch 2" and not size.is_workload


def test_rows_that_a_request_must_get() -> None:
    given, size = workloads("chat_mix"), SIZES.of_kind("chats")
    wanted = {role: given.wanted("chat_mix", size, i, 25) for i, role in enumerate(CHAT_ROLES)}
    assert wanted == {
        "steer": None, "ablate": None, None: None, "capture": (6, 1, 8), "project": (6, 4, 2),
        "steer and capture": (6, 4, 8),
    }  # fmt: skip
    assert given.few_layers == (0, 3) and given.wanted("extract", TEXTS, 0, 9) == (2, 9, 8)
    assert given.wanted("mean", TEXTS, 0, 9) == given.wanted("last_mixed", TEXTS, 0, 9) == (6, 1, 8)
    assert given.wanted("long_one", SIZES.of_kind("long"), 0, 50) == (1, 50, 8)


def test_engines_of_workloads_have_the_defaults_of_vllm_and_room_for_the_longest() -> None:
    given = workloads("extract", "long", "chat_mix", context=40)
    steps, defaults = given.engine(), given.engine("workloads")
    assert steps["enable_prefix_caching"] is False and steps["max_num_seqs"] == 32
    assert not {"enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens"} & defaults.keys()
    assert defaults["max_model_len"] == 40 and workloads("extract").engine("workloads")["max_model_len"] == 74


def test_engines_for_steps_start_only_where_they_are_needed() -> None:
    needed = [("idle",), ("steer_one", "extract"), ("startup", "extract")]
    assert all(workloads(*cases).has_steps for cases in needed) and EngineChoice() == EngineChoice(kind="steps")
    assert not any(workloads(*cases).has_steps for cases in (("extract",), ("idle", "extract"), SETS["guard"]))


def test_idle_of_a_size_comes_last_and_on_weir_only_where_it_is_named() -> None:
    def cases(given: BenchPlan, system: str) -> list[str]:
        return [f"{task.case} {task.size.kind}" for task in given.workload_tasks(system)]

    assert cases(workloads("extract", "mean", "long"), "weir") == ["extract texts", "mean texts", "long long"]
    named = workloads("idle", "extract", "long")
    assert cases(named, "weir") == ["extract texts", "idle texts", "long long", "idle long"]
    assert cases(named, "stock") == ["idle texts", "idle long"]


def test_systems_that_fix_their_blocks_at_the_start_have_an_engine_for_each_choice() -> None:
    given = workloads("extract", "mean", "long_one", systems=("stock", "weir", "native", "vllm-lens"))
    groups = Bench(given, Path("out.json"), Path(), lambda _: None).groups()
    assert [(group.names, group.choice.layers, [t.case for t in group.tasks]) for group in groups] == [
        (("stock", "weir"), (), ["idle", "idle", "extract", "mean", "long_one"]),
        (("vllm-lens",), (), ["extract", "mean", "long_one"]),
        (("native",), (0, 3), ["extract"]),
        (("native",), (0, 1, 2, 3, 4, 5), ["mean"]),
        (("native",), (3,), ["long_one"]),
    ]
    assert {group.choice.kind for group in groups} == {"workloads"}


def test_the_first_call_is_the_first_of_its_kind_in_its_engine(monkeypatch: Any, tmp_path: Path) -> None:
    class Slower(Fake):
        def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
            reply = super().ask(seconds, do, **what)
            if do == "run":
                key = (self.system, what["case"], what["size"]["count"])
                reply = {"seconds": (4.0 if self.system == "weir" else 2.0) if self.calls.count(key) == 1 else 1.0}
            return reply

    more: dict[str, Any] = dict(cases=("extract", "last_mixed", "steer_one"), batches=(1,), workloads=SIZES)
    by = by_key(run_fake(monkeypatch, tmp_path, kind=Slower, **more))
    for case in ("extract", "last_mixed"):
        assert (by["weir", case, TEXTS.label].first, by["weir", case, TEXTS.label].first_ratio) == (4000.0, 2.0)
    assert by["weir", "extract", TEXTS.label].ratio_to_stock == 1.0
    assert by["stock", "idle", TEXTS.label].first == 2000.0
    assert by["weir", "steer_one", "batch 1"].first_ratio == 2.0
    assert by["weir", "steer_one", "prefill 2x32"].first is None


def test_a_first_call_is_timed_before_an_ablation_is_compared(monkeypatch: Any, tmp_path: Path) -> None:
    found = run_fake(monkeypatch, tmp_path, cases=("ablate_everywhere",), workloads=SIZES)
    weirs = [count for system, case, count in Fake.calls if (system, case) == ("weir", "ablate_everywhere")]
    assert weirs == [3, 3, 3, 3, 0]
    (check,) = found.checks
    assert check.what == "after = before without the direction, 1 rows of 1 blocks" and found.passed


def test_what_a_system_cannot_do_is_said(monkeypatch: Any, tmp_path: Path) -> None:
    systems = ("stock", "weir", "vllm-lens", "native", "nnsight")
    more: dict[str, Any] = {"workloads": SIZES, "systems": systems}
    found = run_fake(monkeypatch, tmp_path, cases=("extract", "chat_mix"), **more)
    assert found.systems["native"]["cannot"] == {"chat_mix": CANNOT["native"]["chat_mix"]}
    assert "* native has no chat_mix: it only reads activations" in as_markdown(found)
    only = run_fake(monkeypatch, tmp_path, cases=("chat_mix",), **more)
    assert only.systems["nnsight"] == {"status": "skipped", "reason": CANNOT["nnsight"]["chat_mix"]}


@needs(module("matplotlib"))
def test_workloads_have_a_table_and_a_panel_of_their_own(tmp_path: Path) -> None:
    found = result([texts("stock", "idle", 2.0, 4.0), texts("weir", "extract", 3.0, 5.0)])
    text = as_markdown(found)
    assert "| nothing asked (texts 6x3-9) | stock | 2 (2-2) |  | 4 |  |" in text
    assert "| `extract`: every prompt token, a few blocks | weir | 3 (3-3) | **x1.500** | 5 | **x1.250** |" in text
    assert columns(found) == [] and "ms/step" not in text
    form = json.loads(found.model_dump_json())["cases"][1]
    assert form["workload"] == "texts 6x3-9" and "batch" not in form and form["first_ratio"] == 1.25
    assert all(file.stat().st_size > 2000 for file in draw_chart(found, tmp_path / "chart"))


def test_pooled_first_calls_are_medians() -> None:
    runs = [result([texts("stock", "idle", 2.0, 4.0), texts("weir", "extract", 3.0, x)]) for x in (4.0, 8.0, 6.0)]
    pooled = {c.case: c for c in pool(runs).cases}["extract"]
    assert (pooled.first, pooled.first_ratio, pooled.rounds) == (6000.0, 1.5, [])


def test_rows_that_a_case_asks_for_of_every_position() -> None:
    rows = torch.arange(2 * 5 * 3).reshape(2, 5, 3).float()
    assert torch.equal(chosen_rows("last_mixed", rows, 4), rows[:, 3:4])
    assert torch.equal(chosen_rows("mean", rows, 4), rows[:, :4].mean(1, keepdim=True))
    assert torch.equal(chosen_rows("extract", rows, 4), rows[:, :4])
    assert chosen_rows("capture_all_all_layers", rows, 4) is rows
    assert shape(list(rows)) == shape(rows) == (2, 5, 3) and shape([rows[0], rows[1, :2]]) == (2, 0)


class Rows(dict[int, torch.Tensor]):
    sites = property(list)


@pytest.mark.parametrize(
    ("case", "rows", "count"),
    [("z_generated", 3, 6), ("project_sampled", 4, 6), ("one_user", 4, 6), ("qkv_one", 8, 3), ("z_all", 8, 6),
     ("pattern_long", 1, 6), ("attn_mlp_out", 5, 4), ("probes_and_stop", 8, 3), ("gate_each", 8, 1)],
)  # fmt: skip
def test_an_instrument_that_lacks_a_row_or_did_not_act_is_refused(case: str, rows: int, count: int) -> None:
    def check(rows: int, count: int, steered: int = 1) -> None:
        found = Rows({i: torch.zeros(rows, 2) for i in range(count)})
        out = SimpleNamespace(
            prompt_token_ids=[0] * 5, outputs=[SimpleNamespace(token_ids=[0] * 4)], activations=found, scores=found,
            receipt=SimpleNamespace(steered=[{0: 1}] * steered),
        )  # fmt: skip
        instruments.verify(case, workloads(case), [out])

    check(rows, count)
    for wrong in ((rows - 1, count), (rows, count - 1), *([(rows, count, 0)] if case == "one_user" else [])):
        with pytest.raises(ValueError, match="request 0"):
            check(*wrong)


def test_what_an_ablation_should_make() -> None:
    system = StockSystem(plan(), Path())
    before, vectors = torch.randn(2, 3, 4, 8), torch.randn(2, 8)
    after = system.intended("ablate_everywhere", before, vectors)
    assert torch.einsum("rlpd,rd->rlp", after, vectors).abs().max() < 1e-5
    assert torch.allclose(system.intended("ablate_everywhere", after, vectors), after, atol=1e-6)
    assert torch.equal(system.intended("steer_one", before, vectors), before + vectors[:, None, None, :])


def test_wrong_rows_are_far_and_the_next_block_is_found_for_any_choice_of_blocks() -> None:
    truth = torch.randn(6, 3, 64)
    assert reference.distance(truth, truth) < 1e-12 and reference.distance(truth.roll(1, 0), truth) > 0.5
    assert reference.distance(torch.full_like(truth, float("nan")), truth) == float("inf")
    assert reference.next_block(truth[[1, 4]], truth, [1, 4]) > 0.1
    assert reference.next_block(truth[[2]], truth, [1]) < 1e-9  # rows of block 2, said to be block 1's
    assert reference.next_block(truth[[5]], truth, [5]) == 2.0
