"""Every served point of a multimodal model against transformers: prompts of text alone, of one item, and of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import vllm_weir as weir
from tests.conformance.checks import SOME, by_expert, middle, served, steerable, vector_for
from tests.conformance.engine import ARGUMENTS
from tests.conformance.inside import INNER
from tests.conformance.multimodal.oracle import MediaOracle
from tests.conformance.multimodal.recipe import Recipe
from tests.support.measure import rel_err

GENERATED = 4
MIXED = ("pattern", "attn_scores")
"""Refused where tokens of one image see each other."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its items, by modality."""

    text: str
    items: Mapping[str, tuple[Any, ...]]

    @property
    def for_vllm(self) -> dict[str, Any]:
        """As `LLM.generate` takes it."""
        data = {modality: list(some) for modality, some in self.items.items() if some}
        return {"prompt": self.text} | ({"multi_modal_data": data} if data else {})


def picture(size: tuple[int, int], seed: int = 0) -> Any:
    """A picture of noise, (width, height) pixels."""
    from PIL import Image

    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def sound(seed: int = 0, seconds: float = 0.4, rate: int = 16_000) -> Any:
    """Noise, at 16 kHz."""
    return np.random.default_rng(seed).standard_normal(int(seconds * rate)).astype(np.float32)


def prompts(recipe: Recipe) -> list[Prompt]:
    """Text alone; one item in the middle; two items, the first at the start."""
    (modality, mark), *_ = recipe.media.items()
    items = [picture(size, n) if modality == "image" else sound(n) for n, size in enumerate(recipe.sizes)]
    words = [" ".join(f"w{(7 * k + n) % 500}" for k in range(9)) for n in range(3)]
    return [
        Prompt(words[0], {}),
        Prompt(f"w1 w2 w3 {mark} {words[1]}", {modality: (items[0],)}),
        Prompt(f"{mark} w5 w6 {mark} {words[2]}", {modality: (items[1], items[0])}),
    ]


def engine(recipe: Recipe, where: Any, **more: Any) -> Any:
    """An engine for a recipe's model."""
    from vllm import LLM

    arguments = ARGUMENTS | {"max_model_len": 256, "skip_tokenizer_init": False, "max_num_batched_tokens": 256}
    arguments |= {"limit_mm_per_prompt": {m: 3 for m in recipe.media}, "skip_mm_profiling": True}
    return LLM(str(where), **arguments | dict(recipe.engine) | more)


def ask(llm: Any, asked: Sequence[tuple[Prompt, Any]]) -> list[Any]:
    """Generate for prompts, each with its keyword arguments of `weir.params` (None: no key of Weir's)."""
    from vllm import SamplingParams

    common = SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False, logprobs=5)
    params = [common if keys is None else weir.params(common, **keys) for _, keys in asked]
    return llm.generate([prompt.for_vllm for prompt, _ in asked], params, use_tqdm=False)


def captures(sites: Sequence[tuple[str, int]], positions: Any = "all") -> list[weir.Capture]:
    """Captures of sites."""
    hooks = {hook: [layer for name, layer in sites if name == hook] for hook, _ in sites}
    return [weir.Capture(hook, layers=layers, positions=positions) for hook, layers in hooks.items()]


def reference(oracle: MediaOracle, prompt: Prompt) -> list[int]:
    """Let the oracle take up a prompt; its expanded token ids."""
    names = {"image": "images", "audio": "audio"}
    return oracle.prompt(prompt.text, **{names[m]: list(some) for m, some in prompt.items.items() if some})


def rows_error(output: Any, oracle: MediaOracle, prompt: Prompt, steer: Any = None) -> dict[str, float]:
    """Hook point -> how far its rows are from transformers'; `steer`: (hook, layer, vector, positions) added there."""
    expanded = reference(oracle, prompt)
    assert list(output.prompt_token_ids) == expanded, "vLLM and transformers expand the prompt differently"
    ids = [*expanded, *output.outputs[0].token_ids][:-1]
    rows = by_expert((oracle.points(ids) if steer is None else oracle.steer(ids, *steer))[0])
    activations = output.outputs[0].activations
    errors: dict[str, float] = {}
    mine = by_expert({tuple(site): activations[site].float() for site in activations.sites})
    for site, got in mine.items():
        assert activations.positions_of(*site).tolist() == list(range(len(ids))), site
        assert got.shape == rows[site].shape, (site, got.shape, rows[site].shape)
        errors[site[0]] = max(errors.get(site[0], 0.0), rel_err(got, rows[site]))
    return errors


def media_positions(oracle: MediaOracle, recipe: Recipe, ids: Sequence[int]) -> list[int]:
    """The positions of a prompt that hold embeddings of items, read off transformers' configuration."""
    config = oracle.model.config
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    token = next(v for name in names if (v := getattr(config, name, None)) is not None)
    return [p for p, one in enumerate(ids) if one == token]


def steer_errors(
    llm: Any, oracle: MediaOracle, recipe: Recipe, prompt: Prompt, good: Sequence[tuple[str, int]]
) -> dict[str, float]:
    """Hook point -> how far all rows are from transformers' when something is added there, at the items' positions.

    Beside a plain request and one with text alone, which stay what they are to the bit.
    """
    modality = next(iter(recipe.media))
    beside = prompts(recipe)
    plain = [out.outputs[0] for out in ask(llm, [(prompt, None), (beside[0], None), (beside[1], None)])]
    ids = reference(oracle, prompt)
    at, errors = media_positions(oracle, recipe, ids), {}
    for seed, hook in enumerate(dict.fromkeys(hook for hook, _ in good)):
        site = middle(good, hook)
        if site is None or not steerable(hook):
            continue
        rows, _ = oracle.points(ids)
        vector = vector_for(rows[site], seed)
        steer = [weir.Add(vector, layers=site[1], hook=hook, positions={"modality": modality})]
        keys = {"capture": captures(good), "interventions": steer}
        out, *others = ask(llm, [(prompt, keys), (beside[0], None), (beside[1], None)])
        for other, before in zip(others, plain[1:], strict=True):
            assert other.outputs[0].token_ids == before.token_ids and other.outputs[0].logprobs == before.logprobs
        errors[hook] = max(rows_error(out, oracle, prompt, (*site, vector, at)).values())
    return errors


def sites_of(llm: Any) -> tuple[list[tuple[str, int]], Any]:
    """The sites that are served, and all."""
    sites = list(weir.sites(llm))
    return served(sites), sites


__all__ = ["INNER", "SOME", "torch"]
