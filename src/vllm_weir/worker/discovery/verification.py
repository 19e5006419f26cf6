"""The proof: what was found is held against the identities, and against what writing there must do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from vllm_weir.schema.hooks import BLOCK_HOOKS, INNER_HOOKS, Site
from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.boundary_sites import BoundarySites, runs_again
from vllm_weir.worker.discovery.matcher import Matcher, rms
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.noise import enter_noise, leave_noise, noise
from vllm_weir.worker.discovery.recorder import Override, Recorder, Trace, terms_at, value_at
from vllm_weir.worker.discovery.resolve import BlockPoints, StreamPorts, stream_through

if TYPE_CHECKING:
    from vllm_weir.worker.discovery.site_map import SiteMap

ROUNDINGS = 4
"""Units of rounding that a sum of three tensors may be off."""


class Verification:
    """Turns what was found into verdicts.

    Args:
        tree, run, matcher, ports: as in `sites`.
        found: points by block.
        noisy: the pass in which a block's points were found, by block.
        own: the pass with the model's own weights.
        sites: takes the verdicts.
        outer: a pass with noise, for what lies outside the blocks.
        mix: what the pass with the model's own weights leaves behind instead of token mixers' results.
    """

    def __init__(
        self,
        tree: ModuleTree,
        run: Callable[[], None],
        matcher: Matcher,
        ports: StreamPorts,
        found: Mapping[int, BlockPoints],
        noisy: Mapping[int, Trace],
        own: Trace,
        sites: SiteMap,
        outer: Trace,
        mix: Override,
    ) -> None:
        self._tree, self._run, self._m, self._ports = tree, run, matcher, ports
        self._found, self._noisy, self._own, self._sites, self._outer = found, noisy, own, sites, outer
        self._mix, self._shared = mix, tree.shared()
        self._ends = BoundarySites(tree, matcher, own, outer, sites)

    def conclude(self, cores: set[str], astray: Mapping[int, str]) -> None:
        """Fill the map; `astray`: block -> why what was taken for its stream is not."""
        self._resolve_stream(astray)
        times = Counter(c.path for calls in (self._outer.outside, *self._outer.blocks) for c in calls)
        for block, points in self._found.items():
            if block in astray:
                continue
            for hook in INNER_HOOKS:
                anchor = points.anchors.get(hook)
                if anchor is None:
                    self._sites.refuse((hook,), (block,), points.refused.get(hook, "it was not found"))
                    continue
                modules = [anchor.module, *([anchor.beside.module] if anchor.beside else [])]
                if shared := self._shared & {*modules}:
                    self._sites.refuse((hook,), (block,), f"{shared.pop()} is shared by several blocks")
                elif again := [m for m in modules if times[m] > 1]:
                    # A tap there acts in each: of what it records, the last call's is left.
                    self._sites.refuse((hook,), (block,), runs_again(again[0], times[again[0]]))
                else:
                    self._sites.anchors[Site(hook, block)] = anchor
        if 0 in self._tree.blocks:
            self._ends.find_embed()
        if self._tree.num_layers - 1 in self._tree.blocks:
            self._ends.find_final_norm(self._tree.num_layers - 1)
        self._check_own()
        self._check_writes(cores)
        self._check_embed()
        self._hand_over()

    def _hand_over(self) -> None:
        """Between two pipeline stages the earlier one, where the stream leaves its last block, serves both names."""
        for block in self._tree.blocks:
            following = Site("resid_pre", block + 1)
            if block and block - 1 not in self._tree.blocks:
                self._sites.anchors.pop(Site("resid_pre", block), None)
                self._sites.refused.pop(Site("resid_pre", block), None)
            if block + 1 in self._tree.blocks or block + 1 == self._tree.num_layers:
                continue
            post = Site("resid_post", block)
            if post in self._sites.anchors:
                self._sites.anchors[following] = self._sites.anchors[post]
            else:
                self._sites.refused[following] = self._sites.refused[post]

    def _resolve_stream(self, astray: Mapping[int, str]) -> None:
        ports, stack = self._ports, self._tree.stack
        for block in self._found:
            if block in astray:
                self._sites.refuse(BLOCK_HOOKS, (block,), astray[block])
                continue
            call = self._own.blocks[block][0]
            at, path = ports.of(call), f"{stack}.{block}"
            after = at.residual_out if at.residual_out in call.behind else None
            before = at.residual_in if at.residual_in in call.args else None
            self._sites.anchors[Site("resid_post", block)] = Anchor(path, "after", at.hidden_out, after)
            self._sites.anchors[Site("resid_pre", block)] = Anchor(path, "before", at.hidden_in, before)
        for block in self._tree.blocks:
            if block - 1 not in self._tree.blocks:
                continue
            left = self._value(self._own, block - 1, self._sites.anchors.get(Site("resid_post", block - 1)))
            given = self._value(self._own, block, self._sites.anchors.get(Site("resid_pre", block)))
            if left is None or given is None or not self._close(left, given, left.abs()):
                why = f"between block {block - 1} and block {block} the model changes the stream"
                self._sites.refuse(("resid_pre",), (block,), why)

    def _check_own(self) -> None:
        """The identities on the model's own weights."""
        for block, points in self._found.items():
            sites, kind = self._sites, points.kind
            at = {h: sites.anchors.get(Site(h, block)) for h in BLOCK_HOOKS}
            value = {h: self._value(self._own, block, anchor) for h, anchor in at.items()}
            checks: dict[str, list[tuple[str, tuple[str, ...]]]] = {
                "sequential": [("resid_mid", ("resid_pre", "attn_out")), ("resid_post", ("resid_mid", "mlp_out"))],
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
                gain = points.gain if whole == "resid_post" else 1.0
                total = gain * torch.stack(right).sum(0)
                rooms = [self._room(block, anchor) for h in (whole, *parts) if (anchor := at[h]) is not None]
                if not self._close(total, left, rooms[0] + abs(gain) * torch.stack(rooms[1:]).sum(0)):
                    error = float((total - left).abs().max() / left.abs().max())
                    what = " + ".join(parts) if gain == 1 else f"{gain:.6g} x ({' + '.join(parts)})"
                    why = f"with the model's own weights {whole} is not {what} (off by {error:.1e})"
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
                if inside or (outer and site.hook == "final_norm"):
                    writes.setdefault(anchor, []).append(self._what(site))
            if not writes:
                continue
            added = {anchor: torch.stack(parts).sum(0) for anchor, parts in writes.items()}
            enter, leave = enter_noise(self._ports), leave_noise(self._tree, mode, cores)
            recorder = Recorder(self._tree, enter, leave, added, noise)
            with recorder.recording() as trace:
                self._run()
            for block in blocks:
                self._check_block(block, trace)
            if outer:
                self._ends.check_final_norm(trace)

    def _check_block(self, block: int, trace: Trace) -> None:  # noqa: C901
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

        # Also where resid_pre itself is refused: the model may change the stream before the block.
        pre, post = stream_through(trace.blocks[block][0], self._ports)
        a, o = moved("attn_out"), moved("mlp_out")
        if pre is None or post is None:
            return
        stream = pre
        if at["resid_mid"] is not None:
            mid = self._value(trace, block, at["resid_mid"])
            if mid is None:
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
        if points.kind == "sequential" and o is None:
            # What the MLP adds is the same noise in both passes, so what was added before it is all that differs.
            parts = ("resid_mid",) if at["resid_mid"] is not None else ("resid_pre", "attn_out")
            was = [self._value(before, block, at[h]) for h in (*parts, "resid_post")]
            old = [value for value in was if value is not None]
            if len(old) == len(was) and self._m.factor(stream - sum(old[:-1]), post - old[-1]) is None:
                why = "what is added before the MLP does not arrive in the stream that leaves the block"
        elif (a is not None or o is not None) and not self._m.same(post, points.gain * stream):
            why = "what is added there does not arrive in the stream that leaves the block"
        if why:
            self._sites.refuse(INNER_HOOKS, (block,), why)

    def _check_embed(self) -> None:
        """Add something to the embedding, with the model's own weights."""
        anchor, into = (self._sites.anchors.get(Site(hook, 0)) for hook in ("embed", "resid_pre"))
        stream = None if 0 not in self._tree.blocks else self._value(self._own, 0, into)
        if anchor is None or stream is None:
            return
        # As large as the stream there: next to a large multiplier little things are lost in rounding.
        what = self._what(Site("embed", 0))[: len(stream)] * rms(stream)
        recorder = Recorder(self._tree, leave=self._mix, writes={anchor: what})
        with recorder.recording() as trace:
            self._run()
        self._ends.check_embed(trace, what)

    def _value(self, trace: Trace, block: int, anchor: Anchor | None) -> torch.Tensor | None:
        """A point's value in a pass."""
        return None if anchor is None else value_at(trace.blocks[block], anchor)

    def _room(self, block: int, anchor: Anchor) -> torch.Tensor:
        terms = terms_at(self._own.blocks[block], anchor)
        assert terms is not None
        return anchor.magnitude(*terms)

    def _what(self, site: Site) -> torch.Tensor:
        """What is added at a site to see where it arrives."""
        width = self._tree.width
        call = next(c for calls in self._own.blocks for c in calls[:1])
        like = call.args[self._ports.of(call).hidden_in]
        return noise(f"write {site}", like.new_zeros(len(like), width))

    def _close(self, a: torch.Tensor, b: torch.Tensor, room: torch.Tensor) -> bool:
        """Whether two sums agree up to their rounding; `room`: magnitude of what was summed."""
        return a.shape == b.shape and bool(((a - b).abs() <= ROUNDINGS * self._m.eps * room + 1e-30).all())
