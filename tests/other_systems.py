"""The newest sources of four systems whose place Weir takes, fetched and tried: their keys, files and own tests.

    python -m pytest tests/other_systems.py

Not in any tier, since it needs a network: where a source cannot be fetched, its tests are skipped with
the reason. ``WEIR_OTHER_SYSTEMS`` names a folder with checkouts, under the names of `SOURCES`, that are
taken instead.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support import other_systems as known
from vllm_weir import analysis
from vllm_weir.storage import Batch, convert, load, open_writer

SOURCES = {
    "vllm-lens": ("https://github.com/UKGovernmentBEIS/vllm-lens", []),
    "vllm-probe-hook": ("https://github.com/lysandermawby/vllm-probe-hook", []),
    "Vllm_mi_patch": ("https://github.com/prof-schacht/Vllm_mi_patch", []),
    "RhizoNymph-vllm": ("https://github.com/RhizoNymph/vllm", ["vllm/entrypoints", "vllm/v1/capture"]),
}
"""Name -> address, and the folders that are looked at; none for all."""
D, ROWS = 16, 5
LENS_TESTS = (
    "vllm_lens/tests/test_activations_chunked_prefill.py",
    "vllm_lens/tests/test_activations_offline.py",
    "vllm_lens/tests/test_qk_chunked_prefill.py",
    "vllm_lens/tests/test_qk_match.py",
    "vllm_lens/tests/test_steering.py",
    "vllm_lens/tests/test_steering_offline.py",
    "tests/unit/test_attention_helper.py",
    "tests/unit/test_serialize.py",
)
"""vllm-lens's own, but for those that compare with results of one GPU, or need several or a server, and for those
of what is inside it."""
NOT_APPLYING = "tp or pp or MLARefusal or leaked_state or shapes_and_meta or alibi_sqrt"
"""Names of its tests for which more than one device is needed, which look inside it, know another model's sizes, or
want another class of error than Weir's."""


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Return the folder with a system's source, fetched once; skips where it cannot be."""

    def fetched(name: str) -> Path:
        if given := os.environ.get("WEIR_OTHER_SYSTEMS"):
            return Path(given) / name
        address, folders = SOURCES[name]
        target = tmp_path_factory.getbasetemp() / name
        if not target.exists():
            sparse = ["--filter=blob:none", "--sparse"] if folders else []
            _git("clone", "--quiet", "--depth", "1", *sparse, address, str(target))
            if folders:
                _git("-C", str(target), "sparse-checkout", "set", *folders)
        return target

    return fetched


def _git(*arguments: str) -> None:
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=600, env=quiet, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        pytest.skip(f"the source cannot be fetched: {e}")
    if done.returncode:
        pytest.skip(f"the source cannot be fetched: {done.stderr.strip()[-300:]}")


def text_of(folder: Path, pattern: str) -> str:
    """The Python files of a folder, one after the other."""
    files = sorted(folder.glob(pattern))
    assert files, f"{folder} has no {pattern}: the source was rearranged"
    return "\n".join(file.read_text() for file in files)


def fields_of(text: str, cls: str) -> set[str]:
    """The annotated fields of a class."""
    (found,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == cls)
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


# Are there keys that nobody has judged?


def test_the_keys_of_vllm_lens(source):
    package = source("vllm-lens") / "vllm_lens"
    read = set(re.findall(r'extra(?:_args or \{\}\))?\.(?:get|pop)\(\s*"([a-z]\w*)"', text_of(package, "*.py")))
    assert {"output_residual_stream", "apply_steering_vectors"} <= read <= set(known.LENS_KEYS)
    exported = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", text_of(package, "__init__.py"), re.S)[1])
    assert set(exported) <= set(known.LENS_NAMES)
    found = re.findall(r'@(\w*)router\.(\w+)\("(/[^"]+)"', text_of(package, "_hooks_router.py"))
    routes = {(how, f"/v1/{owner.rstrip('_') or 'hooks'}{path}") for owner, how, path in found}
    assert routes - {("get", "/v1/hooks/ui/{filename:path}")} == set(known.LENS_ROUTES)
    facts = re.search(
        r"self\._qk_layer_meta\[layer_idx\] = (\{.*?\n            \})", text_of(package, "_worker_ext.py"), re.S
    )
    assert set(re.findall(r'^\s+"(\w+)":', facts[1], re.M)) == known.LENS_ANSWERS["qk_meta"]


