"""Verdicts: every point that was found is verified, and served or refused with the reason.

1. Stream: place `resid_pre` and `resid_post` at the blocks' entries and exits. Refuse `resid_pre`
   where it is not the `resid_post` of the block before.
2. Inside the blocks: take over the anchors that were found, except on modules that several blocks
   share or that run several times in a pass, where a tap would act more than once.
3. Outside the blocks: place `embed` and `final_norm` (`boundary_sites`).
4. Identities: in the baseline, with the model's own weights, every identity of a block's kind must
   hold (`block_points.IDENTITIES`), up to the rounding of its terms.
5. Writes: run the noise passes again with a vector added at every point. The stream after each
   point must move by exactly what was added before it.
6. The same for `embed`, with the model's own weights.
7. Between pipeline stages, name the exit of a stage's last block `resid_pre` of the next block too.

A point that fails any check is refused, as are the other points in the same equation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from vllm_weir.schema.hooks import INNER_HOOKS, STREAM_HOOKS, Site
from vllm_weir.worker.discovery.anchors import Anchor, Trace, terms_at, value_at
from vllm_weir.worker.discovery.block_stack import IDENTITIES, BlockPoints, Identity
from vllm_weir.worker.discovery.boundary_sites import BoundarySites, why_repeated
from vllm_weir.worker.discovery.matcher import rms
from vllm_weir.worker.discovery.recorded_model import NoiseLevel, RecordedModel, enter_noise, leave_noise, noise
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.stream_ports import StreamPorts

ROUNDINGS = 4
"""Units of rounding, of the summed magnitudes, by which a sum of three tensors may be off."""


class Verification:
    """Turns what was found into verdicts. `noise_levels`: block -> level of the noise pass in which it was found."""

    def __init__(
        self,
        recorded: RecordedModel,
        ports: StreamPorts,
        points: Mapping[int, BlockPoints],
        noise_levels: Mapping[int, NoiseLevel],
        noise_passes: Mapping[NoiseLevel, Trace],
        sites: SiteMap,
    ) -> None:
        self._recorded, self._tree, self._baseline, self._matcher = (
            recorded,
            recorded.tree,
            recorded.baseline,
            recorded.matcher,
        )
        self._ports, self._points, self._sites = ports, points, sites
        self._noise_levels, self._noise_passes = noise_levels, noise_passes
        self._boundary = BoundarySites(recorded, noise_passes["children"], sites)

    def fill(self, stream_failures: Mapping[int, str]) -> None:
        """Fill the site map; `stream_failures` is block -> why its stream is not known."""
        self._place_stream(stream_failures)
        self._check_between_blocks()
        self._place_inner_points(stream_failures)
        if 0 in self._tree.blocks:
            self._boundary.find_embed()
        if self._tree.num_layers - 1 in self._tree.blocks:
            self._boundary.find_final_norm(self._tree.num_layers - 1)
        for block in self._points:
            self._check_identities(block)
        for level in self._noise_passes:
            self._check_writes(level)
        self._check_embed()
        self._name_between_stages()

    def _place_stream(self, stream_failures: Mapping[int, str]) -> None:
        """Place resid_pre and resid_post."""
        for block in self._points:
            if block in stream_failures:
                self._sites.refuse(STREAM_HOOKS, (block,), stream_failures[block])
                continue
            call = self._baseline.blocks[block][0]
            self._sites.anchors[Site("resid_post", block)] = self._ports.exit(call)
            self._sites.anchors[Site("resid_pre", block)] = self._ports.entry(call)

    def _check_between_blocks(self) -> None:
        """Refuse resid_pre where the model changes the stream between two blocks."""
        for block in self._tree.blocks:
            if block - 1 not in self._tree.blocks:
                continue
            left = self._value(self._baseline, Site("resid_post", block - 1))
            entered = self._value(self._baseline, Site("resid_pre", block))
            if left is None or entered is None or not self._equal_sums(left, entered, left.abs()):
                why = f"between block {block - 1} and block {block} the model changes the stream"
                self._sites.refuse(("resid_pre",), (block,), why)

    def _place_inner_points(self, stream_failures: Mapping[int, str]) -> None:
        """Take over the anchors of attn_out, resid_mid and mlp_out, or refuse them."""
        shared = self._tree.shared()
        trace = self._noise_passes["children"]
        num_calls = Counter(call.path for calls in (trace.outside, *trace.blocks) for call in calls)
        for block, points in self._points.items():
            if block in stream_failures:
                continue
            for hook in INNER_HOOKS:
                anchor = points.anchors.get(hook)
                if anchor is None:
                    why = points.refused.get(hook, "it was not found")
                else:
                    why = why_acts_again(anchor, shared, num_calls)
                if anchor is None or why:
                    self._sites.refuse((hook,), (block,), why)
                else:
                    self._sites.anchors[Site(hook, block)] = anchor

    def _check_identities(self, block: int) -> None:
        """Refuse the points of a block between which an identity does not hold in the baseline."""
        points = self._points[block]
        values = {hook: self._value(self._baseline, Site(hook, block)) for hook in STREAM_HOOKS}
        magnitudes = {hook: self._magnitude(Site(hook, block)) for hook in STREAM_HOOKS}
        for identity in _identities(points.kind, values):
            missing = [hook for hook in identity.hooks if values[hook] is None]
            if not missing:
                gain = points.gain if identity.whole == "resid_post" else 1.0
                why = self._why_violated(identity, gain, values, magnitudes)
            elif points.kind == "described":
                # The search proves its own points; only this check proves described ones.
                why = f"nothing proves its description without {', '.join(missing)}"
            else:
                why = ""
            if why:
                self._sites.refuse([hook for hook in identity.hooks if hook in INNER_HOOKS], (block,), why)

    def _why_violated(
        self,
        identity: Identity,
        gain: float,
        values: Mapping[str, torch.Tensor | None],
        magnitudes: Mapping[str, torch.Tensor | None],
    ) -> str:
        """Return how far off ``whole == gain * sum of parts`` is; "" if it holds."""
        whole, whole_magnitude = values[identity.whole], magnitudes[identity.whole]
        assert whole is not None and whole_magnitude is not None
        total = gain * torch.stack([t for part in identity.parts if (t := values[part]) is not None]).sum(0)
        summed = torch.stack([t for part in identity.parts if (t := magnitudes[part]) is not None]).sum(0)
        if self._equal_sums(total, whole, whole_magnitude + abs(gain) * summed):
            return ""
        error = float((total - whole).abs().max() / whole.abs().max())
        parts = " + ".join(identity.parts)
        formula = parts if gain == 1 else f"{gain:.6g} x ({parts})"
        return f"with the model's own weights {identity.whole} is not {formula} (off by {error:.1e})"

    def _check_writes(self, level: NoiseLevel) -> None:
        """Run a noise pass again with a vector added at every point, and see that each arrives.

        A block is checked in the pass in which its points were found, final_norm with the children.
        """
        blocks = [block for block, its_level in self._noise_levels.items() if its_level == level]
        written = [
            site
            for site in self._sites.anchors
            if (site.hook in ("resid_pre", *INNER_HOOKS) and site.layer in blocks)
            or (site.hook == "final_norm" and level == "children")
        ]
        if not written:
            return
        writes: dict[Anchor, torch.Tensor] = {}
        for site in written:  # two sites may be at one place
            anchor, added = self._sites.anchors[site], self._added_at(site)
            writes[anchor] = writes[anchor] + added if anchor in writes else added
        leave = leave_noise(self._tree, level, self._recorded.mixers)
        trace = self._recorded.record(enter_noise(self._ports), leave, writes, noise)
        for block in blocks:
            self._check_writes_in_block(block, trace)
        if level == "children":
            self._boundary.check_final_norm(trace)

    def _check_writes_in_block(self, block: int, trace: Trace) -> None:
        """Follow the stream through a block; each addition must include what was written there.

        Start from the recorded entry, not from resid_pre, which may have been refused.
        """
        pre, post = self._ports.stream_through(trace.blocks[block][0])
        if pre is None or post is None:
            return
        attn_out, mlp_out = (self._written_value(Site(hook, block), trace) for hook in ("attn_out", "mlp_out"))
        stream = pre if attn_out is None else pre + attn_out
        resid_mid = Site("resid_mid", block)
        if resid_mid in self._sites.anchors:
            mid = self._value(trace, resid_mid)
            if mid is None:
                return
            stream = mid if attn_out is None else stream + self._added_at(resid_mid)[: len(pre)]
            if not self._matcher.same(mid, stream):
                why = "what is added there does not arrive in the stream before the MLP"
                self._sites.refuse(("attn_out", "resid_mid"), (block,), why)
                return
        if self._points[block].kind == "sequential" and mlp_out is None:
            arrives = self._moves_exit(block, stream, post)
            place = "before the MLP"
        else:
            expected = stream if mlp_out is None else stream + mlp_out
            nothing_written = attn_out is None and mlp_out is None
            arrives = nothing_written or self._matcher.same(post, self._points[block].gain * expected)
            place = "there"
        if not arrives:
            why = f"what is added {place} does not arrive in the stream that leaves the block"
            self._sites.refuse(INNER_HOOKS, (block,), why)

    def _moves_exit(self, block: int, stream: torch.Tensor, post: torch.Tensor) -> bool:
        """Return whether a block's exit moved by a multiple of what the stream before its MLP did.

        For a block without mlp_out: its MLP adds the same noise in both passes, which cancels.
        """
        has_middle = Site("resid_mid", block) in self._sites.anchors
        parts = ("resid_mid",) if has_middle else ("resid_pre", "attn_out")
        trace = self._noise_passes[self._noise_levels[block]]
        before = [self._value(trace, Site(hook, block)) for hook in (*parts, "resid_post")]
        known = [value for value in before if value is not None]
        if len(known) < len(before):
            return True  # nothing to compare with
        *stream_before, post_before = known
        return self._matcher.factor(stream - sum(stream_before), post - post_before) is not None

    def _check_embed(self) -> None:
        """Run the baseline again with a vector added at the embedding."""
        anchor = self._sites.anchors.get(Site("embed", 0))
        stream = self._value(self._baseline, Site("resid_pre", 0)) if 0 in self._tree.blocks else None
        if anchor is None or stream is None:
            return
        # As large as the stream, so that rounding does not lose it.
        added = self._added_at(Site("embed", 0))[: len(stream)] * rms(stream)
        self._boundary.check_embed(self._recorded.with_mixer_noise(writes={anchor: added}), added)

    def _name_between_stages(self) -> None:
        """Serve the exit of a pipeline stage's last block as resid_pre of the next block."""
        for block in self._tree.blocks:
            if block and block - 1 not in self._tree.blocks:
                self._sites.anchors.pop(Site("resid_pre", block), None)
                self._sites.refused.pop(Site("resid_pre", block), None)
            if block + 1 in self._tree.blocks or block + 1 == self._tree.num_layers:
                continue
            exit_, following = Site("resid_post", block), Site("resid_pre", block + 1)
            if exit_ in self._sites.anchors:
                self._sites.anchors[following] = self._sites.anchors[exit_]
            else:
                self._sites.refused[following] = self._sites.refused[exit_]

    def _value(self, trace: Trace, site: Site) -> torch.Tensor | None:
        anchor = self._sites.anchors.get(site)
        return None if anchor is None else value_at(trace.blocks[site.layer], anchor)

    def _written_value(self, site: Site, trace: Trace) -> torch.Tensor | None:
        """Return a site's value including what was added there.

        For an anchor after a call, this is what was recorded. For one before a call, it is the
        value in the pass without writes plus what was added.
        """
        anchor = self._sites.anchors.get(site)
        if anchor is None:
            return None
        if anchor.when == "after":
            return self._value(trace, site)
        value = self._value(self._noise_passes[self._noise_levels[site.layer]], site)
        return None if value is None else value + self._added_at(site)[: len(value)]

    def _magnitude(self, site: Site) -> torch.Tensor | None:
        """Return the summed magnitudes of the terms of a site's value in the baseline."""
        anchor = self._sites.anchors.get(site)
        terms = None if anchor is None else terms_at(self._baseline.blocks[site.layer], anchor)
        return None if anchor is None or terms is None else anchor.magnitude(*terms)

    def _added_at(self, site: Site) -> torch.Tensor:
        """Return the vectors that are added at a site to see that they arrive, [tokens, d]."""
        call = next(calls[0] for calls in self._baseline.blocks if calls)
        like = call.args[self._ports.of(call).hidden_in]
        return noise(f"write {site}", like.new_zeros(len(like), self._tree.width))

    def _equal_sums(self, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor) -> bool:
        """Return whether two sums agree up to the rounding of terms of this magnitude."""
        bound = ROUNDINGS * self._matcher.eps * magnitude + 1e-30
        return a.shape == b.shape and bool(((a - b).abs() <= bound).all())


def why_acts_again(anchor: Anchor, shared: set[str], num_calls: Mapping[str, int]) -> str:
    """Return why a tap at an anchor would act more than once in a pass; "" if it would not."""
    for module in anchor.modules:
        if module in shared:
            return f"{module} is shared by several blocks"
    for module in anchor.modules:
        if num_calls[module] > 1:
            return why_repeated(module, num_calls[module])
    return ""


def _identities(kind: str, values: Mapping[str, torch.Tensor | None]) -> tuple[Identity, ...]:
    """Return the identities for a kind of block; for "described", infer it from the points."""
    if kind == "described":
        if values["resid_mid"] is not None:
            kind = "sequential"
        else:
            kind = "attention only" if values["mlp_out"] is None else "parallel"
    return IDENTITIES.get(kind, ())
