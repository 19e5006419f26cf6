"""KV connectors whose loads fail, whose engine restarts or runs out of blocks, or that Weir does not know."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

import vllm_weir as weir
from tests.engine.test_kv_connectors import BY_KEYS, BY_TOKENS, CAPTURE, P, conditions, connect, quiet, run, start
from tests.support.engines import close_all
from tests.support.machine import needs
from tests.support.offloading import device_caches, failed_loads
from tests.support.steered import check, directory, prompt, sampling, tokens, truth
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine
THOROUGH = pytest.mark.thorough
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    close_all()


@pytest.fixture(scope="module")
def oracle():
    return truth(directory())


class Failing:
    """Loads of the worker's connector that fail: nothing is loaded, and the blocks are reported."""

    def __init__(self, monkeypatch):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.blocks: set[int] = set()
        self.failures = 0
        connector = get_kv_transfer_group()
        monkeypatch.setattr(connector, "get_block_ids_with_load_errors", self.report)
        if hasattr(connector, "connector_worker"):
            worker = connector.connector_worker.worker
            self.loads: dict[int, int] = {}
            monkeypatch.setattr(worker, "submit_load", partial(self.submit, worker, worker.submit_load))
            monkeypatch.setattr(worker, "get_finished", partial(self.finish, worker, worker.get_finished))
        else:
            self.connector = connector
            monkeypatch.setattr(connector, "start_load_kv", self.load)

    def load(self, *_args, **_kwargs):
        """Of the ExampleConnector, in the step that needs what is loaded."""
        for request in self.connector._get_connector_metadata().requests:
            if not request.is_store:
                self.blocks.update((request.slot_mapping // 32).tolist())

    def submit(self, _worker, submit, job, source, target):
        """Of the OffloadingConnector: not all blocks of a load fail, or vLLM would load them again and again."""
        self.loads[job] = int(target.block_ids[-1])
        return submit(job, source, target)

    def finish(self, worker, finished):
        """Of the OffloadingConnector, between steps."""
        done = finished()
        for job in done:
            if (block := self.loads.pop(job.job_id, None)) is not None:
                self.blocks.add(block)
                for cache in device_caches(worker):
                    cache[block] = 7  # rubbish
        return done

    def report(self):
        failed, self.blocks = self.blocks, set()
        self.failures += bool(failed)
        return failed


@THOROUGH
@needs(failed_loads)
def test_rows_are_exact_if_a_step_runs_on_blocks_that_were_not_loaded(tmp_path, oracle, monkeypatch):
    """A plain request loads in the step that needs the blocks; others find these in the prefix cache."""
    llm = start(BY_TOKENS, tmp_path, transfer=RECOMPUTE)
    run(llm, [], tokens(P, 7))
    failing = Failing(monkeypatch)
    probe = weir.Probe("one", torch.ones(oracle.hidden_size), 0.0, "resid_post", 2, positions="sampled")
    interventions = [weir.Add(torch.ones(oracle.hidden_size), 2, positions="generated")]
    asked = [
        weir.params(sampling(6), capture=CAPTURE, probes=[probe]),
        weir.params(sampling(6), capture=CAPTURE, interventions=interventions, probes=[probe]),
    ]
    want = []
    for params in asked:
        assert llm.reset_prefix_cache()
        want += llm.generate(prompt(P, 7), params, use_tqdm=False)
        assert want[-1].num_cached_tokens == 0  # Weir's requests load nothing here
    assert not failing.failures
    assert llm.reset_prefix_cache()
    outs = llm.generate([prompt(P, 7)] * 3, [sampling(6), *asked], use_tqdm=False)
    assert failing.failures == 1
    assert [out.num_cached_tokens for out in outs] == [96] * 3  # they had been given the blocks
    assert list(outs[0].outputs[0].token_ids) == oracle.steered_greedy(tokens(P, 7), 6, [])
    for out, cold, given in zip(outs[1:], want, ([], interventions), strict=True):
        check(out, given, oracle)
        assert out.scores["one"].shape == cold.scores["one"].shape
        summed = float(out.activations["resid_post", 2].abs().sum(1).max())  # a score is the sum of a row
        torch.testing.assert_close(out.scores["one"], cold.scores["one"], rtol=0, atol=1e-5 * summed)
    assert quiet(llm)


@THOROUGH
def test_rows_are_exact_if_blocks_do_not_arrive_between_steps(tmp_path, oracle, monkeypatch):
    llm = start(BY_KEYS, tmp_path, transfer=RECOMPUTE)
    every = conditions(oracle.hidden_size)
    for name in ("clean", "A"):
        run(llm, every[name][0], tokens(P, 8))
    failing = Failing(monkeypatch)
    for name in ("clean", "A", "A in generation"):
        out = run(llm, every[name][0], tokens(P, 8))
        check(out, every[name][0], oracle)
    assert failing.failures == 3
    assert quiet(llm)


@THOROUGH
def test_preempted_requests_load_what_they_had(tmp_path, oracle):
    """20 blocks for eight requests of five: they are preempted, and take their blocks from the host."""
    llm = start(BY_KEYS, tmp_path, num_gpu_blocks_override=20, max_num_seqs=8)
    every = [interventions for interventions, _ in conditions(oracle.hidden_size).values()]
    everywhere = weir.Capture("resid_post")
    asked = [every[k % len(every)] for k in range(8)]
    params = [weir.params(sampling(50), capture=everywhere, interventions=i) for i in asked]
    outs = llm.generate([prompt(P, 9 + k) for k in range(8)], params, use_tqdm=False)
    for out, interventions in zip(outs, asked, strict=True):
        check(out, interventions, oracle)
        assert out.activations.positions.tolist() == list(range(P + 49))
    assert quiet(llm)


@THOROUGH
def test_an_engine_that_starts_with_a_full_store(tmp_path, oracle):
    every = conditions(oracle.hidden_size)
    llm = start(BY_TOKENS, tmp_path)
    for k, (interventions, _) in enumerate(every.values()):
        run(llm, interventions, tokens(P, 20 + k))
        run(llm, interventions, tokens(P, 30))
    run(llm, [], tokens(P, 30))
    close_all()
    llm = start(BY_TOKENS, tmp_path)
    for k, name in enumerate(every):
        # Steered requests left nothing.
        out = run(llm, [], tokens(P, 20 + k))
        check(out, [], oracle)
        assert out.num_cached_tokens == (96 if name == "clean" else 0), name
        out = run(llm, every[name][0], tokens(P, 30))
        check(out, every[name][0], oracle)
        assert out.num_cached_tokens == (96 if name == "clean" else 0), name


@THOROUGH
def test_prompts_in_several_steps(tmp_path, oracle):
    llm = start(BY_KEYS, tmp_path, max_num_batched_tokens=48, max_num_seqs=4)
    every = conditions(oracle.hidden_size)
    for _ in range(2):
        for interventions, _ in every.values():
            check(
                run(llm, interventions, tokens(P, 40), weir.Capture("resid_post", positions="40:")),
                interventions,
                oracle,
            )


def test_a_connector_that_weir_does_not_know(tmp_path, oracle):
    own = {"kv_connector": "OwnConnector", "kv_connector_module_path": "tests.support.unknown_connector"}
    llm = start(BY_TOKENS, tmp_path, transfer=own)
    for cached in (0, 96):
        out = run(llm, [], tokens(P, 50))
        check(out, [], oracle)
        assert out.num_cached_tokens == cached
    out = run(llm, [], tokens(P, 50), weir.Capture("resid_post"))
    check(out, [], oracle)
    assert out.num_cached_tokens == 0
    steered = conditions(oracle.hidden_size)["A in generation"][0]
    with pytest.raises(WeirError, match="KV connector, OwnConnector, could give") as caught:
        run(llm, steered, tokens(P, 50))
    assert caught.value.field == "interventions[0]"
    with pytest.raises(WeirError, match="OwnConnector"):
        weir.set_global(llm, steered)
    run(llm, [weir.Add(torch.ones(oracle.hidden_size), 1, scale=0.0)], tokens(P, 50))  # it changes nothing


@THOROUGH
def test_a_connector_of_made_up_numbers(tmp_path):
    llm = start(BY_TOKENS, tmp_path, transfer=connect("DecodeBenchConnector"))
    llm.generate(prompt(P, 1), sampling(2), use_tqdm=False)
    with pytest.raises(WeirError, match="DecodeBenchConnector fills the KV cache with made-up numbers"):
        run(llm, [], tokens(P, 1))


@THOROUGH
@pytest.mark.parametrize("kind", [pytest.param(BY_TOKENS, marks=needs(failed_loads)), BY_KEYS])
def test_a_request_whose_load_fails_for_good(kind, tmp_path, oracle, monkeypatch):
    """vLLM ends it with an error. Rows of a step that ran without the blocks are not handed out."""
    llm = start(kind, tmp_path)
    run(llm, [], tokens(P, 8))
    with monkeypatch.context() as patch:
        failing = Failing(patch)
        engine = llm.llm_engine
        with (
            mock.patch.object(engine, "step", wraps=engine.step) as step,
            pytest.raises(WeirError, match="keys and values that could not be loaded; send it again") as caught,
        ):
            run(llm, [], tokens(P, 8))
        assert failing.failures == 1 and step.call_count < 20, "it is not tried again and again"
    (out,) = caught.value.outputs
    assert out.outputs[0].finish_reason == "error" and not out.outputs[0].token_ids
    with pytest.raises(WeirError, match="could not be loaded"):
        _ = out.activations
    del out, caught
    check(run(llm, [], tokens(P, 8)), [], oracle)
    assert quiet(llm)
