"""A crowd of mixed requests, and an engine of random weights whose drafts are mostly accepted, for `speculative.py`.

The unembedding is that of a cycle of seven tokens: what blocks add to the embedding makes some predictions leave it,
so of the drafts of an n-gram drafter, or of a draft model with the same cycle, some are rejected.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_weir.bench.reference import fill_engine, fill_reference

CYCLE = 7
LOGIT = 0.02
"""What the unembedding is scaled with: logits of about ten, as a model's are."""
ADDED = 0.2
"""What the outputs of attention and MLP are scaled with at 8B shapes. What 32 blocks add together is then about twice
as long as the embedding; unscaled it is ten times as long, and predictions seldom follow the cycle."""
BETWEEN = ("plain", "stream", "steer", "steer generated", "ablate", "probe")
"""Kinds of requests that read and write between blocks alone."""
ALL = ("plain", "stream", "sides", "inside", "steer", "steer generated", "ablate", "probe", "probe inside")
KINDS = {"between": BETWEEN, "all": ALL}
UNSTEERED = frozenset({"plain", "stream", "sides", "inside", "probe", "probe inside"})
HOOKS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "q", "z", "mlp_post")
"""What they read and write."""
SERVED = {"all": "all", "prompt": "prompt", "generated": "generated"}
"""Which positions a request's parts are, where the engine generates what follows the prompt."""


def forced(prompt_len: int) -> dict[str, str]:
    """Return the same positions of a prompt that begins with a prompt and ends with what was generated."""
    return {"all": "all", "prompt": f":{prompt_len}", "generated": f"{prompt_len}:"}


@torch.no_grad()
def set_cycle(embedding: torch.Tensor, head: torch.Tensor) -> None:
    """Write an unembedding that predicts the next token of a cycle."""
    tokens = torch.arange(len(head), device=head.device)
    after = torch.where(tokens % CYCLE == CYCLE - 1, tokens - CYCLE + 1, tokens + 1).clamp(max=len(head) - 1)
    head[after] = embedding[tokens] * LOGIT


@torch.no_grad()
def fill_cyclic(model: torch.nn.Module) -> None:
    """Draw the weights of vLLM's model, with that unembedding; not on a CPU, where engines repack weights."""
    fill_engine(model)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.mul_(ADDED)
    set_cycle(model.model.embed_tokens.weight, model.lm_head.weight)


@torch.no_grad()
def fill_drafter(worker: Any) -> bool:
    """Do the same to the draft model of a worker, with other blocks; return False if it has none."""
    runner = worker.model_runner
    for holder in ("drafter", "speculator"):  # runner V1, V2
        model = getattr(getattr(runner, holder, None), "model", None)
        if isinstance(model, torch.nn.Module) and hasattr(model, "lm_head"):
            fill_cyclic(model)
            for name, parameter in model.named_parameters():
                if "down_proj" in name:
                    parameter.neg_()
            return True
    return False


def write_checkpoint(folder: str) -> None:
    """Write the weights of a model, of which there is a configuration, for engines on a CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    fill_reference(net)
    set_cycle(net.model.embed_tokens.weight, net.lm_head.weight)
    net.save_pretrained(folder)


def make_prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Token ids of prompts of which each stays in a cycle of its own, but for a few tokens."""
    draw = random.Random(31)
    found = []
    for _ in range(count):
        first = CYCLE * draw.randrange(1, vocabulary // CYCLE - 1)
        ids = [first + k % CYCLE for k in range(draw.randint(longest // 2, longest))]
        for _ in range(len(ids) // 12):
            ids[draw.randrange(len(ids) - 2 * CYCLE)] = draw.randrange(vocabulary)
        found.append(ids)
    return found


def asked(
    kind: str, draw: int, config: Mapping[str, Any], at: Mapping[str, str], captures_only: bool
) -> dict[str, Any]:
    """Return the arguments of `weir.params` for a request of a kind.

    Args:
        kind: one of `ALL`.
        draw: of its vectors.
        config: the model's.
        at: see `SERVED`.
        captures_only: leave out what changes the stream.
    """
    import vllm_weir as weir

    layers, d = config["num_hidden_layers"], config["hidden_size"]
    third, half = layers // 3, layers // 2
    vector = torch.randn(d, generator=torch.Generator().manual_seed(draw))
    steered: dict[str, Any] = {"capture": weir.Capture("resid_post", [half, layers - 1], at["all"])}
    interventions = {
        "steer": weir.Add(vector, third, 1.0, positions=at["all"]),
        "steer generated": weir.Add(vector, [third, half], 1.0, positions=at["generated"]),
        "ablate": weir.Ablate(vector, list(range(layers)), positions=at["generated"]),
    }
    if kind in interventions:
        return steered if captures_only else {**steered, "interventions": interventions[kind]}
    linear = weir.Probe("linear", vector[None] / d**0.5, torch.zeros(1), "resid_post", half, positions=at["all"])
    smooth = weir.Probe("smooth", vector[None] / d**0.5, torch.zeros(1), "resid_mid", third, smooth=("mean", 5))
    of_kind: dict[str, dict[str, Any]] = {
        "plain": {},
        "stream": {"capture": weir.Capture("resid_post", list(range(0, layers, max(1, layers // 4))), at["all"])},
        "sides": {
            "capture": [
                weir.Capture(hook, half, at["generated"]) for hook in ("resid_pre", "attn_out", "resid_mid", "mlp_out")
            ]
        },
        "inside": {
            "capture": [
                weir.Capture("z", third, at["all"]),
                weir.Capture("mlp_post", third, at["generated"]),
                weir.Capture("q", half, at["prompt"]),
            ]
        },
        "probe": {"probes": linear},
        "probe inside": {"probes": [linear, smooth]},
    }
    return of_kind[kind]


def params_of(
    kinds: Sequence[str],
    config: Mapping[str, Any],
    tokens: int,
    crowd: str,
    prompt_lens: Sequence[int] | None = None,
    **more: Any,
) -> list[Any]:
    """Return the parameters of the requests.

    Args:
        kinds: of the requests.
        config: the model's.
        tokens: how many are generated.
        crowd: "plain", "capture" or "mixed".
        prompt_lens: of the prompts, where they go on with what was generated; see `forced`.
        more: for `SamplingParams`.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **more)
    if crowd == "plain":
        return [sampling] * len(kinds)
    import vllm_weir as weir

    places = [SERVED] * len(kinds) if prompt_lens is None else [forced(n) for n in prompt_lens]
    found, seen = [], Counter[str]()
    for kind, at in zip(kinds, places, strict=True):
        fields = asked(kind, seen[kind] % 4, config, at, captures_only=crowd == "capture")
        seen[kind] += 1
        found.append(weir.params(sampling, **fields) if fields else sampling)
    return found


def delivered(out: Any) -> dict[str, torch.Tensor]:
    """Return every row and score of an output, by its place and as a tensor."""
    found: dict[str, torch.Tensor] = {}
    if getattr(out, "activations", None) is not None:
        found |= {f"{hook}[{layer}]": out.activations[hook, layer] for hook, layer in out.activations.sites}
    if getattr(out, "scores", None) is not None:
        found |= {f"scores {name}": scores for name, scores in out.scores.items()}
    return found
