"""The properties of vLLM's outputs such as ``.activations`` and ``.receipt``.

Weir adds them. Importing `vllm_weir` is enough to have them in any process: outputs are pickled and read where no
engine runs.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from vllm_weir.guard.import_hook import when_imported

VIEW = "_weir_view"
"""Attribute of a ``CompletionOutput``, or of what a pooling request returns, that holds its `OutputView`."""
BEAMS = "vllm.entrypoints.generate.beam_search.utils"
"""The module of the sequences that beam search returns."""
POOLED = ("PoolingOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput")
READ_VALUES = ("features", "lens")
ROUTED = "routed_experts"
"""vLLM's own field of the routers' choices, which Weir fills for requests that ask it."""
ROUTING = {ROUTED: "ids", "routing_weights": "weights"}
TRANSLATED = {"hook_results": "vllm_weir.compat.vllm_lens.request"}
"""Properties of other systems -> the module with a function of that name, which makes them of what was saved."""
_PROPERTIES = {
    "activations": "Rows captured for this sequence (index 0's for a request), or None; see `weir.Activations`.",
    "features": "Features of autoencoders by name (index 0's for a request), or None; see `weir.Features`.",
    "lens": "Likeliest next tokens by block (index 0's for a request), or None; see `weir.Lens`.",
    "scores": "Scores of probes by name (index 0's for a request), or None without probes; see `weir.Probe`.",
    "values": "What functions gave for rows, by name (index 0's for a request); see `weir.Hook`.",
    "saved": "What functions saved (index 0's for a request); see `weir.Hook`.",
    "hook_results": "What vllm-lens's hooks saved, by index (index 0's for a request), or None; see `weir.Hook`.",
    "routed_experts": "Experts that routers chose, [positions, blocks, top_k] (index 0's for a request), or None; see "
    "`weir.Routing`.",
    "routing_weights": "Weights of these, float32 (index 0's for a request), or None; see `weir.Routing`.",
    "receipt": "What Weir did for this sequence (index 0's for a request), or None; see `weir.Receipt`.",
}


def give_outputs_properties() -> None:
    when_imported("vllm.outputs", _add_properties)
    when_imported(BEAMS, _add_to_beams)


def _add_properties(outputs: ModuleType) -> None:
    for name, doc in _PROPERTIES.items():
        own = name == ROUTED  # vLLM sets it, too
        getter, setter = _completion_getter(name), _setter(name) if own else None
        setattr(outputs.CompletionOutput, name, property(getter, setter, doc=doc))
        setattr(outputs.RequestOutput, name, property(_request_getter(name), _setter(name), doc=doc))
        for pooled in POOLED:
            setattr(getattr(outputs, pooled), name, property(_completion_getter(name), doc=doc))
        setattr(outputs.PoolingRequestOutput, name, property(_pooled_getter(name), doc=doc))


def _add_to_beams(beams: ModuleType) -> None:
    for name, doc in _PROPERTIES.items():
        setattr(beams.BeamSearchSequence, name, property(_completion_getter(name), doc=doc))


def _completion_getter(name: str) -> Any:
    def get(self: Any) -> Any:
        view = getattr(self, VIEW, None)
        if view is None or (name != "receipt" and not view.asked):
            return vars(self).get(name) if name == ROUTED else None
        if name in ROUTING:
            found = view.routing()
            return vars(self).get(name) if found is None else getattr(found, ROUTING[name])
        if name in READ_VALUES:
            return getattr(view.read_values(), name)
        if name in TRANSLATED:
            return getattr(importlib.import_module(TRANSLATED[name]), name)(view.all_saved() or {}) or None
        return getattr(view, name)()

    return get


def _pooled_getter(name: str) -> Any:
    return lambda self: getattr(self.outputs, name)


def _setter(name: str) -> Any:
    """Return what lets vllm-lens, where it is installed too, give an output results of its own."""
    return lambda self, value: self.__dict__.update({name: value})


def _request_getter(name: str) -> Any:
    def get(self: Any) -> Any:
        if name in vars(self):
            return vars(self)[name]
        first = min(self.outputs, key=lambda o: o.index, default=None)
        return None if first is None else getattr(first, name)

    return get
