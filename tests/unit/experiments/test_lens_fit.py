"""Lenses that are fitted: Jacobians against autograd of transformers itself, and fits that are broken off."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_weir as weir
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.build import build
from tests.support.models import make_model
from tests.unit.refusals import refused
from vllm_weir.experiments import lens_fit
from vllm_weir.experiments.attribute.twin import Twin

SKIP = 3
generator = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(5, 400, (n,), generator=generator).tolist() for n in (9, 12, 7)]
SHORT = [7, 8, 9, 10]


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma2", "cohere"))]
)
def model(request, tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    if request.param == "cohere":
        build(ZOO["CohereForCausalLM"], where)
    else:
        where = make_model(request.param, "a", where)
    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager")


SOME = range(0, 128, 9)
"""Rows of a matrix that are compared."""


def reference(model, layer):
    """Some rows of the estimator as it is published, a source position at a time, with hooks of torch."""
    total = 0.0
    for ids in TEXTS:
        rows = {}

        def keep(k, rows=rows):
            def hook(_module, _args, output):
                output = output[0] if isinstance(output, tuple) else output
                if k == layer:
                    output.requires_grad_(True)
                rows[k] = output

            return hook

        blocks = model.model.layers
        handles = [blocks[k].register_forward_hook(keep(k)) for k in (layer, len(blocks) - 1)]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model(input_ids=torch.tensor([ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        final, valid = rows[len(blocks) - 1], range(SKIP, len(ids) - 1)
        matrix = torch.zeros(len(SOME), final.shape[-1])
        for k, i in enumerate(SOME):
            for source in valid:
                sum_of = sum(final[0, target, i] for target in valid if target >= source)
                (slope,) = torch.autograd.grad(sum_of, rows[layer], retain_graph=True)
                matrix[k] += slope[0, source] / len(valid)
        total = total + matrix / len(TEXTS)
    return total


def test_jacobians_are_those_of_autograd(model, tmp_path):
    lens = weir.fit_lens(model, [*TEXTS, SHORT], out=tmp_path / "j.pt", skip_first=SKIP, batch=100, progress=False)
    last = model.config.num_hidden_layers - 1
    assert (lens.kind, lens.layers, lens.n_prompts) == ("jacobian", tuple(range(last)), len(TEXTS))
    for layer in (0, last - 1):
        expected = reference(model, layer)
        got = lens.matrix(layer)[SOME]
        assert got.dtype == torch.float16
        # The file has float16: half a unit in the last place of each value.
        assert (got.float() - expected).abs().max() <= 1e-3 * expected.abs().max()
        exact = sum(Twin(model).jacobians(ids, [layer], SKIP, len(ids) - 2, 64)[layer] for ids in TEXTS) / len(TEXTS)
        assert (exact[SOME] - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_fit_that_is_broken_off_goes_on_where_it_was(tmp_path, monkeypatch):
    path = str(make_model("llama", "a", tmp_path))
    fit = lambda out, texts=TEXTS: weir.fit_lens(path, texts, out=out, layers=1, skip_first=SKIP, progress=False)
    whole = fit(tmp_path / "whole.pt").matrix(1)
    calls, jacobians = [], Twin.jacobians

    def counted(twin, ids, *more):
        calls.append(ids)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return jacobians(twin, ids, *more)

    monkeypatch.setattr(Twin, "jacobians", counted)
    out = tmp_path / "broken.pt"
    with pytest.raises(KeyboardInterrupt):
        fit(out)
    assert not out.exists()
    with refused("out", "of a fit with other arguments"):
        fit(out, TEXTS[:2])
    assert torch.equal(fit(out).matrix(1), whole)
    assert calls == [TEXTS[0], TEXTS[1], TEXTS[1], TEXTS[2]]
    assert sorted(one.name for one in tmp_path.glob("*.pt*")) == ["broken.pt", "whole.pt"]


def test_a_tuned_lens_says_more_of_what_the_model_says(tmp_path):
    path = str(make_model("llama", "a", tmp_path))
    lens = weir.fit_lens(path, TEXTS, out=tmp_path / "t", kind="tuned", skip_first=SKIP, epochs=20, progress=False)
    assert (lens.kind, lens.path) == ("tuned", tmp_path / "t")
    twin = Twin.load(path)
    sites = [weir.Site("resid_post", layer) for layer in (*lens.layers, twin.num_layers - 1)]
    apart = {}
    for ids in TEXTS:
        rows = twin.rows(ids, sites)
        own = twin.finish(rows[sites[-1]]).log_softmax(-1)
        for site in sites[:-1]:
            for name, mapped in (("logit", rows[site]), ("tuned", rows[site] @ lens.matrix(site.layer).T)):
                said = twin.finish(mapped).log_softmax(-1)
                apart[name, site.layer] = apart.get((name, site.layer), 0) + float((own.exp() * (own - said)).sum())
    assert all(apart["tuned", layer] < 0.9 * apart["logit", layer] for layer in lens.layers)


def test_the_unembedding_of_the_twin_is_the_model_s(model):
    twin = Twin(model)
    site = weir.Site("resid_post", twin.num_layers - 1)
    rows = twin.rows(TEXTS[0], [site])[site]
    with torch.no_grad(), twin.unembedding() as logits:
        assert torch.allclose(logits(rows), twin.finish(rows), atol=1e-5)
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([TEXTS[0]])).logits[0]
    assert (twin.finish(rows) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_what_cannot_be_fitted_is_refused(tmp_path):
    path, out = str(make_model("llama", "a", tmp_path)), tmp_path / "x.pt"
    fit = lambda texts=TEXTS, **more: weir.fit_lens(path, texts, **{"out": out, "progress": False} | more)
    with refused("kind", "jacobian, tuned"):
        fit(kind="linear")
    with refused("texts", "none has 18 tokens"):
        fit([SHORT])
    with refused("texts", "does not exist"):
        fit([[10**6] * 30])
    with refused("layers", "only they have a matrix"):
        fit(layers=[3], skip_first=SKIP)
    with refused("layers", "leave layers out"):
        fit(layers=[1], kind="tuned")
    with refused("out", "there is no folder"):
        fit(out=tmp_path / "none" / "x.pt")
    with refused("skip_first", "from 0"):
        fit(skip_first=-1)
    with refused("model", "expected a checkpoint"):
        weir.fit_lens(3, TEXTS, out=out)
    assert lens_fit.KINDS == ("jacobian", "tuned") and not out.exists()