def test_the_arguments_of_vllm_probe_hook(source):
    module = ast.parse(text_of(source("vllm-probe-hook") / "src" / "vllm_probe_hook", "llm.py"))
    inits = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert len(inits) == 2
    for init in inits:
        assert tuple(argument.arg for argument in init.args.args[1:]) == known.PROBE_HOOK


def test_the_variables_and_functions_of_vllm_mi_patch(source):
    package = source("Vllm_mi_patch") / "vllm_capture"
    named = set(re.findall(r"VLLM_ACT_([A-Z]+(?:_[A-Z]+)*)", text_of(package, "**/*.py")))
    assert "CAPTURE" in named and named <= set(known.MI_PATCH)
    module = ast.parse(text_of(package, "analysis/load.py"))
    defined = {node.name for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {name for name in defined if not name.startswith("_")} == set(known.MI_PATCH_NAMES)


def test_the_fields_and_routes_of_the_fork(source):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    folder = source("RhizoNymph-vllm") / "vllm" / "entrypoints"
    ours = re.compile("steer|patch|captur|conversation|probe|gate")
    for name, stock in (("chat_completion", ChatCompletionRequest), ("completion", CompletionRequest)):
        theirs = fields_of(text_of(folder / "openai" / name, "protocol.py"), stock.__name__) - set(stock.model_fields)
        assert {field for field in theirs if ours.search(field)} == set(known.FORK_FIELDS), name
    routes = re.findall(r'@router\.(\w+)\(\s*"(/v1/[^"]+)"', text_of(folder / "serve", "**/*router.py"))
    assert {route for route in routes if ours.search(route[1])} == set(known.FORK_ROUTES)


# Do their readers read Weir's files?


def rows(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(seed))


def module_of(file: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_forks_reader_reads_what_is_converted_for_it(source, tmp_path, monkeypatch):
    folder = source("RhizoNymph-vllm") / "vllm" / "v1" / "capture" / "consumers" / "filesystem"
    names = "vllm.v1.capture.consumers.filesystem.types"  # its constants; the packages above it import all of vLLM
    constants = re.findall(r'^(PACKED_\w+|SHARD_\w+) = "(.*)"', text_of(folder, "types.py"), re.M)
    for k in range(1, names.count(".") + 1):
        monkeypatch.setitem(sys.modules, names.rsplit(".", k)[0], types.ModuleType("stand_in"))
    stand_in = types.ModuleType(names)
    vars(stand_in).update(constants)
    monkeypatch.setitem(sys.modules, names, stand_in)
    monkeypatch.setitem(sys.modules, "forks_reader", None)
    reader = module_of(folder / "reader.py", "forks_reader")
    with open_writer(tmp_path / "own", "per_request") as writer:
        writer.write(Batch("r", "resid_post", 3, np.arange(ROWS), np.arange(ROWS), rows(3)))
        writer.write(Batch("r", "resid_mid", 4, np.arange(ROWS), np.arange(ROWS), rows(4).bfloat16()))
        writer.finish_request("r")
    convert(tmp_path / "own", tmp_path / "fork", "fork")
    read = reader.read_request(tmp_path / "fork" / "r")
    assert set(read) == {(3, "post_block"), (4, "post_attn")}
    assert np.array_equal(read[3, "post_block"].array, rows(3).numpy())
    low = torch.from_numpy(read[4, "post_attn"].array.copy()).view(torch.bfloat16)
    assert torch.equal(low, rows(4).bfloat16()) and load(tmp_path / "fork").count() == 2 * ROWS


def test_vllm_mi_patchs_loader_reads_weirs_files(source, tmp_path):
    theirs = module_of(source("Vllm_mi_patch") / "vllm_capture" / "analysis" / "load.py", "mi_patchs_loader")
    with open_writer(tmp_path, "npz", compress="full8") as writer:
        writer.write(Batch("r", "resid_post", 3, np.arange(ROWS), np.arange(ROWS), rows(3)))
        writer.finish_request("r", {"prompt_tokens": 2})
    folder = tmp_path / "req_r"
    assert theirs.ActivationLoader(str(tmp_path)).list_requests() == analysis.ActivationLoader(tmp_path).list_requests()
    stored = theirs.load_activation_file(folder / "seq0_layer3_rank0.npz")
    ours = analysis.load_activation_file(folder / "seq0_layer3_rank0.npz")
    assert all(np.array_equal(stored[name], ours[name]) for name in ("q", "scale", "zero"))
    assert theirs.load_activation_manifest(folder / "manifest.json")["request_id"] == "r"


# Their own tests.


SHIM = {
    "__init__.py": "from vllm_weir import (Hook, HookContext, SteeringVector, decode_activations, deserialize_tensor,\n"
    "    serialize_activations, serialize_tensor)\n",
    "_worker_ext.py": "HiddenStatesExtension = None\n",
    "attention.py": "from vllm_weir import attention_patterns, compute_attention_weights\n",
    "_helpers/__init__.py": "",
    "_helpers/types.py": "from vllm_weir import Hook, SteeringVector\n",
    "_helpers/_serialize.py": "from vllm_weir.compat.vllm_lens.tensors import *\n",
    "tests/__init__.py": "",
}
CONFTEST = """
import gc
import os
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_NAME, REFERENCE_DTYPE = os.environ["OTHER_SYSTEMS_MODEL"], "float32"
NUM_LAYERS, LAYER_IDX, PROMPT, PROMPTS = {num_layers}, {layer}, {prompt!r}, {prompts!r}

@pytest.fixture(scope="module")
def hf_model():
    model = AutoModelForCausalLM.from_pretrained(MODEL_NAME, dtype="auto").eval()
    yield model, AutoTokenizer.from_pretrained(MODEL_NAME)
"""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", LENS_TESTS)
def test_vllm_lenss_own_tests(source, tmp_path, file):
    """On Weir's shipped model, with Weir in place of the package."""
    pytest.importorskip("vllm")
    folder = source("vllm-lens")
    theirs = folder / "vllm_lens" / "tests"
    package = tmp_path / "vllm_lens"
    for name, text in SHIM.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assigned = (node for node in ast.parse(text_of(theirs, "conftest.py")).body if isinstance(node, ast.Assign))
    names = ("LAYER_IDX", "PROMPT", "PROMPTS")
    values = {n.targets[0].id: ast.literal_eval(n.value) for n in assigned if n.targets[0].id in names}
    model = tmp_path / "model"
    model.mkdir()
    for one in Path(weir.demo_model()).iterdir():
        if one.name == "config.json":  # their bounds are absolute, and those of another model's bfloat16
            config = json.loads(one.read_text()) | {"dtype": "float32", "torch_dtype": "float32"}
            (model / one.name).write_text(json.dumps(config))
        else:
            (model / one.name).symlink_to(one)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    (package / "tests" / "conftest.py").write_text(
        CONFTEST.format(num_layers=6, layer=values["LAYER_IDX"], prompt=values["PROMPT"], prompts=values["PROMPTS"])
    )
    (package / "tests" / "_qk_asserts.py").write_text(text_of(theirs, "_qk_asserts.py"))
    text = text_of(folder, file).replace('dtype="auto"', 'dtype="float32"')  # vLLM's auto halves float32
    if "async def test_" in text:
        pytest.importorskip("pytest_asyncio")
    if not torch.cuda.is_available():
        text = re.sub(r'device_map="cuda",?', "", text).replace('"cuda"', '"cpu"')  # a map needs accelerate
    copy = package / "tests" / Path(file).name
    copy.write_text(text)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "OTHER_SYSTEMS_MODEL": str(model), "VLLM_CPU_KVCACHE_SPACE": "1"}
    scopes = (f"asyncio_default_{kind}_loop_scope=module" for kind in ("test", "fixture"))
    options = ["addopts=", "asyncio_mode=auto", *scopes]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *(f"-o{one}" for one in options),
               "--rootdir", str(tmp_path), str(copy), "-k", f"not ({NOT_APPLYING})"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, cwd=tmp_path, check=False)
    print(textwrap.indent(done.stdout[-6000:], "| "))
    assert done.returncode == 0, done.stderr[-2000:]
