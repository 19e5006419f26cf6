"""What a request asks for: pure data, parsed and validated, without torch and vLLM."""

from typing import TYPE_CHECKING

from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_weir.schema.capture import Capture
    from vllm_weir.schema.hooks import HOOKS, Site, normalise_hook, parse_site
    from vllm_weir.schema.intervention_base import Intervention
    from vllm_weir.schema.interventions import Ablate, Add, Clamp, LowRank, Replace
    from vllm_weir.schema.positions import Positions
    from vllm_weir.schema.request import WIRE_KEY, WIRE_VERSION, RequestSpec

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

# Lazy, because the plugin imports `vllm_weir.schema.keys` with the standard library alone.
__getattr__, __dir__ = lazy_names(__name__)
