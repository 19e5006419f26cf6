"""Which tensors carry the residual stream into a block and out of it.

What may carry it is read off one recorded pass: the tensors that one block returns (or writes into)
and the next block is given, recognised by their addresses. Where that is one tensor, it is the
stream. Where it is two, as in vLLM's fused blocks, the stream may be their sum or either of them;
`stream_port_candidates` lists these choices, and `sites` takes the one that is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, Trace, parameters_of, value_at
from vllm_weir.worker.discovery.module_tree import ModuleTree


@dataclass(frozen=True)
class StreamPorts:
    """The arguments and results of a block that carry the stream.

    With a residual, the sum of the two tensors is the stream.
    """

    hidden_in: TensorKey
    hidden_out: TensorKey
    residual_in: TensorKey | None = None
    residual_out: TensorKey | None = None

    def of(self, block_call: ModuleCall) -> StreamPorts:
        """Return the ports of a block that may be called with its arguments in another order."""
        return StreamPorts(
            alike(self.hidden_in, block_call.args),
            alike(self.hidden_out, block_call.results),
            self.residual_in and alike(self.residual_in, block_call.args),
            self.residual_out and alike(self.residual_out, block_call.results),
        )

    def entry(self, block_call: ModuleCall) -> Anchor:
        """Return where the stream enters a block; without a residual if this call has none."""
        ports = self.of(block_call)
        residual = ports.residual_in if ports.residual_in in block_call.args else None
        return Anchor(block_call.path, "before", ports.hidden_in, residual)

    def exit(self, block_call: ModuleCall) -> Anchor:
        ports = self.of(block_call)
        residual = ports.residual_out if ports.residual_out in block_call.visible_after else None
        return Anchor(block_call.path, "after", ports.hidden_out, residual)

    def stream_through(self, block_call: ModuleCall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the stream at a block's entry and exit; None for what was not recorded."""
        return value_at([block_call], self.entry(block_call)), value_at([block_call], self.exit(block_call))


def alike(key: TensorKey, tensors: Mapping[TensorKey, torch.Tensor]) -> TensorKey:
    """Return `key` if it is among `tensors`, else the key with the same name there, else `key`."""
    if key in tensors or not key.name:
        return key
    return next((k for k in tensors if k.kind == key.kind and k.name == key.name), key)


def stream_port_candidates(trace: Trace, tree: ModuleTree) -> list[StreamPorts]:
    """Return what may carry the stream, likeliest first; empty if blocks hand nothing on.

    If at least two blocks are here, the candidates are the links between them that most blocks
    have: first the sum of the first two linked tensors, then each tensor alone. For a single block
    they are guessed from the names of its parameters.
    """
    links = _commonest_links(trace, tree)
    if not links:
        return _ports_by_name(trace.blocks[min(tree.blocks)][0], tree)
    pairs = [StreamPorts(*links[0], *links[1])] if len(links) > 1 else []
    return [*pairs, *(StreamPorts(*link) for link in links)]


Link = tuple[TensorKey, TensorKey]
"""An argument of a block, and the result of the block before it that is the same memory."""


def _commonest_links(trace: Trace, tree: ModuleTree) -> tuple[Link, ...]:
    """Return the links to the block before that most blocks have; in a tie, the most links."""
    counts: Counter[tuple[Link, ...]] = Counter()
    for block in tree.blocks:
        if block - 1 not in tree.blocks:
            continue
        previous, call = trace.blocks[block - 1][0], trace.blocks[block][0]
        arguments = {call.pointers[key]: key for key in call.args}
        links = tuple(
            (arguments[previous.pointers[key]], key)
            for key in previous.result_keys
            if previous.pointers[key] in arguments
        )
        if links:
            counts[links] += 1
    return max(counts, key=lambda links: (counts[links], len(links)), default=())


def _ports_by_name(call: ModuleCall, tree: ModuleTree) -> list[StreamPorts]:
    """Return what may carry the stream through a single block, by vLLM's parameter names."""
    by_name = {key.name: key for key in call.args}
    hidden = by_name.get("hidden_states") or (next(iter(call.args)) if len(call.args) == 1 else None)
    results = call.result_keys
    if hidden is None or not results:
        return []
    candidates = [StreamPorts(hidden, results[0])]
    residual_in = by_name.get("residual") or _residual_parameter(tree.modules[call.path])
    if residual_in is not None:
        second = results[1] if len(results) > 1 else None
        residual_out = residual_in if residual_in in results else second
        if residual_out is not None:
            candidates.insert(0, StreamPorts(hidden, results[0], residual_in, residual_out))
    return candidates


def _residual_parameter(block: torch.nn.Module) -> TensorKey | None:
    """Return the key of a parameter called residual: the first block is given None for it."""
    names = parameters_of(block)
    return TensorKey("arg", names.index("residual"), "residual") if "residual" in names else None
