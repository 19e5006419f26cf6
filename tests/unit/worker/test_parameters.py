"""Weights for users' functions: put together from the parts of ranks, kept while used, and never from old parts."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tests.unit.refusals import refused
from vllm_weir.worker.parameters import HeldWeight, Parameters

WHOLE = torch.arange(48 * 6.0).view(48, 6)


def held(part, sizes=None, copies=None, dim=0, live=True, **more):
    sizes = sizes or [len(part)]
    return HeldWeight(lambda: part.clone(), part, live, sizes, copies or [1] * len(sizes), dim, **more)


def columns(rank, ranks, heads, kv_heads, d_head):
    """What a rank has of q, k and v below each other: a share of q's heads, and of the others' too, at least one."""
    q, k, v = WHOLE.split([heads * d_head, kv_heads * d_head, kv_heads * d_head])
    replicas = max(1, ranks // kv_heads)
    parts = [q.chunk(ranks)[rank], *(one.chunk(ranks // replicas)[rank // replicas] for one in (k, v))]
    return torch.cat(parts), [len(part) for part in parts], [1, replicas, replicas]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "d_head"), [(1, 4, 2, 6), (2, 4, 2, 6), (4, 4, 2, 6), (4, 8, 2, 4), (2, 22, 1, 2)]
)
def test_columns_of_several_matrices(ranks, heads, kv_heads, d_head):
    own = [columns(rank, ranks, heads, kv_heads, d_head) for rank in range(ranks)]
    for rank in range(ranks):
        part, sizes, copies = own[rank]
        assert torch.equal(held(part, sizes, copies).joined([one for one, *_ in own]), WHOLE)
    bounds = [0, heads * d_head, (heads + kv_heads) * d_head, 48]
    for k in range(3):
        chosen = held(*own[0], chosen=k).joined([one for one, *_ in own])
        assert torch.equal(chosen, WHOLE[bounds[k] : bounds[k + 1]])


def test_rows_of_a_matrix_and_padded_vocabularies():
    parts = list(WHOLE.chunk(2, 1))
    assert torch.equal(held(parts[0], dim=1).joined(parts), WHOLE)
    padded = list(torch.cat([WHOLE, torch.full((16, 6), 7.0)]).chunk(4))
    assert torch.equal(held(padded[0], rows=48).joined(padded), WHOLE)
    assert held(WHOLE, rows=40).joined([WHOLE]).data_ptr() == WHOLE.data_ptr()


class Ranks:
    """Two ranks that hold halves of a weight, or all of it, each in a thread of its own."""

    def __init__(self, dim=0):
        halves = [WHOLE[:24].clone(), WHOLE[24:].clone()]
        self.parts = halves if dim == 0 else [halves[0], halves[0].clone()]
        self.said, self.gathered, self.occasions, self.together = [""] * 2, [0, 0], set(), threading.Barrier(2)
        self.both = [
            Parameters(lambda _, k=k: held(self.parts[k], dim=dim), 2, partial(self.gather, k), partial(self.agree, k))
            for k in range(2)
        ]

    def gather(self, rank, _part):
        self.gathered[rank] += 1
        return self.parts

    def agree(self, rank, occasion, said):
        self.occasions.add(occasion)
        self.said[rank] = said
        self.together.wait(60)
        found = list(self.said)
        self.together.wait(60)
        return found

    def get(self):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda one: one.get("w", "here"), self.both))


def test_what_is_put_together_is_kept_while_it_is_used_and_the_weights_are_the_same():
    ranks = Ranks()
    first, of_other = ranks.get()
    assert torch.equal(first.tensor, WHOLE) and torch.equal(of_other.tensor, WHOLE) and ranks.occasions == {"here w"}
    same = ranks.get()
    assert same[0] is first and same[1] is of_other and ranks.gathered == [1, 1]
    ranks.parts[1][3, 2] += 1  # of the other rank
    again = ranks.get()
    assert torch.equal(again[0].tensor, torch.cat(ranks.parts)) and ranks.gathered == [2, 2]
    assert torch.equal(first.tensor, WHOLE), "who holds it goes on with it"
    del first, of_other, same, again
    gc.collect()
    assert not ranks.both[0]._kept and ranks.get() and ranks.gathered == [3, 3]


def test_a_rank_that_kept_nothing_lets_all_gather():
    ranks = Ranks()
    first = ranks.get()[0]
    gc.collect()
    assert not ranks.both[1]._kept
    assert ranks.get()[0] is not first and ranks.gathered == [2, 2]


def test_what_every_rank_has_whole_is_the_model_s_own():
    ranks = Ranks(dim=None)
    assert torch.equal(ranks.get()[0].tensor, WHOLE[:24]) and ranks.gathered == [0, 0]
    ranks.parts[1][0] += 1
    with refused("", "the ranks hold different parts of w"):
        ranks.get()


def test_one_rank_gives_its_own_memory_as_it_is_now():
    part = WHOLE.clone()
    given = HeldWeight(lambda: part, part, True, [48], [1])
    parameters = Parameters(lambda _: given, agree=lambda *_: pytest.fail("nobody is there to ask"))
    found = parameters.get("w", "here")
    part += 1
    assert torch.equal(found.tensor, part) and not found.marks
