#!/usr/bin/env python3
"""Train the demo's sparse autoencoder on the shipped model's activations.

Weir extracts the rows of one block for stories and chats into a dataset, and the training loop reads them back as a
torch dataset. Training is BatchTopK (Bussmann et al. 2024, arXiv:2412.06410) with nested widths (Matryoshka,
arXiv:2503.17547), saved as SAELens saves it: a JumpReLU SAE. Then the features that tell happy stories from sad ones
are looked for, and written to ``training.json`` with what was measured; ``labels.json`` gets the tokens at which each
feature is most active. Ten minutes on one core; with ``--label``, which labels the one that is there, two minutes:

    python scripts/train_demo_sae.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import vllm_weir as weir  # noqa: E402
from examples.demo.stories import chat_pairs, make_stories, openings, sentiment_of, well_formed  # noqa: E402
from vllm_weir.demo.probe import auc  # noqa: E402
from vllm_weir.sae.tensors import scale_input  # noqa: E402

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
# Seeds of the texts; the model was trained on others.
TRAIN, HELD_OUT, PROMPTS = 20_001, 20_002, 20_003
ENGINE = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 512}
DEAD_AFTER = 200  # steps without activation
AUXILIARY = 64  # dead features that explain what is left


def texts(stories: int, chats: int, seed: int) -> list[dict]:
    """Return stories with their mood, and chats in the model's template."""
    lines = [{"text": s.text, "happy": s.sentiment == "positive"} for s in make_stories(stories, seed)]
    for pair in chat_pairs(chats, seed):
        lines.append({"text": f"{USER}{pair.user}{END}{ASSISTANT}{pair.assistant}"})
    return lines


def extract(lines: list[dict], layer: int, folder: Path):
    """Return a dataset of the rows of all positions of these texts."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = weir.extract(source, weir.demo_model(), folder, layers=layer, dtype="float32", engine=ENGINE)
    print(f"{summary.requests} texts, {summary.rows} rows")
    return weir.load(str(folder))


def batch_top_k(pre: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k largest activations a row, on average over the batch."""
    active = pre.relu().flatten()
    values, ids = active.topk(k * len(pre), sorted=False)
    return torch.zeros_like(active).scatter_(0, ids, values).view_as(pre)


