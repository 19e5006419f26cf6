"""The cases that `weir bench` times, the systems that it times them on, and who cannot do what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

SizeKind = Literal[
    "decode", "prefill", "texts", "long", "medium", "short", "chats", "requests", "crowd", "single", "cells"
]

SYSTEMS = ("stock", "weir", "vllm-lens", "native", "nnsight", "interp-engine", "hotwire", "transformers")
INSTRUMENTS = {
    "z_all": "z of every token, all blocks",
    "mlp_post_one": "mlp_post of every token, one block",
    "pattern_last": "pattern of the last prompt token, all blocks",
    "features": "top-32 features of every token, one autoencoder",
    "set_feature": "clamp a feature, another one per request",
    "lens": "logit lens of every prompt token, all blocks, top-10",
    "probe_each": "a linear probe on every token",
    "probe_and_gate": "a probe and a gate per request",
}
"""Step cases that read inside the block, or use sparse autoencoders, lenses and probes; with titles."""
_STEPS = {
    "idle": "nothing asked",
    "steer_one": "steer one block, a vector per request",
    "steer_all_distinct": "steer all blocks, a vector per request",
    "capture_last_all_layers": "capture the last prompt token, all blocks",
    "capture_all_all_layers": "capture every token, all blocks",
    "capture_rp8": "capture every token, all blocks, rp8 k=64",
    **INSTRUMENTS,
}
STEP_CASES = tuple(_STEPS)
"""Cases that run at every batch size and in the prefill, on engines without a prefix cache."""
_OF_STREAM: dict[str, tuple[SizeKind, float, str]] = {
    "extract": ("texts", 1.01, "every prompt token, a few blocks"),
    "mean": ("texts", 1.02, "mean over the prompt, all blocks"),
    "last_mixed": ("texts", 1.02, "last prompt token, all blocks"),
    "long": ("long", 1.05, "every prompt token, all blocks"),
    "long_one": ("long", 1.02, "every prompt token, one block"),
    "chat_mix": ("chats", 1.02, "five of eight chats steer, capture, project, ablate"),
    "one_user": ("single", 1.005, "steer one block, capture sampled tokens of all"),
    "ablate_everywhere": ("requests", 1.03, "ablate at three points of all blocks"),
    "steer_everywhere": ("crowd", 1.015, "steer all blocks, a vector per request"),
}
_OF_INSTRUMENTS: dict[str, tuple[SizeKind, float, str]] = {
    "z_generated": ("requests", 1.02, "z of generated tokens, all blocks"),
    "qkv_one": ("requests", 1.01, "q, k and v of every token, one block"),
    "probes_and_stop": ("requests", 1.01, "three probes on every token, and a stop rule"),
    "gate_each": ("requests", 1.01, "a probe and a gate per request"),
    "project_sampled": ("requests", 1.02, "four projections of sampled tokens, all blocks"),
    "features_requests": ("requests", 1.03, "top-32 features of every token"),
    "features_texts": ("texts", 1.05, "top-32 features of every prompt token"),
    "lens_last": ("texts", 1.02, "logit lens of the last prompt token, all blocks"),
    "lens_prompt": ("short", 1.6, "logit lens of every prompt token, all blocks"),
    "pattern_long": ("medium", 1.2, "pattern of the last prompt token, all blocks"),
    "attn_mlp_out": ("texts", 1.01, "attn_out and mlp_out of every prompt token, a few blocks"),
    "set_feature_each": ("requests", 1.01, "clamp a feature, another one per request"),
    "one_user_probes": ("single", 1.01, "three probes on every token, and a stop rule"),
    "sweep": ("cells", 1.05, "activation patching, over as many plain requests"),
}
_SIZED = _OF_STREAM | _OF_INSTRUMENTS
WORKLOADS: dict[str, SizeKind] = {case: kind for case, (kind, _, _) in _SIZED.items()}
"""Cases that have a size of their own, on engines with vLLM's defaults; the kind of their prompts."""
GOALS = {"idle": 1.005} | {case: goal for case, (_, goal, _) in _SIZED.items()}
"""The ratio to stock that a workload should not exceed."""
SETS = {
    "workloads": tuple(_OF_STREAM),
    "instruments": tuple(_OF_INSTRUMENTS),
    "guard": (
        "idle",
        *(case for case, kind in WORKLOADS.items() if kind in ("requests", "crowd", "single", "short", "medium")),
    ),
}
"""Names for several cases; `guard` has those that take minutes together."""
CASES = (*STEP_CASES, *WORKLOADS, "startup")
OPTIONAL = ("capture_rp8", *INSTRUMENTS, *WORKLOADS)
"""Cases that run only when they are named."""
DEFAULT_CASES = tuple(case for case in CASES if case not in OPTIONAL)
TITLES = _STEPS | {case: title for case, (_, _, title) in _SIZED.items()} | {"startup": "start of the engine"}

