"""Wrappers in the worker, set on the runner's and the worker's own instances."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_weir.config.settings import Settings
from vllm_weir.controllers import make_sync
from vllm_weir.errors import WeirError
from vllm_weir.patches import cuda_graphs
from vllm_weir.patches.kv_connectors import RELOADED
from vllm_weir.patches.model.discovery import find_sites
from vllm_weir.patches.model.lens_ranks import agree, unembedding_of_ranks
from vllm_weir.patches.model.parameters import parameters_of, weights_now
from vllm_weir.patches.model.unembedding import unembedding_of, unembedding_rows
from vllm_weir.patches.model.whole_head import WholeHead
from vllm_weir.patches.scheduler import WAITING, engine_request_of
from vllm_weir.patches.speculation import drafts_of, patch_sample_tokens, traits_of
from vllm_weir.schema.engine_spec import EngineRequest, EngineSpec
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.read_outs import LENS
from vllm_weir.util.memory import frozen_heap
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.runtime import WorkerRuntime
from vllm_weir.worker.tap.warmup import TapWarmup

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus

logger = logging.getLogger(__name__)


def init_device(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``WorkerWrapperBase.init_device``: place taps as soon as the worker has loaded its model."""

    def wrapper(self: Any) -> None:
        original(self)
        worker = self.worker
        worker.weir_report = functools.partial(_report, status, None)
        if status.active:
            load_model = worker.load_model

            @functools.wraps(load_model)
            def load_model_and_taps(*args: Any, **kwargs: Any) -> None:
                _keep_operations_in_order(worker)
                warmup = _start_warmup(worker)
                load_model(*args, **kwargs)
                _place_taps(worker, status, warmup)

            worker.load_model = load_model_and_taps

    return wrapper


def _keep_operations_in_order(worker: Any) -> None:
    """Turn off, on a CPU, the pass of Inductor that reorders operations for less peak memory.

    There a fused loop can lose its dependency on the operation that writes a buffer, and the pass may
    then run the loop first. Whether it does depends on the taps: with taps at `z` and `attn_out`, a
    model with latent attention chose its experts by uninitialised memory.
    """
    if worker.model_runner.device.type == "cpu":
        worker.vllm_config.compilation_config.inductor_compile_config["reorder_for_peak_memory"] = False


def _report(status: PatchStatus, runtime: WorkerRuntime | None, reason: str | None = None) -> dict[str, Any]:
    if runtime is None:
        return {"ok": False, "reason": reason or status.refusal or "the model was not loaded through Weir"}
    if status.refusal is not None:
        return {"ok": False, "reason": status.refusal}
    return runtime.report()


def _start_warmup(worker: Any) -> TapWarmup | None:
    """Start to compile the taps' kernels, which need to know only the model's width and dtype."""
    config = worker.vllm_config.model_config
    try:
        width = config.get_hidden_size()
    except AttributeError:
        return None  # `_place_taps` fails with the same error and reports it
    settings = Settings.load(worker.vllm_config.additional_config)
    cells = settings.table_sizes(width).cells
    copies = 1 + traits_of(worker.vllm_config).draft_tokens
    return TapWarmup(width, config.dtype, worker.model_runner.device, cells=cells, copies=copies)


