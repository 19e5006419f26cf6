"""The proof: what was found is held against the identities, and against what writing there must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from vllm_weir.spec.hooks import BLOCK_HOOKS, INNER_HOOKS, Site
from vllm_weir.worker.anchors import Anchor
from vllm_weir.worker.noise import enter_noise, leave_noise, noise
from vllm_weir.worker.resolve import Matcher, Points, Ports
from vllm_weir.worker.trace import Call, Recorder, Scene, Trace

if TYPE_CHECKING:
    from vllm_weir.worker.sites import SiteMap

ROUNDINGS = 4
"""Units of rounding that a sum of three tensors may be off."""


class Proof:
    """Turns what was found into verdicts.

    Args:
        scene, run, matcher, ports: as in `sites`.
        found: points by block.
        noisy: the pass in which a block's points were found, by block.
        own: the pass with the model's own weights.
        sites: takes the verdicts.
        outer: a pass with noise, for what lies outside the blocks.
    """

    def __init__(
        self,
        scene: Scene,
        run: Callable[[], None],
        matcher: Matcher,
        ports: Ports,
        found: Mapping[int, Points],
        noisy: Mapping[int, Trace],
        own: Trace,
        sites: SiteMap,
        outer: Trace,
    ) -> None:
        self._scene, self._run, self._m, self._ports = scene, run, matcher, ports
        self._found, self._noisy, self._own, self._sites, self._outer = found, noisy, own, sites, outer
        self._shared = scene.shared()

    def conclude(self, cores: set[str]) -> None:
        """Fill the map."""
        self._resolve_stream()
        for block, points in self._found.items():
            for hook in INNER_HOOKS:
                anchor = points.anchors.get(hook)
                if anchor is None:
                    self._sites.refuse((hook,), (block,), points.refused.get(hook, "it was not found"))
                elif anchor.module in self._shared:
                    self._sites.refuse((hook,), (block,), f"{anchor.module} is shared by several blocks")
                else:
                    self._sites.anchors[Site(hook, block)] = anchor
        self._resolve_outside()
        self._check_own()
        self._check_writes(cores)
        self._hand_over()

    def _hand_over(self) -> None:
        """Between two pipeline stages the earlier one, where the stream leaves its last block, serves both names."""
        for block in self._scene.blocks:
            following = Site("resid_pre", block + 1)
            if block and block - 1 not in self._scene.blocks:
                self._sites.anchors.pop(Site("resid_pre", block), None)
                self._sites.refused.pop(Site("resid_pre", block), None)
            if block + 1 in self._scene.blocks or block + 1 == self._scene.num_layers:
                continue
            post = Site("resid_post", block)
            if post in self._sites.anchors:
                self._sites.anchors[following] = self._sites.anchors[post]
            else:
                self._sites.refused[following] = self._sites.refused[post]

    def _resolve_stream(self) -> None:
        ports, stack = self._ports, self._scene.stack
        for block, points in self._found.items():
            if ports.residual_in is not None and not points.proven:
                why = "the block hands on two tensors, and it could not be shown that the stream is their sum: " + next(
                    iter(points.refused.values()), "nothing was found"
                )
                self._sites.refuse(BLOCK_HOOKS, (block,), why)
                continue
            call = self._own.blocks[block][0]
            at, path = ports.of(call), f"{stack}.{block}"
            after = at.residual_out if at.residual_out in call.out else None
            before = at.residual_in if at.residual_in in call.args else None
            self._sites.anchors[Site("resid_post", block)] = Anchor(path, "after", at.hidden_out, after)
            self._sites.anchors[Site("resid_pre", block)] = Anchor(path, "before", at.hidden_in, before)
        for block in self._scene.blocks:
            if block - 1 not in self._scene.blocks:
                continue
            left = self._value(self._own, block - 1, self._sites.anchors.get(Site("resid_post", block - 1)))
            given = self._value(self._own, block, self._sites.anchors.get(Site("resid_pre", block)))
            if left is None or given is None or not self._close(left, given, left.abs()):
                why = f"between block {block - 1} and block {block} the model changes the stream"
                self._sites.refuse(("resid_pre",), (block,), why)

    def _resolve_outside(self) -> None:
        """`embed` and `final_norm`."""
        scene, sites, first, last = self._scene, self._sites, 0, self._scene.num_layers - 1
        if first in scene.blocks:
            calls = [c for c in self._outer.outside if scene.is_embedding(scene.modules[c.path]) and c.out]
            into = sites.anchors.get(Site("resid_pre", 0))
            if into is None or not calls:
                sites.refuse(("embed",), (0,), "no token embedding runs together with the blocks")
            else:
                # Positions may be added to it, or a norm applied; a mere factor is part of the embedding. Some models
                # keep a copy of it beside the stream, so it is tapped where it comes from.
                factor = self._m.factor(*self._embedded(calls[0], into)) or 1.0
                sites.anchors[Site("embed", 0)] = Anchor(calls[0].path, "after", next(iter(calls[0].out)), None, factor)
        if last in scene.blocks:
            self._resolve_final_norm(last)

    def _embedded(self, call: Call, into: Anchor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the embedding gave, and what entered block 0, in the pass in which blocks are entered by the stream."""
        same = next(c for c in self._own.outside if c.path == call.path)
        value = self._value(self._own, 0, into)
        assert value is not None
        return next(iter(same.out.values())), value

    def _resolve_final_norm(self, last: int) -> None:
        site = Site("final_norm", 0)
        stream = self._value(self._outer, last, self._sites.anchors.get(Site("resid_post", last)))
        end = self._outer.blocks[last][0].end
        root = self._outer.root
        for call in self._outer.outside:
            given = list(call.args.values())
            sums = [*given, given[0] + given[1]] if len(given) == 2 and given[0].shape == given[1].shape else given
            if call.start < end or stream is None or not any(self._m.same(g, stream) for g in sums) or not call.out:
                continue
            key, out = next(iter(call.out.items()))
            if root is None or not self._m.same(out, root):
                why = f"the model changes what {call.path} returns before it hands it on"
                self._sites.refuse(("final_norm",), (0,), why)
            else:
                self._sites.anchors[site] = Anchor(call.path, "after", key)
            return
        self._sites.refuse(("final_norm",), (0,), "no module was found that is given what leaves the last block")

    def _check_own(self) -> None:
        """The identities on the model's own weights."""
        for block, points in self._found.items():
            sites, kind = self._sites, points.kind
            value = {h: self._value(self._own, block, sites.anchors.get(Site(h, block))) for h in BLOCK_HOOKS}
            checks: dict[str, list[tuple[str, tuple[str, ...]]]] = {
                "sequential": [("resid_mid", ("resid_pre", "attn_out")), ("resid_post", ("resid_mid", "mlp_out"))],
                "two mixers": [("resid_post", ("resid_mid", "mlp_out"))],
                "parallel": [("resid_post", ("resid_pre", "attn_out", "mlp_out"))],
                "attention only": [("resid_post", ("resid_pre", "attn_out"))],
                "MLP only": [("resid_post", ("resid_pre", "mlp_out"))],
            }
            if kind == "described":
                checks[kind] = checks["sequential" if value["resid_mid"] is not None else "parallel"]
                if value["resid_mid"] is None and value["mlp_out"] is None:
                    checks[kind] = checks["attention only"]
            for whole, parts in checks.get(kind, []):
                left, right = value[whole], [t for p in parts if (t := value[p]) is not None]
                if left is None or len(right) < len(parts):
                    # What was found by arithmetic holds already; a description has nothing else to show for itself.
                    if kind == "described":
                        missing = ", ".join(h for h in (whole, *parts) if value[h] is None)
                        why = f"nothing proves its description without {missing}"
                        sites.refuse([h for h in (whole, *parts) if h in INNER_HOOKS], (block,), why)
                    continue
                total = torch.stack(right).sum(0)
                if not self._close(total, left, torch.stack([left, *right]).abs().sum(0)):
                    error = float((total - left).abs().max() / left.abs().max())
                    why = f"with the model's own weights {whole} is not {' + '.join(parts)} (off by {error:.1e})"
                    sites.refuse([h for h in (whole, *parts) if h in INNER_HOOKS], (block,), why)

    def _check_writes(self, cores: set[str]) -> None:
        """Add something everywhere and see that it arrives."""
        sites = self._sites
        for mode in ("children", "leaves"):
            blocks = [b for b, t in self._noisy.items() if (t is self._outer) == (mode == "children")]
            outer = mode == "children"
            writes: dict[Anchor, list[torch.Tensor]] = {}
            for site, anchor in sites.anchors.items():
                inside = site.hook in ("resid_pre", *INNER_HOOKS) and site.layer in blocks
                if inside or (outer and site.hook in ("embed", "final_norm")):
                    writes.setdefault(anchor, []).append(self._what(site))
            if not writes:
                continue
            added = {anchor: torch.stack(parts).sum(0) for anchor, parts in writes.items()}
            enter, leave = enter_noise(self._ports), leave_noise(self._scene, mode, cores)
            recorder = Recorder(self._scene, enter, leave, added)
            with recorder.recording() as trace:
                self._run()
            for block in blocks:
                self._check_block(block, trace)
            if outer:
                self._check_final_norm(trace)

    def _check_block(self, block: int, trace: Trace) -> None:
        points, before = self._found[block], self._noisy[block]
        at = {h: self._sites.anchors.get(Site(h, block)) for h in BLOCK_HOOKS}

        def moved(hook: str) -> torch.Tensor | None:
            """A point's value with what was added there."""
            anchor = at[hook]
            if anchor is None:
                return None
            if anchor.when == "after":
                return self._value(trace, block, anchor)
            value = self._value(before, block, anchor)
            return None if value is None else value + self._what(Site(hook, block))[: len(value)]

        pre, a, o = self._value(trace, block, at["resid_pre"]), moved("attn_out"), moved("mlp_out")
        post = self._value(trace, block, at["resid_post"])
        if pre is None or post is None:
            return
        stream = pre
        if at["resid_mid"] is not None:
            mid = self._value(trace, block, at["resid_mid"])
            if mid is None or (a is None and points.kind != "two mixers"):
                return
            stream = mid if a is None else pre + a + self._what(Site("resid_mid", block))[: len(pre)]
            if not self._m.same(mid, stream):
                why = "what is added there does not arrive in the stream before the MLP"
                self._sites.refuse(("attn_out", "resid_mid"), (block,), why)
                return
        elif a is not None:
            stream = pre + a
        if o is not None:
            stream = stream + o
        why = ""
        if points.kind in ("sequential", "two mixers") and o is None:
            # What the MLP adds is the same noise in both passes, so what was added before it is all that differs.
            was = self._value(before, block, at["resid_mid"]), self._value(before, block, at["resid_post"])
            if was[0] is not None and was[1] is not None and self._m.factor(stream - was[0], post - was[1]) is None:
                why = "what is added before the MLP does not arrive in the stream that leaves the block"
        elif (a is not None or o is not None) and not self._m.same(post, stream):
            why = "what is added there does not arrive in the stream that leaves the block"
        if why:
            self._sites.refuse(INNER_HOOKS, (block,), why)

    def _check_final_norm(self, trace: Trace) -> None:
        site = Site("final_norm", 0)
        anchor = self._sites.anchors.get(site)
        if anchor is None:
            return
        value = next(c for c in reversed(trace.outside) if c.path == anchor.module).left[anchor.hidden]
        if trace.root is None or not self._m.same(trace.root, value):
            self._sites.refuse(("final_norm",), (0,), "what is added there does not arrive in what the model returns")

    def _value(self, trace: Trace, block: int, anchor: Anchor | None) -> torch.Tensor | None:
        """A point's value in a pass."""
        if anchor is None:
            return None
        call = next((c for c in trace.blocks[block] if c.path == anchor.module), None)
        if call is None:
            return None
        tensors = call.left if anchor.when == "after" else call.args
        hidden = tensors.get(anchor.hidden)
        if hidden is None:
            return None
        residual = tensors.get(anchor.residual) if anchor.residual is not None else None
        return hidden * anchor.scale if residual is None else hidden + residual

    def _what(self, site: Site) -> torch.Tensor:
        """What is added at a site to see where it arrives."""
        width = self._scene.width
        call = next(c for calls in self._own.blocks for c in calls[:1])
        like = call.args[self._ports.of(call).hidden_in]
        return noise(f"write {site}", like.new_zeros(len(like), width))

    def _close(self, a: torch.Tensor, b: torch.Tensor, room: torch.Tensor) -> bool:
        """Whether two sums agree up to their rounding; `room`: magnitude of what was summed."""
        return a.shape == b.shape and bool(((a - b).abs() <= ROUNDINGS * self._m.eps * room + 1e-30).all())
