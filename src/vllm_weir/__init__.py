"""Weir: read and steer activations of models served by stock vLLM, at vLLM's own speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_weir.guard import outputs as _outputs
from vllm_weir.guard import refuse as _guard
from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
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
    )
    from vllm_weir.api import list_vectors as list
    from vllm_weir.client.async_client import AsyncClient
    from vllm_weir.client.client import Client
    from vllm_weir.client.errors import AuthError, NotFound, ServerError, TooLarge
    from vllm_weir.compat.probe_hook import LLM, AsyncLLM
    from vllm_weir.compat.rhizonymph.tiers import from_tiers
    from vllm_weir.compat.vllm_lens.request import SteeringVector
    from vllm_weir.compat.vllm_lens.tensors import (
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
    from vllm_weir.schema.features import Features, Lens, SetFeature
    from vllm_weir.schema.gates import When
    from vllm_weir.schema.hooks import Site
    from vllm_weir.schema.interventions import Ablate, Add, Clamp, LowRank, Replace
    from vllm_weir.schema.named_hooks import Use
    from vllm_weir.schema.probe_files import load_probe
    from vllm_weir.schema.probes import AttentionProbe, MLPProbe, Probe
    from vllm_weir.schema.site_verdict import SiteVerdict
    from vllm_weir.schema.user_hooks import Hook
    from vllm_weir.storage.dataset import ActivationDataset
    from vllm_weir.storage.features.dataset import load_features
    from vllm_weir.storage.loading import load, open_writer
    from vllm_weir.util.shipped import demo_model, demo_sae
    from vllm_weir.worker.own_function import HookContext

__version__ = "0.1.0"
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
    "Replace",
    "RequestOutput",
    "SamplingParams",
    "ServerError",
    "SetFeature",
    "Site",
    "SiteVerdict",
    "SteeringVector",
    "Sweep",
    "TooLarge",
    "Use",
    "WeirError",
    "When",
    "__version__",
    "add_controller",
    "attribute",
    "clear_global",
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
    "sweep",
    "unload_lens",
    "unload_sae",
    "unload_sae_async",
    "unregister",
    "unregister_hook",
    "unregister_probe",
]

_guard.install()
_outputs.give_outputs_properties()

# vLLM imports this package in every process, and ignores a plugin whose import fails. So only the
# standard library is imported here and on the way to `vllm_weir.plugin`, and the rest on first use.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Ablate": "vllm_weir.schema.interventions",
        "ActivationDataset": "vllm_weir.storage.dataset",
        "Activations": "vllm_weir.results.activations",
        "Add": "vllm_weir.schema.interventions",
        "AsyncClient": "vllm_weir.client.async_client",
        "AsyncLLM": "vllm_weir.compat.probe_hook",
        "AttentionProbe": "vllm_weir.schema.probes",
        "Attribution": "vllm_weir.experiments.attribute.result",
        "AuthError": "vllm_weir.client.errors",
        "Capture": "vllm_weir.schema.capture",
        "Clamp": "vllm_weir.schema.interventions",
        "Client": "vllm_weir.client.client",
        "Directions": "vllm_weir.experiments.directions",
        "Engine": "vllm_weir.frontend.engine",
        "Features": "vllm_weir.schema.features",
        "FittedLens": "vllm_weir.lenses.fitted",
        "LLM": "vllm_weir.compat.probe_hook",
        "Lens": "vllm_weir.schema.features",
        "Hook": "vllm_weir.schema.user_hooks",
        "HookContext": "vllm_weir.worker.own_function",
        "LowRank": "vllm_weir.schema.interventions",
        "MLPProbe": "vllm_weir.schema.probes",
        "NotFound": "vllm_weir.client.errors",
        "Probe": "vllm_weir.schema.probes",
        "Receipt": "vllm_weir.results.receipt",
        "Replace": "vllm_weir.schema.interventions",
        "RequestOutput": "vllm",  # with the drop-in classes, so that a script can import all that it needs from here
        "SAE": "vllm_weir.sae.autoencoder",
        "SamplingParams": "vllm",
        "ServerError": "vllm_weir.client.errors",
        "SetFeature": "vllm_weir.schema.features",
        "Site": "vllm_weir.schema.hooks",
        "SiteVerdict": "vllm_weir.schema.site_verdict",
        "SteeringVector": "vllm_weir.compat.vllm_lens.request",
        "Sweep": "vllm_weir.experiments.sweep.result",
        "TooLarge": "vllm_weir.client.errors",
        "Use": "vllm_weir.schema.named_hooks",
        "WeirError": "vllm_weir.errors",
        "When": "vllm_weir.schema.gates",
        "add_controller": "vllm_weir.api",
        "attribute": "vllm_weir.experiments.attribute.run",
        "clear_global": "vllm_weir.api",
        "decode_activations": "vllm_weir.compat.vllm_lens.tensors",
        "demo_model": "vllm_weir.util.shipped",
        "demo_sae": "vllm_weir.util.shipped",
        "deserialize_tensor": "vllm_weir.compat.vllm_lens.tensors",
        "engine": "vllm_weir.api",
        "extract": "vllm_weir.extraction.run",
        "fit": "vllm_weir.experiments.fit.run",
        "fit_lens": "vllm_weir.experiments.lens_fit",
        "flush": "vllm_weir.api",
        "from_tiers": "vllm_weir.compat.rhizonymph.tiers",
        "list": "vllm_weir.api:list_vectors",
        "list_hooks": "vllm_weir.api",
        "list_lenses": "vllm_weir.api",
        "list_probes": "vllm_weir.api",
        "list_vectors": "vllm_weir.api",
        "load": "vllm_weir.storage.loading",
        "load_features": "vllm_weir.storage.features.dataset",
        "load_probe": "vllm_weir.schema.probe_files",
        "load_reft": "vllm_weir.experiments.vectors.reft",
        "load_lens": "vllm_weir.api",
        "load_lens_async": "vllm_weir.api",
        "load_sae": "vllm_weir.api",
        "load_sae_async": "vllm_weir.api",
        "logit_diff": "vllm_weir.experiments.metrics",
        "load_vector": "vllm_weir.experiments.vectors.load",
        "mark": "vllm_weir.api",
        "on_logits": "vllm_weir.experiments.metrics",
        "open_writer": "vllm_weir.storage.loading",
        "params": "vllm_weir.api",
        "register": "vllm_weir.api",
        "register_hook": "vllm_weir.api",
        "register_probe": "vllm_weir.api",
        "remove_controller": "vllm_weir.api",
        "saes": "vllm_weir.api",
        "serialize_activations": "vllm_weir.compat.vllm_lens.tensors",
        "serialize_tensor": "vllm_weir.compat.vllm_lens.tensors",
        "set_global": "vllm_weir.api",
        "sinks": "vllm_weir.api",
        "sites": "vllm_weir.api",
        "sites_async": "vllm_weir.api",
        "sweep": "vllm_weir.experiments.sweep.run",
        "unload_lens": "vllm_weir.api",
        "unload_sae": "vllm_weir.api",
        "unload_sae_async": "vllm_weir.api",
        "unregister": "vllm_weir.api",
        "unregister_hook": "vllm_weir.api",
        "unregister_probe": "vllm_weir.api",
    },
)
