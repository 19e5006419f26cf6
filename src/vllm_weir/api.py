"""The public functions.

`params` puts captures and interventions into a copy of vLLM's SamplingParams; the others act on an
engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_weir.config.env import OFF, disabled
from vllm_weir.errors import WeirError
from vllm_weir.guard import refuse
from vllm_weir.guard.request_extras import extras_in, set_extras, with_extras
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.features import Features, Lens
from vllm_weir.schema.fields import dumps, parse_flag, right_words
from vllm_weir.schema.intervention_kinds import AnyIntervention
from vllm_weir.schema.keys import WIRE_KEY, refuse_slips
from vllm_weir.schema.model_facts import SiteVerdict
from vllm_weir.schema.named_hooks import Use
from vllm_weir.schema.probes import AnyProbe, parse_probe
from vllm_weir.schema.read_outs import SAEInfo
from vllm_weir.schema.request import RequestSpec, parse_interventions
from vllm_weir.schema.routing import Routing
from vllm_weir.schema.user_hooks import Hook

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams

    from vllm_weir.controllers.async_controller import AsyncController
    from vllm_weir.frontend.engine import Engine
    from vllm_weir.frontend.outputs.ticket import Ticket
    from vllm_weir.frontend.warm import Warmed
    from vllm_weir.guard.beam_params import BeamSearchParams
    from vllm_weir.lenses.fitted import FittedLens
    from vllm_weir.sae.autoencoder import SAE


@right_words
def params(
    sampling_params: SamplingParams | PoolingParams | BeamSearchParams | None = None,
    *,
    capture: Capture | Mapping[str, Any] | Sequence[Capture | Mapping[str, Any]] | None = None,
    interventions: AnyIntervention | Mapping[str, Any] | Sequence[AnyIntervention | Mapping[str, Any]] | None = None,
    hooks: Hook | Use | str | Mapping[str, Any] | Sequence[Hook | Use | str | Mapping[str, Any]] | None = None,
    features: Features | Mapping[str, Any] | Sequence[Features | Mapping[str, Any]] | None = None,
    lens: Lens | Mapping[str, Any] | Sequence[Lens | Mapping[str, Any]] | None = None,
    probes: AnyProbe | str | Mapping[str, Any] | Sequence[AnyProbe | str | Mapping[str, Any]] | None = None,
    stop_when: str | Sequence[str] | None = None,
    dose: bool | None = None,
    tag: str | None = None,
    routing: Routing | Mapping[str, Any] | bool | None = None,
) -> Any:
    """Return a copy of `sampling_params` that carries what is asked of Weir.

    Args:
        sampling_params: vLLM's own, ``SamplingParams``, or ``PoolingParams`` for ``LLM.encode`` and
            its like, or ``BeamSearchParams``; never changed. None: ``SamplingParams()``.
        capture: one `Capture` or a list of them (or their wire form).
        interventions: one intervention or a list of them (or their wire form), applied in the order
            given.
        hooks: one `Hook`, a `Use` (or its wire form, or the name alone) of a registered one, or a list of these,
            applied after the interventions. Among `interventions` a hook acts at its place.
        features: one `Features` or a list of them (or their wire form).
        lens: a `Lens` or a list of them (or their wire form). Of several, ``out.lens[label][layer]`` has what each
            reads, where `Lens.label` is its name, or its kind.
        probes: one `Probe`, `MLPProbe` or `AttentionProbe`, the name of a registered one, or a list
            of these (or their wire form); their scores come back as ``out.scores``.
        stop_when: a rule such as ``"name > 0.9"`` (``"name[1] > 0.9"`` of a probe with several
            scores), or a list of rules, any of which ends generation with the token whose score
            says so.
        dose: whether to measure how much the interventions change the rows, for
            ``out.receipt.interventions[i].relative_dose``; False if no call says so.
        tag: a printable text of at most 256 characters that comes back as ``out.receipt.tag``, by which the caller
            knows the request again.
        routing: true or a `Routing` (or its wire form) for the experts of each position, in vLLM's own field
            ``out.outputs[0].routed_experts``; false takes back what an earlier call asked.

    If `sampling_params` is the result of an earlier call, an argument replaces what that call set,
    and one left out keeps it.

    Returns:
        New params of the same kind, for any number of requests; their ``extra_args["weir"]``
        (``extra_kwargs["weir"]`` of ``PoolingParams``) is plain JSON data.

    Raises:
        WeirError: naming the field that is wrong.
    """
    if sampling_params is None:
        from vllm import SamplingParams as Params

        sampling_params = Params()
    out = with_extras(sampling_params)
    if refuse.NOT_LOADED.unguarded is not None:  # an engine of this process would pass over what is written here
        raise WeirError(refuse.NOT_LOADED.unguarded, WIRE_KEY)
    carried = extras_in(out) or {}
    refuse_slips(carried)
    spec = RequestSpec.carried_by(carried)
    spec = spec.asking(
        capture=capture,
        interventions=interventions,
        hooks=hooks,
        features=features,
        lens=lens,
        probes=probes,
        stop_when=stop_when,
        dose=dose,
        tag=tag,
        routing=routing,
    )
    set_extras(out, {**carried, WIRE_KEY: spec.to_json()})
    return out


def engine(llm: Any) -> Engine:
    """Return an engine as what is built on it sees it: `capabilities`, `stream` and `call_workers`.

    Args:
        llm: ``vllm.LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in class.

    Raises:
        WeirError: if Weir does not serve it.
    """
    _frontend(llm)
    from vllm_weir.frontend.engine import Engine

    return Engine(llm)


def register(llm: Any, name: str, vector: Any) -> str:
    """Register `vector` under `name` for requests to this engine, and return its digest.

    Its shape is [d_model], [n, d_model] or [n_layers, n, d_model], or has the width of another hook
    point's rows, say [d_head] for a head; the intervention that names it says what the rows mean.

    A request uses the vector that the name stands for when the request is admitted; registering the
    name again affects later requests only. KV cache entries of the two vectors never mix, because
    they are keyed by content.

    Raises:
        WeirError: if this is not a vector, or Weir does not serve the engine.
    """
    digest: str = _frontend(llm).names.put_vector(name, vector)
    return digest


def unregister(llm: Any, name: str) -> None:
    """Forget a registered name; requests that were admitted keep their vector.

    Raises:
        WeirError: if there is no such name.
    """
    _frontend(llm).names.remove_vector(name)


def list_vectors(llm: Any) -> dict[str, dict[str, Any]]:
    """Return the registered vectors: name -> {"digest", "shape"}."""
    return _frontend(llm).names.vectors.names()


def set_global(llm: Any, interventions: Any) -> None:
    """Apply interventions to every request admitted from now on, before the request's own.

    They replace earlier global ones.

    Raises:
        WeirError: naming the field that is wrong; then nothing changes.
    """
    _frontend(llm).names.set_always(parse_interventions(interventions, "interventions"))


def clear_global(llm: Any) -> None:
    """Remove the global interventions from requests admitted from now on."""
    _frontend(llm).names.set_always(())


def register_probe(llm: Any, probe: AnyProbe | Mapping[str, Any], *, everyone: bool = False) -> None:
    """Register a probe under its name for requests to this engine, replacing any other of that name.

    Requests then list its name in `probes`, and gates name it. A request uses the probe that the
    name stands for when the request is admitted.

    Args:
        llm: ``LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in class.
        probe: the probe, or its wire form.
        everyone: whether it scores every request, besides those that name it.

    Raises:
        WeirError: if the engine cannot serve it.
    """
    _frontend(llm).names.register_probe(parse_probe(probe, "probe"), parse_flag(everyone, "everyone", "register_probe"))


def unregister_probe(llm: Any, name: str) -> None:
    """Forget a registered probe; requests that were admitted keep it.

    Raises:
        WeirError: if there is no such name, or a global intervention is gated by it.
    """
    _frontend(llm).names.unregister_probe(name)


def list_probes(llm: Any) -> dict[str, dict[str, Any]]:
    """Return the registered probes: name -> {"kind", "outputs", "hook", "layer", ...}, without their vectors."""
    return _frontend(llm).names.probes.infos()


def register_hook(llm: Any, name: str, hook: Hook | Callable[..., Any], *, warm: bool = True) -> None:
    """Register a hook under a name for requests to this engine, replacing any other of that name.

    Requests then name it: ``hooks=[weir.Use("clip", args={"w": w})]``. A request uses the hook that the name stands
    for when the request is admitted.

    The CUDA graphs that call a compiled hook at its layers are captured now, as `warm` does; that takes
    seconds. An engine that has requests, and an ``AsyncLLM`` (await `warm_async`), captures them when a request
    first needs them, and the log says so.

    Args:
        llm: ``LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in class.
        name: 1 to 256 characters.
        hook: a `Hook`, whose args are what requests leave out; or a function alone, ``Hook(function)``.
        warm: whether its CUDA graphs are captured now.

    Raises:
        WeirError: if the engine cannot serve it; then the name keeps what it stood for.
    """
    warm = parse_flag(warm, "warm", "register_hook")
    frontend = _frontend(llm)
    frontend.names.register_hook(name, hook)
    if warm:
        from vllm_weir.frontend.warm import warm_hook

        warm_hook(llm, frontend, name, params(hooks=Use(name)))


def unregister_hook(llm: Any, name: str) -> None:
    """Forget a registered hook; requests that were admitted keep it.

    Raises:
        WeirError: if there is no such name.
    """
    _frontend(llm).names.unregister_hook(name)


def list_hooks(llm: Any) -> dict[str, dict[str, Any]]:
    """Return the registered hooks: name -> {"function", "hook", "layers", "args", "positions", ...}.

    An arg that is a tensor is told as {"dtype", "shape"}.
    """
    return _frontend(llm).names.hooks.infos()


def warm(
    llm: Any,
    *params: SamplingParams,
    batch_sizes: int | Sequence[int] | None = None,
    prompt: str | Sequence[int] | Mapping[str, Any] | None = None,
    host_bytes: int | None = None,
) -> Warmed:
    """Prepare the engine for requests with these params, so that the first of them is as quick as later ones.

    A short request with each of the `params` runs, which compiles kernels and functions, uploads vectors and
    moves weights. Then the CUDA graphs are captured that steps with such requests replay, each of the `params`
    alone and all of them together, and host memory for rows is pinned. Nothing of these requests is counted in
    metrics, goes to sinks, or is found in the prefix cache by others.

    Args:
        llm: ``LLM``, ``LLMEngine`` or Weir's drop-in class, without unfinished requests; for an
            ``AsyncLLM`` await `warm_async`.
        params: what `params` returns, at most 256.
        batch_sizes: how many such requests generate at a time; decoding graphs of larger batches are
            left out. None: as many as the engine has at once.
        prompt: what the requests are given: text, token ids, or a prompt of vLLM's (with images, say).
            None: some tokens, as few as reach all positions that the params ask for; on an engine with
            CUDA graphs also more than the largest of them takes.
        host_bytes: how much host memory for rows is pinned, at most the setting `host_bytes`. None: an
            eighth of that (what one step may fill) if the params capture rows, else none.

    Returns:
        ``tap_sets``, ``graphs``, ``failed``, ``without_graphs``, ``graph_bytes``, ``pinned_bytes``, ``seconds``.

    Raises:
        WeirError: as a request with the params would, or if the engine has unfinished requests.
    """
    _frontend(llm)
    from vllm_weir.frontend.warm import warm as run

    return run(llm, params, batch_sizes, prompt, host_bytes)


async def warm_async(
    engine: Any,
    *params: SamplingParams,
    batch_sizes: int | Sequence[int] | None = None,
    prompt: str | Sequence[int] | Mapping[str, Any] | None = None,
    host_bytes: int | None = None,
) -> Warmed:
    """Do what `warm` does, for an ``AsyncLLM``."""
    _frontend(engine)
    from vllm_weir.frontend.warm import warm_async as run

    return await run(engine, params, batch_sizes, prompt, host_bytes)


def load_sae(llm: Any, name: str, sae: SAE | str | os.PathLike) -> None:
    """Load a sparse autoencoder onto the engine's workers, for requests that name it.

    It stays there, beside the model, until `unload_sae`; the setting `sae_bytes` bounds how much
    all of them take.

    Args:
        llm: ``LLM``, ``LLMEngine`` or Weir's drop-in class; for an ``AsyncLLM`` await
            `load_sae_async`.
        name: for `Features` and `SetFeature`.
        sae: an `SAE`, or the path of a directory of SAELens (`SAE.load` takes what else there is to
            say of its files).

    Raises:
        WeirError: if the name is taken, the engine does not serve the hook point with rows of this
            width, or the workers have no room.
    """
    frontend = _frontend(llm)
    from vllm_weir.frontend.saes import load

    load(llm, frontend, name, sae)


async def load_sae_async(engine: Any, name: str, sae: SAE | str | os.PathLike) -> None:
    """Do what `load_sae` does, for an ``AsyncLLM``."""
    frontend = _frontend(engine)
    from vllm_weir.frontend.saes import load_async

    await load_async(engine, frontend, name, sae)


def unload_sae(llm: Any, name: str) -> None:
    """Remove a sparse autoencoder from the engine's workers.

    Requests that were admitted with a `SetFeature` keep what it does. Those for which the workers
    encode rows go on if they have begun, and its memory is free once they have ended; those that
    still wait fail.

    Raises:
        WeirError: if there is no such name, or what `set_global` or `register` were given has the
            workers encode rows with it.
    """
    frontend = _frontend(llm)
    from vllm_weir.frontend.saes import unload

    unload(llm, frontend, name)


async def unload_sae_async(engine: Any, name: str) -> None:
    """Do what `unload_sae` does, for an ``AsyncLLM``."""
    frontend = _frontend(engine)
    from vllm_weir.frontend.saes import unload_async

    await unload_async(engine, frontend, name)


def load_lens(llm: Any, name: str, lens: FittedLens | str | os.PathLike) -> FittedLens:
    """Name a tuned or Jacobian lens in an engine, for ``Lens(name=...)``, in the place of any other of the name.

    Its files stay where they are: the workers read the matrices of the blocks that requests ask for.

    Args:
        llm: ``LLM``, ``LLMEngine`` or Weir's drop-in class; for an ``AsyncLLM`` await
            `load_lens_async`.
        name: for `Lens`.
        lens: the directory of a tuned lens, the file of a Jacobian one (see `Lens`), or what
            `fit_lens` has returned.

    Returns:
        The lens; ``.direction(token_id, layer)`` is what to steer along.

    Raises:
        WeirError: if there is no lens, it does not fit the model, or the engine serves none.
    """
    frontend = _frontend(llm)
    from vllm_weir.frontend.lenses import load

    return load(llm, frontend, name, lens)


async def load_lens_async(engine: Any, name: str, lens: FittedLens | str | os.PathLike) -> FittedLens:
    """Do what `load_lens` does, for an ``AsyncLLM``."""
    frontend = _frontend(engine)
    from vllm_weir.frontend.lenses import load_async

    return await load_async(engine, frontend, name, lens)


def unload_lens(llm: Any, name: str) -> None:
    """Forget the name of a lens, of an ``LLM`` or ``AsyncLLM``; requests that were admitted with it go on.

    Raises:
        WeirError: if there is no such name.
    """
    _frontend(llm).names.unload_lens(name)


def list_lenses(llm: Any) -> dict[str, dict[str, Any]]:
    """Return the named lenses of an engine: name -> {"kind", "layers", "d_model", "n_prompts"}."""
    return _frontend(llm).names.lenses.infos()


def saes(llm: Any) -> list[SAEInfo]:
    """Return the sparse autoencoders that the engine has loaded, by name."""
    return _frontend(llm).names.saes.infos()


def sites(llm: Any) -> list[SiteVerdict]:
    """Return every hook point of the engine's model: whether it is served, and if not, why.

    Args:
        llm: ``LLM``, ``LLMEngine`` or Weir's drop-in class; for an ``AsyncLLM`` use `sites_async`.

    Raises:
        WeirError: if Weir does not serve this engine at all, with the reason.
    """
    return _verdicts(_frontend(llm).engine.require_capabilities())


async def sites_async(engine: Any) -> list[SiteVerdict]:
    """Return what `sites` returns, for an ``AsyncLLM``: its workers answer only asynchronously."""
    from vllm_weir.frontend.lookup import ask_workers

    await ask_workers(engine)
    return _verdicts(_frontend(engine).engine.require_capabilities())


def _verdicts(capabilities: Any) -> list[SiteVerdict]:
    return [
        SiteVerdict(
            site.hook,
            site.layer,
            not why,
            why,
            () if why else capabilities.shape(site),
            "" if why else capabilities.read_only.get(site, ""),
        )
        for site, why in capabilities.sites.items()
    ]


def mark(request_id: str, *, llm: Any = None, **metadata: Any) -> list[Ticket]:
    """Write the rows of a request that were captured with ``keep="marked"``.

    Call it while the request runs (its rows are then written when it finishes), or within
    `marked_seconds` after it has finished.

    Args:
        request_id: as on vLLM's output (``out.request_id``); stands for all its `n` sequences.
        llm: the engine; needed if several engines of this process know the id.
        **metadata: plain JSON data that the sink stores with the rows.

    Returns:
        One ticket for each sequence and sink whose rows are being written; ``ticket.wait()``
        returns the files.

    Raises:
        WeirError: if no such request is known, or its rows are gone.
    """
    from vllm_weir.frontend.engine_frontend import frontends

    dumps(metadata, "metadata")
    managers = [frontend.manager for frontend in ([_frontend(llm)] if llm is not None else frontends())]
    if not managers:
        raise WeirError("there is no engine in this process", "request_id")
    running = [manager for manager in managers if manager.marks.has(request_id)]
    if len(running) > 1:
        raise WeirError(f"{len(running)} engines of this process have a request {request_id!r}; pass llm", "llm")
    finished = [manager for manager in managers if manager.marks.had(request_id)]
    return (running or finished or managers)[0].mark(request_id, metadata)


def flush(llm: Any, timeout: float = 600.0) -> None:
    """Wait until every sink of the engine has stored the rows sent to it durably.

    Raises:
        WeirError: if that takes longer than `timeout` seconds, or a sink fails.
    """
    _frontend(llm).manager.flush(timeout)


def sinks(llm: Any) -> dict[str, dict[str, Any]]:
    """Return the state of the engine's open sinks.

    Name -> counts of what waits, was taken, was dropped and failed, and the last error.
    """
    return _frontend(llm).manager.report()


def add_controller(
    llm: Any,
    name: str,
    controller: AsyncController,
    *,
    policy: str = "block",
    queue_bytes: int | None = None,
    required: bool | None = None,
) -> None:
    """Let a controller act on what is asked of this engine from now on.

    The setting `controllers` does the same for controllers that are installed as plugins, or that
    can be imported.

    Args:
        llm: ``LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in class.
        name: `weir.sinks` and receipts list it as ``controller:NAME``.
        controller: not added anywhere before; its `open` is called.
        policy: what becomes of sequences that finish while its queue is full, as for sinks.
        queue_bytes: most bytes of rows that wait for it; default: 1 GiB.
        required: whether a request fails when it fails; None: as the controller says.

    Raises:
        WeirError: naming the field that is wrong, if the name is taken, or if its probes or captures
            cannot be served.
    """
    options = {"policy": policy, "queue_bytes": queue_bytes, "required": required}
    frontend = _frontend(llm)
    from vllm_weir.frontend.controllers import add_object

    add_object(frontend, name, controller, {key: value for key, value in options.items() if value is not None})


def remove_controller(llm: Any, name: str) -> None:
    """Remove a controller, after it has taken what is queued, and the probes that it declares.

    What it has changed stays.

    Raises:
        WeirError: if there is none of the name, or a global intervention is gated by one of its
            probes.
    """
    frontend = _frontend(llm)
    from vllm_weir.frontend.controllers import remove

    remove(frontend, name)


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