def _place_taps(worker: Any, status: PatchStatus, warmup: TapWarmup | None) -> None:
    """Place the taps on the loaded model and patch the runner; report the reason if that cannot be done."""
    runner, config = worker.model_runner, worker.vllm_config
    settings, parallel = Settings.load(config.additional_config), config.parallel_config
    whole, stages_told = None, False
    try:
        one_set = not worker.use_v2_model_runner and config.compilation_config.cudagraph_mode.name != "NONE"
        if one_set and settings.hooks is None:
            settings = settings.model_copy(update={"hooks": ("resid_pre", "resid_post")})
        model_info = _model_info(runner, config, worker.use_v2_model_runner)
        assert warmup is not None, "the model's width is known"
        sites = find_sites(runner, config, model_info, settings, worker.use_v2_model_runner)
        stages_told = True
        if parallel.pipeline_parallel_size * parallel.tensor_parallel_size == 1:
            unembedding = unembedding_of(runner.get_model(), sites, config)
        else:
            unembedding, whole = unembedding_of_ranks(runner.get_model(), sites, config, runner.device)
        model, controllers = runner.get_model(), make_sync(settings.controllers)
        runtime = WorkerRuntime(
            model, model_info, settings, sites, unembedding, controllers, parameters_of(model, config)
        )
        warmup.add({shard.stop - shard.start for shard in runtime.layout.shards.values()}, unembedding.vocabulary)
        patch_inputs = _v2_inputs(runner) if worker.use_v2_model_runner else _v1_inputs(runner)
    except (WeirError, AttributeError, TypeError) as e:
        if not stages_told:
            agree(str(e))
        if settings.refused == "start":
            raise
        # The engine serves plain requests; those with Weir's keys are told this reason.
        logger.error("Weir does not serve this model: %s", e)
        worker.weir_report = functools.partial(_report, status, None, str(e))
        return
    graphs = None
    if worker.use_v2_model_runner:
        graphs = cuda_graphs.patch_runner(runner, runtime, config, settings.graphs == "eager")
        worker.weir_graphs = graphs.report
    elif one_set:
        warmup.wait()
        runtime.parts.switch.activate_always()  # runner V1 has one set of graphs, with live taps
    _patch_execute_model(runner, runtime)
    _patch_dummy_run(runner, runtime)
    if runtime.model_info.traits.speculative:
        patch_sample_tokens(runner, runtime)
    _patch_shutdown(worker, runtime)
    _patch_warm_up(worker, warmup, settings)
    patch_inputs(runtime)
    worker.weir_report = functools.partial(_report, status, runtime)
    worker.weir_new_weights = functools.partial(_new_weights, worker, whole)
    worker.weir_usage = runtime.usage
    worker.weir_warm = functools.partial(_warm, runtime, graphs)
    worker.weir_weights = functools.partial(weights_now, runner)
    worker.weir_unembedding = functools.partial(unembedding_rows, model, model_info, whole)
    if whole is not None:
        whole.keeps = runtime.sends
        _patch_lens_ranks(worker, whole, parallel.pipeline_parallel_size)
    worker.weir_load_sae, worker.weir_unload_sae = runtime.parts.saes.load, runtime.parts.saes.unload
    kept, settle = runtime.parts.kept_rows, runtime.parts.notifier.settle
    worker.weir_keep_rows, worker.weir_drop_rows = kept.begin, kept.end
    worker.weir_apply_to_rows = functools.partial(kept.apply, settle)


def _new_weights(worker: Any, whole: WholeHead | None) -> dict[str, Any]:
    """Let go of what was made of weights that may have been replaced, and return the worker's report."""
    if whole is not None:
        whole.renew()
    return worker.weir_report()


