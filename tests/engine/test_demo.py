"""What `make demo` prints and draws, against transformers and recounted from what it shows."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import vllm_weir as weir
from examples.demo import fact, steering
from tests.support.measure import logit_bound
from tests.support.patched import Patched
from tests.support.zygote import zygote

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, HEADS, WIDTH = 6, 4, 512


@cache
def truth() -> Patched:
    return Patched(weir.demo_model())


def printed(show: Any, *args: Any) -> str:
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    show(console, *args)
    return console.export_text()


@pytest.mark.engine("demo")
def test_the_fact_is_where_transformers_has_it(llm: Any) -> None:
    found = fact.find_fact(llm)
    encode = llm.get_tokenizer().encode
    she, he = (encode(answer, add_special_tokens=False)[0] for answer in fact.ANSWERS)
    women, men = ([encode(text) for text in texts] for texts in fact._pairs(llm))
    last = len(men[0]) - 1
    assert found.pairs == found.asked == len(men) > 1
    places, heads, sizes = np.zeros((BLOCKS, last + 1)), np.zeros((BLOCKS, HEADS)), []
    turned, back, ends = np.zeros((BLOCKS, HEADS)), np.zeros((BLOCKS, HEADS)), np.zeros(2)

    def metric(logits: Any) -> float:
        sizes.append(logit_bound(logits, 3 * BLOCKS, WIDTH))
        return float(logits[she].double() - logits[he].double())

    for woman, man in zip(women, men, strict=True):
        ends += metric(truth().run(woman)[0]), metric(truth().run(man)[0])
        for block in range(BLOCKS):
            for p in range(last + 1):
                places[block, p] += metric(truth().patch(man, woman, ("resid_post", block), [p]))
            for head in range(HEADS):
                value = metric(truth().patch(man, woman, ("z", block), [last], head))
                heads[block, head] += value
                turned[block, head] += value > 0
                back[block, head] += metric(truth().patch(woman, man, ("z", block), [last], head)) < 0

    room = 4 * max(sizes) / abs(ends[0] - ends[1]) * len(men)  # of a quotient of two differences
    for mine, sums in ((found.by_place, places), (found.by_head, heads)):
        np.testing.assert_allclose(mine, (sums - ends[1]) / (ends[0] - ends[1]), atol=room)
    block, head = np.unravel_index(heads.argmax(), heads.shape)
    assert found.strongest == (block, head)
    assert (found.turned, found.turned_back) == (turned[block, head], back[block, head])

    said = printed(fact.print_fact, found)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    for layer, cells in enumerate(rows):
        place, strongest = int(places[layer].argmax()), int(found.by_head[layer].argmax())
        shares = found.by_place[layer, place], found.by_head[layer, strongest]
        assert cells == [str(layer), found.words[place], f"{shares[0]:.2f}", str(strongest), f"{shares[1]:.2f}"]
    assert len(rows) == BLOCKS and found.words[1] == fact.NAME
    assert f"Head {head} of block {block} carries it" in said
    assert f"for {turned[block, head]:.0f} of {len(men)} men" in said
    assert f"for {back[block, head]:.0f} of {len(men)} women" in said


@pytest.mark.engine("demo")
def test_a_fact_that_the_model_does_not_have_is_refused(llm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(fact, "ANSWERS", (" he", " she"))
    with pytest.raises(weir.WeirError, match="does not go on with she after 'Mia was so happy that'"):
        fact.find_fact(llm)


def story(text: str, well_formed: bool = True) -> steering.SteeredStory:
    return steering.SteeredStory("Tom went out.", text, 0.5, well_formed)


def test_stories_are_counted() -> None:
    happy, sad, neither = story("He was happy."), story("He was sad."), story("He rowed.", False)
    doses = [
        steering.DoseResult(-1.0, [sad, sad, sad]),
        steering.DoseResult(0.0, [sad, neither, happy]),
        steering.DoseResult(0.5, [happy, neither, happy]),
        steering.DoseResult(1.0, [happy, happy, happy]),
    ]
    said = printed(steering.print_doses, doses, 3, 1.0, True)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert [row[:3] + row[4:] for row in rows] == [
        ["-1", "0 of 3", "3 of 3", "3 of 3"],
        ["0", "1 of 3", "1 of 3", "2 of 3"],
        ["+0.5", "2 of 3", "0 of 3", "2 of 3"],
        ["+1", "3 of 3", "0 of 3", "3 of 3"],
    ]
    assert [dose.works for dose in doses] == [True, False, False, True]
    assert not steering.failures(doses) and len(steering.failures(doses[1:3])) == 2
    shown = printed(steering.print_story, doses)
    assert "scale 0" in shown and "scale +1" in shown and "He was sad." in shown and "He was happy." in shown


@pytest.mark.engine
@pytest.mark.thorough
def test_the_demo_as_a_user_runs_it(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "COLUMNS": "120"}
    done = zygote().run(["-m", "examples.demo", "--out", str(tmp_path / "out")], env, tmp_path, tmp_path, 800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "%" not in done.stdout and "FAILED" not in done.stdout
    pictures = re.findall(r"\S+\.png", done.stdout)
    assert len(pictures) == 3 and all(Path(path).read_bytes()[:4] == b"\x89PNG" for path in pictures)
    # Without steering as many stories go on happy as sad, so that steering changes either half.
    assert re.search(r"│ +0 │ +(\d+) of (\d+) │ +\1 of \2 │", done.stdout)
    *_, serve, again, page = done.stdout.strip().splitlines()
    assert serve.split()[:3] == [".venv/bin/weir", "serve", "demo"] and again.startswith("  make demo MODEL=")
    assert (ROOT / page.split()[0]).exists()
