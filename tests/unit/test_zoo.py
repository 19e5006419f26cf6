"""The conformance suite leaves no architecture out, and its representatives show every kind of block."""

from __future__ import annotations

import csv
import faulthandler
import os
import signal

import pytest

pytest.importorskip("vllm")

from tests.conformance import pool
from tests.conformance.__main__ import DOCS, GPU_RESULTS, RESULTS
from tests.conformance.docs import _mark, write_docs
from tests.conformance.multimodal.__main__ import bad
from tests.conformance.multimodal.finding import Finding, load, save
from tests.conformance.multimodal.more_recipes import ALL_RECIPES
from tests.conformance.representatives import REPRESENTATIVES
from tests.conformance.verdict import CANNOT, CONFORMS, FAILS, REFUSED, Verdict, load_results, save_results
from tests.conformance.zoo import VARIANTS, ZOO
from tests.conformance.zoo.backend import BACKEND
from tests.conformance.zoo.entry import COARSE, LOOSE
from tests.conformance.zoo.gpu import GPU, NOT_THERE, in_bfloat16
from tests.conformance.zoo.variants import OTHERS


def test_every_architecture_of_the_registry_has_an_entry() -> None:
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    extras = {entry.architecture for entry in BACKEND}
    assert not extras & set(_TEXT_GENERATION_MODELS)
    assert set(ZOO) - extras == set(_TEXT_GENERATION_MODELS)


def test_every_text_model_of_the_transformers_backend_has_an_entry() -> None:
    import transformers
    from vllm.model_executor.models.registry import _TRANSFORMERS_SUPPORTED_MODELS

    causal = {a for a in _TRANSFORMERS_SUPPORTED_MODELS if a.endswith("ForCausalLM")}
    assert {entry.architecture for entry in BACKEND} == causal
    for entry in BACKEND:
        assert bool(entry.verdict) != hasattr(transformers, entry.architecture), entry.architecture


def test_what_cannot_be_run_says_why() -> None:
    for entry in ZOO.values():
        assert bool(entry.verdict) == bool(entry.reason), entry.architecture
        assert entry.verdict in ("", CANNOT)


def test_other_configurations_are_told_apart() -> None:
    assert len(VARIANTS) == len(OTHERS) and not set(VARIANTS) & set(ZOO)
    for name, entry in VARIANTS.items():
        first = ZOO[entry.architecture]
        assert name == f"{entry.architecture}:{entry.variant}" and entry.differs
        assert (entry.config, entry.engine, entry.dtype) != (first.config, first.engine, first.dtype), name
        assert not entry.verdict, f"{name} does not run"


def point(capture=3e-7, steer=4e-7, layers=4, has=None, refused="") -> dict:
    """What was measured at a hook point, of four blocks."""
    return dict(layers=layers, of=4, has=has, capture=capture, steer=steer, rounding={}, refused=refused)


def lines_of(folder, *found, **more) -> list[str]:
    write_docs(*found, folder / "page.md", **more)
    return (folder / "page.md").read_text().splitlines()


def numbers_of(folder, name="page.csv") -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def test_other_configurations_have_a_table_of_their_own(tmp_path) -> None:
    found = {
        "A": Verdict("A", CONFORMS, model_class="A", hooks={"embed": point()}, vllm="0.32.0"),
        "A:flat": Verdict("A:flat", CONFORMS, model_class="B", hooks={"embed": point()}, differs="flat True"),
        "A:deep": Verdict("A:deep", REFUSED, "two streams", differs="deep True"),
    }
    page = "\n".join(lines_of(tmp_path, found, {}))
    assert "\n1 conforms\n" in page, "configurations are not counted as architectures"
    assert "through Weir: 1 of 2\n" in page
    assert "|A|✓|?|?|?|?|?|?|?|?|?|1||" in page, "beside it, how many others conform"
    assert "| A:deep, deep True | cpu, vLLM  | two streams |" in page
    rows = {row["architecture"]: row for row in numbers_of(tmp_path)}
    assert rows["A:flat"]["what differs"] == "flat True" and rows["A:flat"]["embed"] == "3e-07 / 4e-07"
    assert rows["A:deep"]["why a point is not there"] == "two streams"


