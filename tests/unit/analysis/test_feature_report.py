"""Pages on features: every number against one computed another way, and nothing in them but text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.support import machine
from tests.support.extracting import FakeFeatureEngine, fake_features, run_fake, texts, write_jsonl
from tests.unit.refusals import refused
from vllm_weir.analysis import sae_report
from vllm_weir.analysis.feature_report.page import ContextToken, FeatureContext, FeatureReport, SAEReport, render
from vllm_weir.analysis.feature_report.report import _effects
from vllm_weir.analysis.feature_report.statistics import BINS, CheckpointUnembedding, FeatureTotals
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.storage.features.dataset import FeatureInfo, load_features
from vllm_weir.util.shipped import demo_model, demo_sae
from vllm_weir.util.token_texts import TokenTexts

VALUES = texts(60)
RECORDS = [fake_features(FakeFeatureEngine._encode(None, value), i) for i, value in enumerate(VALUES)]  # type: ignore[arg-type]
DENSE = [record.dense(512) for record in RECORDS]
ALL = np.concatenate(DENSE)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    source = write_jsonl(folder / "t.jsonl", VALUES)
    run_fake(source, str(folder / "out"), sae={"mood": demo_sae()}, top_k=5, start_engine=FakeFeatureEngine)
    return folder / "out"


@pytest.fixture(scope="module")
def report(features: Path) -> SAEReport:
    return sae_report(demo_sae(), features, features.parent / "report.html", model=demo_model(), contexts=7)


def test_totals(report: SAEReport) -> None:
    totals = report.totals
    assert (totals.rows, report.records) == (len(ALL), 60)
    assert np.array_equal(totals.active, (ALL > 0).sum(0)) and np.array_equal(totals.largest, ALL.max(0))
    assert np.allclose(totals.density, (ALL > 0).mean(0), atol=1e-12)
    assert np.allclose(totals.total, ALL.astype(np.float64).sum(0), rtol=1e-12)
    assert totals.full_rows == ((ALL > 0).sum(1) == 5).sum() > 0


def test_which_features(report: SAEReport, features: Path, tmp_path: Path) -> None:
    active = np.flatnonzero(ALL.max(0) > 0)
    assert [one.feature for one in report.features] == sorted(active, key=lambda f: (-ALL[:, f].max(), f))[:50]
    dense = sae_report(demo_sae(), features, tmp_path / "r.html", top=3, order="density", model="/nowhere")
    assert [one.feature for one in dense.features] == sorted(active, key=lambda f: (-(ALL[:, f] > 0).sum(), f))[:3]
    named = sae_report(demo_sae(), features, tmp_path / "r.html", feature=[30, 400, 30], model="/nowhere")
    assert [(one.feature, one.active) for one in named.features] == [(30, (ALL[:, 30] > 0).sum()), (400, 0)]
    assert named.features[1].contexts == () and "It is never active" in (tmp_path / "r.html").read_text()


def test_a_features_numbers(report: SAEReport) -> None:
    for one in report.features:
        column = ALL[:, one.feature]
        active = column[column > 0].astype(np.float64)
        assert one.mean == pytest.approx(active.mean(), rel=1e-9) and one.active == len(active)
        wanted, _ = np.histogram(active, bins=BINS, range=(0.0, float(column.max())))
        assert one.histogram.sum() == wanted.sum() and np.abs(one.histogram - wanted).sum() <= 2  # at the bins' edges
        peaks = sorted(((-values[:, one.feature].max(), i) for i, values in enumerate(DENSE)))[:7]
        wanted_peaks = [(i, -value) for value, i in peaks if value < 0]
        assert [(context.record, context.value) for context in one.contexts] == wanted_peaks


def test_contexts_are_the_rows_around_the_peak(report: SAEReport) -> None:
    for one in report.features[:10]:
        for context in one.contexts:
            values, ids = DENSE[context.record][:, one.feature], RECORDS[context.record].token_ids
            peak = int(values.argmax())
            first, end = max(peak - 24, 0), min(peak + 13, len(values))
            assert [token.position for token in context.tokens] == list(range(first, end))
            assert [token.value for token in context.tokens] == values[first:end].tolist()
            assert [token.token_id for token in context.tokens] == ids[first:end].tolist()
            assert context.cut == (first > 0, end < len(values))


def test_effects_are_those_of_the_checkpoint(report: SAEReport) -> None:
    """Through the weights as they are in the file; the twin's modules are not asked."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in Path(demo_model()).glob("*.safetensors"):
        tensors |= load_file(file)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).double()
    norm, decoder = tensors["model.norm.weight"].double(), SAE.load(demo_sae()).tensors["W_dec"].double()
    for one in report.features[:8]:
        logits = head @ (norm * decoder[one.feature])
        assert one.effects is not None
        for found, sign in ((one.effects.raised, 1), (one.effects.lowered, -1)):
            values = torch.tensor([value for _, value in found], dtype=torch.float64)
            assert torch.allclose(values, sign * (sign * logits).sort(descending=True).values[:10], atol=1e-4)
            assert torch.allclose(values, logits[[token for token, _ in found]], atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "olmo"])
