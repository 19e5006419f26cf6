"""One multimodal architecture from its tiny model to its finding: ``... .run_one ARCH OUT``."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.conformance.engine import ARGUMENTS, ON_GPU, device_name, set_environment
from tests.conformance.multimodal.finding import Finding
from tests.conformance.multimodal.recipe import Recipe

GENERATED = 4


def run_one(recipe: Recipe, where: Path) -> Finding:
    """The finding on one architecture; `where` is an empty directory for its model."""
    import torch
    import vllm

    finding = Finding(recipe.name, next(iter(recipe.media)), vllm=vllm.__version__)
    torch.set_num_threads(1)
    try:
        _check(recipe, where, finding)
    except Exception as e:  # noqa: BLE001 - whatever stops it is the finding
        traceback.print_exc()
        finding.failed = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    return finding


def _check(recipe: Recipe, where: Path, finding: Finding) -> None:
    import torch
    from vllm import LLM

    import vllm_weir as weir
    from tests.conformance.checks import middle, served, steerable, vector_for
    from tests.conformance.multimodal.build import build
    from tests.conformance.multimodal.check import MUTUAL, Reference, captures, prompts, rows_error
    from tests.support.measure import rel_err

    build(recipe, where)
    on_cpu = device_name() == "cpu"
    truth = Reference(recipe, where, on_cpu)
    arguments: dict[str, Any] = ARGUMENTS | ({} if on_cpu else ON_GPU)
    arguments |= {"max_model_len": 256, "skip_tokenizer_init": False}
    arguments |= {
        "limit_mm_per_prompt": dict.fromkeys(recipe.media, 1 if recipe.one_in_front else 3),
        "skip_mm_profiling": True,
    }
    llm = LLM(str(where), **arguments | dict(recipe.engine))
    finding.model_class = llm.apply_model(_class_name)[0]
    sites = list(weir.sites(llm))
    good = [site for site in served(sites) if truth.oracle.missing(*site) is None]
    finding.refused = _refused(sites, truth.oracle)
    with_items = [site for site in good if not (recipe.mutual and site[0] in MUTUAL)]
    if recipe.mutual:
        reason = f"tokens of one {finding.modality} see each other; served to text"
        finding.refused[reason] = ", ".join(f"`{hook}`" for hook in MUTUAL)
    text, one, two = prompts(recipe)

    def ask(prompt: Any, captured: Any, **more: Any) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False)
        params = weir.params(params, capture=captures(captured), **more)
        (out,) = llm.generate([prompt.for_vllm], params, use_tqdm=False)
        assert list(out.prompt_token_ids) == truth.ids(prompt), "the prompt is expanded differently"
        return out.outputs[0]

    completion = ask(text, good)
    finding.text = rows_error(completion, truth.rows(text, completion.token_ids))

    def lens_error(prompt: Any) -> float:
        from vllm import SamplingParams

        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        params = SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False)
        (out,) = llm.generate([prompt.for_vllm], weir.params(params, lens=weir.Lens(top_k=vocabulary)), use_tqdm=False)
        expected = truth.oracle.lens([*truth.ids(prompt), *out.outputs[0].token_ids][:-1]).log_softmax(-1)
        found = (torch.zeros_like(expected[layer]).scatter(1, r.token_ids, r.logprobs) for layer, r in out.lens.items())
        return max(rel_err(mine, expected[layer]) for layer, mine in zip(out.lens, found))

    finding.lens = lens_error(text if recipe.no_media and on_cpu else two)
    if recipe.no_media and on_cpu:
        finding.failed = f"cannot be run: {recipe.no_media}"
        return
    finding.items = 0.0
    for prompt in (one, two):
        completion = ask(prompt, with_items)
        rows = truth.rows(prompt, completion.token_ids)
        finding.items = max(finding.items, rows_error(completion, rows))
    at, worst = truth.media_positions(two), 0.0
    for seed, hook in enumerate(dict.fromkeys(hook for hook, _ in with_items)):
        site = middle(with_items, hook)
        if site is None or not steerable(hook):
            continue
        vector = vector_for(rows[site], seed)
        add = weir.Add(vector, layers=site[1], hook=hook, positions={"modality": finding.modality})
        try:
            completion = ask(two, with_items, interventions=add)
        except weir.WeirError as e:
            if "can be read and not changed" not in e.message:
                raise
            continue
        worst = max(worst, rows_error(completion, truth.rows(two, completion.token_ids, (*site, vector, at))))
    finding.steered = worst


def _refused(sites: Any, oracle: Any) -> dict[str, str]:
    """Reason -> the points that it is about, with their layers, of those that the reference has."""
    reasons: dict[str, dict[str, list[int]]] = {}
    for site in sites:
        if not site.supported and oracle.missing(site.hook, site.layer) is None:
            reasons.setdefault(site.reason, {}).setdefault(site.hook, []).append(site.layer)
    return {
        reason: ", ".join(f"`{hook}` {layers}" for hook, layers in hooks.items()) for reason, hooks in reasons.items()
    }


def _class_name(model: Any) -> str:
    return type(model).__name__


def main() -> None:
    """The command."""
    architecture, out = sys.argv[1:]
    set_environment()
    from tests.conformance.multimodal.more_recipes import ALL_RECIPES

    with tempfile.TemporaryDirectory(prefix="weir-multimodal-") as scratch:
        finding = run_one(ALL_RECIPES[architecture], Path(scratch) / "model")
    Path(out).write_text(json.dumps(asdict(finding)))


if __name__ == "__main__":
    main()