def test_marks_say_what_is_served() -> None:
    has_not = point(None, None, 0, refused="this block has no experts to choose from")
    one, inner = Verdict("A", CONFORMS), ("z", "pattern")
    for found, mark in (
        ([point()], "✓"),
        ([point(layers=2, has=2)], "✓"),
        ([point(layers=2, refused="this block has no attention; block 3 has no attention")], "✓"),
        ([point(layers=2, has=4, refused="packed")], "◐"),
        ([point(), point(None, None, 0, 4, "packed")], "◐"),
        ([point(), has_not], "✓"),
        ([point(None, None, 0, 4, "packed")], "✗"),
        ([point(None, None, 0, 0)], "–"),
        ([has_not], "–"),
        ([], "?"),
    ):
        one.hooks = dict(zip(inner, found, strict=False))
        assert _mark(one, inner) == mark, found


def test_points_inside_a_part_share_a_cell(tmp_path) -> None:
    hooks = {"z": point(has=4), "pattern": point(2e-6, None, has=4)}
    hooks |= {"mlp_in": point(1e-7, 2e-7, 2, 2), "mlp_post": point(None, None, 0, 4, "packed")}
    hooks |= {"mlp_pre_linear": point(None, None, 0, 0, "no gate")}
    found = {name: Verdict(name, CONFORMS, model_class=name, hooks=hooks, vllm="0.32.0") for name in ("A", "B")}
    found["C"] = Verdict("C", CONFORMS, model_class="C", vllm="0.32.0")
    lines = lines_of(tmp_path, found, {})
    rows = {row["architecture"]: [row["attention"], row["MLP"]] for row in numbers_of(tmp_path)}
    assert rows["A"] == ["all: 2e-06 / 4e-07", "`mlp_in`: 1e-07 / 2e-07 (2 of 4)"]
    assert rows["C"] == ["not measured"] * 2
    assert "| packed | `mlp_post` | 2 |" in lines and not any("no gate" in line for line in lines)
    assert [line for line in lines if line.startswith("|A|")] == ["|A|" + "?|" * 7 + "✓|◐|?||" + "|"]


def test_every_architecture_that_conforms_has_a_verdict_for_the_lens(tmp_path) -> None:
    found = {
        "A": Verdict("A", CONFORMS, model_class="A", vllm="0.32.0", lens={"error": 3e-7, "refused": ""}),
        "B": Verdict("B", CONFORMS, model_class="B", vllm="0.32.0", lens={"error": None, "refused": "no norm"}),
    }
    lines = lines_of(tmp_path, found, {})
    assert [line.split("|")[-4] for line in lines if line.startswith(("|A|", "|B|"))] == ["✓", "✗"]
    assert [row["lens"] for row in numbers_of(tmp_path)] == ["3e-07", "refused"]
    assert [row["why a point is not there"] for row in numbers_of(tmp_path)] == ["", "lens: no norm"]
    assert all(v.lens for v in load_results(RESULTS).values() if v.verdict == CONFORMS), "run with --lens"


def test_the_page_and_its_numbers_are_written_from_the_results(tmp_path) -> None:
    write_docs(load_results(RESULTS), load_results(GPU_RESULTS), tmp_path / DOCS.name, multimodal=load().values())
    for path in tmp_path.iterdir():
        assert path.read_text() == DOCS.with_name(path.name).read_text(), "run `python -m tests.conformance docs`"
    assert len([*tmp_path.iterdir()]) == 3


def test_representatives_are_in_the_zoo_and_run() -> None:
    for architecture in REPRESENTATIVES:
        assert not (ZOO | VARIANTS)[architecture].verdict, architecture


def test_what_a_gpu_runs_has_a_bound_for_its_dtype() -> None:
    assert len({entry.architecture for entry in GPU}) == len(GPU)
    for entry in GPU:
        assert entry.architecture in ZOO
        assert entry.bound == (LOOSE if entry.dtype == "float32" else COARSE), entry.architecture
        assert entry.identities == (entry.dtype == "bfloat16"), entry.architecture
        assert in_bfloat16(entry).bound == COARSE


