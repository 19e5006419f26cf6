"""The points outside the blocks, `embed` and `final_norm`: where they are, and whether writing there arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.matcher import SLIGHT, Matcher
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.recorder import ModuleCall, Trace, value_at

if TYPE_CHECKING:
    from vllm_weir.worker.discovery.site_map import SiteMap

Found = tuple[ModuleCall, TensorKey, torch.Tensor]
"""A call, one of its tensors, and what was recorded of that."""
EMBED, FINAL_NORM = Site("embed", 0), Site("final_norm", 0)


class BoundarySites:
    """Verdicts on the two.

    Args:
        tree, matcher: as in `sites`.
        own: the pass with the model's own weights.
        outer: a pass with noise in the embedding, the blocks and the final norm.
        sites: takes the verdicts.
    """

    def __init__(self, tree: ModuleTree, matcher: Matcher, own: Trace, outer: Trace, sites: SiteMap) -> None:
        self._tree, self._m, self._own, self._outer, self._sites = tree, matcher, own, outer, sites
        self._after_norm: str | None = None
        """The module that alone is given what the final norm returned, if the model does not return that itself."""

    def find_embed(self) -> None:
        """The token embedding, or what widens it to the stream."""
        into = self._sites.anchors.get(Site("resid_pre", 0))
        calls = [c for c in self._own.outside if self._tree.is_embedding(self._tree.modules[c.path])]
        given = [c for c in self._own.outside if c.path == self._tree.entrance]
        before = None if into is None else value_at(self._own.blocks[0], into)
        if before is None:
            why = self._sites.refused.get(Site("resid_pre", 0), "what enters block 0 could not be followed")
            self._refuse(EMBED, why)
            return
        if given and not self._looked_up_plainly():
            why = "tokens are looked up before the model runs, and what it is given is no multiple of their embeddings"
            self._refuse(EMBED, why)
            return
        found = self._hidden_of(given or calls)  # positions may be looked up inside
        if found is None:
            self._refuse(EMBED, "no token embedding runs together with the blocks")
            return
        call, key, value = self._normed(*found, before)
        if self._again(EMBED, call):
            return
        # Positions may be added to it; a mere factor is part of the embedding. Some models keep a copy of it beside the
        # stream, so it is tapped where it comes from.
        factor = self._m.factor(value, before) or 1.0
        self._sites.anchors[EMBED] = Anchor(call.path, "after" if key.kind == "out" else "before", key, None, factor)

    def _hidden_of(self, embeddings: list[ModuleCall]) -> Found | None:
        """Of the embedding, or of what widens its result, where it has the stream's width."""
        for call in embeddings:
            for key, value in (call.out or call.args).items():
                return call, key, value
        for call in embeddings:
            narrow = list(call.narrow.values())
            for wider in self._own.outside:
                if wider.start > call.end and wider.out and self._gets(wider, narrow):
                    return wider, *next(iter(wider.out.items()))
        return None

    def _looked_up_plainly(self) -> bool:
        """Whether the embeddings that the model is given for tokens are the embedding's own, or multiples of them."""
        if self._tree.look_up is None:
            return True
        made: list[torch.Tensor] = []
        tables = [m for m in self._tree.modules.values() if self._tree.is_embedding(m)]
        handles = [m.register_forward_hook(lambda _module, _args, out: made.append(out)) for m in tables]
        try:
            given = self._tree.look_up()
        finally:
            for handle in handles:
                handle.remove()
        return any(self._m.factor(one.float(), given.float()) is not None for one in made)

    def _normed(self, embedding: ModuleCall, key: TensorKey, value: torch.Tensor, before: torch.Tensor) -> Found:
        """The norm of the embedding's own (Bloom's) whose result enters block 0; the embedding, if there is none."""
        if self._m.factor(value, before) is None:
            for call in self._own.outside:
                if self._is_norm_of(call, embedding, value, before):
                    return call, *next(iter(call.out.items()))
        return embedding, key, value

    def _is_norm_of(self, call: ModuleCall, embedding: ModuleCall, value: torch.Tensor, before: torch.Tensor) -> bool:
        """Whether a call of a norm, the module's only one, makes of the embedding's `value` what enters block 0."""
        plain = all(p.dim() < 2 for p in self._tree.modules[call.path].parameters())
        if not (plain and call.start > embedding.end and call.out and self._times(call.path) == 1):
            return False
        return self._gets(call, [value]) and self._m.factor(next(iter(call.out.values())), before) is not None

    def check_embed(self, trace: Trace, what: torch.Tensor) -> None:
        """`trace`: the pass with the model's own weights, and `what` added at the embedding."""
        anchor, into = self._sites.anchors.get(EMBED), self._sites.anchors.get(Site("resid_pre", 0))
        if anchor is None or into is None:
            return
        before, after = value_at(self._own.blocks[0], into), value_at(trace.blocks[0], into)
        value = value_at(self._own.outside, anchor)
        assert before is not None and after is not None and value is not None
        moved = after - before
        simple, factor = self._m.same(value, before), self._m.factor(what, moved)
        everywhere = bool((moved.abs().amax(1) > SLIGHT * before.abs().amax()).all())
        if factor != 1 and (simple or not everywhere):
            self._refuse(EMBED, "what is added there does not arrive in what enters block 0")
        elif factor is not None:
            # Where positions are added as well, this alone tells the model's multiplier.
            self._sites.anchors[EMBED] = replace(anchor, scale=factor * anchor.scale)

    def find_final_norm(self, last: int) -> None:
        """The norm that is given what leaves the last block."""
        anchor = self._sites.anchors.get(Site("resid_post", last))
        stream = None if anchor is None else value_at(self._outer.blocks[last], anchor)
        end, root = self._outer.blocks[last][0].end, self._outer.root
        if stream is None:
            self._refuse(FINAL_NORM, "what leaves the last block could not be followed")
            return
        given = [c for c in self._outer.outside if c.start > end and c.out and any(self._streams(c, stream))]
        # A dropout hands it on as it came.
        given = [c for c in given if not self._m.same(next(iter(c.out.values())), stream)]
        normed = [c for c in given if all(p.dim() < 2 for p in self._tree.modules[c.path].parameters())]
        if not normed:
            why = "no module was found that is given what leaves the last block"
            if given:
                why = f"{given[0].path}, which is given what leaves the last block, is no norm"
            if root is not None and self._m.same(stream, root):
                why = (
                    "the model returns the stream as it leaves the last block: it has no final norm, or one that runs "
                    "later, and then on the rows alone that logits are computed from"
                )
            self._refuse(FINAL_NORM, why)
            return
        if self._again(FINAL_NORM, normed[0]):
            return
        key, out = next(iter(normed[0].out.items()))
        if root is None or self._m.factor(out, root) is None:
            after = next((c for c in self._outer.outside if c.start > normed[0].end and self._returns(c, out)), None)
            if after is None:
                self._refuse(FINAL_NORM, f"the model changes what {normed[0].path} returns before it hands it on")
                return
            self._after_norm = after.path
        self._sites.anchors[FINAL_NORM] = Anchor(normed[0].path, "after", key)

    def check_final_norm(self, trace: Trace) -> None:
        """`trace`: the pass with noise, and something added at the final norm."""
        anchor = self._sites.anchors.get(FINAL_NORM)
        value = None if anchor is None else value_at(trace.outside[::-1], anchor)
        if value is None:
            return
        if self._after_norm is None:
            arrives = trace.root is not None and self._m.factor(value, trace.root) is not None
        else:
            after = next(c for c in reversed(trace.outside) if c.path == self._after_norm)
            arrives = self._gets(after, [value])
        if not arrives:
            self._refuse(FINAL_NORM, "what is added there does not arrive in what the model returns")

    def _again(self, site: Site, call: ModuleCall) -> bool:
        """Whether the module of a call is called once more, where a tap on it would act as well; then it is refused."""
        times = self._times(call.path)
        if times > 1:
            self._refuse(site, runs_again(call.path, times))
        return times > 1

    def _times(self, path: str) -> int:
        """How often a module is called in a pass."""
        return sum(c.path == path for calls in (self._own.outside, *self._own.blocks) for c in calls)

    def _streams(self, call: ModuleCall, stream: torch.Tensor) -> Iterator[bool]:
        given = list(call.args.values())
        if len(given) == 2 and given[0].shape == given[1].shape:
            yield self._m.same(given[0] + given[1], stream)
        yield from (self._m.same(g, stream) for g in given)

    def _returns(self, call: ModuleCall, given: torch.Tensor) -> bool:
        """Whether a call is given that, and returns what the model returns."""
        root = self._outer.root
        made = [*call.out.values(), *(v for k, v in call.narrow.items() if k.kind == "out")]
        return root is not None and self._gets(call, [given]) and any(self._m.same(v, root) for v in made)

    def _gets(self, call: ModuleCall, tensors: list[torch.Tensor]) -> bool:
        given = [*call.args.values(), *(v for k, v in call.narrow.items() if k.kind == "arg")]
        return any(self._m.same(g, t) for g in given for t in tensors)

    def _refuse(self, site: Site, why: str) -> None:
        self._sites.refuse((site.hook,), (site.layer,), why)


def runs_again(path: str, times: int) -> str:
    """Why there is no point at a module that is called several times."""
    return f"{path} runs {times} times in one pass, and what is added there would be in each"