_READ = ("extract", "mean", "last_mixed", "long", "long_one")
_ROWS = ("capture_last_all_layers", "capture_all_all_layers", *_READ)
CAPTURES = (*_ROWS, "chat_mix")
"""Cases whose rows are compared with transformers."""
STEERS = ("steer_one", "steer_all_distinct", "ablate_everywhere", "steer_everywhere")
"""Cases whose interventions are compared with what they should do."""
CHAT_ROLES = ("steer", "capture", "project", "ablate", "steer and capture", None, None, None)
"""What each of eight consecutive chats of `chat_mix` asks for."""
ABLATED_HOOKS = ("resid_pre", "resid_mid", "resid_post")
"""Hook points of `ablate_everywhere`."""
COMPRESSION = {"method": "rp8", "k": 64}
"""How `capture_rp8` compresses."""

_READS_ONLY = "it only reads activations, and cannot change them"
_ALWAYS_READS = "its engine extracts for every request, so it has no idle state"
_UNCOMPRESSED = "it does not compress rows on the device"
_NO_ABLATION = "its steering vectors are added; none projects a direction out at a chosen hook point"
_WORKLOADS_ONLY = "its adapter here has the workloads in which prompts are read, and no others"
_STEERS_ONLY = "it adds vectors, and returns no activations"
_NO_INSTRUMENTS = "its adapter here has the stream between blocks only"
_STEPS_ONLY = "its adapter here has the cases of steps only"
_NOT_BOTH = "its adapter here captures or steers, and not both at once"


def _all_but(can: Sequence[str], why: str, **others: str) -> dict[str, str]:
    """Return why a system cannot run what it cannot: `why`, unless a case has a reason of its own."""
    return {case: others.get(case, why) for case in CASES if case not in can}


_UNABLATED = dict.fromkeys(("chat_mix", "ablate_everywhere"), _NO_ABLATION)
CANNOT: dict[str, dict[str, str]] = {
    "stock": _all_but(("idle", "startup"), "it returns no activations"),
    "weir": {},
    "vllm-lens": _all_but(
        ("idle", "steer_one", "steer_all_distinct", "steer_everywhere", *_ROWS, "startup"),
        _NO_INSTRUMENTS, capture_rp8=_UNCOMPRESSED, one_user=_NOT_BOTH, **_UNABLATED,
    ),
    "native": _all_but(
        (*_ROWS, "startup"), _NO_INSTRUMENTS, idle=_ALWAYS_READS, capture_rp8=_UNCOMPRESSED,
        **dict.fromkeys((*STEERS, "chat_mix", "one_user"), _READS_ONLY),
    ),
    "hotwire": _all_but(
        ("idle", "steer_one", "steer_all_distinct", "startup"), _STEERS_ONLY, steer_everywhere=_STEPS_ONLY, **_UNABLATED
    ),
    **dict.fromkeys(("nnsight", "interp-engine", "transformers"), _all_but(_READ, _WORKLOADS_ONLY)),
}  # fmt: skip
"""System -> case -> why it cannot run that case, in one sentence."""


def can_run(system: str, case: str) -> bool:
    return case not in CANNOT[system]
