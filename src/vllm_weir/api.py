"""What a caller writes: `params` puts Weir's wishes into a copy of vLLM's SamplingParams."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_weir.errors import WeirError
from vllm_weir.spec.capture import Capture
from vllm_weir.spec.request import WIRE_KEY, RequestSpec, parse_captures

if TYPE_CHECKING:
    from vllm import SamplingParams


def params(
    sampling_params: SamplingParams | None = None,
    *,
    capture: Capture | Mapping[str, Any] | Sequence[Capture | Mapping[str, Any]] = (),
    interventions: Sequence[Any] = (),
) -> SamplingParams:
    """A copy of `sampling_params` that carries what is asked of Weir.

    Args:
        sampling_params: vLLM's own; never changed. None stands for ``SamplingParams()``.
        capture: one `Capture` or a list of them (or their wire form).
        interventions: not available in this version; must be empty.

    Returns:
        A new ``SamplingParams`` whose ``extra_args["weir"]`` is plain JSON data; usable in any number of requests.

    Raises:
        WeirError: naming the field that is wrong.
    """
    if sampling_params is None:
        from vllm import SamplingParams as Params

        sampling_params = Params()
    if interventions:
        raise WeirError("interventions are not available in this version", "interventions")
    spec = RequestSpec(parse_captures(capture, "capture"))
    out = copy.copy(sampling_params)
    out.extra_args = {**(sampling_params.extra_args or {}), WIRE_KEY: spec.to_json()}
    return out


def demo_model() -> str:
    """Directory of the small Llama that ships with the package (HF format, bf16, own tokenizer)."""
    return str(Path(__file__).parent / "demo" / "model")
