"""What is asked: pure data, parsed and validated, with no torch.cuda and no vLLM in it."""

from typing import TYPE_CHECKING

from vllm_weir.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_weir.spec.capture import Capture
    from vllm_weir.spec.hooks import HOOKS, Site, normalise_hook, parse_site
    from vllm_weir.spec.interventions import Ablate, Add, Clamp, Intervention, LowRank, Replace
    from vllm_weir.spec.positions import Positions
    from vllm_weir.spec.request import WIRE_KEY, WIRE_VERSION, RequestSpec

__all__ = [
    "HOOKS",
    "WIRE_KEY",
    "WIRE_VERSION",
    "Ablate",
    "Add",
    "Capture",
    "Clamp",
    "Intervention",
    "LowRank",
    "Positions",
    "Replace",
    "RequestSpec",
    "Site",
    "normalise_hook",
    "parse_site",
]

# `vllm_weir.spec.keys` is on the way to the plugin: see `vllm_weir`.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "HOOKS": "vllm_weir.spec.hooks",
        "WIRE_KEY": "vllm_weir.spec.request",
        "WIRE_VERSION": "vllm_weir.spec.request",
        "Ablate": "vllm_weir.spec.interventions",
        "Add": "vllm_weir.spec.interventions",
        "Capture": "vllm_weir.spec.capture",
        "Clamp": "vllm_weir.spec.interventions",
        "Intervention": "vllm_weir.spec.interventions",
        "LowRank": "vllm_weir.spec.interventions",
        "Positions": "vllm_weir.spec.positions",
        "Replace": "vllm_weir.spec.interventions",
        "RequestSpec": "vllm_weir.spec.request",
        "Site": "vllm_weir.spec.hooks",
        "normalise_hook": "vllm_weir.spec.hooks",
        "parse_site": "vllm_weir.spec.hooks",
    },
)
