"""Experiments under a LoRA adapter, against transformers with the adapter merged into its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest

import vllm_weir as weir
from tests.engine.common import directory, tokens
from tests.support.adapters import adapter
from tests.support.engines import close_all, get_llm
from tests.support.extracting import write_jsonl
from tests.support.machine import cpu, engine_processes, needs
from tests.support.measure import close_logits, rel_err
from tests.support.patched import Patched
from vllm_weir.experiments.attribute.twin import RowPatch, Twin

pytestmark = [pytest.mark.engine, needs(cpu("vLLM's LoRA kernels for GPUs take no float32"))]
A, B = 7, 11
CLEAN = tokens(30, 3)
CORRUPT = [token if i not in (5, 16, 17) else (token + 90) % 500 for i, token in enumerate(CLEAN)]
METRIC = weir.logit_diff(A, B)


@pytest.fixture(scope="module")
def adapted(root, tmp_path_factory):
    """The folder of an adapter, and what it adds to which weight."""
    where = tmp_path_factory.mktemp("adapter")
    return where, adapter(directory(root), where)


def merge(model, added):
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, delta in added.items():
            weights[name] += delta
    return model


@pytest.fixture(scope="module")
def truth(root, adapted):
    """Transformers with the adapter merged."""
    found = Patched(directory(root))
    merge(found.model, adapted[1])
    return found


@pytest.fixture
def llm(root):
    return get_llm(directory(root), block_size=32, max_num_seqs=8, enable_lora=True, max_lora_rank=8)


def close(found, logits):
    return close_logits(found, float(logits[A].double() - logits[B].double()), logits, 12, 192)


def test_sweep(llm, root, truth, adapted, tmp_path):
    """Every cell; a checkpoint goes on under the same adapter alone, however it is named."""
    where, file = str(adapted[0]), tmp_path / "cells"
    more = dict(layers=[0, 2], positions=[5, -1], metric=METRIC, progress=False)
    found = weir.sweep(llm, CLEAN, CORRUPT, ["resid_post", "z"], lora=where, checkpoint=file, **more)
    for h, hook in enumerate(("resid_post", "z")):
        for n, layer in enumerate((0, 2)):
            for p, at in enumerate((5, len(CLEAN) - 1)):
                assert close(found.grid[h, n, p], truth.patch(CORRUPT, CLEAN, (hook, layer), [at])), (hook, layer, at)
    plain = weir.sweep(llm, CLEAN, CORRUPT, **more)
    assert close(plain.baseline.clean, Patched(directory(root)).run(CLEAN)[0])
    assert abs(plain.baseline.clean - found.baseline.clean) > 0.01, "the adapter does nothing that could be told"
    request = LoRARequest("by another name", 77, where)
    again = weir.sweep(llm, CLEAN, CORRUPT, ["resid_post", "z"], lora=request, checkpoint=file, **more)
    assert np.array_equal(again.grid.array, found.grid.array)
    other = tmp_path / "other"
    shutil.copytree(where, other)
    rescale(other, 1.1)
    for lora in (None, other):
        with pytest.raises(weir.WeirError, match="belongs to another sweep") as e:
            weir.sweep(llm, CLEAN, CORRUPT, ["resid_post", "z"], lora=lora, checkpoint=file, **more)
        assert e.value.field == "checkpoint"


def test_fit(llm, root, truth, adapted):
    """The means of transformers' rows; the check steers under the adapter, too."""
    sides = [[tokens(20, seed) for seed in range(start, start + 6)] for start in (0, 50)]
    found = weir.fit(llm, *sides, layers=[1, 2], metric=METRIC, lora=adapted[0], progress=False)
    plain = weir.fit(llm, *sides, layers=[1, 2], check=False, progress=False)
    for layer in (1, 2):
        site = "resid_post", layer
        means = [torch.stack([truth.run(ids, reads=[site])[1][site][-1] for ids in side]) for side in sides]
        expected, length = means[0].mean(0) - means[1].mean(0), found.details["layers"][str(layer)]["norm"]
        assert (found.vector(layer) - expected).abs().max() < 1e-5 * length
        assert (plain.vector(layer) - expected).abs().max() > 1e-3 * length
    assert found.details["lora"]["name"] == adapted[0].name and "lora" not in plain.details
    means = found.details["causal"]["means"]
    held = [side[k] for side in sides for k in range(6)]
    logits = [truth.run(ids)[0] for ids in held]
    differences = [float(one[A] - one[B]) for one in logits]
    assert min(differences) - 1e-3 <= means["plain_positive"] <= max(differences) + 1e-3


