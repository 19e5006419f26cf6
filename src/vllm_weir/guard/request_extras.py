"""Where params carry the keys of plugins: ``extra_args``, in PoolingParams ``extra_kwargs``."""

from __future__ import annotations

import copy
from typing import Any

from vllm_weir.errors import WeirError

PLACES = ("extra_args", "extra_kwargs")
"""The attribute of either kind of params."""


def place_in(params: Any) -> str | None:
    """Return the attribute in which params carry keys of plugins; None if they have none."""
    for place in PLACES:
        if hasattr(params, place):
            return place
    return None


def extras_in(params: Any) -> dict[str, Any] | None:
    place = place_in(params)
    return None if place is None else getattr(params, place)


def with_extras(params: Any) -> Any:
    """Return a shallow copy of params that has a place for keys of plugins.

    Raise WeirError if these are no params of vLLM's.
    """
    if place_in(params) is not None:
        return copy.copy(params)
    from vllm.sampling_params import BeamSearchParams

    if not isinstance(params, BeamSearchParams):
        raise WeirError(
            f"{type(params).__name__} has no extra_args to carry what is asked; give SamplingParams, PoolingParams or "
            "BeamSearchParams",
            "sampling_params",
        )
    from vllm_weir.guard.beam_params import carrying

    return carrying(params)


def set_extras(params: Any, extras: dict[str, Any]) -> None:
    setattr(params, place_in(params) or PLACES[0], extras)


def lora_request(name: str, number: int, path: str, like: Any = None) -> Any:
    """Return vLLM's ``LoRARequest``, with all else as in `like`."""
    from vllm.lora.request import LoRARequest

    made = LoRARequest(name, number, path) if like is None else copy.copy(like)
    made.lora_name, made.lora_int_id, made.lora_path = name, number, path
    return made


def extras_of(request: Any) -> dict[str, Any] | None:
    """Return what a request of vLLM's (``EngineCoreRequest``, ``Request`` ...) carries for plugins, or None."""
    params = request.sampling_params
    if params is not None:
        return params.extra_args
    params = request.pooling_params
    return None if params is None else params.extra_kwargs


def replace_extras(request: Any, extras: dict[str, Any]) -> None:
    """Give a request a copy of its params that carries `extras`; the params themselves stay as they are."""
    name = "sampling_params" if request.sampling_params is not None else "pooling_params"
    params = copy.copy(getattr(request, name))
    set_extras(params, extras)
    setattr(request, name, params)
