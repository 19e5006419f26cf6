"""`Directions`: what it checks, and the probes and interventions that it makes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.experiments.directions import Directions


def made(**fields) -> Directions:
    vectors = {4: [3.0, 4.0], 1: torch.tensor([0.0, 2.0])}
    return Directions(**{"vectors": vectors, "method": "diff", "convention": "blocks from 0", **fields})


def test_vectors_are_sorted_read_only_float32():
    found = made()
    assert found.layers == (1, 4) and found.width == 2 and found.hook == "resid_post"
    assert all(v.dtype == np.float32 and not v.flags.writeable for v in found.vectors.values())
    assert torch.equal(found.vector(4), torch.tensor([3.0, 4.0]))


def test_a_caller_cannot_change_it_through_a_tensor():
    found = made()
    found.vector(4).zero_()
    assert found.vectors[4].tolist() == [3, 4]


def test_equality_is_of_the_content():
    assert made() == made() and made() != made(method="pca")
    assert made() != made(vectors={4: [3.0, 4.0], 1: [0.0, 2.5]}) and made() != "directions"


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"vectors": {}}, "directions.vectors"),
        ({"vectors": {-1: [1.0]}}, "directions.vectors.-1"),
        ({"vectors": {"a": [1.0]}}, "directions.vectors.a"),
        ({"vectors": {0: [1.0], 1: [1.0, 2.0]}}, "directions.vectors"),
        ({"vectors": {0: [float("nan")]}}, "directions.vectors.0"),
        ({"vectors": {0: "name"}}, "directions.vectors.0"),
        ({"vectors": {0: [[1.0], [2.0]]}}, "directions.vectors.0"),
        ({"layers": (0,)}, "directions.layers"),
        ({"hook": "nowhere"}, "directions.hook"),
        ({"auc_by_layer": {2: 0.5}}, "directions.auc_by_layer"),
        ({"bias": {1: "x"}}, "directions.bias.1"),
        ({"details": {"a": float("nan")}}, "directions.details"),
        ({"details": [1]}, "directions.details"),
        ({"method": None}, "directions.method"),
    ],
)
def test_what_is_refused(fields, field):
    with refused(field):
        made(**fields)


def test_auc_and_best():
    found = made(auc_by_layer={1: 0.75, 4: 0.9})
    assert found.auc(1) == 0.75 and found.best == 4
    assert made(auc_by_layer={1: 0.9, 4: 0.9}).best == 1
    with pytest.raises(WeirError, match="AUC is not known"):
        made().auc(1)
    with pytest.raises(WeirError, match="no AUC is known"):
        _ = made().best
    with pytest.raises(WeirError, match="nothing for block 2"):
        found.auc(2)


def test_the_probe_of_a_difference_of_means_is_of_unit_length():
    probe = made(bias={4: -2.5}).probe(4, name="mood", positions="last_prompt")
    assert probe.name == "mood" and probe.layer == 4 and probe.hook == "resid_post" and probe.bias == -2.5
    assert np.array_equal(probe.weight.array, np.array([3 / 5, 4 / 5], np.float32))


def test_the_probe_of_a_logistic_direction_has_its_weights():
    probe = made(method="logistic", bias={4: 0.5, 1: 0.0}, auc_by_layer={1: 0.5, 4: 0.75}).probe()
    assert probe.layer == 4 and probe.weight.array.tolist() == [3, 4] and probe.bias == 0.5


def test_a_probe_needs_a_bias_and_a_direction():
    with pytest.raises(WeirError, match="give bias="):
        made().probe(4)
    assert made().probe(4, bias=0.0).bias == 0
    with pytest.raises(WeirError, match="length zero"):
        made(vectors={0: [0.0, 0.0]}).probe(0, bias=0.0)
    with pytest.raises(WeirError, match="nothing for block 7"):
        made().probe(7, bias=0.0)


def test_add_has_the_vectors_of_its_layers():
    whole, one = made().add(2.0), made().add(-1, layers=4, positions="generated")
    assert whole.layers == (1, 4) and whole.scale == 2 and whole.hook == "resid_post"
    assert whole.vector.vectors[4].array.tolist() == [3, 4]
    assert one.layers == (4,) and one.scale == -1 and one.positions.kind != "all"


def test_only_keeps_what_is_known_of_the_layers():
    part = made(auc_by_layer={1: 0.5, 4: 1.0}, bias={4: 1.0}, details={"pairs": 3}).only([4])
    assert part.layers == (4,) and part.auc_by_layer == {4: 1.0} and part.bias == {4: 1.0}
    assert part.details == {"pairs": 3} and made().only(np.int64(1)).layers == (1,)
    with pytest.raises(WeirError, match="nothing for block 3"):
        made().only([3])


def test_repeng_that_is_missing_or_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "repeng", None)
    with pytest.raises(WeirError, match="pip install repeng"):
        made().to_repeng()


@pytest.mark.parametrize(
    "call, field",
    [(lambda d: d.add(layers=1.0), "layer"), (lambda d: d.only(2.5), "layer"), (lambda d: d.save(3), "path")],
)
def test_arguments_of_another_type(call, field):
    with refused(field):
        call(made())


def test_how_it_looks():
    found = made(auc_by_layer={1: 0.75, 4: 0.9}, bias={4: 0.5})
    assert repr(found) == "Directions(diff at resid_post, vector[2] of 2 blocks, best at block 4: AUC 0.900)"
    assert repr(made().only(4)) == "Directions(diff at resid_post, vector[2] of block 4)"
    assert str(found).splitlines()[1:] == [
        "block    AUC   bias  length",
        "    1  0.750              2",
        "    4  0.900  0.500       5",
    ]
    assert str(made()).splitlines()[1:] == ["block  length", "    1       2", "    4       5"]
    page = found._repr_html_()
    assert ">0.750<" in page and page.count("background:#") == 2 and "block 4: AUC" in page
    assert "&lt;b&gt;" in made(method="<b>")._repr_html_() and made()._repr_html_().count("background:#") == 0


def test_plot(tmp_path):
    found = made(auc_by_layer={1: 0.75, 4: 0.9})
    (axis,) = found.plot().axes
    assert axis.lines[1].get_xydata().tolist() == [[1, 0.75], [4, 0.9]]
    assert axis.get_title(loc="left") == "diff at resid_post: AUC by block"
    assert found.plot(tmp_path / "auc.html") == tmp_path / "auc.html" and (tmp_path / "auc.html").exists()
    with refused("plot"):
        made().plot()
    with refused("path"):
        found.plot(tmp_path / "auc.pdf")


def test_the_right_word():
    for word, right in (("coeff", "scale"), ("strength", "scale"), ("layer", "layers"), ("position", "positions")):
        with refused(word, f"Add calls it {right}"):
            made().add(**{word: 1})
    with refused("layers", "Probe calls it layer"):
        made(bias={1: 0.0, 4: 0.0}).probe(4, layers=3)
