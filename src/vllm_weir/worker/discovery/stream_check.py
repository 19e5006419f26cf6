"""Whether what was taken for the stream is all that a block hands on.

Blocks that hand on one tensor leave nothing to ask. With two, the stream may be their sum, or one of them, and the
other something that nobody uses any more. So each block is entered by the stream of the pass with the model's own
weights, once more and differently: the same sum in other parts, noise in whatever is not part of the stream. A block
that goes by the stream alone leaves the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.matcher import Matcher, rms
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.noise import noise
from vllm_weir.worker.discovery.recorder import ModuleCall, Override, Recorder, Trace, value_at
from vllm_weir.worker.discovery.resolve import StreamPorts

ROUNDINGS = 2
"""Units of rounding, of the magnitudes that make up the stream, that it may be off after it was summed differently."""


class StreamCheck:
    """The test, for one choice of what carries the stream.

    Args:
        tree, run, matcher: as in `sites`.
        ports: the choice.
        own: the pass with the model's own weights.
        mix: what that pass left behind instead of token mixers' results.
    """

    def __init__(
        self,
        tree: ModuleTree,
        run: Callable[[], None],
        matcher: Matcher,
        ports: StreamPorts,
        own: Trace,
        mix: Override,
    ) -> None:
        self._tree, self._run, self._m, self._ports, self._own, self._mix = tree, run, matcher, ports, own, mix
        self._spare = {block: self._spare_of(block) for block in tree.blocks}
        # What one rounding of what enters a block may grow to, relative to what the block adds.
        self._part = 0.01 if matcher.tolerance < 1e-3 else 0.2

    def failures(self) -> dict[int, str]:
        """Block -> why its stream cannot be what was chosen; one more pass, where blocks hand on several tensors."""
        last = self._tree.num_layers - 1
        besides = last in self._tree.blocks and bool(self._unclaimed(last))
        if self._ports.residual_in is None and not any(self._spare.values()) and not besides:
            return {}
        recorder = Recorder(self._tree, self._enter, self._mix, self._behind(last))
        with recorder.recording() as trace:
            self._run()
        names = " and ".join(str(k) for k in (self._ports.hidden_in, self._ports.residual_in) if k is not None)
        what = f"the blocks hand on several tensors, and it could not be shown that the stream is {names}"
        if last in self._tree.blocks and self._own.root is not None:
            root, was = trace.root, self._own.root
            if root is None or not self._agree(root, was, was, 0 * was):
                finite = root is not None and bool(root.isfinite().all() and was.isfinite().all())
                more = "what the model returns depends on more" if finite else "what the model returns is not finite"
                why = f"{what}: {more}"
                return dict.fromkeys(self._tree.blocks, why)
        return {
            b: f"{what}: what leaves block {b} depends on more" for b in self._tree.blocks if not self._alike(b, trace)
        }

    def _spare_of(self, block: int) -> dict[TensorKey, TensorKey]:
        """What the block before this one hands on that is not part of the stream: results -> arguments."""
        if block - 1 not in self._tree.blocks:
            return {}
        before, call = self._own.blocks[block - 1][0], self._own.blocks[block][0]
        ports = self._ports.of(call)
        stream = {key for key in (ports.hidden_in, ports.residual_in) if key is not None}
        taken = {call.pointers[key] for key in stream if key in call.pointers}
        given = {call.pointers[k]: k for k in call.args if k not in stream and call.pointers[k] not in taken}
        return {o: given[before.pointers[o]] for o in before.handed if before.pointers[o] in given}

    def _enter(self, block: int, path: str, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        anchor = self._anchor(block, "before")
        own = value_at(self._own.blocks[block], anchor)
        if own is None or anchor.hidden not in live:
            return
        if anchor.residual is not None and anchor.residual in live:
            hidden, residual = live[anchor.hidden], live[anchor.residual]
            residual.copy_(_share(path, own).reshape(residual.shape))
            hidden.copy_(own.reshape(hidden.shape) - residual.float())
        for key in self._spare[block].values():
            live[key].copy_(rms(own) * noise(f"{path}:{key.name or key.index}:spare", live[key]))

    def _behind(self, block: int) -> dict[Anchor, torch.Tensor]:
        """What to add behind the last block: to one part of the stream what is taken from the other, and noise."""
        if block not in self._tree.blocks:
            return {}
        anchor, path = self._anchor(block, "after"), f"{self._tree.stack}.{block}"
        stream, call = value_at(self._own.blocks[block], anchor), self._own.blocks[block][0]
        if stream is None:
            return {}
        writes = {}
        if anchor.residual is not None:
            share = _share(path, stream)
            writes = {Anchor(path, "after", anchor.hidden): -share, Anchor(path, "after", anchor.residual): share}
        for key in self._unclaimed(block):
            size = max(rms(stream), rms(call.left[key]))
            writes[Anchor(path, "after", key)] = size * noise(f"{path}:{key.index}:spare", stream)
        return writes

    def _unclaimed(self, block: int) -> list[TensorKey]:
        """What a block hands on besides its stream."""
        anchor, call = self._anchor(block, "after"), self._own.blocks[block][0]
        stream = {call.pointers[k] for k in (anchor.hidden, anchor.residual) if k is not None and k in call.behind}
        return [key for key in call.handed if call.pointers[key] not in stream]

    def _alike(self, block: int, trace: Trace) -> bool:
        """Whether a block left the same in both passes, what is not part of the stream included."""
        own, now = self._own.blocks[block], trace.blocks[block]
        before, after = self._anchor(block, "before"), self._anchor(block, "after")
        pre, post, new = value_at(own, before), value_at(own, after), value_at(now, after)
        if pre is None or post is None or new is None:
            return False
        room = self._magnitude(own[0], before) + self._magnitude(own[0], after)
        if not self._agree(new, post, post - pre, room):
            return False
        spare = self._spare.get(block + 1, {})
        return all(self._agree(now[0].behind[o], own[0].behind[o], own[0].behind[o] - pre, room) for o in spare)

    def _agree(self, now: torch.Tensor, was: torch.Tensor, added: torch.Tensor, room: torch.Tensor) -> bool:
        """Whether most rows are the same: a router that rounding tips over changes some of them."""
        if now.shape != was.shape:
            return False
        bound = self._part * _row_rms(added) + ROUNDINGS * self._m.eps * _row_rms(room)
        return bool((_row_rms(now - was) <= bound).float().mean() > 0.5)

    def _anchor(self, block: int, when: str) -> Anchor:
        path, call = f"{self._tree.stack}.{block}", self._own.blocks[block][0]
        ports = self._ports.of(call)
        if when == "after":
            return Anchor(
                path, "after", ports.hidden_out, ports.residual_out if ports.residual_out in call.behind else None
            )
        return Anchor(path, "before", ports.hidden_in, ports.residual_in if ports.residual_in in call.args else None)

    def _magnitude(self, call: ModuleCall, anchor: Anchor) -> torch.Tensor:
        tensors = call.args if anchor.when == "before" else call.behind
        return sum(
            (tensors[k].abs() for k in (anchor.hidden, anchor.residual) if k is not None), start=torch.tensor(0.0)
        )


def _share(path: str, stream: torch.Tensor) -> torch.Tensor:
    """A part of the stream, of another size in every element, so that little ones are not lost beside great ones."""
    return stream * noise(f"{path}:share", stream)


def _row_rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().pow(2).mean(1).sqrt()
