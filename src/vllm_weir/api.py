"""What a caller writes: `params` puts captures and interventions into a copy of vLLM's SamplingParams."""

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
    """A copy of `sampling_params` that carries what is asked of Weir.

    Args:
        sampling_params: vLLM's own; never changed. None stands for ``SamplingParams()``.
        capture: one `Capture` or a list of them (or their wire form).
        interventions: one intervention or a list of them (or their wire form), applied in the order given.

    Params from an earlier call keep what is not given now; what is given replaces it.

    Returns:
        A new ``SamplingParams`` whose ``extra_args["weir"]`` is plain JSON data; usable in any number of requests.

    Raises:
        WeirError: naming the field that is wrong.
    """
    if sampling_params is None:
        from vllm import SamplingParams as Params

        sampling_params = Params()
    if not hasattr(sampling_params, "extra_args"):
        name = type(sampling_params).__name__
        raise WeirError(f"{name} has no extra_args to carry what is asked; give a SamplingParams", "sampling_params")
    if refuse.NOT_LOADED.unheld is not None:  # an engine of this process would pass over what is written here
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
    """Keep `vector` under `name` for requests to this engine; returns its digest.

    It is [d_model], [n, d_model] or [n_layers, n, d_model]; what its rows mean is up to the intervention that names it.

    A name stands for what it means when a request is admitted: registering it again affects later requests only, and
    their KV cache entries never mix, because what is cached is keyed by content.

    Raises:
        WeirError: for a vector that is none, or an engine that Weir does not serve.
    """
    return _frontend(llm).registry.put(name, vector)


def unregister(llm: Any, name: str) -> None:
    """Forget a name; requests already admitted go on. Raises WeirError if there is no such name."""
    _frontend(llm).registry.remove(name)


def list_vectors(llm: Any) -> dict[str, dict[str, Any]]:
    """Registered vectors: name -> {"digest", "shape"}."""
    return _frontend(llm).registry.names()


def set_global(llm: Any, interventions: Any) -> None:
    """Interventions that every request admitted from now on undergoes, before its own; replaces earlier ones.

    Raises:
        WeirError: naming the field that is wrong; then nothing changes.
    """
    _frontend(llm).set_always(parse_interventions(interventions, "interventions"))


def clear_global(llm: Any) -> None:
    """Requests admitted from now on undergo only their own interventions."""
    _frontend(llm).set_always(())


def sites(llm: Any) -> list[SiteVerdict]:
    """Every hook point of every block of the engine's model: whether it is served, and if not, why.

    Args:
        llm: ``LLM``, ``LLMEngine`` or Weir's drop-in; of an ``AsyncLLM`` use `sites_async`.

    Raises:
        WeirError: if Weir does not serve this engine at all; it says why.
    """
    return _verdicts(_frontend(llm).require_capabilities())


async def sites_async(engine: Any) -> list[SiteVerdict]:
    """`sites` of an ``AsyncLLM``, whose workers can only be asked asynchronously."""
    from vllm_weir.frontend.lookup import ask_workers

    await ask_workers(engine)
    return _verdicts(_frontend(engine).require_capabilities())


def _verdicts(capabilities: Any) -> list[SiteVerdict]:
    return [SiteVerdict(site.hook, site.layer, not why, why) for site, why in capabilities.sites.items()]


def mark(request_id: str, *, llm: Any = None, **metadata: Any) -> list[Ticket]:
    """Have the rows of a request written that were captured with ``keep="marked"``.

    May be called while the request runs (its rows are written when it finishes) and for `marked_seconds` after it.

    Args:
        request_id: as on vLLM's output (``out.request_id``); all `n` sequences are meant.
        llm: the engine, if there are several in this process that know the id.
        metadata: plain JSON data that the sink keeps with the rows.

    Returns:
        One ticket for each sequence and sink whose rows are being written now: ``ticket.wait()`` gives the files.

    Raises:
        WeirError: if no such request is known, or its rows are gone.
    """
    from vllm_weir.frontend.engine_frontend import frontends

    dumps(metadata, "metadata")
    boards = [frontend.manager for frontend in ([_frontend(llm)] if llm is not None else frontends())]
    if not boards:
        raise WeirError("there is no engine in this process", "request_id")
    able = [manager for manager in boards if manager.marks.has(request_id)]
    if len(able) > 1:
        raise WeirError(f"{len(able)} engines of this process have a request {request_id!r}; pass llm", "llm")
    late = [manager for manager in boards if manager.marks.had(request_id)]
    return (able or late or boards)[0].mark(request_id, metadata)


def flush(llm: Any, timeout: float = 600.0) -> None:
    """Wait until every sink of the engine has taken the rows sent to it, and has made them durable.

    Raises:
        WeirError: if that takes longer than `timeout` seconds, or a sink fails.
    """
    _frontend(llm).manager.flush(timeout)


def sinks(llm: Any) -> dict[str, dict[str, Any]]:
    """The engine's open sinks: name -> what waits, what was taken, dropped and failed, and the last error."""
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
    """Directory of the small Llama that ships with the package (HF format, bf16, own tokenizer)."""
    return str(Path(__file__).parent / "demo" / "model")
