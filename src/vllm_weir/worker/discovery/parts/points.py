"""The points inside attention and MLP: found and verified in two more passes, by structure.

Which tensors a part of a block computes with shows in a pass in which every block is entered by
noise, and every linear module, token mixer and layer of experts returns noise (`parts.recorder`):

1. Find. What is given to such a module and equals some columns of what another returned *is* those
   columns: projections of queries, keys and values (`parts.attention`), of gate and neurons, of a
   router (`parts.mlp`). The two projections out of attention and MLP are the linear modules whose
   results are the block's `attn_out` and `mlp_out`, up to a factor or a norm.
2. Verify. Run the pass again with something added at every point that can be steered
   (`parts.verification`). What is given to the next modules must move by exactly that, a head of
   `q_rot` by its head of `q` alone, and neither the stream nor the other part may move. A point
   that passes but for the last is served to be read, and not to be written.
3. Fill in. A row of the whole model may be divided among tensor-parallel workers. Which part is
   here is what the linear modules say of themselves (`parts.recorder`).

Which modules are linear, attention or experts is told by `patches.model.discovery`; no model is
known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vllm_weir.schema.hooks import ATTENTION_HOOKS, PART_HOOKS, Site
from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.parts.attention import find_attention
from vllm_weir.worker.discovery.parts.findings import BlockView
from vllm_weir.worker.discovery.parts.mlp import find_mlp
from vllm_weir.worker.discovery.parts.recorder import BlockRecord, PartModules, PartRecorder
from vllm_weir.worker.discovery.parts.verification import BlockCheck
from vllm_weir.worker.discovery.recorded_model import RecordedModel
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.stream_ports import StreamPorts
from vllm_weir.worker.discovery.verification import why_acts_again


def map_parts(recorded: RecordedModel, ports: StreamPorts, parts: PartModules, sites: SiteMap) -> None:
    try:
        _PartSearch(recorded, ports, parts, sites).fill()
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as e:
        # The other points were found without these passes.
        sites.refuse(PART_HOOKS, recorded.tree.blocks, f"the pass with noise inside the blocks failed: {str(e)[:300]}")


class _PartSearch:
    def __init__(self, recorded: RecordedModel, ports: StreamPorts, parts: PartModules, sites: SiteMap) -> None:
        self._recorded, self._tree, self._ports, self._parts, self._sites = recorded, recorded.tree, ports, parts, sites
        self._checks: dict[int, BlockCheck] = {}

    def fill(self) -> None:
        """Run the two passes and write the verdicts."""
        first = self._record(self._find)
        for block in self._tree.blocks:
            if block not in self._checks:
                self._sites.refuse(PART_HOOKS, (block,), f"block {block} did not run in the pass with noise inside it")
        writes: dict[Anchor, torch.Tensor] = {}
        for check in self._checks.values():
            writes |= check.writes
        self._record(lambda record: self._checks[record.block].compare(record), writes)
        for block, check in self._checks.items():
            self._place(block, check, first.num_calls)

    def _record(
        self, on_block: Callable[[BlockRecord], None], writes: Mapping[Anchor, torch.Tensor] | None = None
    ) -> PartRecorder:
        recorder = PartRecorder(self._tree, self._parts, self._ports, on_block, writes)
        with recorder.recording():
            self._recorded.run()
        return recorder

    def _find(self, record: BlockRecord) -> None:
        block = record.block
        view = BlockView(record, self._tree, self._parts, self._recorded.matcher)
        attn_out, mlp_out = Site("attn_out", block), Site("mlp_out", block)
        anchors, refused = self._sites.anchors, self._sites.refused
        attention, members = find_attention(view, anchors.get(attn_out), refused.get(attn_out, ""))
        mlp = find_mlp(view, anchors.get(mlp_out), refused.get(mlp_out, ""), members)
        resid_mid = self._sites.anchors.get(Site("resid_mid", block))
        self._checks[block] = BlockCheck(view, attention, mlp, resid_mid, self._ports)

    def _place(self, block: int, check: BlockCheck, num_calls: Mapping[str, int]) -> None:
        """Write the verdicts on one block."""
        shared = self._tree.shared()
        for hook in PART_HOOKS:
            findings = check.attention if hook in ATTENTION_HOOKS else check.mlp
            site, anchor = Site(hook, block), findings.anchors.get(hook)
            if anchor is None:
                self._sites.refuse((hook,), (block,), findings.refused.get(hook, "it was not found"))
                continue
            if why := why_acts_again(anchor, shared, num_calls):
                self._sites.refuse((hook,), (block,), why)
                continue
            self._sites.anchors[site] = anchor
            if hook in check.read_only:
                self._sites.read_only[site] = check.read_only[hook]
            if hook in findings.quantised:
                self._sites.before_quantised.add(site)
            if hook in findings.shapes:
                self._sites.shapes[site] = findings.shapes[hook]
            features = findings.features.get(hook)
            if features is not None and features.width != features.whole:
                self._sites.shards[site] = features.shard
