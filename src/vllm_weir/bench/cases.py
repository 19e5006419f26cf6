"""The cases that `weir bench` times, the systems that it times them on, and who cannot do what."""

from __future__ import annotations

from typing import Literal

SizeKind = Literal["decode", "prefill", "texts", "long", "chats", "requests"]

SYSTEMS = ("stock", "weir", "vllm-lens", "native", "nnsight", "interp-engine", "hotwire", "transformers")
INSTRUMENTS = (
    "z_all",
    "mlp_post_one",
    "pattern_last",
    "features",
    "set_feature",
    "lens",
    "probe_each",
    "probe_and_gate",
)
"""Step cases that read inside the block, or use sparse autoencoders, lenses and probes."""
STEP_CASES = (
    "idle",
    "steer_one",
    "steer_all_distinct",
    "capture_last_all_layers",
    "capture_all_all_layers",
    "capture_rp8",
    *INSTRUMENTS,
)
"""Cases that run at every batch size and in the prefill, on engines without a prefix cache."""
WORKLOADS: dict[str, SizeKind] = {
    "extract": "texts",
    "mean": "texts",
    "last_mixed": "texts",
    "long": "long",
    "long_one": "long",
    "chat_mix": "chats",
    "ablate_everywhere": "requests",
}
"""Cases that have a size of their own, on engines with vLLM's defaults; the kind of their prompts."""
CASES = (*STEP_CASES, *WORKLOADS, "startup")
OPTIONAL = ("capture_rp8", *INSTRUMENTS, *WORKLOADS)
"""Cases that run only when they are named."""
CAPTURES = (
    "capture_last_all_layers",
    "capture_all_all_layers",
    "extract",
    "mean",
    "last_mixed",
    "long",
    "long_one",
    "chat_mix",
)
"""Cases whose rows are compared with transformers."""
STEERS = ("steer_one", "steer_all_distinct", "ablate_everywhere")
"""Cases whose interventions are compared with what they should do."""
CHAT_ROLES = ("steer", "capture", "project", "ablate", "steer and capture", None, None, None)
"""What each of eight consecutive chats of `chat_mix` asks for."""
ABLATED_HOOKS = ("resid_pre", "resid_mid", "resid_post")
"""Hook points of `ablate_everywhere`."""
COMPRESSION = {"method": "rp8", "k": 64}
"""How `capture_rp8` compresses."""

TITLES = {
    "idle": "nothing asked",
    "steer_one": "steer one block, a vector per request",
    "steer_all_distinct": "steer all blocks, a vector per request",
    "capture_last_all_layers": "capture the last prompt token, all blocks",
    "capture_all_all_layers": "capture every token, all blocks",
    "capture_rp8": "capture every token, all blocks, rp8 k=64",
    "z_all": "z of every token, all blocks",
    "mlp_post_one": "mlp_post of every token, one block",
    "pattern_last": "pattern of the last prompt token, all blocks",
    "features": "top-32 features of every token, one autoencoder",
    "set_feature": "clamp a feature, another one per request",
    "lens": "logit lens of every prompt token, all blocks, top-10",
    "probe_each": "a linear probe on every token",
    "probe_and_gate": "a probe and a gate per request",
    "extract": "every prompt token, a few blocks",
    "mean": "mean over the prompt, all blocks",
    "last_mixed": "last prompt token, all blocks",
    "long": "every prompt token, all blocks",
    "long_one": "every prompt token, one block",
    "chat_mix": "five of eight chats steer, capture, project, ablate",
    "ablate_everywhere": "ablate at three points of all blocks",
    "startup": "start of the engine",
}

_READS_ONLY = "it only reads activations, and cannot change them"
_ALWAYS_READS = "its engine extracts for every request, so it has no idle state"
_UNCOMPRESSED = "it does not compress rows on the device"
_NO_ABLATION = "its steering vectors are added; none projects a direction out at a chosen hook point"
_WORKLOADS_ONLY = "its adapter here has the workloads in which prompts are read, and no others"

_STEERS_ONLY = "it adds vectors, and returns no activations"
_NO_INSTRUMENTS = "its adapter here has the stream between blocks only"

CANNOT: dict[str, dict[str, str]] = {
    "stock": dict.fromkeys((c for c in CASES if c not in ("idle", "startup")), "it returns no activations"),
    "weir": {},
    "vllm-lens": {
        **dict.fromkeys(INSTRUMENTS, _NO_INSTRUMENTS),
        "capture_rp8": _UNCOMPRESSED,
        "chat_mix": _NO_ABLATION,
        "ablate_everywhere": _NO_ABLATION,
    },
    "native": {
        **dict.fromkeys(INSTRUMENTS, _NO_INSTRUMENTS),
        "idle": _ALWAYS_READS,
        "capture_rp8": _UNCOMPRESSED,
        **dict.fromkeys(("steer_one", "steer_all_distinct", "chat_mix", "ablate_everywhere"), _READS_ONLY),
    },
    "nnsight": dict.fromkeys((*STEP_CASES, "chat_mix", "ablate_everywhere", "startup"), _WORKLOADS_ONLY),
    "interp-engine": dict.fromkeys((*STEP_CASES, "chat_mix", "ablate_everywhere", "startup"), _WORKLOADS_ONLY),
    "hotwire": {
        **dict.fromkeys((*CAPTURES, "capture_rp8", *INSTRUMENTS), _STEERS_ONLY),
        **dict.fromkeys(("chat_mix", "ablate_everywhere"), _NO_ABLATION),
    },
    "transformers": dict.fromkeys((*STEP_CASES, "chat_mix", "ablate_everywhere", "startup"), _WORKLOADS_ONLY),
}
"""System -> case -> why it cannot run that case, in one sentence."""


def can_run(system: str, case: str) -> bool:
    """Return whether a system has a way to do a case."""
    return case not in CANNOT[system]
