"""The check of the points inside one block's attention and MLP: what is added there arrives, and nowhere else.

Two passes are compared, as `parts.recorder` records them: one as it is, one with vectors added at
the points. Every linear module, mixer and layer of experts returns the same noise in both. So only
what is added since the last of these can move a tensor:

* What reads `attn_in`, `z`, `mlp_in`, `mlp_post` or `router_logits` moves by what was added
  there. The vectors of attention's input, the MLP's input and the others are added at tokens of
  their own, so it shows which of them moved what should have stayed: the stream, or the input of
  the other part, where these are one memory. Such a point is read, and not written.
* Heads of `q`, `k` and `v` are changed at the tokens that their numbers spell in binary. The same
  heads of what attention is given must move at the same tokens, and by exactly that where nothing
  lies between. Others may move at these tokens too, by a norm
  over all heads, if a module between is known to be given the heads as they are.
* If `z` is not what attention returned (there is an output gate, or a norm), it must move with a
  head of that.
* If the router runs inside the layer of experts, what that computes must move with its logits.
"""

from __future__ import annotations

import torch

from vllm_weir.schema.hooks import MLP_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor, value_at
from vllm_weir.worker.discovery.matcher import rms
from vllm_weir.worker.discovery.parts.findings import BlockView, PartFindings, row_at
from vllm_weir.worker.discovery.parts.projections import ROTATED
from vllm_weir.worker.discovery.parts.recorder import BlockRecord
from vllm_weir.worker.discovery.recorded_model import noise
from vllm_weir.worker.discovery.stream_ports import StreamPorts

_REMAINDERS = {"attn_in": 0, "mlp_in": 1, "z": 2, "mlp_post": 2, "router_logits": 2}
"""Point -> remainder of the numbers of the tokens at which it is written, divided by `_PERIOD`."""
_PERIOD = 3
_UNCHANGED = {"q": 0, "k": 1, "v": 2}
"""Point -> the token at which none of its heads is changed."""
_MIXED_TOKEN = 0
"""The token at which a head of what attention returns is changed; z is not written there."""
MOVED, STILL = 1e-2, 1e-3
"""A tensor moved if its largest change is more than the first part of its root mean square, and
stayed if it is less than the second."""