def test_norms_of_other_models(kind: str) -> None:
    """LayerNorm with and without weights, and Gemma's 1 + weight, against the derivative of the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        sizes |= {"n_embd": 32, "n_layer": 1, "n_head": 2}
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
                  "intermediate_size": 32, "head_dim": 16, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    weights = {"gpt2": "transformer.ln_f.weight", "gemma": "model.norm.weight"}
    if kind in weights:
        torch.nn.init.normal_(network.get_parameter(weights[kind]), 0.5, 0.2)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
    found = CheckpointUnembedding.of_network(network).effects(direction.numpy(), 50)
    effects = torch.zeros(50)
    for token, value in found.raised:
        effects[token] = value
    # A stream orthogonal to the direction, and to ones: there the derivative of its norm is 0.
    basis = torch.stack([direction - direction.mean(), direction, torch.ones(32)])
    stream = torch.randn(32, generator=torch.Generator().manual_seed(2))
    stream = stream - torch.linalg.lstsq(basis[1:].T, stream[:, None]).solution[:, 0] @ basis[1:]
    norm = {"gpt2": "transformer.ln_f", "gemma": "model.norm", "olmo": "model.norm"}[kind]

    def logits(row: torch.Tensor) -> torch.Tensor:
        return network.get_output_embeddings()(network.get_submodule(norm)(row[None, None]))[0, 0]

    _, derivative = torch.func.jvp(logits, (stream,), (direction,))
    scale = stream.square().mean().sqrt()
    assert torch.allclose(derivative * scale, effects, atol=1e-4)


def test_a_model_that_projects_behind_its_norm_is_refused() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    network = OPTForCausalLM(OPTConfig(vocab_size=50, word_embed_proj_dim=16, **sizes)).eval()
    with pytest.raises(WeirError, match="no norm comes right before the unembedding of OPTForCausalLM") as e:
        CheckpointUnembedding.of_network(network)
    assert e.value.field == "model"


def test_what_cannot_be_read_is_left_out(features: Path, tmp_path: Path) -> None:
    report = sae_report(demo_sae(), features, tmp_path / "r.html", top=2)  # the run's model is "fake"
    page = (tmp_path / "r.html").read_text()
    assert all(one.effects is None for one in report.features) and "Logits raised" not in page
    assert "Effects on logits are left out: transformers cannot load fake" in page
    assert "Tokens are shown as ids" in page and f"[{report.features[0].contexts[0].tokens[0].token_id}]" in page


class Elements(HTMLParser):
    """What a page has: elements, attributes, and text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


NASTY = "<script>alert('&\"')</script><img src=x onerror=alert(1)>"


