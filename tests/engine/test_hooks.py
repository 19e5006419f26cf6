"""Users' functions on a live engine: what transformers gives with the same functions, whatever shares the steps."""

from __future__ import annotations

import copy

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held
from tests.engine.probe_cases import preemptions
from tests.support.engines import get_llm
from tests.support.hook_functions import both, breaks_at_31, cases, of_parts, probe_and_steer, smoothed
from tests.support.machine import cpu, needs
from tests.support.measure import alike, logit_bound, rel_err, rounding
from tests.support.named import named_llm
from tests.support.references import reference
from tests.support.steered import check, chunks, directory, generated, prompt, same_answers, sampling, vectors
from vllm_weir.errors import WeirError
from vllm_weir.worker.tap.calls import TapCalls

pytestmark = pytest.mark.engine("default")
D, D_MLP, D_Z = 128, 192, 128
CAPTURE = [weir.Capture("resid_post"), weir.Capture("resid_pre", [2])]


def asked(function, given, max_tokens=6, **more):
    hook, applied = both(function, given)
    return weir.params(sampling(max_tokens, **more), hooks=hook, capture=CAPTURE), [applied]


def sixteen(mode="eager"):
    return [*cases(D, D_MLP, D_Z, mode=mode), *cases(D, D_MLP, D_Z, 5, mode), *of_parts(D_MLP, mode)]