def test_what_a_gpu_found_joins_the_page(tmp_path) -> None:
    hooks = {"embed": point(3e-3, 4e-3)}
    cpu = {
        "A": Verdict("A", CONFORMS, model_class="A", hooks=hooks, vllm="0.32.0"),
        "B": Verdict("B", CANNOT, "no kernel", checked="by running it", vllm="0.32.0"),
        "C": Verdict("C", CANNOT, "no kernel either", checked="by running it", vllm="0.32.0"),
    }
    done = Verdict("B", CONFORMS, model_class="B", hooks=hooks, vllm="0.26.0", backend="H200", bound=COARSE)
    cpu["D"] = Verdict("D", CANNOT, "nor here", checked="by running it", vllm="0.32.0")
    refused = Verdict("D", REFUSED, "two streams", vllm="0.26.0", backend="H200", checked="identities")
    undone = Verdict("C", CANNOT, "too big", vllm="0.26.0", backend="H200", dtype="bfloat16")
    save_results([done, undone, refused], tmp_path / "gpu.json")
    lines = lines_of(tmp_path, cpu, load_results(tmp_path / "gpu.json"))
    assert [line[-6:] for line in lines if line.startswith("|B|")] == ["|only|"]
    (row,) = [row for row in numbers_of(tmp_path) if row["architecture"] == "B"]
    assert (row["where"], row["dtype"], row["bound"]) == ("H200, vLLM 0.26.0", "float32", "2e-02")
    assert row["embed"] == "3e-03 / 4e-03"
    assert "1 conforms · 1 more conforms on H200, vLLM 0.26.0 · 1 refused · 1 cannot run" in lines
    assert "| D | H200, vLLM 0.26.0 | two streams |" in lines
    rows = [line for line in lines if line.startswith("| C |")]
    assert rows == ["| C | no kernel either | by running it | too big (bfloat16) |"]
    assert "| architecture | cpu, vLLM 0.32.0 | known | on a GPU |" in lines
    write_docs(cpu, load_results(tmp_path / "gpu.json"), tmp_path / "page.md", {"C": "no headers"})
    assert "| C | no kernel either | by running it | no headers |" in (tmp_path / "page.md").read_text()


def test_multimodal_models_have_a_table_of_their_own(tmp_path) -> None:
    found = [
        Finding("B", "image", "B", 1e-6, 2e-6, 3e-6, 4e-6, {"tokens of one image see each other": "`pattern`"}),
        Finding("A", "audio", "A", 1e-6, lens=2e-6, failed="cannot be run: no kernel"),
    ]
    save(found[:1], tmp_path / "found.json")
    save(found[1:], tmp_path / "found.json")
    verdict = {"C": Verdict("C", CANNOT, "no kernel", vllm="0.32.0")}
    lines = lines_of(tmp_path, verdict, {}, multimodal=load(tmp_path / "found.json").values())
    assert "## Models that take images and sound" in lines
    assert [line for line in lines if line.startswith(("|A|", "|B|"))] == [
        "|A|audio|✓|✗|✗|✓|cannot be run: no kernel|",
        "|B|image|✓|✓|✓|✓|`pattern`: tokens of one image see each other|",
    ]
    a, b = numbers_of(tmp_path, "page-multimodal.csv")
    assert (a["with items"], a["lens"], a["refused, and why"]) == ("cannot be run: no kernel", "2e-06", "nothing")
    assert [b[name] for name in ("text", "with items", "added at items")] == ["1e-06", "2e-06", "3e-06"]
    assert set(load()) == set(ALL_RECIPES), "run `python -m tests.conformance.multimodal`"
    assert not [one for one in load().values() if bad(one)]
    assert not any("images and sound" in line for line in lines_of(tmp_path, verdict, {}))


def test_what_is_not_run_on_a_gpu_cannot_be_run_on_a_cpu_either() -> None:
    assert all(ZOO[architecture].verdict == CANNOT for architecture in NOT_THERE)
    run = {entry.architecture for entry in GPU}
    assert {a for a, entry in ZOO.items() if entry.verdict == CANNOT} <= run | set(NOT_THERE)


@pytest.mark.parametrize(("stock", "verdict"), [("dies", CANNOT), ("runs", FAILS)])
def test_what_dies_cannot_be_run_only_if_stock_vllm_dies_too(stock, verdict, tmp_path, monkeypatch) -> None:
    def child(entry, out, retry, lens, alone) -> None:
        if not alone or stock == "dies":
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGFPE)
        os._exit(0)

    monkeypatch.setattr(pool, "_child", child)
    monkeypatch.setattr(pool, "_import_everything", lambda: None)
    monkeypatch.setattr(pool, "set_environment", lambda: None)  # it is for a process that does nothing else
    told = []
    (found,) = pool.run_all([ZOO["LlamaForCausalLM"]], tmp_path, done=told.append)
    assert found.verdict == verdict and told == [found]
    assert found.reason.startswith("the process ended with -8") and found.vllm
    assert ("stock vLLM alone" in found.reason) == (stock == "dies")
