"""Rows that stay on a worker: filed as the planner sends them, fitted in the order of the prompts, and forgotten."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.experiments.fit.engine import FIT
from vllm_weir.fitting.layer import FitTask, LayerFit, fit_layer
from vllm_weir.fitting.methods import METHODS, MethodOptions
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.taps import column_of
from vllm_weir.worker import kept_rows
from vllm_weir.worker.kept_rows import KeptRows
from vllm_weir.worker.planning.columns import ARRIVAL, as_integers

D, PROMPTS = 4, 6
SITES = [Site("resid_post", 0), Site("resid_post", 2)]
COLUMNS = [column_of(site, False) for site in SITES]


class Worker:
    """Kept rows of a worker that sends the sites, and what its notifier hands over."""

    def __init__(self, dtype=torch.bfloat16, shapes=None, sites=SITES, settles=True):
        columns = {column_of(site, False) for site in sites}
        self.dtype = dtype
        self.kept = KeptRows(columns, shapes or {}, D, dtype, torch.device("cpu"))
        self.settle = lambda seconds: settles
        self.endpoint = ""

    def begin(self, key="k", sites=SITES, prompts=PROMPTS):
        answer = self.kept.begin(key, [list(site) for site in sites], prompts, False)
        self.endpoint = self.kept.endpoint(key)
        return answer

    def send(self, number, request, rows, columns=COLUMNS, kind="rows", **more):
        """Send rows [columns, D] of a request in a row sequence, which is closed."""
        width = {"values": D, "width": -(-len(columns) * 4 // self.dtype.itemsize)} if kind == "fold" else {}
        opened = messages.SequenceOpened(number, request, list(columns), kind, **width)
        layout = messages.LayoutUpdate(opened=[opened], closed=[number])
        arrivals = as_integers(np.array([(number, 0, 0, len(rows) // len(columns), 1)], ARRIVAL))
        payload = rows.view(torch.uint8).numpy().tobytes()
        payload += bytes(len(rows) // len(columns) * opened.rank_bytes(D * self.dtype.itemsize) - len(payload))
        self.kept.receive(self.endpoint, layout, arrivals, payload, more.get("failures", {}))


def values(seed=0, dtype=torch.bfloat16, width=D):
    """Rows [prompts, sites, width]."""
    return torch.randn(PROMPTS, len(SITES), width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(rows, site, method="diff"):
    task = FitTask(method, PROMPTS // 2, PROMPTS // 2, 3)
    exact = rows[:, SITES.index(site)].double()
    return fit_layer(exact[: PROMPTS // 2], exact[PROMPTS // 2 :], METHODS[method], task.parts, MethodOptions())


def fitted(worker, site, names, method="diff"):
    answer = apply(worker, site, names, FitTask(method, PROMPTS // 2, PROMPTS // 2, 3))
    return LayerFit.from_wire(answer["value"]) if "value" in answer else answer


def apply(worker, site, names, task):
    return worker.kept.apply(worker.settle, "k", list(site), names, FIT, [task.to_wire()])


@pytest.mark.parametrize("kind", ["rows", "fold"])
@pytest.mark.parametrize("method", ["diff", "pca", "logistic"])
def test_fits_are_those_of_the_rows_in_the_order_of_the_prompts(kind, method):
    worker, rows = Worker(), values(dtype=torch.float32 if kind == "fold" else torch.bfloat16)
    assert worker.begin() == {"sites": [list(site) for site in SITES]}
    names = [f"r{k}" for k in range(PROMPTS)]
    for number, k in enumerate((3, 1, 5, 0, 4, 2)):
        worker.send(number, names[k], rows[k], kind=kind)
    for site in SITES:
        found, wanted = fitted(worker, site, names, method), expected(rows, site, method)
        assert (
            found.direction.vector == wanted.direction.vector
        ).all() and found.direction.bias == wanted.direction.bias
        assert (found.held.weight == wanted.held.weight).all() and found.doses == wanted.doses
        assert (found.auc, found.norm) == (wanted.auc, wanted.norm)
    assert worker.kept.nbytes == rows.nbytes
    worker.kept.end("k")
    assert worker.kept.nbytes == 0 and fitted(worker, SITES[0], names) == {}
    with pytest.raises(WeirError, match="keep no rows under this key"):
        worker.kept.endpoint("k")


def test_rows_wider_than_the_ring_are_joined():
    """Six values lie in two rows of the ring; what follows them is undefined."""
    sites = [Site("mlp_post", 1)]
    worker = Worker(torch.float32, {sites[0]: (6,)}, sites)
    worker.begin(sites=sites, prompts=2)
    column = column_of(sites[0], False)
    for k in range(2):
        rows = torch.full((2, D), torch.nan)
        rows.view(-1)[:6] = torch.arange(6.0) * (k + 1)
        worker.send(k, f"r{k}", rows, [column, column])
    answer = apply(worker, sites[0], ["r1", "r0"], FitTask("diff", 1, 1))
    assert LayerFit.from_wire(answer["value"]).direction.vector.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_worker_keeps_the_sites_that_it_sends():
    worker = Worker(sites=SITES[1:])
    assert worker.begin() == {"sites": [["resid_post", 2]]}
    assert apply(worker, SITES[0], ["a"], FitTask("diff", 1, 1)) == {}


def test_rows_computed_again_replace_the_older_ones():
    worker, rows = Worker(), values()
    worker.begin()
    names = [f"r{k}" for k in range(PROMPTS)]
    for k in range(PROMPTS):
        worker.send(k, names[k], rows[k] + 1)
        worker.send(10 + k, names[k], rows[k])
    assert (fitted(worker, SITES[0], names).direction.vector == expected(rows, SITES[0]).direction.vector).all()


def test_prompts_without_rows_are_named():
    worker, rows = Worker(), values()
    worker.begin()
    names = [f"r{k}" for k in range(PROMPTS)]
    for k in range(PROMPTS - 2):
        worker.send(k, names[k], rows[k])
    why = "prompt 4 of both lists together cannot be read"
    assert fitted(worker, SITES[0], names) == {"error": f"{why}: its rows did not arrive", "field": "positive"}
    nothing = np.empty((0, 5), np.int32)
    worker.kept.receive(worker.endpoint, messages.LayoutUpdate(), nothing, b"", {"": "the device is lost"})
    assert fitted(worker, SITES[0], names)["error"] == f"{why}: the device is lost"
    opened = messages.LayoutUpdate(opened=[messages.SequenceOpened(9, names[4], COLUMNS)])
    dropped = as_integers(np.array([(9, -1, 0, 1, 1)], ARRIVAL))
    worker.kept.receive(worker.endpoint, opened, dropped, b"", {})
    assert fitted(worker, SITES[0], names)["error"].endswith("the host buffer was full, and its rows were dropped")
    bad = rows[4].clone()
    bad[0, 0] = torch.inf
    for k in (4, 5):
        worker.send(k, names[k], bad)
    assert fitted(worker, SITES[0], names) == {
        "error": "block 0: rows hold NaN or infinite values; leave the block out", "field": "layers",
    }  # fmt: skip
    late = Worker(settles=False)
    late.begin()
    assert fitted(late, SITES[0], names)["field"] == "llm"


def test_rows_that_arrive_after_the_end_are_passed_over():
    worker = Worker()
    worker.begin()
    worker.kept.end("k")
    worker.send(0, "r0", values()[0])
    assert worker.kept.nbytes == 0


def test_more_than_there_is_memory_for_is_refused(monkeypatch):
    size = PROMPTS * len(SITES) * D * 2
    monkeypatch.setattr(kept_rows, "available_bytes", lambda: size * 2 - 1)
    worker = Worker()
    for reduced, bytes_ in ((False, size), (True, 2 * size)):
        answer = worker.kept.begin("k", [list(site) for site in SITES], PROMPTS, reduced)
        assert answer["field"] == "layers" and f"their rows take {bytes_} bytes" in answer["error"]
    with pytest.raises(WeirError):
        worker.kept.endpoint("k")
    monkeypatch.undo()
    assert kept_rows.available_bytes() > 1 << 20


def test_of_rows_that_arrive_together_the_last_counts():
    worker, rows = Worker(), values()
    worker.begin()
    names = [f"r{k}" for k in range(PROMPTS)]
    for k, name in enumerate(names):
        worker.send(k, name, torch.cat([torch.zeros_like(rows[k]), rows[k]]))
    found, wanted = fitted(worker, SITES[1], names), expected(rows, SITES[1])
    assert (found.direction.vector == wanted.direction.vector).all()
