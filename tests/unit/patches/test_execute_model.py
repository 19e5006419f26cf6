"""What the worker's runtime is told around each step of the model."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

from vllm_weir.patches.kv_connectors import RELOADED
from vllm_weir.patches.worker import _patch_execute_model
from vllm_weir.schema.engine_spec import EngineRequest
from vllm_weir.schema.keys import WIRE_KEY


def scheduled(new=(), cached=(), finished=(), resumed=(), **more):
    """A SchedulerOutput: `new` and `cached` are (request, position of its first token)."""
    ids, computed = [r for r, _ in cached], [n for _, n in cached]
    return SimpleNamespace(
        scheduled_new_reqs=[request for request, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ids,
            num_computed_tokens=computed,
            resumed_req_ids=set(resumed),
            all_token_ids={name: [0] * 5 for name in resumed},
        ),
        finished_req_ids=set(finished),
        **more,
    )


def request(name, asked, prompt, computed=0):
    extra_args = None if asked is None else {WIRE_KEY: asked, "own": 1}
    params = SimpleNamespace(n=1, _made=2, extra_args=extra_args, __struct_fields__=("n", "_made", "extra_args"))
    return SimpleNamespace(
        req_id=name, sampling_params=params, pooling_params=None, prompt_token_ids=prompt, num_computed_tokens=computed
    ), computed


def patched():
    """A runner with a stand-in for the runtime, and the order of what is called."""
    calls, runtime = MagicMock(), MagicMock()
    runner = SimpleNamespace(execute_model=calls.execute)
    calls.attach_mock(runtime, "runtime")
    _patch_execute_model(runner, runtime)
    return runner, runtime, calls


def test_who_joins_leaves_and_resumes_is_told_before_the_taps_are_turned_on(monkeypatch):
    runner, runtime, calls = patched()
    asked = EngineRequest(b"", "", calls={"f": b""})
    monkeypatch.setattr("vllm_weir.patches.worker._prompt", lambda r, _asked: (len(r.prompt_token_ids), None))
    output = scheduled(
        new=[request("steered", asked, [1, 2, 3], 2), request("plain", None, [4])],
        cached=[("old", 7)],
        finished=["gone"],
        resumed=["back"],
        **{RELOADED: ["again"]},
    )
    output.scheduled_new_reqs[0].prefill_token_ids = [1, 2, 3, 4]  # of runner V2: it has generated one before
    output.scheduled_new_reqs[1].prefill_token_ids = [4]
    assert runner.execute_model(output) is calls.execute.return_value
    new, finished, resumed, known = runtime.requests.follow.call_args.args
    assert [(name, *rest) for name, _, *rest in new] == [("steered", 3, None, 2)]
    runtime.parts.functions.note_params.assert_called_once_with({"steered": {"n": 1, "extra_args": {"own": 1}}})
    assert finished == {"gone"} and set(resumed) == {"back", "again"} and known == {"back": 5, "steered": 4}
    assert runtime.begin_step.call_args.args == ((["old"], [7]), (["steered", "plain"], [2, 0]))
    names = [name for name, *_ in calls.mock_calls]
    order = ["runtime.requests.follow", "runtime.begin_step", "execute", "runtime.steps.end_step"]
    assert [name for name in names if name in order] == order


def test_a_dummy_pass_is_silent():
    runner, _, calls = patched()
    runner.execute_model(None, dummy_run=True)
    assert [name for name, *_ in calls.mock_calls] == ["runtime.silence", "execute"]
