"""The steered reference: transformers with forward hooks that do each intervention's arithmetic from its definition."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.conformance.inside import INNER
from tests.support.check import expected_positions
from tests.support.measure import alike, rel_err, rounding
from tests.support.models import make_model
from tests.support.oracle import Oracle, Site
from tests.support.remembered import REFERENCES
from vllm_weir.schema.intervention_base import Intervention


class SteeredOracle(Oracle):
    """An Oracle under interventions."""

    def steered(
        self,
        token_ids: Sequence[int],
        prompt_len: int,
        interventions: Sequence[Any],
        doses: dict[tuple[int, int], dict[int, float]] | None = None,
        sites: Iterable[Site] | None = None,
    ) -> tuple[dict[Site, torch.Tensor], torch.Tensor]:
        """(rows by site, logits [n, vocab]) with the interventions at their positions. Rows are after them.

        Sites are those between blocks, and those inside attention and MLP; those inside are left out where neither
        `sites` nor an intervention needs them. `doses` is filled with the relative doses by position of each
        (intervention, block).
        """
        hooks = {item.hook for item in interventions} | {hook for hook, _ in sites or ()}
        inside = sites is None or bool(hooks & set(INNER))
        mlp = "mlp_out" in hooks
        digests = [_digest(item) for item in interventions] if doses is None else [None]
        if None in digests:
            return self._steered(list(token_ids), prompt_len, interventions, doses, inside, mlp)
        key = (self._key, "steered", tuple(token_ids), prompt_len, tuple(digests), mlp)
        found = REFERENCES.get((*key, True)) or REFERENCES.get((*key, inside))
        if found is None:
            found = self._steered(list(token_ids), prompt_len, interventions, None, inside, mlp)
            REFERENCES.put((*key, inside), found, [*found[0].values(), found[1]])
        return dict(found[0]), found[1]

    def _steered(
        self, ids: list[int], prompt_len: int, interventions: Sequence[Any], doses: Any, inside: bool, mlp: bool
    ) -> tuple[dict[Site, torch.Tensor], torch.Tensor]:
        found: dict[Site, torch.Tensor] = {}
        # As many rows as tokens: everything given here has gone through the model.
        generated = len(ids) - prompt_len + 1
        acting: dict[Site, list[tuple[int, Any, list[int]]]] = {}
        for k, item in enumerate(interventions):
            at = expected_positions(item.positions.to_json(), prompt_len, generated, ids)
            layers = range(self.num_layers) if item.layers == "all" else item.layers
            for layer in layers:
                acting.setdefault((item.hook, layer), []).append((k, of_layer(item, layer, layers), at))

        def changed(hook: str, layer: int, rows: torch.Tensor, apply: Any) -> torch.Tensor:
            for k, item, at in acting.get((hook, layer), ()):
                rows, before = rows.clone(), rows[at]
                rows[at] = apply(item, before)
                if doses is not None:
                    moved = (rows[at] - before).flatten(1).double().norm(dim=1)
                    relative = moved / before.flatten(1).double().norm(dim=1)
                    doses[k, layer] = dict(zip(at, relative.tolist(), strict=True))
            return rows

        def change(hidden: torch.Tensor, hook: str, layer: int) -> torch.Tensor:
            rows = changed(hook, layer, hidden[0], _apply)
            found[hook, layer] = rows.detach().clone()
            return rows[None]

        def after(hook: str, layer: int) -> Any:
            def act(_module: Any, _args: Any, out: Any) -> Any:
                return (change(out[0], hook, layer), *out[1:]) if isinstance(out, tuple) else change(out, hook, layer)

            return act

        def before(layer: int) -> Any:
            def act(_module: Any, args: Any, kwargs: Any) -> Any:
                if args:
                    return (change(args[0], "resid_pre", layer), *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"], "resid_pre", layer)}

            return act

        watched = self.inside if inside else None  # found by a pass of its own, which must be before anything acts
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                stack.callback(block.register_forward_pre_hook(before(layer), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(after("resid_post", layer)).remove)
                if mlp:  # what it returns is what it adds, as in a Llama
                    stack.callback(block.mlp.register_forward_hook(after("mlp_out", layer)).remove)
            if watched is not None:
                edit = lambda hook, layer, rows: changed(hook, layer, rows, _apply_to_part)
                stack.enter_context(watched.watched(found, edit))
            logits = self.model(torch.tensor([ids], device=self.model.device), use_cache=False).logits[0]
        return found, logits

    def steered_greedy(
        self, prompt: Sequence[int], n: int, interventions: Sequence[Any], guess: Sequence[int] = ()
    ) -> list[int]:
        """`n` greedy tokens under the interventions; a right `guess` of them saves all passes but one."""
        ids, P = list(prompt), len(prompt)
        while len(ids) < P + n:
            tried = (ids + list(guess)[len(ids) - P :])[: P + n - 1]
            best = self.steered(tried, P, interventions, sites=())[1][len(ids) - 1 :].argmax(-1).tolist()
            for token in best:
                ids.append(token)
                if tried[: len(ids)] != ids:
                    break
        return ids[P:]


def _digest(item: Any) -> str | None:
    """What tells an intervention from others; None of a reference's own object, which may keep something."""
    return repr(type(item)) + json.dumps(item.to_json(), sort_keys=True) if isinstance(item, Intervention) else None


