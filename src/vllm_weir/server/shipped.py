"""What `weir serve demo` starts with: the shipped autoencoder, and a vector and a probe named ``mood``."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.server import probes, saes
from vllm_weir.server.limits import DEMO as VARIABLE
from vllm_weir.server.routes.vectors import put_vector
from vllm_weir.server.state import ServerState
from vllm_weir.util.shipped import NAME, demo_model, demo_mood, demo_sae

MOOD = "mood"
EXAMPLES = (
    "Tell me a story about the garden.",
    "Write a short casual story about the market.",
    "I want to read a new formal story about music.",
)
"""Messages for the shipped model, in words that it knows and of no mood, so that the vector turns the replies."""
CACHE = 256 << 20
"""Bytes of the KV cache, if the command does not say: all of the model's contexts, on any machine."""


def put_options(arguments: list[str], sae_options: list[str], environ: MutableMapping[str, str]) -> list[str]:
    """Return vLLM's arguments for ``weir serve demo``; put what the server keeps into the environment.

    Other models' arguments are returned as they are. The shipped autoencoder joins `sae_options`, the
    values of ``--weir-sae``, as ``demo``.
    """
    if arguments[:1] != [NAME]:
        return arguments
    _, options = saes.model_in(arguments)
    environ[VARIABLE] = "1"
    sae_options.append(f"{NAME}={demo_sae()}")
    more = [] if "served_model_name" in options else ["--served-model-name", NAME]
    if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(options):
        more += ["--kv-cache-memory-bytes", str(CACHE)]
    return [demo_model(), *arguments[1:], *more]


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    if VARIABLE in environ:
        capabilities = await state.capabilities()
        await state.change(lambda: _keep(state, capabilities))


def _keep(state: ServerState, capabilities: EngineCapabilities) -> None:
    vector, probe = (Path(file).read_bytes() for file in demo_mood())
    put_vector(state, MOOD, vector, "application/vnd.safetensors", capabilities)
    probes.keep(state, probes.read_file(MOOD, probe, {}))