def revival(weights: dict, pre: torch.Tensor, residual: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
    """Return the loss by which dead features learn what the live ones leave (Gao et al. 2024, arXiv:2406.04093)."""
    if not dead.any():
        return residual.new_zeros(())
    values, ids = pre[:, dead].topk(min(AUXILIARY, int(dead.sum())), dim=-1)
    acts = torch.zeros_like(pre[:, dead]).scatter_(1, ids, values.relu())
    return (acts @ weights["W_dec"][dead] - residual.detach()).square().mean()


def train(dataset, site, args) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights in units of rows that have norm sqrt(d) on average, and the factor that gives them it."""
    torch.manual_seed(args.seed)
    batches = iter(dataset.torch(site, batch_size=args.batch, seed=args.seed, epochs=None, drop_last=True))
    sample = torch.cat([next(batches) for _ in range(8)]).float()
    d, factor = sample.shape[1], sample.shape[1] ** 0.5 / sample.norm(dim=1).mean().item()
    decoder = torch.nn.functional.normalize(torch.randn(args.d_sae, d), dim=1)
    weights = {
        "W_enc": decoder.T.clone(),
        "W_dec": decoder,
        "b_enc": torch.zeros(args.d_sae),
        "b_dec": factor * sample.mean(0),
    }
    for tensor in weights.values():
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=args.lr, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, 5 * (1 - step / args.steps)))
    threshold, idle = 0.0, torch.zeros(args.d_sae, dtype=torch.long)
    progress = tqdm(range(args.steps), desc="training", mininterval=2)
    for step in progress:
        x = factor * next(batches).float()
        pre = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
        acts = batch_top_k(pre, args.k)
        outs = [acts[:, :width] @ weights["W_dec"][:width] + weights["b_dec"] for width in args.widths]
        idle = torch.where((acts > 0).any(0), 0, idle + 1)
        loss = sum((x - out).square().mean() for out in outs) / len(outs)
        loss = loss + revival(weights, pre, x - outs[-1], idle > DEAD_AFTER) / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            weights["W_dec"] /= weights["W_dec"].norm(dim=1, keepdim=True)
            smallest = acts[acts > 0].min().item()
            threshold = smallest if step == 0 else 0.99 * threshold + 0.01 * smallest
            if step % 50 == 0:
                left = (x - outs[-1]).square().sum() / (x - x.mean(0)).square().sum()
                progress.set_postfix(explained=f"{1 - left:.3f}", dead=int((idle > DEAD_AFTER).sum()))
    done = {name: tensor.detach() for name, tensor in weights.items()}
    return {**done, "threshold": torch.full((args.d_sae,), threshold)}, factor


def measure(sae, dataset, site) -> dict:
    """Return how much of the variance of held-out rows is explained, by how many features."""
    rows = dataset.rows(site).rows.float()
    acts = sae.encode(rows)
    left = (rows - sae.decode(acts)).square().sum() / (rows - rows.mean(0)).square().sum()
    used = (acts > 0).float().mean(0)
    return {
        "rows": len(rows),
        "explained_variance": round(1 - left.item(), 4),
        "l0": round((acts > 0).sum(1).float().mean().item(), 2),
        "dead_features": int((used == 0).sum()),
        "features_on_more_than_a_tenth": int((used > 0.1).sum()),
    }


def moods(sae, dataset, site, lines: list[dict]) -> dict:
    """Return the features whose mean activation over a story tells happy stories from sad ones best."""
    found = dataset.rows(site)
    records = torch.tensor([dataset.metadata(name)["record"] for name in dataset.requests])[found.request_index]
    happy = torch.tensor([bool(line.get("happy")) for line in lines])
    acts = sae.encode(found.rows.float())
    means = torch.stack([acts[records == record].mean(0) for record in range(len(lines))])
    stories = torch.tensor(["happy" in line for line in lines])
    means, labels = means[stories], happy[stories]
    scores = torch.tensor([auc(means[:, feature], labels) for feature in range(sae.d_sae)])
    out = {}
    for mood, feature in (("happy", int(scores.argmax())), ("sad", int(scores.argmin()))):
        active = acts[:, feature] > 0
        right = happy[records[active & stories[records]]].float().mean().item()
        out[mood] = {
            "feature": feature,
            "auc": round(abs(scores[feature].item() - 0.5) + 0.5, 4),
            "active_share_of_rows": round(active.float().mean().item(), 4),
            "active_rows_in_stories_of_the_mood": round(right if mood == "happy" else 1 - right, 4),
            "mean_when_active": round(acts[active, feature].mean().item(), 3),
            "largest": round(acts[:, feature].max().item(), 3),
        }
    return out


def labels(sae, dataset, site, mood: dict) -> dict[int, str]:
    """Return the tokens that have the largest shares of each feature's activation, and the mood of its stories."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weir.demo_model())
    found = dataset.rows(site)
    acts = sae.encode(found.rows.float())
    totals = torch.zeros(len(tokenizer), sae.d_sae).index_add_(0, found.token_ids, acts)
    moods = {one["feature"]: f"{name} stories: " for name, one in mood.items()}
    out = {}
    for feature, (values, ids) in enumerate(zip(*totals.T.topk(3), strict=True)):
        shown = dict.fromkeys(tokenizer.decode([token]).strip() for token in ids[values > values[0] / 5].tolist())
        if values[0] > 0:
            out[feature] = moods.get(feature, "") + " · ".join(shown)
    return out


def steer(sae, mood: dict, prompts: int) -> dict:
    """Return the mood of stories while the direction of a mood's feature is added to every generated row."""
    from vllm import LLM, SamplingParams

    llm = LLM(weir.demo_model(), **ENGINE)
    starts = openings(prompts, PROMPTS)
    sampling = SamplingParams(max_tokens=80, temperature=0.7, seed=0)
    out = {}
    for name, feature in [("plain", None), *((name, found["feature"]) for name, found in mood.items())]:
        params = sampling
        if feature is not None:
            length = mood[name]["largest"]
            add = weir.Add(length * sae.decoder_direction(feature), layers=sae.site.layer, positions="sampled")
            params = weir.params(sampling, interventions=[add])
        stories = [answer.outputs[0].text for answer in llm.generate(starts, params, use_tqdm=False)]
        out[name] = {
            "happy_share": round(sum((sentiment_of(text) or 0) > 0 for text in stories) / prompts, 3),
            "sad_share": round(sum((sentiment_of(text) or 0) < 0 for text in stories) / prompts, 3),
            "well_formed": round(
                sum(well_formed(f"{start}{text}") for start, text in zip(starts, stories, strict=True)) / prompts, 3
            ),
        }
    return out


def write_labels(folder: Path, said: dict[int, str]) -> None:
    (folder / "labels.json").write_text(json.dumps(said, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "src/vllm_weir/demo/sae")
    parser.add_argument("--work", type=Path, help="where the datasets are kept, to be used again")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--d-sae", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128, 512], help="nested; the last is --d-sae")
    parser.add_argument("--k", type=int, default=12)
    parser.add_argument("--stories", type=int, default=1600)
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=60, help="stories whose mood is measured; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--label", action="store_true", help="only label the features of the one in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    site, started = ("resid_post", args.layer), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        held_out = texts(300, 60, HELD_OUT)
        held_out_rows = extract(held_out, args.layer, work / "held_out")
        if args.label:
            record = json.loads((args.out / "training.json").read_text())
            write_labels(args.out, labels(weir.SAE.load(args.out), held_out_rows, site, record["moods"]))
            return
        dataset = extract(texts(args.stories, args.chats, TRAIN), args.layer, work / "train")
        weights, factor = train(dataset, site, args)
        scale_input(weights, factor)
        sae = weir.SAE.from_tensors(
            "jumprelu", site, name="demo", apply_b_dec_to_input=True, metadata={"model_name": "weir-demo"}, **weights
        ).to(dtype=torch.float16)
        record = {
            "seed": args.seed,
            "stories": args.stories,
            "chats": args.chats,
            "steps": args.steps,
            "batch": args.batch,
            "k": args.k,
            "widths": args.widths,
            "seconds": round(time.monotonic() - started),
            "held_out": measure(sae, held_out_rows, site),
            "moods": moods(sae, held_out_rows, site, held_out),
        }
        said = labels(sae, held_out_rows, site, record["moods"])
    if args.prompts:
        record["stories_with_the_feature_added"] = steer(sae, record["moods"], args.prompts)
    sae.save(args.out)
    write_labels(args.out, said)
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
