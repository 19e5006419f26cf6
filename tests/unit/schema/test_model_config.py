"""What ``config.json`` tells is refused before an engine starts, and what it leaves open is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import vllm_weir as weir
from tests.support.sae_reference import weights
from tests.unit.refusals import refused
from vllm_weir.cli.main import app
from vllm_weir.experiments.attribute.run import attribute
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.server import saes

MODEL = weir.demo_model()
"""It has 6 blocks, 4 heads, and rows of 256 values."""


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 256, "num_key_value_heads": 2}, (6, 4, 256)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 768)),
        ({"text_config": {"num_hidden_layers": 6}, "vision_config": {"num_hidden_layers": 24}}, (6, None, None)),
        ({"thinker_config": {"text_config": {"hidden_size": 8}}, "num_hidden_layers": 3}, (None, None, 8)),
        # What is left out is a default of the model's class, which may be more than an image encoder has.
        ({"text_config": {"model_type": "llama"}, "vision_config": {"num_hidden_layers": 24}}, (None, None, None)),
        ({"num_attention_heads": 8, "linear_num_value_heads": 32}, (None, 32, None)),
        ({"num_attention_heads": 8, "num_attention_heads_per_layer": [4, 16]}, (None, 16, None)),
        ({"mamba_num_heads": 8}, (None, None, None)),
        ({"num_hidden_layers": "6", "hidden_size": None}, (None, None, None)),
        ({"is_encoder_decoder": True, "num_hidden_layers": 6}, (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_what_a_config_says(tmp_path: Path, config: Any, facts: tuple[Any, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.read(str(tmp_path), {}) == facts
    assert ModelConfig.read(str(tmp_path), {"hf_overrides": {"num_hidden_layers": 99}}) == (None, None, None)


@pytest.mark.thorough
def test_no_architecture_is_refused_what_it_has(tmp_path: Path) -> None:
    """The tiny models of the conformance tests: 4 blocks, 4 heads or more, a stream of 128."""
    from transformers import AutoConfig

    from tests.conformance.zoo import ZOO

    for name, entry in ZOO.items():
        config: dict[str, Any] = {"model_type": entry.model_type, **entry.fields()}
        if entry.oracle:
            config = json.loads(AutoConfig.for_model(entry.model_type, **entry.fields()).to_json_string())
        (tmp_path / "config.json").write_text(json.dumps({**config, **entry.config_json}))
        found = ModelConfig.read(str(tmp_path), {})
        assert found.layers in (4, None) and (found.heads or 4) >= 4 and found.width in (128, None), (name, found)


def test_what_says_nothing(tmp_path: Path) -> None:
    for text in (None, "{", "\x00"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        assert ModelConfig.read(str(tmp_path), {}) == ModelConfig()
    for model in ("", "no-such-owner/no-such-model", "a/b/c.gguf"):
        assert ModelConfig.read(model, {}) == ModelConfig()
    with refused("model", "there is no folder"):
        ModelConfig.read(str(tmp_path / "none"), {})


def test_what_is_not_known_is_not_refused() -> None:
    nothing = ModelConfig()
    nothing.check_layers("resid_post", (99,))
    nothing.check_heads([99])
    nothing.check_width("resid_post", 3, "sae")
    ModelConfig(6, 4, 256).check_width("z", 64, "sae")
    ModelConfig(6, 4, 256).check_heads("all")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No command may start one."""
    for module in ("extraction.engine", "experiments.fit.cli", "experiments.sweep.cli"):
        monkeypatch.setattr(f"vllm_weir.{module}.start_llm", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a\nb\n")
    for name, site, d_in in (("late", ("resid_post", 9), 256), ("wide", ("resid_post", 2), 8)):
        sae = weir.SAE.from_tensors("jumprelu", site, **weights("jumprelu", 0, d_in, 12))
        sae.save(tmp_path / name)


PAIR = ["--clean", "a", "--corrupt", "b", "--answer", "c", "--wrong", "d"]
LATE = "block 9 does not exist: the model has blocks 0..5"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["extract", "p.txt", "-o", "out", "--layers", "1,9"], f"layers: {LATE}"),
        (["extract", "p.txt", "-o", "out", "--hook", "z", "--heads", "4"], "heads: head 4 does not exist"),
        (["extract", "p.txt", "-o", "out", "--sae", "a=late"], f"sae: {LATE}"),
        (["extract", "p.txt", "-o", "out", "--sae", "a=wide"], "sae: it reads 8 values"),
        (["extract", "p.txt", "-o", "out", "-e", "max_model_len=16", "--max-length", "16"], "max_length: .*up to 15"),
        (["fit", "p.txt", "p.txt", "-o", "x.gguf", "--layers", "9"], f"layers: {LATE}"),
        (["sweep", *PAIR, "--layers", "0,9"], f"layers: {LATE}"),
        (["sweep", *PAIR, "--hook", "z", "--heads", "0,7"], "heads: head 7 does not exist"),
        (["sweep", *PAIR, "--to", "q.9"], f"to: {LATE}"),
        (["sweep", *PAIR, "--to", "q.5", "--to-heads", "4"], "to_heads: head 4 does not exist"),
    ],
)
@pytest.mark.usefixtures("no_engine")
def test_commands_refuse_before_an_engine_starts(arguments: list[str], says: str) -> None:
    model = [MODEL] if arguments[0] == "sweep" else ["-m", MODEL]
    done = CliRunner().invoke(app, [arguments[0], *model, *arguments[1:], "-q"])
    assert done.exit_code == 1 and "Traceback" not in done.output, done.output
    with refused_text(says):
        raise ValueError(done.output)
    missing = CliRunner().invoke(
        app, [arguments[0], *(one.replace(MODEL, "/nowhere") for one in model), *arguments[1:]]
    )
    assert missing.exit_code == 1 and "model: there is no folder /nowhere" in missing.output


def refused_text(says: str) -> Any:
    return pytest.raises(ValueError, match=says)


def test_attribution_refuses_before_it_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_weir.experiments.attribute.run._open", lambda *_: pytest.fail("weights were read"))
    metric = weir.logit_diff(" a", " b")
    for field, given in (
        ("layers", {"layers": [9]}),
        ("attribute.heads", {"hooks": "z", "heads": [4]}),
        ("mode", {"mode": "other"}),
        ("positions", {"positions": "sometimes"}),
        ("hooks[0]", {"hooks": ["nowhere"]}),
    ):
        with refused(field):
            attribute(MODEL, "a", "b", metric=metric, **given)


@pytest.mark.parametrize(
    ("source", "says"),
    [("a=late", f"site: {LATE}"), ("a=wide", "d_in: it reads 8 values"), ("a=none", "path: none does not exist")],
)
@pytest.mark.parametrize("model", [[MODEL, "--port", "1"], ["--port", "1", "--model", MODEL], [f"--model={MODEL}"]])
@pytest.mark.usefixtures("no_engine")
def test_a_server_refuses_autoencoders_before_its_engine_starts(source: str, says: str, model: list[str]) -> None:
    environ: dict[str, str] = {}
    saes.put_options([source], environ)
    with refused("--weir-sae", f"a: {says}"):
        saes.check_given(model, environ)
    saes.check_given(model, {})
    if "does not exist: " in says:
        saes.check_given([*model, '--hf-overrides={"num_hidden_layers": 12}'], environ)
