"""vllm-lens's request keys, read as the same wishes in Weir's own words."""

from __future__ import annotations

import json

from vllm_weir.errors import WeirError
from vllm_weir.spec.capture import Capture

LENS_CAPTURE_KEY = "output_residual_stream"
LENS_STEER_KEY = "apply_steering_vectors"


def lens_capture(value: object) -> Capture | None:
    """``output_residual_stream``: a list of blocks, True for all of them, or either as JSON; None for False or []."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise WeirError("expected true, a list of ints, or that as JSON", LENS_CAPTURE_KEY) from None
    if value is False or value == []:
        return None
    return Capture("resid_post", layers="all" if value is True else value, path=LENS_CAPTURE_KEY)