def test_everything_is_escaped() -> None:
    class Tokenizer:
        def decode(self, ids: Any, **_: Any) -> str:
            return NASTY

    info = FeatureInfo(NASTY, ("resid_post", 3), 2, {"architecture": NASTY}, "", NASTY, 32, None)  # type: ignore[arg-type]
    totals = FeatureTotals(4, 0, np.array([1, 0]), np.array([2.0, 0.0], np.float32), np.array([2.0, 0.0]))
    context = FeatureContext(0, 2.0, (ContextToken(NASTY, 5, 0, 2.0), ContextToken("\n", 6, 1, 0.0)), (True, False))
    from vllm_weir.analysis.feature_report.statistics import LogitEffects

    one = FeatureReport(
        0, 0.25, 1, 2.0, 2.0, np.ones(BINS, np.int64), (context,), LogitEffects(((1, 1.0),), ((2, -1.0),))
    )
    page = Elements(render(SAEReport(info, 1, totals, (one,), TokenTexts(Tokenizer()), (NASTY,))))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1 and "img" not in tags
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count(NASTY) >= 4 and "↵" in page.text


def test_the_page_loads_nothing(report: SAEReport, features: Path) -> None:
    page = Elements((features.parent / "report.html").read_text())
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links and all(link is not None and link.startswith("#feature-") for link in links)
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link} <= set(ids)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    # Twice a feature: marked in its contexts, with its value at hand.
    marked = [a for tag, a in page.tags if tag == "span" and "t" in (a.get("class") or "").split()]
    shown = [token for one in report.features for context in one.contexts for token in context.tokens if token.value]
    assert len(marked) == len(shown)
    assert {a["title"] for a in marked} == {
        f"{token.value:.3f} · position {token.position} · token {token.token_id}" for token in shown
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=machine.browser(), args=["--no-sandbox"])
        yield browser
        browser.close()


@machine.needs(machine.chromium)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sorting_in_a_browser(scheme: str, report: SAEReport, features: Path, browser: Any) -> None:
    page = browser.new_page(color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto((features.parent / "report.html").as_uri())
    for key, value in (("density", "density"), ("max", "largest"), ("mean", "mean")):
        for descending in (True, False):
            page.click(f"#index button[data-by={key}]")
            rows = page.eval_on_selector_all("#index tbody tr", "rows => rows.map(row => +row.dataset.feature)")
            cards = page.eval_on_selector_all("#features section", "all => all.map(one => one.id)")
            by = {one.feature: getattr(one, value) for one in report.features}
            found = [by[feature] for feature in rows]
            assert found == sorted(found, reverse=descending) and cards == [f"feature-{f}" for f in rows]
    assert said == []
    page.close()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("order", {"order": "mean"}),
        ("top", {"top": 0}),
        ("contexts", {"contexts": 0}),
        ("top", {"feature": 3, "top": 2}),
        ("feature", {"feature": 512}),
        ("feature", {"feature": []}),
        ("out", {"out": "/nowhere/report.html"}),
        ("sae", {"sae": "/nowhere"}),
    ],
)
def test_arguments(field: str, change: dict[str, Any], features: Path, tmp_path: Path) -> None:
    arguments = {"sae": demo_sae(), "features": features, "out": tmp_path / "r.html", "model": "/nowhere"} | change
    with refused(field):
        sae_report(**arguments)


def test_features_of_another_autoencoder_are_refused(features: Path, tmp_path: Path) -> None:
    sae = SAE.load(demo_sae())
    other = SAE(sae.config, {**sae.tensors, "b_dec": sae.tensors["b_dec"] + 1})
    with pytest.raises(WeirError, match=r"^sae: .*another autoencoder, 'mood'"):
        sae_report(other, features, tmp_path / "r.html")


