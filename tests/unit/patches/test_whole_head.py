"""The unembedding in whole, of two ranks that this process plays, and of a stage that has none."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_weir.patches.model import whole_head
from vllm_weir.patches.model.lens_ranks import _packed, _unpacked
from vllm_weir.patches.model.whole_head import NOT_HERE, Head, HeadForm, WholeHead

WIDTH, TOKENS, PADDED = 100, 21, 24
CPU = torch.device("cpu")
WEIGHT = torch.randn(PADDED, WIDTH, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(PADDED, generator=torch.Generator().manual_seed(2))


class Processor(nn.Module):
    """As vLLM's `LogitsProcessor`: what it does to products is the model's own matter."""

    org_vocab_size, head_dtype, soft_cap = TOKENS, None, 3.0

    def _get_logits(self, hidden_states, lm_head, embedding_bias):
        raise AssertionError("this rank has a part of the weights alone")

    def forward(self, lm_head, hidden_states, embedding_bias=None):
        logits = self._get_logits(hidden_states, lm_head, embedding_bias)
        return torch.tanh(logits / self.soft_cap) * self.soft_cap


def model():
    found = nn.Module()
    found.processor = Processor()
    found.compute_logits = lambda rows: found.processor(None, rows)
    return found


class Group:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.parts, self.barrier = [None] * size, threading.Barrier(size)

    def gather(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = part
        self.barrier.wait(20)
        whole = torch.cat(self.parts, -1)
        self.barrier.wait(20)
        return whole


def heads(bias: bool) -> list[WholeHead]:
    """Two ranks, each with half of the tokens."""
    group, found = Group(2), []
    for rank in range(2):
        half = slice(rank * PADDED // 2, (rank + 1) * PADDED // 2)
        method = SimpleNamespace(apply=lambda module, rows, _bias: rows @ module.weight.T)
        module = SimpleNamespace(weight=WEIGHT[half], quant_method=method, embedding_dim=WIDTH)
        head = Head(module, BIAS[half] if bias else None, Processor())
        form = HeadForm.of(head, torch.float32, CPU, 2)
        assert form == HeadForm(WIDTH, PADDED, torch.float32, torch.float32, bias)
        found.append(WholeHead(model(), form, CPU, head, lambda part, rank=rank: group.gather(rank, part), None))
    return found


def on_both(heads, call):
    threads = [threading.Thread(target=call, args=(one,)) for one in heads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_both_ranks_are_the_whole_model_s(bias):
    both, rows = heads(bias), torch.randn(5, WIDTH)
    on_both(both, lambda one: one.follow(["r"], []))
    products = (rows @ WEIGHT.T + (BIAS if bias else 0))[:, :TOKENS]
    expected = torch.tanh(products / 3) * 3
    for one in both:
        with one.in_place():
            got = one._model.compute_logits(rows)
        assert not one.lacking and (got - expected).abs().max() <= 1e-5
        with pytest.raises(AssertionError, match="a part of the weights alone"):
            one._model.compute_logits(rows)


def test_it_is_there_from_the_first_request_to_the_last():
    both = heads(False)
    on_both(both, lambda one: one.follow([], ["x"]))
    assert [one.lacking for one in both] == [NOT_HERE] * 2
    on_both(both, lambda one: one.follow(["a"], []))
    size = both[0].nbytes
    assert size == 4 * WIDTH * PADDED
    weight = both[0]._weight
    for one in both:
        one.follow(["b"], ["a"])  # no rank waits for another: it is there already
        one.follow(["b"], [])  # as after a preemption
    assert both[0]._weight is weight
    for one in both:
        one.follow([], ["b"])
        assert (one.nbytes, one.lacking) == (0, NOT_HERE)


def test_new_weights_are_fetched_while_requests_are_live():
    """Requests of a trainer overlap: the first one's unembedding would be that of all that follow."""
    both = heads(False)
    on_both(both, lambda one: one.follow(["a"], []))
    for one in both:
        one._head.module.weight = 2 * one._head.module.weight
        one.renew()
    on_both(both, lambda one: one.follow(["b"], ["a"]))
    weight = both[0]._weight
    assert all(torch.equal(one._weight, 2 * WEIGHT.T) for one in both)
    for one in both:
        one.follow([], [])
        assert one._weight is not None
    assert both[0]._weight is weight
    for one in both:
        one.renew()  # nobody uses it: there is nothing to wait for
        one.follow([], ["b"])


def test_a_rank_without_room_still_gives_its_part(monkeypatch):
    both, empty = heads(False), torch.empty

    def full(*args, **more):
        if threading.current_thread().name == "full":
            raise torch.OutOfMemoryError("full")
        return empty(*args, **more)

    monkeypatch.setattr(whole_head.torch, "empty", full)

    def fetch(one):
        threading.current_thread().name = "full" if one is both[1] else "other"
        one.follow(["r"], [])

    on_both(both, fetch)
    assert not both[0].lacking and torch.equal(both[0]._weight, WEIGHT.T)
    assert f"no room for the {4 * WIDTH * PADDED} bytes" in both[1].lacking


def test_rows_of_chosen_tokens():
    both, found = heads(True), []
    on_both(both, lambda one: found.append(one.columns_of([20, 3])))
    assert len(found) == 2 and all(torch.equal(one, WEIGHT[[20, 3]]) for one in found)


def test_a_stage_without_an_unembedding_gets_that_of_the_last():
    """With what has changed since in the modules before it, of which it has copies."""
    form, sent = HeadForm(WIDTH, PADDED, torch.float32, torch.float32, False), []
    norm, copied = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    method = SimpleNamespace(apply=lambda module, rows, _bias: rows @ WEIGHT.T)
    head = Head(SimpleNamespace(quant_method=method), None, Processor())

    def send(tensor):
        sent.append(tensor.clone())

    last = WholeHead(model(), form, CPU, head, lambda part: part, send, [norm.weight.data])
    first = WholeHead(model(), form, CPU, None, lambda _part: pytest.fail("it has no part"),
                      lambda tensor: tensor.copy_(sent.pop(0)), [copied.weight.data])  # fmt: skip
    nn.init.normal_(norm.weight)
    last.follow(["r"], [])
    first.follow(["r"], [])
    assert torch.equal(first._weight, WEIGHT.T) and not sent
    assert torch.equal(copied.weight, norm.weight)


class Compiled(nn.Module):
    """As vLLM's modules with kernels, which keep the method that they have chosen."""

    def __init__(self):
        super().__init__()
        self.weight, self._forward_method = nn.Parameter(torch.ones(3)), self.forward_native

    def forward_native(self, rows):
        return self.weight * rows


def test_modules_travel_without_the_method_that_they_have_chosen():
    given = Compiled()
    given.weight.data.normal_()
    (taken,) = _unpacked(_packed([given]), CPU)
    assert torch.equal(taken.weight, given.weight) and taken.weight is not given.weight
    assert taken._forward_method.__self__ is taken
    assert given._forward_method.__self__ is given
