"""vLLM's ``BeamSearchParams`` with a place for the keys of plugins, which vLLM's own have not."""

from __future__ import annotations

import copy
from typing import Any

from vllm.sampling_params import BeamSearchParams as BeamSearchParams


class CarryingBeamSearchParams(BeamSearchParams, omit_defaults=True, dict=True, kw_only=True):  # type: ignore[call-arg]
    """``BeamSearchParams`` that carry keys of plugins, in ``extra_args`` as ``SamplingParams`` do."""

    extra_args: dict[str, Any] | None = None


def carrying(params: BeamSearchParams) -> CarryingBeamSearchParams:
    if isinstance(params, CarryingBeamSearchParams):
        return copy.copy(params)
    values = {name: getattr(params, name) for name in params.__struct_fields__}
    return CarryingBeamSearchParams(**values)
