"""Every example runs as a user would run it, and prints what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import engine_processes, module, needs
from tests.support.models import make_model
from tests.support.zygote import forking, zygote

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "capture.py": ("resid_post[5]", "torch.float32", "nothing captured", "complete=True"),
    "stream.py": ("rows [", "together ["),
    "steer.py": ("scale -2: Anna", "scale +2: Anna", "({Site(hook='resid_post', layer=2): ", "rows changed: ({},)"),
    "fit_direction.py": (
        "block 5: AUC 1.00",
        "  plain positive: +",
        "  plain negative: -",
        "  added negative: +",
        "  subtracted positive: -",
        "scale -1: Anna",
        "scale +1: Anna",
        "happy: mean score +",
        "sad: mean score -",
    ),
    "load_vector.py": (
        "mood.gguf: blocks [2, 3] at resid_post, width 256",
        "scale -1.5: Anna",
        "scale +1.5: Anna",
    ),
    "hooks.py": ("nothing  ", "probe and steer", "{'score': ", "{'norm': ", "{'value': ", "{'active': ", "top neurons"),
    "cast.py": (
        "the condition is right on 120 of 120 new stories: 100.0%",
        "where it holds, 60 of 60 stories are declined",
        "| (declined)",
        "the other 60 stories are bit-identical to plain ones: True",
    ),
    "speculative.py": ("+ 24 - 1 tokens, ", " rows", "along the direction: before 0.", ", after 0.00"),
    "patch.py": ("words, at [", "last token", "\n5 "),
    "build_on_the_engine.py": ("100 prompts, ", " rows; the mean row of each block has length ["),
    "train_on_stream.py": ("batch 1: probe right at ", "unexplained by the SAE 0.", "read up to Cursor(batch="),
    "replay.py": (
        "step 0: replayed under the same weights, within ",
        "step 1: replayed under the same weights, within ",
        "would choose other experts at ",
        "probability, replayed: ",
    ),
    "sweep.py": (
        "Sweep(denoise, hook: 1, layer: 6, position: ",
        "\nblock 5: ",
        "written: mood.png mood.html mood.npz",
        "direct effects of heads: ",
    ),
    "attribute.py": (
        "logit difference: clean +7.",
        "mlp_out[5] at 19",
        "block 5, head ",
        "['attribution.resid_pre.png', 'attribution.attn_out.png', 'attribution.mlp_out.png']",
    ),
    "images.py": (
        "the image has 16, from 1 to 16: rows (16, 128)",
        "; steered: '",
        "rows changed: {Site(hook='resid_post', layer=1): 16}",
        "refused: capture[0].positions.modality: the prompt has no image; ",
    ),
    "inside_block.py": (
        "looks from 'so' at: awful 0.",
        "and gives z [1, 1, 64], norm ",
        "most active neurons: ",
        "without it: ",
        "rows changed: ({Site(hook='z', layer=5): 1},)",
    ),
    "set_feature.py": (
        "tells happy stories from sad ones with AUC 1.00",
        "held at -4, ",
        "are happy: ",
        "held at +4, ",
    ),
    "beams_and_embeddings.py": (
        "plain: ",
        "rows, changed (): ...",
        "rows, changed ({Site(hook='resid_post', layer=2): 7},): ...",
        "embedding of ",
    ),
    "jacobian_lens.py": ("after block 0: [", "+0: sad over happy", "it says' "),
    "features_and_lens.py": ("\n0 [(", "after block 0: [", "after block 5: ["),
    "lens.py": ("residual_stream: [2, ", "layer=2): 31}", "layer=3): 31}"),
    "scores.py": ("scores, mean +", "scores, mean -", "scores.html | 'sad' is in it: True", "highest score [["),
    "compress.py": ("full8: ", "fp8: ", "topk8: ", "rp8: 72 bytes a row", "of the rows themselves"),
    "sink.py": (
        "'archive': 'written', 'norms': 'written'",
        "'archive': 'held'",
        "marked ",
        "archive: 2 sequences, 0 failed",
    ),
    "keep.py": ("20 requests | 2370 rows | full8", "every row once: True", "projected: torch.Size([33, 64])"),
    "analyse.py": ("layer 4: (22, 128)", "timeline.png"),
    "steering_server.py": (
        "kept: ['happy']",
        "modules: ['mood']",
        "set: {'status': 'ok', 'hook_points': ['resid_post'], 'layers_updated': [2]}",
        "block 99 does not exist",
        "weir_steered_tokens_total",
    ),
    "probes_in_production.py": (
        "kept: mood linear at block 2 scores sampled",
        "highest: 1.0",
        "stopped: stop probe:mood after 3 tokens",
        "a plain request has scores of its own: False",
        'probe="mood"} 3.0\nweir_probe_alerts_total{',
        "left: []",
    ),
    "activation_oracle.py": ("the placeholder is token ", "layer=1): 1}"),
    "client_capture.py": (
        "scale +2: Tom",
        "fetched: Activations(",
        "together [",
        "field capture[0].layers",
        "[6, 256]",
    ),
    "inspect_eval.py": ("residual_stream [1, ", "layer=1): 1}", "success, accuracy 1.0"),
    "serve_rows.py": (
        "6 layers of width 256",
        "inline: Activations(resid_post",
        "by reference: 6 sites x 18 rows",
        "steered: ",
    ),
    "extract_texts.py": (
        "6 of 8 records",
        "skipped record 6: ",
        "the text is empty",
        "skipped record 7: ",
        "tokens, the engine takes 255",
        "again: 0 done, 6 were there already",
        "refused: layers",
        "last tokens of 6 texts: [6, 256]",
    ),
    "extract_features.py": (
        "40 stories, ",
        "mood at resid_post[3] | ",
        "last token: [(",
        "rows of record, position, token_id, generated, features, values",
        "of tokens, most on '",
        "report.html True",
    ),
    "drop_in.py": ("block 2: output [8, ", "block 5: output [8, "),
    "chat_positions.py": (
        "user range(0, 10), assistant range(10, 22), user range(22, 28), then range(28, 29)",
        "users' turns begin at [1, 22]",
        "without special tokens 50 of 60 rows; special tokens among them: 0",
        "-2 at sampled, 32 rows: ",
        "terrible.",
        "-2 at range(10, 22), 12 rows: ",
    ),
    "one_sided_ablation.py": (
        "0 of 15 rows changed: ...Anna was really glad",
        "15 of 15 rows changed: ...Anna was really unhappy",
        "11 of 15 rows changed: ...Anna was really unhappy",
        "4 of 15 rows changed: ...Anna was really glad",
        "rows that pointed the other way are as they were: True",
    ),
}


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES} == set(SAYS)


NO_ENGINE = {"keep.py", "analyse.py"}
FAST = {"capture.py", "steer.py"}
NEEDS = {"images.py": [needs(module("torchvision"))]}
# These start a server as users do, whose processes are forks; test_serve_processes has one that spawns them like vLLM.
# The others are forks of a process that has imported vLLM, and have their engine in them, but for the asynchronous one.
SERVERS = {"client_capture.py", "inspect_eval.py", "probes_in_production.py", "serve_rows.py", "steering_server.py"}
PROCESSES = SERVERS | {"stream.py"}


def example(path: Path) -> Any:
    marks = [*NEEDS.get(path.name, ()), *([] if path.name in NO_ENGINE else [pytest.mark.engine])]
    marks += [] if path.name in FAST else [pytest.mark.thorough]
    return pytest.param(path, marks=[*marks, needs(engine_processes)] if path.name in PROCESSES else marks)


# Compile caches live under the home directory as usual: the examples share what they can.
ENV = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def arguments(name: str, folder: Path) -> list[str]:
    """A model that sees, or has experts, for the example that needs one: neither is shipped."""
    if name == "replay.py":
        return [str(make_model("mixtral", "a", folder))]
    if name != "images.py":
        return []
    from tests.conformance.multimodal.build import build
    from tests.conformance.multimodal.recipes import RECIPES

    return [str(build(RECIPES["LlavaForConditionalGeneration"], folder / "llava"))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", map(example, EXAMPLES), ids=lambda path: path.name)
def test_example(path: Path, tmp_path: Path) -> None:
    if path.name in SERVERS:
        env = ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | forking()
        done: Any = subprocess.run(
            [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800, check=False
        )
    else:
        (tmp_path / "in").mkdir()
        env = ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if path.name in PROCESSES else "0"}
        done = zygote().run([str(path), *arguments(path.name, tmp_path)], env, tmp_path / "in", tmp_path, 800)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    for text in SAYS[path.name]:
        assert text in done.stdout, done.stdout[-2000:]
