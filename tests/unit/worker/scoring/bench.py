"""A worker's runtime around blocks that work on each row alone, and requests with probes for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.config.settings import Settings
from vllm_weir.schema import resolved_probes as rp
from vllm_weir.schema.engine_spec import EngineRequest, EngineSpec
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import AFFINE, BLEND, CONST, NORM, Instruction, ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.schema.vectors import digest_of
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.runtime import WorkerRuntime

LAYERS, D, TOKENS = 4, 8, 64
ENDPOINT = str(messages.ReaderEndpoint("inproc://rows", "inproc://vectors", "", "reader"))
SELECTORS = ["all", "prompt", "generated", "sampled", "last_prompt", "::2", "1:", [0, 2, 3], {"token_ids": [1, 2]}]


class Block(torch.nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x * (0.7 + 0.1 * self.layer) + 0.05 * self.layer


def blocks():
    return [lambda h, k=k: h * (0.7 + 0.1 * k) + 0.05 * k for k in range(LAYERS)]


@dataclass
class Asked:
    """What a request asks: see `EngineSpec`; `vectors` are float32 by digest."""

    moves: tuple
    probes: tuple
    gates: tuple
    vectors: dict
    dose: bool = False

    @property
    def spec(self):
        return EngineSpec(ResolvedSpec(()), self.moves, self.probes, self.gates, self.dose)

    @property
    def layout(self):
        return self.spec.layout


class Draw:
    """Random requests."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.vectors: dict[str, np.ndarray] = {}

    def vector(self, width=D):
        row = (self.random.standard_normal(width) / width**0.5).astype(np.float32)
        digest = digest_of(row)
        self.vectors[digest] = row
        return digest

    def number(self):
        return float(np.float32(self.random.normal()))

    def choice(self, *options):
        return options[int(self.random.integers(len(options)))]

    def place(self):
        layer = int(self.random.integers(LAYERS))
        return self.choice(("resid_post", layer), ("resid_pre", layer + 1 if layer < LAYERS - 1 else layer))

    def probe(self, name, tokens=True):
        hook, layer = self.place()
        positions = Positions.parse(SELECTORS[int(self.random.integers(len(SELECTORS) - (not tokens)))])
        kind, k = self.choice(rp.LINEAR, rp.MLP, rp.ATTENTION), int(self.random.integers(1, 4))
        units, heads = int(self.random.integers(1, 5)), int(self.random.integers(1, 3))
        count = {rp.LINEAR: k, rp.MLP: units, rp.ATTENTION: heads * (1 + k)}[kind]
        start, stop = self.choice((0, 0), (2, 6)) if kind == rp.LINEAR else (0, 0)
        smoothing = int(self.random.integers(4))
        parameter = {1: 0.25, rp.MEAN: float(self.random.integers(1, 5))}.get(smoothing, 0.0)
        return rp.ResolvedProbe(
            name, hook, layer, positions, kind, k,
            rows=tuple(self.vector((stop - start) or D) for _ in range(count)),
            offsets=tuple(self.number() for _ in range(count)),
            start=start,
            stop=stop,
            hidden=int(self.random.integers(4)),
            out_rows=tuple(self.vector(units) for _ in range(k)) if kind == rp.MLP else (),
            out_offsets=tuple(self.number() for _ in range(k)) if kind != rp.LINEAR else (),
            heads=heads if kind == rp.ATTENTION else 0,
            activation=int(self.random.integers(3)),
            smoothing=smoothing,
            parameter=parameter,
            before=bool(self.random.random() < 0.3),
            threshold=self.number() if self.random.random() < 0.2 else None,
        )  # fmt: skip

    def gate(self, probes):
        at = int(self.random.integers(len(probes)))
        latch = bool(self.random.random() < 0.3)
        return rp.ResolvedGate(
            at, int(self.random.integers(probes[at].outputs)), self.number() / 2, bool(self.random.random() < 0.5),
            latch, int(self.random.integers(2)), 0.0 if latch else self.choice(0.0, 3.0),
        )  # fmt: skip

    def move(self, probes, gates, layout):
        g = int(self.random.integers(-1, len(gates))) if gates else -1
        cell, hook, layer = 0, *self.place()
        if g >= 0:
            probe = probes[gates[g].probe]
            after = probe.layer + (probe.hook == "resid_post")
            if after >= LAYERS:
                g = -1
            elif self.random.random() < 0.4 and (probe.before or probe.hook == "resid_post"):
                # At the tap that the probe reads, where it reads before that.
                cell, stays = layout.factors[g] + 1, probe.before and self.random.random() < 0.7
                hook, layer = (probe.hook, probe.layer) if stays else ("resid_pre", after)
            else:
                hook, layer, cell = "resid_post", int(self.random.integers(after, LAYERS)), layout.factors[g] + 1
        kinds = [self.choice(CONST, NORM, BLEND, AFFINE) for _ in range(int(self.random.integers(1, 3)))]
        instructions = tuple(
            Instruction(
                kind, self.vector(), self.vector() if kind == AFFINE else "", self.number(), self.number(), cell=cell
            )
            for kind in kinds
        )
        positions = Positions.parse(self.choice(*SELECTORS))
        return ResolvedIntervention(hook, (layer,), positions, 0, instructions)

    def request(self, tokens=True):
        probes = tuple(self.probe(f"p{k}", tokens) for k in range(int(self.random.integers(1, 4))))
        gates = tuple(self.gate(probes) for _ in range(int(self.random.integers(0, 4))))
        layout = rp.CellLayout.of(probes, gates)
        moves = tuple(self.move(probes, gates, layout) for _ in range(int(self.random.integers(0, 4))))
        return Asked(moves, probes, gates, self.vectors)


