"""The oracle in a process of its own: vLLM's Transformers backend rewrites the classes the oracle would use."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.oracle import NoPoint, Rows


class RemoteOracle:
    """`Oracle`'s methods, answered by another process.

    Raises:
        NoPoint: if the oracle itself refuses the model.
    """

    def __init__(self, model_dir: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, model_dir), daemon=True)
        self._process.start()
        theirs.close()
        self._capabilities: dict[str, Any] | None = None

    @property
    def capabilities(self) -> dict[str, Any]:
        """`num_layers`, `hidden_size`, `kinds` and `gains` of the blocks, and `missing`: (hook, layer) -> why."""
        if self._capabilities is None:
            self._capabilities = self._answer()
        return self._capabilities

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """As `Oracle.logits`."""
        return self._ask("logits", list(ids))

    def points(self, ids: Sequence[int]) -> tuple[Rows, torch.Tensor]:
        """As `Oracle.points`."""
        return self._ask("points", list(ids))

    def steer(
        self, ids: Sequence[int], hook: str, layer: int, vector: torch.Tensor, positions: list[int] | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As `Oracle.steer`."""
        return self._ask("steer", list(ids), hook, layer, vector, positions)

    def lens(self, ids: Sequence[int]) -> torch.Tensor:
        """As `Oracle.lens`."""
        return self._ask("lens", list(ids))

    def rounding(self, ids: Sequence[int], steer: tuple[Any, ...] | None = None) -> dict[Any, float]:
        """As `rounding_errors`."""
        return self._ask("rounding", list(ids), steer)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, *question: Any) -> Any:
        assert self.capabilities
        self._pipe.send(_packed(question))
        return self._answer()

    def _answer(self) -> Any:
        kind, value = self._pipe.recv()
        if kind == "no point":
            raise NoPoint(value)
        if kind == "error":
            raise RuntimeError(f"the oracle failed: {value}")
        return _unpacked(value)


@contextlib.contextmanager
def remote_oracle(model_dir: Path) -> Iterator[RemoteOracle]:
    """A `RemoteOracle` for a while."""
    oracle = RemoteOracle(model_dir)
    try:
        yield oracle
    finally:
        oracle.close()


def _serve(pipe: Any, other_end: Any, model_dir: Path) -> None:
    other_end.close()  # a fork has it too, and would never find that the other side is gone
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from tests.conformance.inside import INNER
    from tests.conformance.oracle import ENDS, FIVE, Oracle
    from tests.conformance.rounding import rounding_errors

    oracle: Oracle

    def answer(name: str, arguments: Sequence[Any]) -> Any:
        return rounding_errors(oracle, *arguments) if name == "rounding" else getattr(oracle, name)(*arguments)

    def capabilities() -> dict[str, Any]:
        nonlocal oracle
        oracle = Oracle(model_dir)
        inside = [(hook, layer) for layer in range(oracle.num_layers) for hook in (*FIVE, *INNER)]
        sites = inside + [(hook, 0) for hook in ENDS]
        return {
            "num_layers": oracle.num_layers,
            "hidden_size": oracle.hidden_size,
            "kinds": [shape.kind for shape in oracle.shapes],
            "gains": oracle.gains,
            "experts_factor": getattr(oracle.model.config.get_text_config(), "routed_scaling_factor", None) or 1.0,
            "missing": {site: why for site in sites if (why := oracle.missing(*site))},
        }

    _reply(pipe, capabilities)
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = _unpacked(pipe.recv())
            _reply(pipe, lambda name=name, arguments=arguments: answer(name, arguments))


def _reply(pipe: Any, work: Any) -> None:
    try:
        answer = ("ok", _packed(work()))
    except NoPoint as e:
        answer = ("no point", str(e))
    except Exception as e:  # noqa: BLE001 - it is the other process's to raise
        answer = ("error", f"{type(e).__name__}: {e}")
    pipe.send(answer)


def _packed(value: Any) -> Any:
    """Tensors as arrays: torch would send file descriptors, which outlive nobody."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, (tuple, list)):
        return type(value)(_packed(v) for v in value)
    return {k: _packed(v) for k, v in value.items()} if isinstance(value, dict) else value


def _unpacked(value: Any) -> Any:
    if type(value).__module__ == "numpy":
        return torch.from_numpy(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_unpacked(v) for v in value)
    return {k: _unpacked(v) for k, v in value.items()} if isinstance(value, dict) else value