def _warm(
    runtime: WorkerRuntime,
    graphs: cuda_graphs.RunnerGraphs | None,
    requests: Sequence[tuple[bytes, int]],
    most: int | None,
    host_bytes: int,
) -> dict[str, Any]:
    """Capture the CUDA graphs and pin the host memory that such requests need, between two steps.

    `requests` are those of `WorkerRuntime.taps_needed`, of which at most `most` decode at a time (None for any
    number), and `host_bytes` says how much of the host buffer is to be pinned. Returned are what `GraphSets.warm`
    returns, how many tap "sets" the requests need, and how many bytes were "pinned"; or an "error" and its "field".
    """
    try:
        wanted = runtime.taps_needed([(wire, length) for wire, length in requests])
        pinned = runtime.parts.host.pin(-(-host_bytes // runtime.parts.host.row_bytes))
    except WeirError as e:
        return {"error": e.message, "field": e.field}
    done = {} if graphs is None else graphs.warm(wanted, most)
    return {"graphs": 0, "bytes": 0, "failed": 0, "without": 0, **done, "sets": len(wanted), "pinned": pinned}


def _model_info(runner: Any, config: Any, v2: bool) -> ModelInfo:
    from vllm.distributed.parallel_state import get_tp_group

    return ModelInfo(
        d_model=config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
        device=runner.device,
        max_tokens=config.scheduler_config.max_num_batched_tokens + config.scheduler_config.max_num_seqs,
        rank=get_tp_group().rank_in_group,
        ranks=get_tp_group().world_size,
        runner="V2" if v2 else "V1",
        engine=config.parallel_config.data_parallel_index,
        traits=traits_of(config),
    )


def _patch_execute_model(runner: Any, runtime: WorkerRuntime) -> None:
    execute_model = runner.execute_model

    @functools.wraps(execute_model)
    def wrapper(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            runtime.silence()
            return execute_model(scheduler_output, *args, **kwargs)
        new = [
            (r.req_id, engine_request, *_prompt(r, engine_request), r.num_computed_tokens)
            for r in scheduler_output.scheduled_new_reqs
            if (engine_request := engine_request_of(r)) is not None
        ]
        calling = {request[0] for request in new if request[1].calls}
        runtime.parts.functions.note_params(
            {r.req_id: _params(r) for r in scheduler_output.scheduled_new_reqs if r.req_id in calling}
        )
        runtime.parts.notifier.note_waiting(vars(scheduler_output).get(WAITING, 0))
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids  # from V1; V2 reports them as new requests
        if reloaded := vars(scheduler_output).get(RELOADED):
            resumed = resumed.union(reloaded)
        runtime.requests.follow(new, scheduler_output.finished_req_ids, resumed, _known_tokens(scheduler_output))
        runtime.begin_step(*_starts(scheduler_output))
        output = execute_model(scheduler_output, *args, **kwargs)
        runtime.steps.end_step()
        return output

    runner.execute_model = wrapper


def _patch_lens_ranks(worker: Any, whole: WholeHead, stages: int) -> None:
    """Tell the parts of the unembedding which requests have a lens, before a stage waits for the rows of another.

    Where there is one stage the runner is told, whose method vLLM's executor on Ray calls alone.
    """
    told = worker if stages > 1 else worker.model_runner
    execute_model = told.execute_model

    @functools.wraps(execute_model)
    def wrapper(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return execute_model(scheduler_output, *args, **kwargs)
        new = ((r.req_id, engine_request_of(r)) for r in scheduler_output.scheduled_new_reqs)
        whole.follow((name for name, asked in new if _has_lens(asked)), scheduler_output.finished_req_ids)
        return execute_model(scheduler_output, *args, **kwargs)

    told.execute_model = wrapper
    usage = worker.weir_usage
    worker.weir_usage = lambda: usage() | {"unembedding_bytes": whole.nbytes}


def _has_lens(engine_request: EngineRequest | None) -> bool:
    if engine_request is None:
        return False
    try:
        postprocess = EngineSpec.from_wire(engine_request.spec).captures.postprocess
    except WeirError:
        return False  # the request fails when it joins
    return postprocess is not None and any(one.kind == LENS for one in postprocess.read_outs)


def _params(new_request: Any) -> dict[str, Any]:
    """Return the sampling or pooling parameters of a request by name, without what Weir adds to them."""
    params = new_request.sampling_params or new_request.pooling_params
    found = {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}
    for name in ("extra_args", "extra_kwargs"):
        if found.get(name):
            found[name] = {key: value for key, value in found[name].items() if key != WIRE_KEY}
    return found


def _known_tokens(scheduler_output: Any) -> dict[str, int]:
    """Return how many tokens requests have that go on after a preemption."""
    cached = scheduler_output.scheduled_cached_reqs
    every = getattr(cached, "all_token_ids", {})  # of runner V1; not in every version
    known = {name: len(every[name]) for name in cached.resumed_req_ids if name in every}
    for request in scheduler_output.scheduled_new_reqs:
        tokens = getattr(request, "prefill_token_ids", None)  # of runner V2
        if tokens is not None and len(tokens) > len(request.prompt_token_ids or tokens):
            known[request.req_id] = len(tokens)
    return known


def _starts(scheduler_output: Any) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the scheduled requests with the positions of their first tokens in the step, alike on all ranks."""
    cached, new = scheduler_output.scheduled_cached_reqs, scheduler_output.scheduled_new_reqs
    yield cached.req_ids, cached.num_computed_tokens
    yield [r.req_id for r in new], [r.num_computed_tokens for r in new]


def _prompt(new_request: Any, engine_request: EngineRequest) -> tuple[int, Sequence[int] | None]:
    """Return how many tokens the prompt has, and their ids if they are known here."""
    ids, length = new_request.prompt_token_ids, engine_request.prompt_len
    if length is None:
        length = len(ids) if ids is not None else new_request.prompt_embeds.shape[0]
    return length, None if ids is None else ids[:length]


def _patch_dummy_run(runner: Any, runtime: WorkerRuntime) -> None:
    dummy_run = runner._dummy_run

    @functools.wraps(dummy_run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        runtime.silence()
        return dummy_run(*args, **kwargs)

    runner._dummy_run = wrapper


def _patch_warm_up(worker: Any, warmup: TapWarmup, settings: Settings) -> None:
    """Pause garbage collection during tracing, and wait for the taps' kernels before capture.

    Room for autoencoders is taken from the memory that the KV cache may have.

    On a GPU, the profiling run traces and compiles the model.
    """
    measure, warm_up = worker.determine_available_memory, worker.compile_or_warm_up_model
    on_gpu = worker.model_runner.device.type == "cuda"
    chosen = worker.vllm_config.cache_config.kv_cache_memory_bytes  # then the user has left room for other things
    room = settings.sae_bytes or 0 if on_gpu and not chosen else 0

    @functools.wraps(measure)
    def profile(*args: Any, **kwargs: Any) -> Any:
        available = measure(*args, **kwargs)
        return available - room if room else available

    @functools.wraps(measure)
    def frozen(*args: Any, **kwargs: Any) -> Any:
        # Tracing makes millions of objects.
        with frozen_heap():
            return profile(*args, **kwargs)

    @functools.wraps(warm_up)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        warmup.wait()
        return warm_up(*args, **kwargs)

    worker.determine_available_memory = frozen
    worker.compile_or_warm_up_model = wrapper


def _patch_shutdown(worker: Any, runtime: WorkerRuntime) -> None:
    shutdown = worker.shutdown

    @functools.wraps(shutdown)
    def wrapper() -> None:
        try:
            runtime.close()  # raises on a device that has failed; vLLM must release its own resources all the same
        finally:
            shutdown()

    worker.shutdown = wrapper


def _v1_inputs(runner: Any) -> Callable[[WorkerRuntime], None]:
    prepare = runner._prepare_inputs

    def patch(runtime: WorkerRuntime) -> None:
        @functools.wraps(prepare)
        def wrapper(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
            result = prepare(scheduler_output, num_scheduled_tokens, *args, **kwargs)
            batch = runner.input_batch
            n = batch.num_reqs
            computed = batch.num_computed_tokens_cpu[:n]
            runtime.steps.plan_step(
                batch.req_ids[:n],
                num_scheduled_tokens[:n],
                computed,
                runner.input_ids.gpu,
                num_drafts=drafts_of(scheduler_output, batch.req_ids[:n]),
                positions=runner.positions,
            )
            return result

        runner._prepare_inputs = wrapper

    return patch


def _v2_inputs(runner: Any) -> Callable[[WorkerRuntime], None]:
    prepare = runner.prepare_inputs
    # The position of this argument differs between versions.
    batch_desc_index = list(inspect.signature(prepare).parameters).index("batch_desc")

    def patch(runtime: WorkerRuntime) -> None:
        @functools.wraps(prepare)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            n = batch.num_reqs
            computed = batch.num_computed_tokens_np[:n]
            desc = kwargs["batch_desc"] if "batch_desc" in kwargs else args[batch_desc_index]
            graph = desc.cg_mode.name != "NONE"
            drafts = batch.num_draft_tokens_per_req
            runtime.steps.plan_step(
                batch.req_ids,
                batch.num_scheduled_tokens[:n],
                computed,
                batch.input_ids,
                graph,
                None if drafts is None else drafts[:n],
                batch.positions,
            )
            return batch

        runner.prepare_inputs = wrapper

    return patch