@dataclass
class Got:
    """What a request's reader has been told, and the rows that left the model."""

    rows: dict = field(default_factory=dict)
    cells: dict = field(default_factory=dict)
    failures: list = field(default_factory=list)


class Bench:
    """Runs steps of a runtime; `got` is by request."""

    def __init__(self, dtype=torch.float32, controllers=None, **sizes) -> None:
        self.model = torch.nn.Sequential(*(Block(k) for k in range(LAYERS)))
        sites = SiteMap(
            LAYERS, {Site("resid_post", k): Anchor(str(k), "after", TensorKey("out", -1)) for k in range(LAYERS)}
        )
        info = ModelInfo(D, dtype, torch.device("cpu"), TOKENS)
        self.runtime = WorkerRuntime(self.model, info, Settings.load(sizes), sites, None, controllers or {})
        self.runtime.parts.notifier.send = self._told
        self.runtime.parts.notifier.fail = lambda _endpoint, request_id, reason: self.got[request_id].failures.append(
            reason
        )
        self.got: dict[str, Got] = {}
        self._series: dict[int, tuple[str, int]] = {}
        self._new: list = []
        self._finished: list[str] = []

    def join(self, request_id, asked, prompt_ids, **fields):
        carried = {digest: row.tobytes() for digest, row in asked.vectors.items()}
        engine_request = EngineRequest(asked.spec.wire, ENDPOINT, vectors=carried, core_refusal="", **fields)
        self._new.append((request_id, engine_request, len(prompt_ids), prompt_ids, 0))
        self.got[request_id] = Got()

    def leave(self, request_id):
        self._finished.append(request_id)

    def step(self, batch, token_ids, resumed=()):
        """Run one step; `batch`: request -> (first position, rows [n, d])."""
        names = list(batch)
        starts, counts = [batch[n][0] for n in names], [len(batch[n][1]) for n in names]
        self.runtime.requests.follow(self._new, self._finished, resumed)
        self._new, self._finished = [], []
        self.runtime.begin_step((names, starts))
        ids = torch.tensor([token_ids[n][s + k] for n, s, c in zip(names, starts, counts) for k in range(c)])
        self.runtime.steps.plan_step(names, counts, starts, ids)
        with torch.inference_mode():
            out = self.model(torch.cat([batch[n][1] for n in names]))
        self.runtime.steps.end_step()
        for name, start, rows in zip(names, starts, out.split(counts)):
            self.got[name].rows |= {start + k: row for k, row in enumerate(rows)}
        return out

    def _told(self, notice):
        for update in notice.layout_updates.values():
            self._series |= {one.series: (one.request_id, one.reported) for one in update.series}
        for failures in notice.failures.values():
            for request_id, reason in failures.items():
                self.got[request_id].failures.append(reason)
        values = notice.scores(None)
        for endpoint, scored in notice.scored.items():
            at = 0
            for series, position, count in scored.tolist():
                request_id, reported = self._series[series]
                block = values[endpoint][at : at + count * reported].reshape(count, reported)
                at += count * reported
                self.got[request_id].cells |= {position + k: row for k, row in enumerate(block)}
            assert at == len(values[endpoint])

    def close(self):
        self.runtime.close()
