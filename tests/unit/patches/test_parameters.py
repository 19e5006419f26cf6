"""How vLLM's modules hold weights, and how ranks agree to put one together."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.support.machine import module, needs
from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.patches.model import parameters

pytestmark = needs(module("vllm"))


def made(kind, loader="own", **more):
    """A module of vLLM's, without what its constructor needs, and its weight."""
    one = object.__new__(kind)
    torch.nn.Module.__init__(one)
    for name, value in more.items():
        setattr(one, name, value)
    weight = torch.nn.Parameter(torch.zeros(12, 4))
    if loader is not None:
        weight.weight_loader = kind.weight_loader.__get__(one) if loader == "own" else loader
    one.weight = weight
    return one


def layout(one, own="weight", ranks=4):
    return parameters._layout(one, own, one.weight, ranks)


def test_layouts():
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    qkv = made(linear.QKVParallelLinear, output_partition_sizes=[8, 2, 2], num_kv_head_replicas=2)
    assert layout(qkv) == ([8, 2, 2], [1, 2, 2], 0) and layout(qkv, ranks=1) == ([8, 2, 2], [1, 1, 1], None)
    assert layout(made(linear.MergedColumnParallelLinear, output_partition_sizes=[6, 6])) == ([6, 6], [1, 1], 0)
    assert layout(made(linear.ColumnParallelLinear, output_partition_sizes=[12])) == ([12], [1], 0)
    row = made(linear.RowParallelLinear, output_partition_sizes=[12])
    assert layout(row) == ([12], [1], 1) and layout(row, "bias") == ([12], [1], None)
    assert layout(made(linear.RowParallelLinear, disable_tp=True)) == ([12], [1], None)
    assert layout(made(linear.ReplicatedLinear)) == layout(made(torch.nn.Linear, None)) == ([12], [1], None)
    embedding, head = made(VocabParallelEmbedding), made(ParallelLMHead)
    assert layout(embedding) == layout(head) == ([12], [1], 0)
    head.weight = embedding.weight  # tied
    assert layout(head) == ([12], [1], 0)


def test_what_is_not_known_is_refused():
    from vllm.model_executor.layers import linear

    class Own(linear.ColumnParallelLinear):
        pass

    for one in (made(Own), made(linear.ColumnParallelLinear, lambda *_: None), made(torch.nn.Linear, lambda *_: None)):
        with refused("", "is not known"):
            layout(one)


def test_names():
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "one": ["one"]}
    model.attn = torch.nn.Module()
    model.attn.qkv_proj, model.attn.o_proj = torch.nn.Linear(2, 6), torch.nn.Linear(2, 2, bias=False)
    model.norm = torch.nn.Module()
    model.norm.register_buffer("scale", torch.ones(2))
    place = lambda name: parameters._place(model, 1, name)
    qkv = model.attn.qkv_proj
    assert place("attn.k_proj.weight") == (qkv, "weight", 1) and place("attn.v_proj.bias") == (qkv, "bias", 2)
    assert place("attn.qkv_proj.weight") == (qkv, "weight", None) and place("norm.scale") == (model.norm, "scale", None)
    for name in ("attn.o_proj.bias", "attn", "k_proj", "weight", "", "..", "attn.k_proj.q_proj.weight", 3):
        with refused("", "the model has no weight"):
            place(name)
    with refused("", "this stage of the model has no weight 'attn.q_porj.weight'; did you mean attn.q_proj.weight"):
        parameters._place(model, 2, "attn.q_porj.weight")


def test_ranks_agree(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(parameters, "PATIENCE", datetime.timedelta(seconds=0.3))
    ranks = [parameters._Agreement(SimpleNamespace(ranks=[4, 5], rank_in_group=k, world_size=2)) for k in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for occasion in ("one", "one", "two"):
            said = list(pool.map(lambda k, at=occasion: ranks[k](at, f"{at}{k}"), range(2)))
            assert said == [[f"{occasion}0", f"{occasion}1"]] * 2
        assert store.num_keys() <= 2 * 3, "what all have read is deleted"
        with pytest.raises(WeirError, match="not all tensor-parallel ranks"):
            ranks[0]("alone", "a")
        with pytest.raises(WeirError, match="not all tensor-parallel ranks"):  # it comes late, and must not go on alone
            ranks[1]("alone", "b")
        assert list(pool.map(lambda k: ranks[k]("three", str(k)), range(2))) == [["0", "1"]] * 2
