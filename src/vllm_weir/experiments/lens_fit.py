"""`fit_lens`: a Jacobian or a tuned lens from texts, on a transformers twin.

**Jacobian.** J_l[i, j] is the mean over texts, and over source positions p of a text, of the sum over target positions
p' >= p of d h_final[p', i] / d h_l[p, j]: what a change of value j of what leaves block l does, to first order, to
value i of what leaves the last block, here and at later positions. Positions are those from `skip_first` to the last
but one, as in the published lenses: the first ones draw attention whatever they say. Sums are float32, the file
float16.

**Tuned** (Belrose et al. 2023, arXiv:2303.08112). For each block an affine map, which starts at none, such that the
model's own final norm and unembedding say of the mapped rows what the model says in the end: the mean of
KL(model || lens) over positions is made small by Adam.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.experiments.attribute.question import parse_count
from vllm_weir.experiments.attribute.run import load_tokenizer
from vllm_weir.experiments.attribute.twin import Twin
from vllm_weir.experiments.prompts import Prompt, check_tokens, encode, named, parse_prompts
from vllm_weir.lenses.fitted import FittedLens
from vllm_weir.schema.capture import parse_layers
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.cli import progress_bar
from vllm_weir.util.atomic_write import atomic_write
from vllm_weir.util.foreign_files import load_torch
from vllm_weir.util.shipped import model_path

logger = logging.getLogger(__name__)
KINDS = ("jacobian", "tuned")


def fit_lens(
    model: Any,
    texts: Any,
    *,
    out: str | os.PathLike,
    kind: str = "jacobian",
    layers: Any = "all",
    skip_first: int = 16,
    max_tokens: int = 128,
    batch: int = 32,
    epochs: int = 4,
    tokenizer: Any = None,
    device: Any = None,
    progress: bool = True,
) -> FittedLens:
    """Fit a lens on a transformers twin, in float32, and write its file.

    A fit that ends early goes on where it was when it is called again with the same arguments: what has been summed
    up is in a file beside `out`, which is deleted at the end.

    Args:
        model: the path or name of a checkpoint (``"demo"``: the shipped model); or a causal language model of
            transformers in float32.
        texts: texts, chats or lists of token ids; the published lenses are of 1,000 texts of 128 tokens. Those that
            are too short to have two positions after `skip_first` are left out, which is logged.
        out: where the lens goes: a file ``.pt`` for ``"jacobian"``, a directory for ``"tuned"``.
        kind: ``"jacobian"`` or ``"tuned"``.
        layers: ``"all"``: those before the last; a block, or a list of them. A tuned lens is of all.
        skip_first: positions of each text that are left out.
        max_tokens: tokens of each text; what follows is cut off.
        batch: rows of a Jacobian that are computed at a time; more take more memory.
        epochs: how often a tuned lens sees each text.
        tokenizer: for texts, if `model` is a loaded model.
        device: where the twin is put; None for the CPU.
        progress: show a progress bar on stderr.

    Returns:
        The lens, for `load_lens`, ``Lens(kind, path=lens.path)`` or ``lens.matrix(layer)``.

    Raises:
        WeirError: naming the argument.
    """
    if kind not in KINDS:
        raise WeirError(f"expected one of {', '.join(KINDS)}, got {kind!r}", "kind")
    skip_first, max_tokens = parse_count(skip_first, "skip_first"), parse_count(max_tokens, "max_tokens", 1)
    batch, epochs = parse_count(batch, "batch", 1), parse_count(epochs, "epochs", 1)
    prompts, blocks, path = parse_prompts(texts, "texts"), parse_layers(layers, "layers"), Path(out)
    if kind == "tuned" and blocks != "all":
        raise WeirError("a tuned lens has a map for each block; leave layers out", "layers")
    if not path.absolute().parent.is_dir():
        raise WeirError(f"there is no folder {path.absolute().parent}", "out")
    twin, tokenizer = _open(model, tokenizer, device)
    ids = _encoded(prompts, tokenizer, twin, skip_first, max_tokens)
    if kind == "tuned":
        _fit_tuned(twin, ids, skip_first, epochs, path, progress)
        return FittedLens(path)
    last = twin.num_layers - 1
    chosen = tuple(range(last)) if blocks == "all" else blocks
    if not chosen or max(chosen) >= last:
        raise WeirError(f"the blocks before the last are 0 to {last - 1}, and only they have a matrix", "layers")
    _fit_jacobian(twin, ids, chosen, skip_first, batch, path, progress)
    return FittedLens(path)


def _fit_jacobian(
    twin: Twin, ids: Sequence[list[int]], layers: Sequence[int], skip_first: int, batch: int, path: Path, progress: bool
) -> None:
    asked = json.dumps([twin.name, twin.width, twin.num_layers, list(layers), skip_first, ids])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    partial = path.with_name(path.name + ".partial")
    sums, done = _resumed(partial, digest, layers, twin)
    with progress_bar(not progress) as bar:
        task = bar.add_task("Jacobians", total=len(ids), completed=done, rate="")
        for index in range(done, len(ids)):
            found = twin.jacobians(ids[index], layers, skip_first, len(ids[index]) - 2, batch)
            for layer, matrix in found.items():
                sums[layer] += matrix.cpu()
            state = {"jacobian_sum": sums, "n_done": index + 1, "source_layers": list(layers), "asked": digest}
            _save(state, partial)
            bar.advance(task)
    means = {layer: (matrix / len(ids)).half() for layer, matrix in sums.items()}
    too_large = [layer for layer, matrix in means.items() if not matrix.isfinite().all()]
    if too_large:
        raise WeirError(f"the Jacobian of block {too_large[0]} has values that float16 does not hold", "model")
    state = {"J": means, "n_prompts": len(ids), "source_layers": list(layers), "d_model": twin.width}
    state |= {"target_layer": twin.num_layers - 1, "skip_first": skip_first}
    _save(state, path)
    partial.unlink()


def _resumed(partial: Path, digest: str, layers: Sequence[int], twin: Twin) -> tuple[dict[int, torch.Tensor], int]:
    """Return what an earlier call has summed up, and of how many texts; raise WeirError if it was another fit."""
    if not partial.exists():
        return {layer: torch.zeros(twin.width, twin.width) for layer in layers}, 0
    state = load_torch(partial, "out")
    if not isinstance(state, dict) or state.get("asked") != digest:
        raise WeirError(f"{partial} is of a fit with other arguments; delete it, or choose another file", "out")
    logger.info("%s has the sums of %d texts", partial, state["n_done"])
    return {layer: matrix.clone() for layer, matrix in state["jacobian_sum"].items()}, int(state["n_done"])


def _fit_tuned(twin: Twin, ids: Sequence[list[int]], skip_first: int, epochs: int, path: Path, progress: bool) -> None:
    width, blocks = twin.width, list(range(twin.num_layers - 1))
    if path.exists() and not path.is_dir():
        raise WeirError("a tuned lens is a directory, and there is a file of that name", "out")
    matrices = torch.zeros(len(blocks), width, width, device=twin.device, requires_grad=True)
    biases = torch.zeros(len(blocks), width, device=twin.device, requires_grad=True)
    sites, final = [Site("resid_post", layer) for layer in blocks], Site("resid_post", twin.num_layers - 1)
    steps = epochs * len(ids)
    optimizer = torch.optim.Adam([matrices, biases], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    with progress_bar(not progress) as bar:
        task = bar.add_task("tuned lens", total=steps, rate="")
        for step in range(steps):
            found = twin.rows(ids[step % len(ids)], [*sites, final])
            own = slice(skip_first, -1)
            rows = torch.stack([found[site][own] for site in sites])  # [blocks, n, width]
            target = twin.finish(found[final][own]).log_softmax(-1)  # [n, vocabulary]
            with torch.enable_grad(), twin.unembedding() as logits:
                mapped = rows + rows @ matrices.mT + biases[:, None]
                said = logits(mapped.flatten(0, 1)).log_softmax(-1).unflatten(0, rows.shape[:2])
                loss = (target.exp() * (target - said)).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
            bar.update(task, advance=1, rate=f"KL {float(loss.detach()):.3f}")
    # Translator i is for what enters block i; what enters the first one is no block's output.
    state = {"0.weight": torch.zeros(width, width), "0.bias": torch.zeros(width)}
    state |= {f"{k + 1}.weight": matrices[k].detach().cpu().clone() for k in blocks}
    state |= {f"{k + 1}.bias": biases[k].detach().cpu().clone() for k in blocks}
    path.mkdir(exist_ok=True)
    told = {"d_model": width, "num_hidden_layers": twin.num_layers, "bias": True, "lens_type": "linear_tuned_lens"}
    (path / "config.json").write_text(json.dumps(told))
    _save(state, path / "params.pt")


def _save(state: dict[str, Any], path: Path) -> None:
    with atomic_write(path) as file:
        torch.save(state, file)


def _open(model: Any, tokenizer: Any, device: Any) -> tuple[Twin, Any]:
    if isinstance(model, (str, os.PathLike)):
        path = model_path(os.fspath(model))
        return Twin.load(path, device), load_tokenizer(path) if tokenizer is None else tokenizer
    if not isinstance(model, torch.nn.Module):
        raise WeirError(f"expected a checkpoint or a transformers model, got {type(model).__name__}", "model")
    if device is not None:
        raise WeirError("a loaded model stays where it is; leave device out", "device")
    return Twin(model), tokenizer


def _encoded(
    prompts: Sequence[Prompt], tokenizer: Any, twin: Twin, skip_first: int, max_tokens: int
) -> list[list[int]]:
    """Return the token ids of texts that are long enough."""
    fields = named(prompts, "texts")
    found = [ids[:max_tokens] for ids in encode(prompts, lambda: tokenizer, None, fields)]
    check_tokens(found, twin.vocab_size, fields)
    long = [ids for ids in found if len(ids) >= skip_first + 2]
    if not long:
        raise WeirError(f"none has {skip_first + 2} tokens; give longer ones, or a smaller skip_first", "texts")
    if len(long) < len(found):
        logger.warning("%d of %d texts have fewer than %d tokens, and are left out", len(found) - len(long),
                       len(found), skip_first + 2)  # fmt: skip
    return long
