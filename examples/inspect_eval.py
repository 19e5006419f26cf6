"""Inspect AI: a solver reads activations and puts them into another prompt. The provider starts the server.

python examples/inspect_eval.py            (or: inspect eval examples/inspect_eval.py --model weir/MODEL)
"""

from __future__ import annotations

import torch
from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver

import vllm_weir as weir
from vllm_weir import SteeringVector

READ_LAYER, INJECT_LAYER, PLACEHOLDER = 3, 1, 4


@solver
def ask_about_activations():
    async def solve(state, generate):
        model = get_model()
        capture_config = GenerateConfig(
            temperature=0.0, max_tokens=1, extra_body={"extra_args": {"output_residual_stream": [READ_LAYER]}}
        )
        output = await model.generate(state.messages, config=capture_config)
        residual_stream = output.metadata["activations"]["residual_stream"]
        print(f"{state.input_text!r}: residual_stream {list(residual_stream.shape)}")

        steering = SteeringVector(
            activations=residual_stream[:, -1:],
            layer_indices=[INJECT_LAYER],
            norm_match=True,
            position_indices=[PLACEHOLDER],
        )
        probe = torch.ones(residual_stream.shape[-1])
        oracle_config = GenerateConfig(
            temperature=0.0,
            max_tokens=8,
            extra_body={
                "extra_args": {"apply_steering_vectors": [steering]},
                "weir": {"capture": [weir.Capture(layers=INJECT_LAYER, project=probe)]},
            },
        )
        state.output = await model.generate([ChatMessageUser(content="Tom was it that day.")], config=oracle_config)
        state.metadata["receipt"] = state.output.metadata["receipt"].to_dict()
        print(f"  {state.output.completion!r}, rows changed: {state.output.metadata['receipt'].steered}")
        return state

    return solve


@scorer(metrics=[accuracy()])
def one_row_was_changed():
    async def score(state, target):
        return Score(value=state.metadata["receipt"]["steered"] == [{f"resid_post.{INJECT_LAYER}": 1}])

    return score


@task
def activations():
    samples = [Sample(input="Tom was happy."), Sample(input="Tom was sad.")]
    return Task(dataset=samples, solver=ask_about_activations(), scorer=one_row_was_changed())


if __name__ == "__main__":
    options = {"max_model_len": 256, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": not torch.cuda.is_available()}
    (log,) = eval(activations(), model=f"weir/{weir.demo_model()}", model_args=options, display="none")
    print(f"{log.status}, accuracy {log.results.scores[0].metrics['accuracy'].value}")