@pytest.mark.parametrize("name", ["blocks.3.hook_mlp_in", "blocks.5.hook_resid_pre", "transformer.h.3", None])
def test_files_that_name_another_site_than_the_run(name: str | None, tmp_path: Path) -> None:
    cfg = json.loads(Path(demo_sae(), "cfg.json").read_text())
    cfg["metadata"]["hook_name"] = name
    sae = Path(shutil.copytree(demo_sae(), tmp_path / "sae"))
    (sae / "cfg.json").write_text(json.dumps(cfg))
    source = write_jsonl(tmp_path / "t.jsonl", VALUES[:4])
    run_fake(source, str(tmp_path / "out"), sae=f"mood={sae}@mlp_in.3", start_engine=FakeFeatureEngine)
    report = sae_report(sae, tmp_path / "out", tmp_path / "r.html", feature=3, model="/nowhere")
    assert report.info.site == ("mlp_in", 3) and report.records == 4


def test_pieces_of_text() -> None:
    pieces = TokenTexts.of_checkpoint(demo_model())
    tokens = pieces._tokenizer("Anna took the boat out.\nTom was happy.", add_special_tokens=False)["input_ids"]
    assert len(pieces.pieces(tokens)) == len(tokens) and "".join(pieces.pieces(tokens)) == pieces._decode(tokens)

    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode("utf-8", "replace")

    assert TokenTexts(Bytes()).pieces(list("a€b".encode())) == ["a", "", "", "€", "b"]


def test_from_the_shell(features: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    job = ["sae", "report", demo_sae(), "--features", str(features), "--out", str(out), "-m", demo_model(), "-q"]
    done = CliRunner().invoke(app, [*job, "--feature", "12", "--feature", "30"])
    assert done.exit_code == 0 and "2 features" in done.output, done.output
    assert re.findall(r'id="feature-(\d+)"', out.read_text()) == ["12", "30"]
    refused = CliRunner().invoke(app, [*job, "--feature", "999"])
    assert refused.exit_code == 1 and "Error: feature: features count from 0 to 511" in refused.output
    (tmp_path / "x").mkdir()
    none = CliRunner().invoke(app, ["sae", "report", demo_sae(), "-f", str(tmp_path / "x"), "-o", str(out)])
    assert none.exit_code == 1 and "holds no features" in none.output


def test_features_that_were_not_extracted(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", VALUES[:9])
    run_fake(source, str(tmp_path / "out"), sae={"mood": demo_sae()}, ids=[30, 7], start_engine=FakeFeatureEngine)
    with pytest.raises(WeirError, match=r"^feature: feature 8 was not extracted"):
        sae_report(demo_sae(), load_features(tmp_path / "out"), tmp_path / "r.html", feature=8)
    info = json.loads((tmp_path / "out" / "features.json").read_text())
    assert info["ids"] == [30, 7]
    report = sae_report(demo_sae(), tmp_path / "out", tmp_path / "r.html", model="/nowhere")
    assert {one.feature for one in report.features} <= {30, 7}


def test_a_feature_of_a_cross_layer_transcoder_reaches_the_logits_from_all_its_blocks() -> None:
    """Directly, it adds to the stream what all its decoders give."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"W_enc": torch.randn(256, 8, generator=generator), "b_enc": torch.zeros(8), "b_dec": torch.zeros(256)}
    decoder = torch.randn(8, 2, 256, generator=generator)
    weights = {name: [tensor] * 2 for name, tensor in tensors.items()} | {"W_dec": [decoder, decoder[:, :1]]}
    block = SAE.from_tensors("transcoder", ("mlp_in", 4), layers=[4, 5], **weights).block(4)
    summed = SAE.from_tensors("transcoder", ("mlp_in", 4), **tensors, W_dec=decoder.sum(1))
    notes: list[str] = []
    found, wanted = (_effects(sae, [3], demo_model(), notes) for sae in (block, summed))
    assert notes == [] and repr(found) == repr(wanted) and found.keys() == {3}
