"""The sites outside the blocks: `embed` and `final_norm`.

`embed`
    1. Find the call that returns the token embedding: the embedding module, or what widens its
       result to the stream; or the argument that takes embeddings looked up before the model runs.
    2. If a norm makes of it exactly what enters block 0 (Bloom), the norm's result is the point.
    3. The point's scale is the model's multiplier, if that alone lies between it and block 0.
    4. Verify: with a vector added there, `resid_pre` of block 0 must move by a multiple of it.

`final_norm`
    1. Find the way from what leaves the last block to what the model returns, in a pass with noise
       (`output_path`). A lens takes it, too.
    2. If it begins with a norm, what the norm returns is the point.
    3. Verify: with a vector added there, the rest of the way must be there again.

No site is placed on a module that runs several times in a pass, where a tap would act every time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, Trace, value_at
from vllm_weir.worker.discovery.matcher import SLIGHT
from vllm_weir.worker.discovery.recorded_model import RecordedModel
from vllm_weir.worker.discovery.site_map import Link, OutputPath, SiteMap, find_links, given_times

EMBED, FINAL_NORM = Site("embed", 0), Site("final_norm", 0)


@dataclass(frozen=True)
class _CallTensor:
    """A tensor of a recorded call."""

    call: ModuleCall
    key: TensorKey
    value: torch.Tensor


class BoundarySites:
    """Finds and verifies the sites outside the blocks; the verdicts go to `sites`.

    `noise_pass`: a pass with noise in the embedding, the blocks and the final norm.
    """

    def __init__(self, recorded: RecordedModel, noise_pass: Trace, sites: SiteMap) -> None:
        self._tree, self._matcher, self._baseline = recorded.tree, recorded.matcher, recorded.baseline
        self._noise_pass, self._sites = noise_pass, sites

    def find_embed(self) -> None:
        """Place `embed`, or refuse it."""
        entry = self._sites.anchors.get(Site("resid_pre", 0))
        stream = None if entry is None else value_at(self._baseline.blocks[0], entry)
        if stream is None:
            why = self._sites.refused.get(Site("resid_pre", 0), "what enters block 0 could not be followed")
            self._refuse(EMBED, why)
            return
        given = [call for call in self._baseline.outside if call.path == self._tree.entrance]
        if given and not self._looks_up_multiples():
            why = "tokens are looked up before the model runs, and what it is given is no multiple of their embeddings"
            self._refuse(EMBED, why)
            return
        # If embeddings are given, the modules that look something up inside may look up positions.
        looked_up = [c for c in self._baseline.outside if self._tree.is_embedding(self._tree.modules[c.path])]
        embedding = self._of_stream_width(given or looked_up)
        if embedding is None:
            self._refuse(EMBED, "no token embedding runs together with the blocks")
            return
        embedding = self._normed(embedding, stream)
        call, key = embedding.call, embedding.key
        if self._refuse_if_repeated(EMBED, call.path):
            return
        # A factor counts as part of the embedding; added position embeddings do not. Some models
        # keep a copy of the embedding beside the stream, so tap its source.
        scale = self._matcher.factor(embedding.value, stream) or 1.0
        self._sites.embeddings_given = bool(given)
        self._sites.anchors[EMBED] = Anchor(call.path, "after" if key.kind == "out" else "before", key, None, scale)

    def check_embed(self, trace: Trace, added: torch.Tensor) -> None:
        """Verify `embed`, given the baseline once more with `added` [tokens, d] added at the embedding."""
        anchor, entry = self._sites.anchors.get(EMBED), self._sites.anchors.get(Site("resid_pre", 0))
        if anchor is None or entry is None:
            return
        before, after = value_at(self._baseline.blocks[0], entry), value_at(trace.blocks[0], entry)
        value = value_at(self._baseline.outside, anchor)
        assert before is not None and after is not None and value is not None
        moved = after - before
        is_stream, factor = self._matcher.same(value, before), self._matcher.factor(added, moved)
        moved_everywhere = bool((moved.abs().amax(1) > SLIGHT * before.abs().amax()).all())
        if factor != 1 and (is_stream or not moved_everywhere):
            self._refuse(EMBED, "what is added there does not arrive in what enters block 0")
        elif factor is not None:
            # If position embeddings are added too, only this pass reveals the model's multiplier.
            self._sites.anchors[EMBED] = replace(anchor, scale=factor * anchor.scale)

    def find_final_norm(self, last: int) -> None:
        """Find the way from `last`, the model's last block, to its output, and place `final_norm`, or refuse it."""
        exit_ = self._sites.anchors.get(Site("resid_post", last))
        stream = None if exit_ is None else value_at(self._noise_pass.blocks[last], exit_)
        if exit_ is None or stream is None:
            self._refuse(FINAL_NORM, "what leaves the last block could not be followed")
            return
        end = self._noise_pass.blocks[last][0].end
        found = find_links(self._noise_pass, self._matcher, stream, end)
        if found is not None:
            self._keep_output_path(*found, value_at(self._baseline.blocks[last], exit_))
        links = () if found is None else found[0]
        if not links or not self._tree.only_scales(links[0].module):
            self._refuse(FINAL_NORM, self._why_no_norm(stream, end))
            return
        norm, key = links[0].module, links[0].result
        if not self._refuse_if_repeated(FINAL_NORM, norm):
            self._sites.anchors[FINAL_NORM] = Anchor(norm, "after", key)

    def check_final_norm(self, trace: Trace) -> None:
        """Verify `final_norm` in a pass with noise, and a vector added there."""
        anchor = self._sites.anchors.get(FINAL_NORM)
        call = None if anchor is None else next((c for c in reversed(trace.outside) if c.path == anchor.module), None)
        value = None if anchor is None or call is None else value_at([call], anchor)
        if call is None or value is None:
            return
        if find_links(trace, self._matcher, value, call.end) is None:
            self._refuse(FINAL_NORM, "what is added there does not arrive in what the model returns")

    def _keep_output_path(self, links: tuple[Link, ...], scale: float, stream: torch.Tensor | None) -> None:
        output = self._baseline.model_output
        if stream is not None and output is not None and len(stream) == len(output):
            self._sites.output_path = OutputPath(links, scale, stream, output)

    def _of_stream_width(self, calls: list[ModuleCall]) -> _CallTensor | None:
        """Return the calls' first tensor of the stream's width, or else their result, widened."""
        for call in calls:
            for key, value in (call.outputs or call.args).items():
                return _CallTensor(call, key, value)
        for call in calls:
            narrow = list(call.other_widths.values())
            for widening in self._baseline.outside:
                if widening.start > call.end and widening.outputs and self._is_given(widening, narrow):
                    return _CallTensor(widening, *next(iter(widening.outputs.items())))
        return None

    def _looks_up_multiples(self) -> bool:
        """Return whether the given embeddings are multiples of the embedding module's."""
        if self._tree.look_up is None:
            return True
        looked_up: list[torch.Tensor] = []
        tables = [m for m in self._tree.modules.values() if self._tree.is_embedding(m)]
        handles = [m.register_forward_hook(lambda _module, _args, out: looked_up.append(out)) for m in tables]
        try:
            given = self._tree.look_up()
        finally:
            for handle in handles:
                handle.remove()
        return any(self._matcher.factor(rows.float(), given.float()) is not None for rows in looked_up)

    def _normed(self, embedding: _CallTensor, stream: torch.Tensor) -> _CallTensor:
        """Return the norm's result if the model norms the embedding, else the embedding."""
        if self._matcher.factor(embedding.value, stream) is None:
            for call in self._baseline.outside:
                if self._is_embedding_norm(call, embedding, stream):
                    return _CallTensor(call, *next(iter(call.outputs.items())))
        return embedding

    def _is_embedding_norm(self, call: ModuleCall, embedding: _CallTensor, stream: torch.Tensor) -> bool:
        """Return whether a call is a norm, run once, that turns the embedding into the stream."""
        if not (self._tree.only_scales(call.path) and call.start > embedding.call.end and call.outputs):
            return False
        if self._num_calls(call.path) != 1 or not self._is_given(call, [embedding.value]):
            return False
        return self._matcher.factor(next(iter(call.outputs.values())), stream) is not None

    def _why_no_norm(self, stream: torch.Tensor, end: int) -> str:
        """Return why no norm between the last block, which ends at `end`, and the output could be placed."""
        output = self._noise_pass.model_output
        if output is not None and self._matcher.same(stream, output):
            return (
                "the model returns the stream as it leaves the last block: it has no final norm, or one that runs "
                "later, and then on the rows alone that logits are computed from"
            )
        readers = [call for call in self._noise_pass.outside if call.start > end and self._reads(call, stream)]
        norm = next((call.path for call in readers if self._tree.only_scales(call.path)), None)
        if norm is not None:
            return f"the model changes what {norm} returns before it hands it on"
        if readers:
            return f"{readers[0].path}, which is given what leaves the last block, is no norm"
        return "no module was found that is given what leaves the last block"

    def _reads(self, call: ModuleCall, stream: torch.Tensor) -> bool:
        """Return whether a call is given the stream and returns something else."""
        returned = next(iter(call.outputs.values()), None)
        passed_on = returned is None or self._matcher.same(returned, stream)
        return not passed_on and given_times(call, stream, self._matcher) is not None

    def _is_given(self, call: ModuleCall, tensors: list[torch.Tensor]) -> bool:
        given = [*call.args.values(), *(v for k, v in call.other_widths.items() if k.kind == "arg")]
        return any(self._matcher.same(argument, tensor) for argument in given for tensor in tensors)

    def _num_calls(self, path: str) -> int:
        return sum(c.path == path for calls in (self._baseline.outside, *self._baseline.blocks) for c in calls)

    def _refuse_if_repeated(self, site: Site, path: str) -> bool:
        times = self._num_calls(path)
        if times > 1:
            self._refuse(site, why_repeated(path, times))
        return times > 1

    def _refuse(self, site: Site, why: str) -> None:
        self._sites.refuse((site.hook,), (site.layer,), why)


def why_repeated(path: str, times: int) -> str:
    return f"{path} runs {times} times in one pass, and what is added there would be in each"
