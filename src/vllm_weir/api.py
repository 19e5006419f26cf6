"""The functions of the public API: request params, registered vectors, sites, sinks and marks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_weir.config.env import OFF, disabled
from vllm_weir.errors import WeirError
from vllm_weir.guard import refuse
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.json_text import dumps
from vllm_weir.schema.keys import WIRE_KEY, refuse_slips
from vllm_weir.schema.request import RequestSpec, parse_captures, parse_interventions
from vllm_weir.schema.site_verdict import SiteVerdict

if TYPE_CHECKING:
    from vllm import SamplingParams

    from vllm_weir.frontend.outputs.ticket import Ticket


def params(
    sampling_params: SamplingParams | None = None,
    *,
    capture: Capture | Mapping[str, Any] | Sequence[Capture | Mapping[str, Any]] | None = None,
    interventions: Intervention | Mapping[str, Any] | Sequence[Intervention | Mapping[str, Any]] | None = None,
) -> SamplingParams:
    """Return a copy of `sampling_params` that carries captures and interventions.

    In params of an earlier call, what is given replaces what they carry, and the rest stays.

    Args:
        sampling_params: vLLM's own; never changed. None stands for ``SamplingParams()``.
        capture: one `Capture` or a list of them (or their wire form).
        interventions: one intervention or a list of them (or their wire form), applied in the order
            given.

    Returns:
        A new ``SamplingParams`` whose ``extra_args["weir"]`` is plain JSON data; usable in any
        number of requests.

    Raises:
        WeirError: naming the field that is wrong.
    """
    if sampling_params is None:
        from vllm import SamplingParams as Params

        sampling_params = Params()
    if not hasattr(sampling_params, "extra_args"):
        name = type(sampling_params).__name__
        raise WeirError(f"{name} has no extra_args for Weir's request; give a SamplingParams", "sampling_params")
    if refuse.NOT_LOADED.unheld is not None:  # this process's engine would ignore the request
        raise WeirError(refuse.NOT_LOADED.unheld, WIRE_KEY)
    carried = sampling_params.extra_args or {}
    refuse_slips(carried)
    spec = RequestSpec() if carried.get(WIRE_KEY) is None else RequestSpec.parse(carried[WIRE_KEY])
    if capture is not None:
        spec = replace(spec, capture=parse_captures(capture, "capture"))
    if interventions is not None:
        spec = replace(spec, interventions=parse_interventions(interventions, "interventions"))
    out = copy.copy(sampling_params)
    out.extra_args = {**carried, WIRE_KEY: spec.to_json()}
    return out


def register(llm: Any, name: str, vector: Any) -> str:
    """Register a vector under a name, so that requests to this engine can refer to it.

    Names are resolved when a request is admitted: registering one again affects later requests
    only. KV-cache entries are keyed by the vectors' content, so those of both never mix.

    Args:
        llm: the engine.
        name: 1 to 256 characters.
        vector: [d_model], [n, d_model] or [n_layers, n, d_model]; the intervention that names it
            decides what its rows mean.

    Returns:
        The vector's digest, which requests may use like the name.

    Raises:
        WeirError: for an invalid vector, or an engine that Weir does not serve.
    """
    return _frontend(llm).registry.put(name, vector)


def unregister(llm: Any, name: str) -> None:
    """Remove a name; admitted requests keep the vector. Raise WeirError for an unknown name."""
    _frontend(llm).registry.remove(name)


def list_vectors(llm: Any) -> dict[str, dict[str, Any]]:
    """Return the registered vectors: name -> {"digest", "shape"}."""
    return _frontend(llm).registry.names()


def set_global(llm: Any, interventions: Any) -> None:
    """Apply interventions to every request admitted from now on, before the request's own.

    They replace those of an earlier call.

    Raises:
        WeirError: naming the field that is wrong; then nothing changes.
    """
    _frontend(llm).set_always(parse_interventions(interventions, "interventions"))


def clear_global(llm: Any) -> None:
    """Undo `set_global` for requests admitted from now on."""
    _frontend(llm).set_always(())


def sites(llm: Any) -> list[SiteVerdict]:
    """List every hook point of every block: whether the engine serves it, and if not, why.

    Args:
        llm: ``LLM``, ``LLMEngine`` or Weir's drop-in; for an ``AsyncLLM`` use `sites_async`.

    Raises:
        WeirError: if Weir does not serve this engine at all, with the reason.
    """
    return _verdicts(_frontend(llm).require_capabilities())


async def sites_async(engine: Any) -> list[SiteVerdict]:
    """List sites as `sites` does, for an ``AsyncLLM``, whose workers answer asynchronously only."""
    from vllm_weir.frontend.lookup import ask_workers

    await ask_workers(engine)
    return _verdicts(_frontend(engine).require_capabilities())


def _verdicts(capabilities: Any) -> list[SiteVerdict]:
    return [SiteVerdict(site.hook, site.layer, not why, why) for site, why in capabilities.sites.items()]


def mark(request_id: str, *, llm: Any = None, **metadata: Any) -> list[Ticket]:
    """Write the rows of a request that were captured with ``keep="marked"``.

    May be called while the request runs (its rows are written when it finishes) and for
    `marked_seconds` after it.

    Args:
        request_id: as on vLLM's output (``out.request_id``); all `n` sequences are meant.
        llm: the engine; needed only if several in this process have a request with this id.
        metadata: plain JSON data that the sink keeps with the rows.

    Returns:
        One ticket for each sequence and sink whose rows are written now; ``ticket.wait()`` returns
        the files.

    Raises:
        WeirError: if no such request is known, or its rows were dropped.
    """
    from vllm_weir.frontend.engine_frontend import frontends

    dumps(metadata, "metadata")
    engine_frontends = [_frontend(llm)] if llm is not None else frontends()
    managers = [frontend.manager for frontend in engine_frontends]
    if not managers:
        raise WeirError("there is no engine in this process", "request_id")
    with_rows = [manager for manager in managers if manager.marks.has(request_id)]
    if len(with_rows) > 1:
        raise WeirError(f"{len(with_rows)} engines of this process have a request {request_id!r}; pass llm", "llm")
    # Without rows, the manager that had them says best why they are gone.
    had_rows = [manager for manager in managers if manager.marks.had(request_id)]
    return (with_rows or had_rows or managers)[0].mark(request_id, metadata)


def flush(llm: Any, timeout: float = 600.0) -> None:
    """Wait until every sink of the engine has taken the rows sent to it, and has made them durable.

    Args:
        llm: the engine.
        timeout: seconds.

    Raises:
        WeirError: if that takes longer than `timeout`, or a sink fails.
    """
    _frontend(llm).manager.flush(timeout)


def sinks(llm: Any) -> dict[str, dict[str, Any]]:
    """Report on the engine's open sinks.

    Returns:
        name -> what waits, what was taken, dropped and failed, and the last error.
    """
    return _frontend(llm).manager.report()


def _frontend(llm: Any) -> Any:
    try:
        from vllm_weir.frontend.lookup import frontend_of

        return frontend_of(llm)
    except ImportError as e:
        raise WeirError(OFF if disabled() else refuse.cause_of(e), WIRE_KEY) from e
    except WeirError:
        if disabled():
            raise WeirError(OFF, WIRE_KEY) from None
        raise


def demo_model() -> str:
    """Return the directory of the small Llama that ships with Weir (HF format, bf16)."""
    return str(Path(__file__).parent / "demo" / "model")
