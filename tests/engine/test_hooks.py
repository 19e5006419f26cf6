"""Users' functions on a live engine: what transformers gives with the same functions, whatever shares the steps."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held
from tests.engine.probe_cases import preemptions
from tests.support.engines import get_llm
from tests.support.hook_functions import both, cases, probe_and_steer, smoothed
from tests.support.machine import cpu, needs
from tests.support.measure import alike, rel_err
from tests.support.named import named_llm
from tests.support.references import reference
from tests.support.steered import check, chunks, directory, generated, prompt, same_answers, sampling, vectors
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine("default")
D, D_MLP, D_Z = 128, 192, 128
CAPTURE = [weir.Capture("resid_post"), weir.Capture("resid_pre", [2])]


def asked(function, given, max_tokens=6, **more):
    hook, applied = both(function, given)
    return weir.params(sampling(max_tokens, **more), hooks=hook, capture=CAPTURE), [applied]


@pytest.mark.parametrize("size", [None, 7])
def test_functions_in_a_mixed_batch(llm, truth, size):
    """Six functions, and two at once with an intervention between them; their plain neighbours keep their bits."""
    every = cases(D, D_MLP, D_Z)
    texts = [prompt(20 + 3 * k, k) for k in range(2 * len(every) + 1)]
    plain = sampling(6, logprobs=3)
    with chunks(llm, size):
        before = generated(llm, texts, plain)
        llm.reset_prefix_cache()
        requests = [asked(*every[k // 2]) if k % 2 else None for k in range(2 * len(every))]
        (first, applied), (second, also) = both(*every[0]), both(*every[2])
        add = weir.Add(vectors(1)(D), 1)
        together = weir.params(sampling(6), interventions=[first, add], hooks=second, capture=CAPTURE)
        requests.append((together, [applied, add, also]))
        outs = generated(llm, texts, [plain if one is None else one[0] for one in requests])
    for out, one, was in zip(outs, requests, before, strict=True):
        if one is None:
            assert same_answers([out], [was])
        else:
            check(out, one[1], truth)
    assert outs[1].receipt.interventions[0].acted == len(outs[1].activations["resid_post", 1])
    del out, outs, was, before
    assert_nothing_is_held(llm)


def test_values_and_what_was_saved(llm, truth):
    """A value for each row and layer; a state that goes on through chunks and decoding."""
    function, given = cases(D, D_MLP, D_Z)[0]
    params, _ = asked(function, given)
    other = cases(D, D_MLP, D_Z)[2]
    with chunks(llm, 7):
        out, stateful = generated(llm, [prompt(30, 1), prompt(30, 1)], [params, asked(*other)[0]])
    before = out.activations["resid_post", 0]
    probe = out.values["probe"]
    assert probe.shape == (35, 2) and out.values.positions["probe"].tolist() == list(range(35))
    # What the function was given at block 1 is not captured; at block 0 nothing acts, so the reference has it.
    rows = truth.steered((list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1], 30, [], sites=())[0]
    assert rel_err(probe[:, 0], rows["resid_post", 1] @ given["args"]["w"]) < 1e-4 and len(before) == 35
    w, state, wanted = other[1]["args"]["w"], torch.zeros(1), []
    ids = (list(stateful.prompt_token_ids) + list(stateful.outputs[0].token_ids))[:-1]
    for row in truth.steered(ids, 30, [], sites=())[0]["resid_post", 0][3:]:
        state = 0.5 * state + 0.5 * (row @ w)
        wanted.append(state)
    assert rel_err(stateful.values["smoothed"], torch.cat(wanted)) < 1e-4
    assert stateful.values.positions["smoothed"].tolist() == list(range(3, 35))
    assert alike(stateful.saved["last"], stateful.values["smoothed"][-1:])


def test_several_sequences_and_the_prefix_cache(llm, truth):
    """Sequences of one request, and equal requests, each have values of their own; keys let requests share rows."""
    function, given = cases(D, D_MLP, D_Z)[0]
    params, applied = asked(function, given, n=3, temperature=1.0, seed=3)
    (out,) = generated(llm, [prompt(70, 2)], [params])
    for one in out.outputs:
        assert one.values["probe"].shape == (75, 2)
    params, applied = asked(function, given)
    for _ in range(2):
        (out,) = generated(llm, [prompt(70, 2)], [params])
        check(out, applied, truth)
        assert out.num_cached_tokens == 0 and len(out.values["probe"]) == 75
    keyed, applied = asked(function, given | {"key": "mine", "layers": [1]})
    keyed = weir.params(keyed, capture=[])
    first, second = (generated(llm, [prompt(70, 3)], [keyed])[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids)
    assert second.values.positions["probe"].tolist() == list(range(64, 75))


@pytest.mark.thorough
def test_preempted_requests_go_on_with_their_state(root):
    llm = named_llm("scarce", root)
    truth = reference(directory())
    every = [cases(D, D_MLP, D_Z)[k] for k in (2, 0, 2, 1, 2, 3)]
    requests = [asked(*case, max_tokens=70) for case in every]
    with preemptions(llm) as found:
        outs = generated(llm, [prompt(40, 60 + k) for k in range(6)], [one for one, _ in requests])
    assert any(computed > 45 for computed in found)
    for out, (_, applied) in zip(outs, requests, strict=True):
        check(out, applied, truth)
    assert len(outs[0].values["smoothed"]) == 106


def test_a_function_that_fails_fails_its_own_request(llm, truth):
    def broken(rows, ctx):
        if ctx.positions[-1] > 31:
            raise ValueError("enough")

    def wrong(rows, ctx):
        return rows[:, :5]

    def unsent(rows, ctx):
        ctx.saved["it"] = object()

    good, applied = asked(*cases(D, D_MLP, D_Z)[0])
    for function, words in ((broken, "ValueError: enough .line .* of broken"), (wrong, "for rows"), (unsent, "object")):
        bad = weir.params(sampling(6), hooks=weir.Hook(function, layers=1))
        with pytest.raises(WeirError, match=words) as caught:
            generated(llm, [prompt(30, 1)] * 2, [bad, good])
        check(caught.value.outputs[1], applied, truth)
    del caught
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "compiled"}, "compiled hooks are not served yet"),
        ({"args": {"w": object()}}, "expected numbers"),
        ({"layers": 30}, "blocks 0..3"),
        ({"hook": "pattern", "layers": 1}, "read"),
        ({"heads": [1], "hook": "z"}, "whole rows"),
        ({"state": (2,), "key": "x"}, "no state"),
    ],
)
def test_refusals(llm, changes, words):
    with pytest.raises(WeirError, match=words):
        llm.generate(prompt(5), weir.params(sampling(2), hooks=weir.Hook(probe_and_steer, **changes)), use_tqdm=False)


@pytest.mark.thorough
@needs(cpu("n-gram drafts run on runner V1 there, which has one set of graphs with all taps"))
def test_drafts(root):
    """Rows of drafts that were rejected leave no value; a state would, and is refused."""
    llm = named_llm("drafts", root)
    function, given = cases(D, D_MLP, D_Z)[0]
    params, applied = asked(function, given, max_tokens=20)
    (out,) = generated(llm, [prompt(40, 5)], [params])
    check(out, applied, reference(directory()))
    assert out.values.positions["probe"].tolist() == list(range(59))
    with pytest.raises(WeirError, match="drafts that are rejected"):
        llm.generate(prompt(5), weir.params(sampling(2), hooks=weir.Hook(smoothed, state=1)), use_tqdm=False)


@pytest.mark.thorough
def test_many_requests_leave_nothing(llm):
    for k in range(40):
        function, given = cases(D, D_MLP, D_Z)[k % 6]
        generated(llm, [prompt(8, k)] * 5, [asked(function, given, 2)[0]] * 5)
    assert_nothing_is_held(llm)


@pytest.mark.thorough
def test_functions_travel_to_another_process(root):
    """By module, or as source with the modules that it uses; a closure cannot."""
    llm = get_llm(directory(), in_process=False)
    bound = 3.0

    def doubled(rows, ctx):
        return 2 * torch.tanh(rows), {"sum": rows.sum(1)}

    def closed(rows, ctx):
        return bound * rows

    for function in (probe_and_steer, doubled):
        given = {"layers": 1, "args": {"w": torch.ones(D) / D, "scale": 2.0}}
        params, applied = asked(function, given)
        (out,) = generated(llm, [prompt(20, 1)], [params])
        check(out, applied, reference(directory()))
        assert len(out.values) == 1
    with pytest.raises(WeirError, match="cannot reach the engine's process: it uses bound"):
        generated(llm, [prompt(20, 1)], [weir.params(sampling(2), hooks=weir.Hook(closed, layers=1))])
    llm = get_llm(directory(), in_process=False, additional_config={"weir": {"functions": "cloudpickle"}})
    hook, applied = both(closed, {"layers": 1})
    weir.register_hook(llm, "closed", hook)
    for one in (hook, weir.Use("closed")):
        (out,) = generated(llm, [prompt(20, 1)], [weir.params(sampling(6), hooks=one, capture=CAPTURE)])
        check(out, [applied], reference(directory()))