def test_attribute(llm, root, adapted):
    """The twin has the adapter, and gives its weights back; the engine's effects are those of a merged model."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory(root), dtype=torch.float32, attn_implementation="eager")
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    merged = Twin(merge(AutoModelForCausalLM.from_pretrained(directory(root), dtype=torch.float32), adapted[1]))
    expected = weir.attribute(merged.network, CLEAN, CORRUPT, metric=METRIC, hooks=("resid_pre", "z"), top_k=0)
    for model, more in ((llm, {}), (network, {"llm": llm}), (network, {})):
        found = weir.attribute(
            model, CLEAN, CORRUPT, metric=METRIC, hooks=("resid_pre", "z"), top_k=4, lora=adapted[0], **more
        )
        assert found.twin_error is None or found.twin_error < 1e-4
        np.testing.assert_allclose(found.grid.array, expected.grid.array, rtol=1e-3, atol=1e-5)
        logits = merged.logits(CORRUPT)
        for one in found.verified:
            row = merged.rows(CLEAN, [one.site])[one.site][one.position]
            after = merged.logits(CORRUPT, [RowPatch(one.site, one.position, row)])
            effect = float((after[A] - after[B]) - (logits[A] - logits[B]))
            assert close_logits(one.effect, effect, torch.cat([logits, after])), one
    assert all(torch.equal(weight, before[name]) for name, weight in network.named_parameters())
    for model, lora in ((merged.network, None), (network, adapted[0])):
        weir.attribute(model, CLEAN, CORRUPT, metric=METRIC, top_k=1, lora=lora)
    with pytest.raises(weir.WeirError, match="under the same adapter"):
        weir.attribute(merged.network, CLEAN, CORRUPT, metric=METRIC, top_k=1, llm=llm)


def test_files_that_change_under_a_name_are_read_again(llm, adapted, tmp_path):
    """What vLLM has loaded, and cached keys and values for, under the same name and number does not count."""
    where = tmp_path / "changing"
    shutil.copytree(adapted[0], where)
    request = LoRARequest("changing", 5, str(where))
    llm.generate([{"prompt_token_ids": CLEAN}] * 2, weir.SamplingParams(max_tokens=1), lora_request=request)
    more = dict(metric=METRIC, layers=[1], positions=[-1], progress=False)
    before = weir.sweep(llm, CLEAN, CORRUPT, lora=request, **more).baseline
    rescale(where, 0.0)
    plain = weir.sweep(llm, CLEAN, CORRUPT, **more).baseline
    after = weir.sweep(llm, CLEAN, CORRUPT, lora=request, **more).baseline
    assert after == pytest.approx(plain, abs=1e-4) and abs(after.clean - before.clean) > 0.01


def rescale(where: Path, factor: float) -> None:
    """Change how much an adapter adds."""
    config = json.loads((where / "adapter_config.json").read_text())
    (where / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": factor * config["lora_alpha"]}))


def test_what_cannot_run_is_refused(llm, root, adapted, tmp_path):
    wide = tmp_path / "wide"
    shutil.copytree(adapted[0], wide)
    config = json.loads((wide / "adapter_config.json").read_text())
    (wide / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))
    more = dict(metric=METRIC, layers=[1], positions=[-1], progress=False)
    for lora, said in ((7, "expected a LoRARequest or the path"), (tmp_path / "none", "is no folder of an adapter"),
                       (directory(root), "is no folder of an adapter"), (wide, "LoRA rank 16 is greater")):  # fmt: skip
        with pytest.raises(weir.WeirError, match=said) as e:
            weir.sweep(llm, CLEAN, CORRUPT, lora=lora, **more)
        assert e.value.field == "lora"
    weir.sweep(llm, CLEAN, CORRUPT, lora=adapted[0], **more)  # the engine goes on
    plain = get_llm(directory(root), block_size=32, max_num_seqs=8)
    with pytest.raises(weir.WeirError, match="takes no LoRA adapters") as e:
        weir.sweep(plain, CLEAN, CORRUPT, lora=adapted[0], **more)
    assert e.value.field == "lora"


@needs(engine_processes)
@pytest.mark.thorough
def test_extract(root, truth, adapted, tmp_path):
    """Rows are the merged model's; the same call goes on, and one without the adapter is refused."""
    close_all()
    source = tmp_path / "texts.jsonl"
    write_jsonl(source, [f"w{n} w{n + 1} w{n + 2}" for n in range(12)])
    engine = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    asked = dict(layers=[1], engine=engine)
    done = weir.extract(source, str(directory(root)), tmp_path / "rows", lora=adapted[0], **asked)
    assert done.requests == 12
    rows = weir.load(tmp_path / "rows")
    for name in rows.requests:
        ids = rows[name].token_ids.tolist()
        expected = truth.run(ids, reads=[("resid_post", 1)])[1]["resid_post", 1]
        assert rel_err(rows[name]["resid_post", 1], expected) < 1e-5
    assert weir.extract(source, str(directory(root)), tmp_path / "rows", lora=adapted[0], **asked).held == 12
    with pytest.raises(weir.WeirError, match="was begun with") as e:
        weir.extract(source, str(directory(root)), tmp_path / "rows", **asked)
    assert e.value.field == "lora"