class BlockCheck:
    """The check of one block.

    Args:
        attention, mlp: what was found in it; what fails is refused there.
        resid_mid: where the stream between the two is; None if that was refused.

    Attributes:
        writes: anchor -> what is to be added in the second pass, float32 [tokens, width].
        read_only: point -> why it is not to be written.
    """

    def __init__(
        self, view: BlockView, attention: PartFindings, mlp: PartFindings, resid_mid: Anchor | None, ports: StreamPorts
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self.writes: dict[Anchor, torch.Tensor] = {}
        self.read_only: dict[str, str] = {}
        self._matcher, self._resid_mid, self._ports = view.matcher, resid_mid, ports
        self._added: dict[str, torch.Tensor] = {}
        self._codes: dict[str, torch.Tensor] = {}
        self._before: dict[Anchor, torch.Tensor] = {}
        self._tokens, record = view.record.tokens, view.record
        if self._tokens < _PERIOD:
            why = f"the probe pass has {self._tokens} tokens, too few to tell the points inside a block apart"
            attention.refuse(tuple(attention.anchors), why)
            mlp.refuse(tuple(mlp.anchors), why)
        self._stream = self._stream_in(record)
        for hook in (*_REMAINDERS, *_UNCHANGED):
            self._prepare(hook, record)
        self._computed = record.computed
        source = attention.source_of_z
        value = None if source is None else row_at(record, source)
        if source is not None and value is not None and "z" in attention.anchors:
            self.writes[source] = noise("mixed", value) * self._at_tokens(_MIXED_TOKEN, self._tokens)

    def compare(self, record: BlockRecord) -> None:
        """Refuse points, or their writing, by the block's record in the pass with writes."""
        self._compare_stream(record)
        for hook in self._codes:
            self._compare_heads(hook, record)
        for hook in self._added:
            for reader in self._findings(hook).readers.get(hook, ()):
                self._compare_reader(hook, reader, record)
        if "z" in self._added and self.attention.source_of_z is not None:
            self._compare_mixed(record)
        if "router_logits" in self._added and self.mlp.router_inside:
            self._compare_experts(record)

    def _findings(self, hook: str) -> PartFindings:
        return self.mlp if hook in MLP_HOOKS else self.attention

    def _prepare(self, hook: str, record: BlockRecord) -> None:
        """Prepare what is added at a point, and keep what reads it."""
        found = self._findings(hook)
        anchor = found.anchors.get(hook)
        value = None if anchor is None else row_at(record, anchor)
        if anchor is None or value is None:
            return
        if hook in _UNCHANGED:
            size = found.shapes[hook][-1]
            codes = head_codes(value.shape[1] // size, self._tokens, _UNCHANGED[hook])
            self._codes[hook], tokens = codes, codes.repeat_interleave(size, 1)
        else:
            tokens = self._at_tokens(_REMAINDERS[hook])
            self._added[hook] = noise(f"write {hook} {anchor.module}", value) * tokens
        self.writes[anchor] = noise(f"write {hook} {anchor.module}", value) * tokens
        for reader in found.readers.get(hook, ()):
            before = row_at(record, reader)
            if before is not None:
                self._before[reader] = before

    def _at_tokens(self, remainder: int, period: int = _PERIOD) -> torch.Tensor:
        return (torch.arange(self._tokens) % period == remainder)[:, None]

    def _compare_heads(self, hook: str, record: BlockRecord) -> None:
        """Refuse q, k or v if heads of what attention is given do not move as they were changed."""
        found, codes = self.attention, self._codes[hook]
        reader = next(iter(found.readers.get(hook, ())), None)
        before, after = (None, None) if reader is None else (self._before.get(reader), row_at(record, reader))
        if before is None or after is None:
            found.refuse((hook,), "attention is given it in a shape in which heads could not be compared")
            return
        change = after - before
        size = change.shape[1] // codes.shape[1]
        moved = change.abs().reshape(*codes.shape, size).amax(-1) / max(rms(before), 1e-30)
        # A norm over all heads moves them all, by however little.
        may_move = codes.any(1, keepdim=True).expand_as(codes) if hook in found.located else codes
        wrong = bool((moved[codes] < MOVED).any()) or bool((moved[~may_move] > STILL).any())
        if hook in found.exact:
            added = self.writes[found.anchors[hook]]
            wrong = wrong or bool(self._moved_tokens(change - added, before).any())
        if wrong:
            also = [ROTATED[hook]] if hook in ROTATED and found.shares_features(hook, ROTATED[hook]) else []
            found.refuse((hook, *also), "a change of one head there does not change that head alone in attention")

    def _compare_reader(self, hook: str, reader: Anchor, record: BlockRecord) -> None:
        """See that a reader of a point moved by what was added there, and by nothing else."""
        before, after = self._before.get(reader), row_at(record, reader)
        if before is None or after is None:
            self._findings(hook).refuse((hook,), f"{_name(reader)} did not run again in the pass with writes")
            return
        off = after - before - self._added[hook]
        if hook == "z" and self.attention.source_of_z is not None:
            off[_MIXED_TOKEN] = 0
        tokens = self._moved_tokens(off, before)
        if bool(tokens[self._at_tokens(_REMAINDERS[hook])[:, 0]].any()):
            self._findings(hook).refuse((hook,), f"what is added there does not arrive at {_name(reader)}")
        self._blame(tokens, f"{_name(reader)} is given the same tensor", but=hook)

    def _compare_mixed(self, record: BlockRecord) -> None:
        """Refuse z if it did not move with what attention returned."""
        reader = self.attention.anchors.get("z")
        if reader is None:
            return
        after = row_at(record, reader)
        if after is None or not bool(self._moved_tokens(after - self._before[reader], after)[_MIXED_TOKEN]):
            self.attention.refuse(
                ("z",), "what the output projection is given does not depend on what attention returns"
            )

    def _compare_experts(self, record: BlockRecord) -> None:
        """Refuse router_logits if the experts' result did not move with it."""
        path = self.mlp.router_inside
        before, after = self._computed[path].nan_to_num(), record.computed[path].nan_to_num()
        moved = self._moved_tokens(after - before, before)
        if not bool(moved[self._at_tokens(_REMAINDERS["router_logits"])[:, 0]].all()):
            self.mlp.refuse(("router_logits",), "the experts' result does not change with it")

    def _compare_stream(self, record: BlockRecord) -> None:
        """Let no point be written whose writing moves the stream."""
        for name, after in self._stream_in(record).items():
            before = self._stream.get(name)
            if before is None or before.shape != after.shape:
                continue
            self._blame(self._moved_tokens(after - before, before), "it is the memory of the stream itself")

    def _stream_in(self, record: BlockRecord) -> dict[str, torch.Tensor]:
        """Return what the block hands on, and the stream before its MLP."""
        block_call = record.calls[0]
        stream = {str(key): value for key, value in block_call.outputs.items()}
        exit_ = value_at([block_call], self._ports.exit(block_call))
        middle = None if self._resid_mid is None else value_at(record.calls, self._resid_mid)
        found = {"exit": exit_, "resid_mid": middle}
        return stream | {name: value for name, value in found.items() if value is not None}

    def _moved_tokens(self, change: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return at which tokens something moved by more than rounding of it and of what was added, [tokens]."""
        return change.abs().amax(1) > self._matcher.tolerance * max(rms(like), 1.0)

    def _blame(self, tokens: torch.Tensor, why: str, but: str = "") -> None:
        """Let the points that are written at these tokens not be written, other than `but`."""
        for hook, remainder in _REMAINDERS.items():
            if hook in self._added and hook != but and bool(tokens[self._at_tokens(remainder)[:, 0]].any()):
                self.read_only.setdefault(hook, f"a change there would reach more than what reads {hook}: {why}")


def _name(reader: Anchor) -> str:
    return reader.module.rsplit(".", 1)[-1]


def head_codes(heads: int, tokens: int, unchanged: int) -> torch.Tensor:
    """Return which heads are changed at which tokens, [tokens, heads].

    At the tokens other than `unchanged`, a head's column spells its number in binary, counted from
    1; heads have numbers of their own as far as there are tokens to spell them.
    """
    bits = tokens - 1
    numbers = torch.arange(heads) % (2**bits - 1) + 1
    codes = numbers[None] >> torch.arange(bits)[:, None] & 1
    silent = torch.zeros(1, heads, dtype=codes.dtype)
    return torch.cat([codes[:unchanged], silent, codes[unchanged:]]).bool()
