"""The lens of every block: with transformers' norm and unembedding of the same rows, or with the model's own.

Where transformers lacks the model, an engine's own log-probabilities stand in: of a request whose last block leaves
what another block left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.conformance.checks import Wrong
from tests.conformance.engine import GENERATED, Engine, prompts
from tests.conformance.remote import RemoteOracle
from tests.conformance.verdict import FAILS, Verdict
from tests.support.measure import rel_err

LONGEST = 1
"""Of the prompts: the one that is longer than windows."""


def check_lens(engine: Engine, oracle: RemoteOracle | None, verdict: Verdict) -> None:
    """Fill in what the lens is, and fail the architecture if it is off."""
    import vllm_weir as weir

    try:
        ids, found, own = _ask(engine)
    except weir.WeirError as e:
        if not e.message.startswith("no lens is served: "):
            raise
        verdict.lens = {"error": None, "refused": e.message.removeprefix("no lens is served: ")}
        return
    last = max(found)
    errors = [_error(found[last][-GENERATED:], own)]
    if oracle is None:
        errors += [_error(found[layer][len(ids) - GENERATED], of) for layer, of in _replaced(engine, ids).items()]
    else:
        expected = oracle.lens(ids)
        errors += [_error(found[layer], expected[layer].log_softmax(-1)) for layer in found]
    verdict.lens = {"error": max(errors), "refused": ""}
    if not max(errors) <= verdict.bound:
        verdict.verdict, verdict.reason = FAILS, f"the lens is off by {max(errors):.1e}"


def _ask(engine: Engine) -> tuple[list[int], dict[int, torch.Tensor], torch.Tensor]:
    """Token ids that went through the model, block -> its lens's log-probabilities [ids, vocabulary], and the model's
    own of the tokens that were generated."""
    import vllm_weir as weir

    vocabulary = engine.llm.llm_engine.model_config.get_vocab_size()
    prompt = prompts()[LONGEST]
    output = _generate(engine, [weir.params(_sampling(), lens=weir.Lens(top_k=vocabulary))], prompt)[0]
    completion = output.outputs[0]
    ids = [*prompt, *completion.token_ids][:-1]
    found = {}
    for layer, read in output.lens.items():
        if read.positions.tolist() != list(range(len(ids))):
            raise Wrong(f"the lens of block {layer} has not one row for each of {len(ids)} tokens")
        found[layer] = torch.full((len(ids), vocabulary), float("nan")).scatter(1, read.token_ids, read.logprobs)
    return ids, found, _own(completion)


def _replaced(engine: Engine, ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """Block -> the model's own log-probabilities [vocabulary] behind the prompt, had its last block left that row."""
    import vllm_weir as weir

    prompt = list(ids[: len(ids) - GENERATED + 1])
    (output,) = _generate(engine, [weir.params(_sampling(), capture=weir.Capture("resid_post"))], prompt)
    rows = output.outputs[0].activations
    layers = [layer for _, layer in rows.sites]
    asked = [
        weir.params(
            _sampling(),
            interventions=weir.Replace(
                rows["resid_post", layer][len(prompt) - 1], max(layers), positions="last_prompt"
            ),
        )
        for layer in layers
    ]
    outputs = _generate(engine, asked, prompt)
    return {layer: _own(output.outputs[0])[0] for layer, output in zip(layers, outputs)}


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1)


def _generate(engine: Engine, asked: list[Any], prompt: list[int]) -> list[Any]:
    return engine.llm.generate([{"prompt_token_ids": prompt} for _ in asked], asked, use_tqdm=False)


def _own(completion: Any) -> torch.Tensor:
    return torch.tensor([[step[token].logprob for token in range(len(step))] for step in completion.logprobs])


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return rel_err(found, expected.to(found.dtype))
