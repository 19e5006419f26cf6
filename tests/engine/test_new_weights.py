"""A trainer replaces the weights between its steps: all that is read, steered and routed is the new model's.

By vLLM's `update_weights`, with a transfer of the test's own, since vLLM's need a GPU. vLLM 0.32 for CPU does not
replace the matrices of experts, with Weir or without, so here they stay as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vllm_weir as weir
from tests.conformance.engine import on_cpu
from tests.conformance.oracle import Oracle
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.build import build
from tests.engine.common import BOUND, assert_nothing_is_held, prompts, sampling
from tests.engine.test_routing import check as check_routing
from tests.support.engines import get_llm
from tests.support.machine import cpu, needs
from tests.support.measure import rel_err
from tests.support.sae_reference import weights as sae_weights

pytestmark = [pytest.mark.engine, needs(cpu("vLLM's own transfers of weights need a GPU"))]
ENTRY, TRANSFER = ZOO["MixtralForCausalLM"], "weir-tests-file"
LAYERS, D, AT = 4, 128, 2
SITE = ("resid_post", AT)
LENGTHS = (40, 7)


@cache
def register_transfer() -> None:
    """Register a transfer of weights that reads a file, as vLLM's transfers load what they receive."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Update(WeightTransferUpdateInfo):
        path: str = ""

    class FromFile(WeightTransferEngine):
        init_info_cls, update_info_cls = WeightTransferInitInfo, Update

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # a CPU has nothing to wait for

        def receive_weights(self, update_info: Any) -> None:
            tensors = load_file(Path(update_info.path) / "model.safetensors")
            self.model.load_weights((name, one) for name, one in tensors.items() if ".experts." not in name)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(TRANSFER, FromFile)


@pytest.fixture(scope="module")
def models(root: Path) -> tuple[Path, Path]:
    """A model, and the same one after a step of training."""
    before, after = build(ENTRY, root / "weights-before"), root / "weights-after"
    shutil.copytree(before, after)
    generator, tensors = torch.Generator().manual_seed(1), load_file(before / "model.safetensors")
    for name, one in tensors.items():
        if ".experts." not in name:
            spread = 0.3 * one.std() if one.dim() > 1 else 0.1
            tensors[name] = one + spread * torch.randn(one.shape, generator=generator)
    save_file(tensors, after / "model.safetensors", {"format": "pt"})
    return before, after


def autoencoder() -> weir.SAE:
    return weir.SAE.from_tensors("topk", SITE, k=5, **sae_weights("topk", 3, D, 64))


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The engine with names of every kind, and its lens."""
    register_transfer()
    options = dict(block_size=32, max_model_len=128, skip_tokenizer_init=True)
    llm = get_llm(models[0], weight_transfer_config={"backend": TRANSFER}, **options | on_cpu(ENTRY) | ENTRY.engine)
    llm.init_weight_transfer_engine({"init_info": {}})
    path = tmp_path_factory.mktemp("lens") / "lens.pt"
    torch.save({"J": {AT: torch.eye(D) + 0.1}, "n_prompts": 1, "d_model": D}, path)
    lens = weir.load_lens(llm, "j", path)
    weir.load_sae(llm, "sae", autoencoder())
    weir.register(llm, "v", torch.linspace(-1, 1, D))
    yield llm, lens
    weir.unregister(llm, "v")
    weir.unload_sae(llm, "sae")
    weir.unload_lens(llm, "j")
    assert_nothing_is_held(llm)


def update(llm: Any, model: Path) -> None:
    """What a trainer calls, one after the other."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(model)}})
    llm.finish_weight_update()


@cache
def truth(model: Path) -> tuple[Oracle, torch.Tensor, torch.Tensor]:
    """The reference, the final norm's gains, and the unembedding."""
    tensors = load_file(model / "model.safetensors")
    return Oracle(model), tensors["model.norm.weight"], tensors["lm_head.weight"]


def gain(rows: torch.Tensor, ctx: Any) -> torch.Tensor:
    ctx.saved["gain"] = ctx.parameter("model.norm.weight").clone()
    return rows


