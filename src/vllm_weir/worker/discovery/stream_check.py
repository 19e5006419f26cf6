"""The check that what was taken for the stream is all that a block passes on.

Blocks that pass on one tensor leave no doubt. With two, the stream may be their sum, or one of them
while the other is not used any more. So one more pass with the model's own weights is recorded:

1. Each block is entered by the stream of the baseline, split differently: a random share of it is
   moved from one tensor of the sum to the other. Tensors that are not part of the stream are
   replaced by noise.
2. Behind the last block the same is done to what it returns.
3. If the choice is right, every block returns what it returned in the baseline, and so does the
   model. A difference beyond rounding shows that something depends on more than the chosen stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, Trace, terms_at, value_at
from vllm_weir.worker.discovery.matcher import rms
from vllm_weir.worker.discovery.recorded_model import RecordedModel, noise
from vllm_weir.worker.discovery.stream_ports import StreamPorts

ROUNDINGS = 2
"""Units of rounding, of the summed magnitudes, by which streams that agree may differ."""


class StreamCheck:
    """The check for one choice of what carries the stream."""

    def __init__(self, recorded: RecordedModel, ports: StreamPorts) -> None:
        self._recorded, self._ports = recorded, ports
        self._tree, self._baseline = recorded.tree, recorded.baseline
        self._links_beside_stream = {block: self._find_links(block) for block in self._tree.blocks}
        # What the rounding of a block's input may grow to, relative to what the block adds.
        self._growth = 0.01 if recorded.matcher.tolerance < 1e-3 else 0.2

    def failures(self) -> dict[int, str]:
        """Return block -> why its stream cannot be what was chosen.

        Run the model only if the blocks pass on several tensors.
        """
        last = self._tree.num_layers - 1
        last_is_here = last in self._tree.blocks
        beside_stream = any(self._links_beside_stream.values()) or (
            last_is_here and bool(self._results_beside_stream(last))
        )
        if self._ports.residual_in is None and not beside_stream:
            return {}
        writes = self._writes_behind(last) if last_is_here else {}
        trace = self._recorded.with_mixer_noise(self._enter, writes)
        names = " and ".join(str(k) for k in (self._ports.hidden_in, self._ports.residual_in) if k is not None)
        not_shown = f"the blocks hand on several tensors, and it could not be shown that the stream is {names}"
        if last_is_here and self._baseline.model_output is not None:
            why = self._why_output_differs(trace.model_output, self._baseline.model_output)
            if why:
                return dict.fromkeys(self._tree.blocks, f"{not_shown}: {why}")
        return {
            block: f"{not_shown}: what leaves block {block} depends on more"
            for block in self._tree.blocks
            if not self._returns_the_same(block, trace)
        }

    def _enter(self, block: int, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        """Give a block the baseline's stream, split differently, and noise beside the stream."""
        anchor = self._entry(block)
        stream = value_at(self._baseline.blocks[block], anchor)
        if stream is None or anchor.hidden not in live:
            return
        if anchor.residual is not None and anchor.residual in live:
            hidden, residual = live[anchor.hidden], live[anchor.residual]
            residual.copy_(_random_share(call.path, stream).reshape(residual.shape))
            hidden.copy_(stream.reshape(hidden.shape) - residual.float())
        for key in self._links_beside_stream[block].values():
            live[key].copy_(rms(stream) * noise(f"{call.path}:{key.name or key.index}:spare", live[key]))

    def _writes_behind(self, block: int) -> dict[Anchor, torch.Tensor]:
        """Return what to add to a block's results: the moved share, and noise beside the stream."""
        anchor, call = self._exit(block), self._baseline.blocks[block][0]
        stream = value_at(self._baseline.blocks[block], anchor)
        if stream is None:
            return {}
        writes = {}
        if anchor.residual is not None:
            share = _random_share(call.path, stream)
            writes = {Anchor(call.path, "after", anchor.hidden): -share}
            writes[Anchor(call.path, "after", anchor.residual)] = share
        for key in self._results_beside_stream(block):
            size = max(rms(stream), rms(call.results[key]))
            writes[Anchor(call.path, "after", key)] = size * noise(f"{call.path}:{key.index}:spare", stream)
        return writes

    def _find_links(self, block: int) -> dict[TensorKey, TensorKey]:
        """Return what is passed on beside the stream: result of the block before -> argument."""
        if block - 1 not in self._tree.blocks:
            return {}
        previous, call = self._baseline.blocks[block - 1][0], self._baseline.blocks[block][0]
        ports = self._ports.of(call)
        stream = {key for key in (ports.hidden_in, ports.residual_in) if key is not None}
        stream_pointers = {call.pointers[key] for key in stream if key in call.pointers}
        arguments = {
            call.pointers[key]: key
            for key in call.args
            if key not in stream and call.pointers[key] not in stream_pointers
        }
        return {
            key: arguments[previous.pointers[key]]
            for key in previous.result_keys
            if previous.pointers[key] in arguments
        }

    def _results_beside_stream(self, block: int) -> list[TensorKey]:
        anchor, call = self._exit(block), self._baseline.blocks[block][0]
        keys = (anchor.hidden, anchor.residual)
        stream = {call.pointers[key] for key in keys if key is not None and key in call.visible_after}
        return [key for key in call.result_keys if call.pointers[key] not in stream]

    def _why_output_differs(self, output: torch.Tensor | None, expected: torch.Tensor) -> str:
        """Return why the model's output contradicts the choice; "" if it is the baseline's."""
        if output is not None and self._agree(output, expected, expected, 0 * expected):
            return ""
        if output is not None and bool(output.isfinite().all() and expected.isfinite().all()):
            return "what the model returns depends on more"
        return "what the model returns is not finite"

    def _returns_the_same(self, block: int, trace: Trace) -> bool:
        """Return whether a block's results agree with the baseline's, also beside the stream."""
        baseline_calls, calls = self._baseline.blocks[block], trace.blocks[block]
        entry, exit_ = self._entry(block), self._exit(block)
        pre, post = value_at(baseline_calls, entry), value_at(baseline_calls, exit_)
        new_post = value_at(calls, exit_)
        if pre is None or post is None or new_post is None:
            return False
        magnitude = self._magnitude(baseline_calls, entry) + self._magnitude(baseline_calls, exit_)
        if not self._agree(new_post, post, post - pre, magnitude):
            return False
        results, new_results = baseline_calls[0].visible_after, calls[0].visible_after
        return all(
            self._agree(new_results[key], results[key], results[key] - pre, magnitude)
            for key in self._links_beside_stream.get(block + 1, {})
        )

    def _agree(
        self, tensor: torch.Tensor, expected: torch.Tensor, added: torch.Tensor, magnitude: torch.Tensor
    ) -> bool:
        """Return whether most rows are equal up to rounding, which can tip a router's choice in some."""
        if tensor.shape != expected.shape:
            return False
        bound = self._growth * _row_rms(added) + ROUNDINGS * self._recorded.matcher.eps * _row_rms(magnitude)
        return bool((_row_rms(tensor - expected) <= bound).float().mean() > 0.5)

    def _magnitude(self, calls: list[ModuleCall], anchor: Anchor) -> torch.Tensor:
        terms = terms_at(calls, anchor)
        assert terms is not None
        return anchor.magnitude(*terms)

    def _entry(self, block: int) -> Anchor:
        return self._ports.entry(self._baseline.blocks[block][0])

    def _exit(self, block: int) -> Anchor:
        return self._ports.exit(self._baseline.blocks[block][0])


def _random_share(name: str, stream: torch.Tensor) -> torch.Tensor:
    """Return the stream times noise: a share of each element, so rounding loses no small ones."""
    return stream * noise(f"{name}:share", stream)


def _row_rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().pow(2).mean(1).sqrt()
