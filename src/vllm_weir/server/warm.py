"""A server gets ready, before it says that it is, for requests that name what it was started with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from vllm_weir.api import params
from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.warm import warm_async
from vllm_weir.schema.features import Features, Lens, SetFeature
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.named_hooks import Use
from vllm_weir.schema.request import RequestSpec, parse_modules
from vllm_weir.server.context import answering
from vllm_weir.server.limits import WARM as VARIABLE
from vllm_weir.server.state import ServerState

if TYPE_CHECKING:
    from vllm import SamplingParams

logger = logging.getLogger(__name__)
OPTION = "--weir-warm"
HOST_BYTES = 0
"""How much host memory is pinned; what clients will capture is not known."""


def put_option(values: list[str], environ: MutableMapping[str, str]) -> None:
    for value in values:
        if value not in ("on", "off"):
            raise WeirError(f"expected on or off, got {brief(value)!r}", OPTION)
        environ[VARIABLE] = "1" if value == "on" else "0"


async def load_given(state: ServerState) -> None:
    """Warm the engine for requests that name what the server has, one name at a time, and for what plain ones capture.

    What cannot be warmed is logged, and is warm once requests have used it.
    """
    if not state.limits.warm:
        return
    for name, one in _requests(state):
        try:
            with answering():
                done = await warm_async(state.engine_client, [one], None, None, HOST_BYTES)
        except WeirError as e:
            logger.warning("Weir could not warm %s: %s", name, e)
        else:
            # Printed, as vLLM shows no plugin's messages below warnings.
            graphs = f"{done.graphs} CUDA graphs ({done.graph_bytes >> 20} MiB)"
            print(f"Weir has warmed {name}: {graphs} in {done.seconds:.1f} s", flush=True)


def _requests(state: ServerState) -> Iterator[tuple[str, SamplingParams]]:
    """Yield what is named, and params of a request that names it as requests usually do."""
    names = state.frontend.names
    names.refresh()
    for sae in names.saes.infos():
        yield f"features of {sae.name!r}", params(features=Features(sae.name))
        yield f"a set feature of {sae.name!r}", params(interventions=SetFeature(sae.name, 0, add=1.0))
    for module in names.vectors.modules:
        spec = RequestSpec(modules=parse_modules(module, "modules"))
        one = params()
        one.extra_args = {WIRE_KEY: spec.to_json()}
        yield f"the module {module!r}", one
    for hook, info in names.hooks.infos().items():
        if info["mode"] == "compiled":
            yield f"the hook {hook!r}", params(hooks=Use(hook))
    for lens in names.lenses.infos():
        yield f"the lens {lens!r}", params(lens=Lens(name=lens))
    if state.by_default is not None:
        one = params()
        one.extra_args = dict(state.by_default.extra_args())
        yield "what plain requests capture", one
    for probe in names.probes.infos():
        yield f"the probe {probe!r}", params(probes=probe)
