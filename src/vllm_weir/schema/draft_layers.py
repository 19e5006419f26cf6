"""The blocks whose rows draft models for speculative decoding are trained on."""

from __future__ import annotations

from vllm_weir.errors import WeirError

DRAFT_LAYERS = ("eagle3", "mtp")


def draft_layers(kind: str, num_layers: int | None, field: str = "layers") -> tuple[int, ...]:
    """Return the blocks whose ``resid_post`` a draft model of a kind takes, as speculators chooses them by default.

    In vLLM's numbering of auxiliary layers (k is the stream after k blocks) ``"eagle3"`` is 2, L // 2 and L - 3, and L
    for the target; ``"mtp"`` is L alone.

    Args:
        kind: One of `DRAFT_LAYERS`.
        num_layers: L; None if it is not known.
        field: Named by errors.

    Raises:
        WeirError: If the model has too few blocks, or nothing says how many.
    """
    if num_layers is None:
        raise WeirError(f"the model's config does not say how many blocks it has; list those of {kind}", field)
    ids = {num_layers} if kind == "mtp" else {2, num_layers // 2, num_layers - 3, num_layers}
    if min(ids) < 1:
        raise WeirError(f"{kind} takes a model of at least 4 blocks, and this one has {num_layers}; list them", field)
    return tuple(sorted(k - 1 for k in ids))
