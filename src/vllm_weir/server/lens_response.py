"""vllm-lens's response fields."""

from __future__ import annotations

from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.results.activations import LENS_KEY, Activations
from vllm_weir.results.lens_tensors import serialize_tensor
from vllm_weir.schema.compat.vllm_lens import LENS_CAPTURE_KEY


def activations_field(acts: Activations, max_bytes: int) -> dict[str, Any] | None:
    """Return the response's field ``activations``, None if vllm-lens's key captured nothing.

    Raises:
        WeirError: If the rows have more than `max_bytes` bytes.
    """
    if LENS_KEY not in acts:
        return None
    rows = acts[LENS_KEY]
    if rows.nbytes > max_bytes:
        raise WeirError(
            f"{rows.nbytes} bytes of rows exceed the {max_bytes} that a response may carry (WEIR_SERVE_LENS_BYTES); "
            "ask for fewer blocks or tokens, or use the key weir, whose rows are fetched by reference",
            LENS_CAPTURE_KEY,
        )
    return {LENS_KEY: serialize_tensor(rows)}