def of_layer(item: Any, layer: int, layers: Sequence[int]) -> Any:
    """What `item`, which acts at `layers` in the order given, does at one of them, with plain vectors."""
    out = copy.copy(item)
    for name in item.vectors:
        value = getattr(item, name)
        if item.per_layer:
            value = SimpleNamespace(array=value.array[list(layers).index(layer)])
        elif hasattr(value, "vectors"):
            value = value.vectors[layer]
        object.__setattr__(out, name, value)
    return out


def _apply_to_part(item: Any, rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, ...] inside a block under an intervention on all of a row, on some heads, or on some neurons."""
    out = rows.clone()
    if item.heads is not None:
        for k, head in enumerate(item.heads):
            out[:, head] = _apply(_of_head(item, k), rows[:, head])
    elif item.neurons is not None:
        out[:, list(item.neurons)] = _apply(item, rows[:, list(item.neurons)])
    else:
        flat = _with_vectors(item, lambda array: array.reshape(-1, rows[0].numel()))
        out = _apply(flat, rows.flatten(1)).view_as(rows)
    return out


def _of_head(item: Any, k: int) -> Any:
    """What `item` does to the k-th head it names: [heads, d_head] is a vector for each, [d_head] one for all."""
    several = len(item.heads) > 1
    return _with_vectors(item, lambda array: array[k] if several and array.ndim == 2 else array)


def _with_vectors(item: Any, change: Any) -> Any:
    out = copy.copy(item)
    for name in item.vectors:
        value = getattr(item, name)
        if value is not None and name != item.numbers:
            object.__setattr__(out, name, SimpleNamespace(array=change(value.array)))
    return out


def _apply(item: Any, h: torch.Tensor) -> torch.Tensor:
    kind = type(item).__name__
    if hasattr(item, "changed"):
        return item.changed(h)

    def get(name):
        found = torch.from_numpy(getattr(item, name).array.copy()).to(h.device)
        return found[0] if len(found) == 1 and found.ndim == 2 and name in ("vector", "values", "b") else found

    if kind == "Add":
        v = get("vector")
        v = v[: len(h)] if v.ndim == 2 else v
        step = item.scale * (v / v.norm(dim=-1, keepdim=True) * h.norm(dim=1, keepdim=True) if item.norm_match else v)
        changed = h + step
        if item.keep_norm:
            length = changed.norm(dim=1, keepdim=True)
            changed = torch.where(length == 0, h, changed / length * h.norm(dim=1, keepdim=True))
        return changed
    if kind == "Ablate":
        q, _ = torch.linalg.qr(torch.atleast_2d(get("directions")).double().T)
        return (h.double() - (h.double() @ q) @ q.T).float()
    if kind == "Clamp":
        u = get("direction").flatten()
        u = u / u.norm()
        along = h @ u
        target = torch.full_like(along, item.value) if item.value is not None else along.clamp(item.min, item.max)
        return h + item.strength * (target - along)[:, None] * u
    if kind == "Replace":
        v = get("values")
        return (1 - item.alpha) * h + item.alpha * (v[: len(h)] if v.ndim == 2 else v)
    if kind == "LowRank":
        r, w, b = get("R"), get("W"), get("b")
        return h + (h @ w.T + b - h @ r.T) @ r
    raise AssertionError(kind)


@lru_cache(maxsize=8)
def directory(family: str = "llama", shape: str = "a") -> Path:
    """A tiny model, made once per test process."""
    return make_model(family, shape)


def truth(model_dir: Path) -> SteeredOracle:
    """Its reference."""
    from tests.support.references import reference

    return reference(model_dir)


def tokens(length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt; different seeds share no prefix."""
    return [(7 * seed + 3 * j + j * j) % 500 + 5 for j in range(length)]


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    """The same as vLLM takes it."""
    return {"prompt_token_ids": tokens(length, seed)}