@pytest.mark.parametrize(("size", "mode"), [(None, "eager"), (50, "eager"), (None, "compiled"), (50, "compiled")])
def test_sixty_four_requests_with_sixteen_hooks(llm, truth, size, mode):
    """Also two at once with an intervention between them; in chunks of prompts; plain neighbours keep their bits."""
    every = sixteen(mode)
    texts = [prompt(20 + k % 23, k) for k in range(64)]
    plain = sampling(4, logprobs=3)
    requests = [asked(*every[(k - k // 4 - 1) % 16], max_tokens=4) if k % 4 else None for k in range(64)]
    (first, applied), (second, also) = both(*every[0]), both(*every[2])
    add = weir.Add(vectors(1)(D), 1)
    together = weir.params(sampling(4), interventions=[first, add], hooks=second, capture=CAPTURE)
    requests[63] = (together, [applied, add, also])
    with chunks(llm, size):
        before = generated(llm, texts, plain)
        llm.reset_prefix_cache()
        outs = generated(llm, texts, [plain if one is None else one[0] for one in requests])
    assert sum(one is None for one in requests) == 16
    for out, one, was in zip(outs, requests, before, strict=True):
        if one is None:
            assert same_answers([out], [was])
        else:
            check(out, one[1], truth)
            assert out.receipt.notes == ()
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


def test_three_sequences_of_each_function(llm, truth):
    """Rows, and the log probabilities of the tokens that were drawn."""
    every = [*cases(D, D_MLP, D_Z), *of_parts(D_MLP)[:1]]
    requests = [asked(*case, n=3, temperature=1.0, seed=k, logprobs=0) for k, case in enumerate(every)]
    outs = generated(llm, [prompt(33, 40 + k) for k in range(len(every))], [params for params, _ in requests])
    for out, (_, applied) in zip(outs, requests, strict=True):
        assert len({tuple(one.token_ids) for one in out.outputs}) == 3
        for one in out.outputs:
            ids, drawn = list(out.prompt_token_ids), list(one.token_ids)
            rows, logits = truth.steered((ids + drawn)[:-1], len(ids), applied, sites=map(tuple, one.activations.sites))
            for site in one.activations.sites:
                assert rel_err(one.activations[site], rows[tuple(site)]) <= rounding()
            said = torch.tensor([step[token].logprob for step, token in zip(one.logprobs, drawn, strict=True)])
            own = logits[len(ids) - 1 :].log_softmax(-1)[torch.arange(6), drawn]
            assert (said - own).abs().max() <= 2 * logit_bound(logits)


def test_equal_keys_share_the_prefix_cache(llm, truth):
    """For each function; other heads of one key are something else."""
    every = [(f, given | {"key": f"{k}"}) for k, (f, given) in enumerate(sixteen()) if "state" not in given]
    requests = [asked(*case) for case in every]
    generated_rows = weir.Capture("resid_post", positions="generated")
    params = [weir.params(one, capture=generated_rows) for one, _ in requests]
    texts = [prompt(70, 100 + k) for k in range(len(every))]
    for cached in (0, 64):
        for out, (_, applied) in zip(generated(llm, texts, params), requests, strict=True):
            check(out, applied, truth)
            assert out.num_cached_tokens == cached
            for name, at in out.values.positions.items():
                assert not len(at) or at[0] >= out.num_cached_tokens, name
    function, given = every[-1]
    other, applied = asked(function, given | {"neurons": [2, 150, 77]})
    (out,) = generated(llm, texts[-1:], [weir.params(other, capture=generated_rows)])
    check(out, applied, truth)
    assert out.num_cached_tokens == 0


def test_parts_of_rows(llm, truth):
    """A function is given the heads or neurons in the order in which they were named; values come in that order."""
    function, given = of_parts(D_MLP)[0]
    seen = weir.params(sampling(2), hooks=weir.Hook(function, **given | {"layers": 1}), capture=weir.Capture("z", 1))
    zeros = given["args"]["factors"] * 0
    same = weir.params(seen, hooks=weir.Hook(function, **given | {"layers": 1, "args": {"factors": zeros}}))
    out, none = generated(llm, [prompt(12, 3)] * 2, [seen, same])
    before = truth.rows(list(out.prompt_token_ids))["z", 1]
    assert rel_err(out.values["heads"][:12], before[:, [3, 0, 1]].norm(dim=2)) <= rounding()
    assert not none.activations["z", 1][:, [0, 1, 3]].any() and none.activations["z", 1][:, 2].any()
    for change, words in (({"heads": [4]}, "heads 0..3"), ({"neurons": [1]}, "no neurons"), ({"heads": []}, "empty")):
        with pytest.raises(WeirError, match=words):
            generated(llm, [prompt(5)], [weir.params(sampling(1), hooks=weir.Hook(function, **given | change))])


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_what_makes_rows_infinite_or_not_a_number_is_told(llm, mode):
    """With the first position and hook point; neighbours, and who gets the request's blocks next, keep their bits."""

    def spoils(rows, ctx):
        here = (ctx.positions == ctx.args["at"]).view(-1, *(1,) * (rows.dim() - 1))
        return torch.where(here, rows * float("inf"), rows), {"unnoticed": rows * float("nan")}

    def at(position, **more):
        hook = weir.Hook(spoils, args={"at": position}, mode=mode, **{"layers": [1, 2]} | more)
        return weir.params(sampling(6), hooks=hook, capture=weir.Capture("resid_post", 1))

    plain, texts = sampling(6, logprobs=3), [prompt(20 + k, k) for k in range(6)]
    part = {"hook": "z", "heads": [2], "layers": 3}
    with chunks(llm, 25):
        before = generated(llm, texts, plain)
        llm.reset_prefix_cache()
        outs = generated(llm, texts, [at(5), plain, at(23), at(99), plain, at(7, **part)])
        assert same_answers([outs[1], outs[4]], [before[1], before[4]])
        llm.reset_prefix_cache()
        assert same_answers(generated(llm, texts, plain), before)
    made = "the hook spoils returned NaN or infinity for"
    assert outs[0].receipt.notes == (f"{made} 1 rows that were finite, first at resid_post[1], position 5",)
    assert outs[2].receipt.notes == (f"{made} 1 rows that were finite, first at resid_post[1], position 23",)
    assert outs[3].receipt.notes == ()
    assert outs[5].receipt.notes == (f"{made} 1 rows that were finite, first at z[3], position 7",)
    assert outs[0].receipt.to_dict()["notes"] == list(outs[0].receipt.notes)
    assert not outs[0].activations["resid_post", 1][5].isfinite().any()
    assert outs[0].activations["resid_post", 1][:5].isfinite().all()


def test_params_of_the_sequence(llm):
    def keep(rows, ctx):
        ctx.saved["params"] = [ctx.params[name] for name in ("temperature", "max_tokens", "n", "seed")]
        ctx.saved["own"] = dict(ctx.params["extra_args"])["mine"]
        try:
            ctx.params["n"] = 2
        except TypeError as e:
            ctx.saved["read only"] = str(e)

    asked_for = sampling(3, n=2, temperature=0.5, seed=8, extra_args={"mine": [1]})
    (out,) = generated(llm, [prompt(9)], [weir.params(asked_for, hooks=weir.Hook(keep, layers=1))])
    for k, one in enumerate(out.outputs):
        assert one.saved["params"] == [0.5, 3, 1, 8 + k] and one.saved["own"] == [1] and "read only" in one.saved


def test_weights_of_the_model(llm, truth):
    """By vLLM's names, and by those of the checkpoint where vLLM has put several together."""
    names = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.self_attn.o_proj.weight",
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"),
        *(f"model.layers.3.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ]

    def keep(rows, ctx):
        for name in names:
            ctx.saved[name] = ctx.parameter(name)
        ctx.saved["qkv"] = ctx.parameter("model.layers.1.self_attn.qkv_proj.weight")
        return rows, {"logits": rows @ ctx.parameter("lm_head.weight").T}

    params = weir.params(sampling(2), hooks=weir.Hook(keep, layers=3), capture=weir.Capture("resid_post", 3))
    (out,) = generated(llm, [prompt(9)], [params])
    expected = truth.model.state_dict()
    for name in names:
        assert rel_err(out.saved[name], expected[name]) <= rounding(1, 1), name
    assert torch.equal(out.saved["qkv"], torch.cat([out.saved[name] for name in names[4:7]]))
    assert rel_err(out.values["logits"], out.activations["resid_post", 3] @ expected["lm_head.weight"].T) <= rounding()

    for name, words in (
        ("model.layers.1.self_attn.k_porj.weight", "no weight .* did you mean model.layers.1.self_attn.k_proj.weight"),
        ("lm_head", "no weight 'lm_head'; did you mean lm_head.weight"),
        ("", "no weight ''"),
    ):

        def wrong(rows, ctx, name=name):
            ctx.parameter(name)

        with pytest.raises(WeirError, match=f"raised WeirError: .*{words}.* of wrong: ctx.parameter"):
            generated(llm, [prompt(9)], [weir.params(sampling(1), hooks=weir.Hook(wrong, layers=1))])


def test_weights_that_were_replaced_are_seen(llm):
    def keep(rows, ctx):
        ctx.saved["now"] = ctx.parameter("lm_head.weight")[3, :2]

    def times(model, factor):
        model.lm_head.weight.data[3] *= factor

    params = weir.params(sampling(1), hooks=weir.Hook(keep, layers=1))
    found = []
    for factor in (1.0, 2.0, 0.5):
        llm.apply_model(lambda model, factor=factor: times(model, factor))
        found.append(generated(llm, [prompt(9)], [params])[0].saved["now"])
    assert torch.equal(found[1], 2 * found[0]) and torch.equal(found[2], found[0])


@pytest.mark.thorough
def test_preempted_requests_go_on_with_their_state(root):
    llm = named_llm("scarce", root)
    truth = reference(directory())
    every = [cases(D, D_MLP, D_Z)[k] for k in (2, 0, 1, 3, 4, 5)]
    requests = [asked(*case, max_tokens=70) for case in every]
    with preemptions(llm) as found:
        outs = generated(llm, [prompt(40, 60 + k) for k in range(6)], [one for one, _ in requests])
    assert any(computed > 45 for computed in found)
    for out, (_, applied) in zip(outs, requests, strict=True):
        check(out, applied, truth)
    assert len(outs[0].values["smoothed"]) == 106


@pytest.mark.parametrize(
    ("length", "size", "more"),
    [(30, None, {}), (40, 7, {}), (30, 7, {"n": 3, "temperature": 1.0})],
    ids=["decoding", "chunks", "several"],
)
def test_a_function_that_raises_fails_its_own_request(llm, truth, length, size, more):
    """Its neighbours go on; the error has the function's line."""
    good, applied = asked(*cases(D, D_MLP, D_Z)[0])
    bad = weir.params(sampling(6, **more), hooks=weir.Hook(breaks_at_31, layers=1))
    with chunks(llm, size), pytest.raises(WeirError, match=r"ValueError: enough .line .* of breaks_at_31") as caught:
        generated(llm, [prompt(length, 1), prompt(30, 2)], [bad, good])
    check(caught.value.outputs[1], applied, truth)
    del caught
    assert_nothing_is_held(llm)


def test_a_function_that_returns_what_does_not_fit_fails_its_own_request(llm, truth):
    def wrong(rows, ctx):
        return rows[:, :5]

    def unsent(rows, ctx):
        ctx.saved["it"] = object()

    good, applied = asked(*cases(D, D_MLP, D_Z)[0])

    def elsewhere(rows, ctx):
        return rows.to("meta")

    for function, words in ((wrong, "for rows"), (unsent, "object"), (elsewhere, "on meta for rows")):
        bad = weir.params(sampling(6), hooks=weir.Hook(function, layers=1))
        with pytest.raises(WeirError, match=words) as caught:
            generated(llm, [prompt(30, 1)] * 2, [bad, good])
        check(caught.value.outputs[1], applied, truth)
    del caught
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_two_functions_at_positions_of_their_own(llm, truth, mode):
    every = cases(D, D_MLP, D_Z, mode=mode)
    here = [{"hook": "resid_post", "layers": 1, "positions": span} for span in ("0:9", "9:")]
    hooks, applied = zip(
        *(both(every[k][0], every[k][1] | at) for k, at in zip((0, 1), here, strict=True)), strict=True
    )
    (out,) = generated(llm, [prompt(20, 8)], [weir.params(sampling(6), hooks=list(hooks), capture=CAPTURE)])
    check(out, applied, truth)
    assert out.values.positions["probe"].tolist() == list(range(9))
    assert out.values.positions["norm"].tolist() == list(range(9, 25))


def test_compiled_functions_meet_eager_ones(llm, truth, monkeypatch):
    """In one step, in one chain and twice at a tap: there the host calls them, elsewhere the plan says where."""
    found, call = [], TapCalls._run
    monkeypatch.setattr(TapCalls, "_run", lambda self, *given: (found.append(given), call(self, *given))[1])
    probe, clamp, *_, sae = cases(D, D_MLP, D_Z, mode="compiled")
    chain = [both(*probe), both(clamp[0], clamp[1] | {"layers": 2}), both(sae[0], sae[1] | {"layers": [1, 2]})]

    def run(*requests):
        params = [weir.params(sampling(6), hooks=[hook for hook, _ in one], capture=CAPTURE) for one in requests]
        outs = generated(llm, [prompt(20 + k, k) for k in range(len(requests))], params)
        for out, one in zip(outs, requests, strict=True):
            check(out, [applied for _, applied in one], truth)
        assert len(outs[0].values["probe"]) == 25
        return bool(found)

    assert not run(chain)
    assert run([both(*probe), both(*cases(D, D_MLP, D_Z)[1])], chain, [both(*probe)])
    found.clear()
    assert run([both(*probe)] * 2)
    found.clear()
    keyed = [weir.Hook(function, **given | {"key": "mine"}) for function, given in (probe, clamp)]
    generated(llm, [prompt(9)] * 2, [weir.params(sampling(2), hooks=hook) for hook in keyed])
    assert not found
    assert_nothing_is_held(llm)
    other = weir.Hook(probe[0], **probe[1] | {"key": "mine", "args": {"w": torch.ones(D), "scale": 1.0}})
    with pytest.raises(WeirError, match="other args have this key"):
        generated(llm, [prompt(9)] * 2, [weir.params(sampling(2), hooks=hook) for hook in (keyed[0], other)])


def means_at_2(out, applied, truth):
    """Return the means of the rows of block 2 before the hook acts there."""
    ids = (list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1]
    (hook,) = applied
    at_1 = copy.copy(hook)
    at_1.layers = [1]
    return truth.steered(ids, len(out.prompt_token_ids), [at_1], sites=())[0]["resid_post", 2].mean(1)


def test_compiled_functions_are_called_once_for_all_requests(llm, truth):
    """Args of their own and a state; a failed one beside them; what vmap cannot map fails its own request."""
    calls = []

    def pushed(rows, ctx):
        return rows + ctx.args["scale"] * torch.tanh(rows @ ctx.args["w"])[:, None] * ctx.args["w"]

    def counted(rows, ctx):
        calls.append(ctx.layer)
        ctx.state = ctx.state + rows.mean(1)
        return pushed(rows, ctx), {"sum": ctx.state}

    vector, every = vectors(3), []
    for k in range(12):
        given = {"layers": [1, 2], "args": {"w": vector(D), "scale": 0.5 * k}}
        hook = weir.Hook(counted, **given, mode="compiled", state=1)
        every.append((weir.params(sampling(6), hooks=hook, capture=CAPTURE), [both(pushed, given)[1]]))
    texts = [prompt(18, 30 + k) for k in range(len(every))]
    outs = generated(llm, texts, [one for one, _ in every])
    assert 2 * (18 + 5) <= len(calls) <= 2 * (18 + 5) * 4, "a call for each position, not for each request"
    for out, (_, applied) in zip(outs, every, strict=True):
        check(out, applied, truth, rounding(width=2048))  # pushes of up to five times the vector pass errors on
        assert rel_err(out.values["sum"][1:, 1], out.values["sum"][:-1, 1] + means_at_2(out, applied, truth)[1:]) < 1e-4

    def looks(rows, ctx):
        return rows if rows.sum() > 0 else -rows

    def keeps(rows, ctx):
        ctx.saved["it"] = rows

    def draws(rows, ctx):
        return rows + torch.randn(rows.shape)

    for function, words in ((looks, "line .* of looks.*mode='eager'"), (keeps, "saved"), (draws, "random")):
        bad = weir.params(sampling(6), hooks=weir.Hook(function, layers=1, mode="compiled"))
        with pytest.raises(WeirError, match=words) as caught:
            generated(llm, texts[:2], [bad, every[0][0]])
        check(caught.value.outputs[1], every[0][1], truth)
    del caught, out, outs
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "graph"}, "expected one of auto, compiled, eager"),
        ({"args": {"w": object()}}, "expected numbers"),
        ({"layers": 30}, "blocks 0..3"),
        ({"hook": "pattern", "layers": 1}, "read"),
        ({"per_layer": True}, "no vectors"),
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
    llm, truth = named_llm("drafts", root), reference(directory())
    every = [case for case in (*cases(D, D_MLP, D_Z), *of_parts(D_MLP)) if "state" not in case[1]]
    requests = [asked(*case, max_tokens=20) for case in every]
    texts = [prompt(40, 5 + k) for k in range(len(every))]
    outs = generated(llm, texts, [params for params, _ in requests])
    for out, (_, applied) in zip(outs, requests, strict=True):
        check(out, applied, truth)
        assert out.receipt.notes == ()
    assert outs[0].values.positions["probe"].tolist() == list(range(59))
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