def check_rows(out: Any, model: Path, generated: int) -> None:
    """Rows, experts, scores, features and lens of one output are those of these weights."""
    oracle, _, _ = truth(model)
    ids = [*out.prompt_token_ids, *out.outputs[0].token_ids][:-1]
    rows, logits = oracle.points(ids)
    for site in out.activations.sites:
        if site.hook != "expert_ids":
            assert rel_err(out.activations[site], rows[tuple(site)]) <= BOUND, site
    check_routing(out.outputs[0].routed_experts, out.outputs[0].routing_weights, rows, LAYERS)
    for layer in range(LAYERS):
        derived = np.sort(out.activations["expert_ids", layer].numpy(), -1)
        assert np.array_equal(derived, np.sort(out.outputs[0].routed_experts[:, layer], -1))
    weight = torch.linspace(-1, 1, D)
    assert rel_err(out.scores["p"], rows[SITE] @ weight[:, None]) <= 1e-4
    found = out.features["sae"]
    features = autoencoder().encode(rows[SITE])
    assert rel_err(found.values, features.gather(1, found.ids.long())) <= 1e-4
    assert torch.equal(found.values > 0, features.topk(found.values.shape[1]).values > 0)
    last = logits.log_softmax(-1)
    lens = out.lens[LAYERS - 1]
    assert rel_err(lens.logprobs, last.gather(1, lens.token_ids.long())) <= 1e-4
    assert len(ids) == len(out.prompt_token_ids) + generated - 1


def ask(llm: Any, generated: int = 4) -> list[Any]:
    captures = [weir.Capture("resid_post"), weir.Capture("router_logits"), weir.Capture("expert_ids")]
    params = weir.params(
        sampling(generated, detokenize=False),
        capture=captures,
        routing=weir.Routing(weights=True),
        probes=weir.Probe("p", torch.linspace(-1, 1, D), layer=AT),
        features=weir.Features("sae", top_k=5),
        lens=weir.Lens(layers=[LAYERS - 1], top_k=3),
    )
    return llm.generate(prompts(LENGTHS), params, use_tqdm=False)


def check(llm: Any, lens: Any, model: Path) -> None:
    """Everything that reads the weights, in requests that come after the prefix cache was reset."""
    oracle, norm, unembedding = truth(model)
    for _ in range(2):  # the second time from the prefix cache, as far as that may go
        for out in ask(llm):
            check_rows(out, model, 4)
    assert rel_err(lens.direction(7, LAYERS - 1), unembedding[7]) <= BOUND
    assert rel_err(lens.direction(7, AT), (torch.eye(D) + 0.1).T @ unembedding[7]) <= BOUND
    params = weir.params(
        sampling(4, detokenize=False),
        capture=weir.Capture("resid_post"),
        interventions=weir.Add("v", 1, scale=3.0),
        hooks=weir.Hook(gain, layers=[0], mode="eager"),
    )
    for _ in range(2):
        (out,) = llm.generate(prompts(LENGTHS[:1]), params, use_tqdm=False)
        ids = [*out.prompt_token_ids, *out.outputs[0].token_ids][:-1]
        steered, _ = oracle.steer(ids, "resid_post", 1, 3 * torch.linspace(-1, 1, D))
        for site in out.activations.sites:
            assert rel_err(out.activations[site], steered[tuple(site)]) <= BOUND, site
        assert torch.equal(out.saved["gain"], norm)


def test_everything_is_of_the_new_weights(engine, models):
    llm, lens = engine
    for model in (*models, models[0]):
        update(llm, model)
        llm.reset_prefix_cache()
        check(llm, lens, model)


def test_rows_of_whole_sequences_are_new_without_a_reset(engine, models):
    """A hit ends before the first wanted position. Rows of later ones alone follow from old keys, as vLLM's tokens."""
    llm, _ = engine
    update(llm, models[0])
    llm.reset_prefix_cache()
    ask(llm)
    update(llm, models[1])
    for out in ask(llm):
        check_rows(out, models[1], 4)


def test_a_request_under_way_has_rows_of_both(engine, models):
    """Each row and choice is of the weights that the step had which computed it."""
    llm, _ = engine
    update(llm, models[0])
    llm.reset_prefix_cache()
    params = weir.params(
        sampling(8, detokenize=False), capture=weir.Capture("router_logits"), routing=weir.Routing(weights=True)
    )
    llm.llm_engine.add_request("r", prompts(LENGTHS[:1])[0], params)
    outs = [one for _ in range(3) for one in llm.llm_engine.step()]
    update(llm, models[1])
    while llm.llm_engine.has_unfinished_requests():
        outs += llm.llm_engine.step()
    (out,) = (one for one in outs if one.finished)
    before, _ = truth(models[0])[0].points(list(out.prompt_token_ids))
    found = out.outputs[0].routed_experts
    assert len(found) == LENGTHS[0] + 7
    for layer in range(LAYERS):
        logits = out.activations["router_logits", layer]
        assert rel_err(logits[: LENGTHS[0]], before["router_logits", layer]) <= BOUND
        chosen = logits.topk(found.shape[-1]).indices.sort(-1).values
        assert torch.equal(chosen, torch.from_numpy(found[:, layer].astype(np.int64)).sort(-1).values)
    del outs, out
