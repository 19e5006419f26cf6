"""What is asked: pure data, parsed and validated, with no torch.cuda and no vLLM in it."""

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