def sampling(max_tokens: int = 6, **more: Any) -> Any:
    """Greedy SamplingParams."""
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more)


def scheduler(llm: Any) -> Any:
    """The scheduler of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextlib.contextmanager
def chunks(llm: Any, size: int | None) -> Iterator[None]:
    """Steps of at most `size` tokens while it lasts; None leaves the engine as it is."""
    core = scheduler(llm)
    before = core.max_num_scheduled_tokens
    core.max_num_scheduled_tokens = size or before
    try:
        yield
    finally:
        core.max_num_scheduled_tokens = before


def usage(llm: Any) -> dict[str, int]:
    """What the workers hold for requests, the largest over ranks; not rows, which live as long as their outputs."""
    llm.generate(prompt(3, 91), sampling(1), use_tqdm=False)  # the step in which the finished ones leave
    found = llm.collective_rpc("weir_usage")
    return {name: max(f[name] for f in found) for name in found[0] if name != "host_rows"}


def idle(llm: Any) -> bool:
    """Whether nothing is left of any request."""
    return not any(usage(llm).values())


def logprobs(out: Any) -> tuple[list[int], list[dict[int, float]]]:
    """Tokens and every logprob of a plain output.

    They are the same to the bit in another batch only if its steps had the same shapes: give it the same prompts, and
    empty the prefix cache before.
    """
    one = out.outputs[0]
    return list(one.token_ids), [{t: p.logprob for t, p in step.items()} for step in one.logprobs]


def same_answers(outs: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether plain outputs have the same tokens and logprobs as others, in steps of the same shapes (`alike`)."""
    pairs = ((logprobs(out), logprobs(other)) for out, other in zip(outs, others, strict=True))
    return all(out[0] == other[0] and alike(out[1], other[1]) for out, other in pairs)


def generated(llm: Any, prompts: Any, params: Any) -> list[Any]:
    """Outputs that are complete: a worker's failure may come after the last token, and is raised here."""
    outs = llm.generate(prompts, params, use_tqdm=False)
    for out in outs:
        out.receipt  # noqa: B018 - a property that waits
    return outs


def vectors(seed: int) -> Any:
    """A function of shape -> random tensor."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def check(
    out: Any, interventions: Sequence[Any], oracle: SteeredOracle, bound: float = rounding(), completion: Any = None
) -> float:
    """Rows (wherever captured) and greedy tokens are those of the reference under `interventions`."""
    completion = completion or out.outputs[0]
    ids, made = list(out.prompt_token_ids), list(completion.token_ids)
    sites = map(tuple, completion.activations.sites)
    rows, logits = oracle.steered((ids + made)[:-1], len(ids), interventions, sites=sites)
    worst = 0.0
    for site in completion.activations.sites:
        at = completion.activations.positions_of(*site)
        if len(at):
            worst = max(worst, rel_err(completion.activations[site], rows[tuple(site)][at]))
    assert worst <= bound, f"{interventions}: max|d| / max|ref| = {worst:.2e}"
    assert made == logits[len(ids) - 1 :].argmax(-1).tolist(), interventions
    return worst
