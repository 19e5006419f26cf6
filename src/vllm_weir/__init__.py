"""Weir: read and steer activations of models served by stock vLLM, at vLLM's own speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_weir.guard import outputs as _outputs
from vllm_weir.guard import refuse as _guard
from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
    # With the drop-in classes, so that a script can import all that it needs from here.
    from vllm import RequestOutput, SamplingParams

    from vllm_weir.api import (
        add_controller,
        clear_global,
        engine,
        flush,
        list_hooks,
        list_lenses,
        list_probes,
        list_vectors,
        load_lens,
        load_lens_async,
        load_sae,
        load_sae_async,
        mark,
        params,
        register,
        register_hook,
        register_probe,
        remove_controller,
        saes,
        set_global,
        sinks,
        sites,
        sites_async,
        unload_lens,
        unload_sae,
        unload_sae_async,
        unregister,
        unregister_hook,
        unregister_probe,
        warm,
        warm_async,
    )
    from vllm_weir.api import list_vectors as list
    from vllm_weir.client.async_client import AsyncClient
    from vllm_weir.client.client import Client
    from vllm_weir.client.errors import AuthError, NotFound, ServerError, TooLarge
    from vllm_weir.compat.probe_hook import LLM, AsyncLLM
    from vllm_weir.compat.rhizonymph.tiers import from_tiers
    from vllm_weir.compat.vllm_lens.request import SteeringVector
    from vllm_weir.compat.vllm_lens.tensors import (
        attention_patterns,
        compute_attention_weights,
        decode_activations,
        deserialize_tensor,
        serialize_activations,
        serialize_tensor,
    )
    from vllm_weir.errors import WeirError
    from vllm_weir.experiments.attribute.result import Attribution
    from vllm_weir.experiments.attribute.run import attribute
    from vllm_weir.experiments.directions import Directions
    from vllm_weir.experiments.fit.run import fit
    from vllm_weir.experiments.lens_fit import fit_lens
    from vllm_weir.experiments.metrics import logit_diff, on_logits
    from vllm_weir.experiments.sweep.result import Sweep
    from vllm_weir.experiments.sweep.run import sweep
    from vllm_weir.experiments.vectors.load import load_vector
    from vllm_weir.experiments.vectors.reft import load_reft
    from vllm_weir.extraction.run import extract
    from vllm_weir.frontend.engine import Engine
    from vllm_weir.lenses.fitted import FittedLens
    from vllm_weir.results.activations import Activations
    from vllm_weir.results.receipt import Receipt
    from vllm_weir.sae.autoencoder import SAE
    from vllm_weir.schema.capture import Capture
    from vllm_weir.schema.features import Features, Lens, Reconstruct, SetFeature
    from vllm_weir.schema.gates import When
    from vllm_weir.schema.hooks import Site
    from vllm_weir.schema.interventions import Ablate, Add, Clamp, LowRank, Replace
    from vllm_weir.schema.model_facts import SiteVerdict
    from vllm_weir.schema.named_hooks import Use
    from vllm_weir.schema.probes import AttentionProbe, MLPProbe, Probe, load_probe
    from vllm_weir.schema.replay import Replay
    from vllm_weir.schema.routing import Routing
    from vllm_weir.schema.user_hooks import Hook
    from vllm_weir.storage.dataset import ActivationDataset
    from vllm_weir.storage.features.dataset import load_features
    from vllm_weir.storage.loading import load, open_writer
    from vllm_weir.streaming.dataset import StreamedRows
    from vllm_weir.streaming.stream import stream_rows
    from vllm_weir.util.shipped import demo_model, demo_sae
    from vllm_weir.worker.own_function import HookContext

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "SAE",
    "Ablate",
    "ActivationDataset",
    "Activations",
    "Add",
    "AsyncClient",
    "AsyncLLM",
    "AttentionProbe",
    "Attribution",
    "AuthError",
    "Capture",
    "Clamp",
    "Client",
    "Directions",
    "Engine",
    "Features",
    "FittedLens",
    "Hook",
    "HookContext",
    "Lens",
    "LowRank",
    "MLPProbe",
    "NotFound",
    "Probe",
    "Receipt",
    "Reconstruct",
    "Replace",
    "Replay",
    "RequestOutput",
    "Routing",
    "SamplingParams",
    "ServerError",
    "SetFeature",
    "Site",
    "SiteVerdict",
    "SteeringVector",
    "StreamedRows",
    "Sweep",
    "TooLarge",
    "Use",
    "WeirError",
    "When",
    "__version__",
    "add_controller",
    "attention_patterns",
    "attribute",
    "clear_global",
    "compute_attention_weights",
    "decode_activations",
    "demo_model",
    "demo_sae",
    "deserialize_tensor",
    "engine",
    "extract",
    "fit",
    "fit_lens",
    "flush",
    "from_tiers",
    "list",
    "list_hooks",
    "list_lenses",
    "list_probes",
    "list_vectors",
    "load",
    "load_features",
    "load_lens",
    "load_lens_async",
    "load_probe",
    "load_reft",
    "load_sae",
    "load_sae_async",
    "load_vector",
    "logit_diff",
    "mark",
    "on_logits",
    "open_writer",
    "params",
    "register",
    "register_hook",
    "register_probe",
    "remove_controller",
    "saes",
    "serialize_activations",
    "serialize_tensor",
    "set_global",
    "sinks",
    "sites",
    "sites_async",
    "stream_rows",
    "sweep",
    "unload_lens",
    "unload_sae",
    "unload_sae_async",
    "unregister",
    "unregister_hook",
    "unregister_probe",
    "warm",
    "warm_async",
]

_guard.install()
_outputs.give_outputs_properties()

# vLLM imports this package in every process, and ignores a plugin whose import fails. So only the
# standard library is imported here and on the way to `vllm_weir.plugin`, and the rest on first use.
__getattr__, __dir__ = lazy_names(__name__)
