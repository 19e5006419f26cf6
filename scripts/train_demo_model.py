#!/usr/bin/env python3
"""Train the demo model from scratch on stories of ``examples.demo.stories``.

Writes a Llama-architecture model with its tokenizer and a ``training.json``
with what was measured: held-out perplexity, well-formed share of generations,
linear probes for sentiment, and steering along the difference of means.

    python scripts/train_demo_model.py --seed 0
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from examples.demo.stories import (  # noqa: E402
    chat_pairs,
    make_stories,
    make_story,
    openings,
    sentiment_of,
    well_formed,
)

CHAT_SHARE = 0.15
ROW = 256
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [PAD, BOS, EOS, UNK, USER, ASSISTANT, END]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + message['content'] | trim + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only the roles user and assistant are known') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Temperatures at which steering is measured; 0 is greedy.
TEMPERATURES = (0.0, 0.7)
# Seeds of the evaluation texts; the training stream starts from --seed.
HELD_OUT, PROBE_TRAIN, PROBE_TEST, PROMPTS, DIRECTION = 10_001, 10_002, 10_003, 10_004, 10_005


def documents(seed: int):
    """Endless training documents, without the leading ``<bos>``."""
    rng = random.Random(seed)
    while True:
        if rng.random() < CHAT_SHARE:
            pair = chat_pairs(1, rng.getrandbits(40))[0]
            yield f"{USER}{pair.user}{END}{ASSISTANT}{pair.assistant}{EOS}"
        else:
            yield make_story(rng).text + EOS


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Word-level tokenizer whose words carry their leading space.

    The space belongs to the token, so decoding is plain concatenation and a
    continuation keeps its space no matter where the prompt was cut.
    """
    core = Tokenizer(models.WordLevel(unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex(r""" ?[A-Za-z]+(?:'[A-Za-z]+)*| ?"|[.,!?;:]|\n"""), behavior="isolated"
    )
    core.decoder = decoders.Fuse()
    texts = [story.text for story in make_stories(20_000, seed)]
    texts += [pair.user for pair in chat_pairs(1_000, seed)]
    # Any capitalised word may start a prompt, where no space precedes it.
    for text in texts[:5_000]:
        texts.extend(word.strip('.,!"') for word in text.split() if word[0].isupper())
    core.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )


def packed_batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int):
    """Batches of rows of ``ROW`` tokens: whole documents, the last one cut.

    Every row starts with a document, as every prompt does at inference; the
    documents after it teach positions beyond the length of one story.
    """
    stream = documents(seed)
    while True:
        rows = []
        for _ in range(size):
            row: list[int] = []
            while len(row) < ROW:
                row += tokenizer(next(stream)).input_ids
            rows.append(row[:ROW])
        ids = torch.tensor(rows)
        yield {"input_ids": ids, "labels": ids}


def story_batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int):
    """Batches of single documents of similar length, padded at the end.

    With no other story in reach, agreement within the story is learned faster.
    """
    stream = documents(seed)
    while True:
        pool = sorted((tokenizer(next(stream)).input_ids for _ in range(8 * size)), key=len)
        groups = [pool[i : i + size] for i in range(0, len(pool), size)]
        random.Random(len(pool[0])).shuffle(groups)
        for group in groups:
            width = len(group[-1])
            ids = torch.tensor([g + [tokenizer.pad_token_id] * (width - len(g)) for g in group])
            # Causal attention never looks at padding that comes last.
            yield {"input_ids": ids, "labels": ids.masked_fill(ids == tokenizer.pad_token_id, -100)}


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Freshly initialised model for the tokenizer."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: LlamaForCausalLM, batches, steps: int, lr: float, beta2: float) -> float:
    """One pass of AdamW with a cosine; returns the mean loss of the last tenth."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, beta2),
    )
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses: list[float] = []
    model.train()
    progress = tqdm(range(steps), desc="training", mininterval=10)
    for _ in progress:
        batch = {name: ids.to(model.device) for name, ids in next(batches).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        recent = losses[-20:]
        progress.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", refresh=False)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def fit(args) -> dict:
    """Train both passes, save the model, and return the record of the training."""
    torch.manual_seed(args.seed)
    started = time.perf_counter()
    record = {"seed": args.seed, "passes": {}}
    if args.first_pass_from is None:
        tokenizer = build_tokenizer(args.seed)
        model = build_model(tokenizer).to(args.device)
        batches = packed_batches(tokenizer, args.seed, args.packed_batch)
        loss = train(model, batches, args.packed_steps, lr=2e-3, beta2=0.95)
        record["passes"]["packed"] = {
            "steps": args.packed_steps,
            "tokens_per_step": args.packed_batch * ROW,
            "loss": round(loss, 4),
            "seconds": round(time.perf_counter() - started, 1),
        }
        save(model, tokenizer, args.out)
    else:
        record = json.loads((args.first_pass_from / "training.json").read_text())
        record["passes"].pop("stories", None)
    # Starting from the saved weights lets the second pass be repeated alone.
    source = args.first_pass_from or args.out
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).to(args.device)
    if args.first_pass_from is None:
        write_record(record, args.out)
    started = time.perf_counter()
    batches = story_batches(tokenizer, args.seed + 1, args.story_batch)
    loss = train(model, batches, args.story_steps, lr=1e-3, beta2=0.98)
    record["passes"]["stories"] = {
        "steps": args.story_steps,
        "stories_per_step": args.story_batch,
        "loss": round(loss, 4),
        "seconds": round(time.perf_counter() - started, 1),
    }
    record |= {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    save(model, tokenizer, args.out)
    write_record(record, args.out)
    return record


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save model and tokenizer, the weights rounded to bfloat16."""
    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids(END),
    ]
    model.to(torch.bfloat16).save_pretrained(out)
    # One file fewer, and readers that know no separate template find it too.
    tokenizer.save_pretrained(out, save_jinja_files=False)
    for path in out.iterdir():
        path.chmod(0o644)


def write_record(record: dict, out: Path) -> None:
    """Write ``training.json`` next to the weights."""
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


@torch.no_grad()
def perplexity(model, tokenizer, n: int = 400) -> float:
    """Per-token perplexity on held-out stories, up to and including the end."""
    total, count = 0.0, 0
    texts = [story.text + EOS for story in make_stories(n, HELD_OUT)]
    for i in range(0, n, 50):
        batch = tokenizer(texts[i : i + 50], return_tensors="pt", padding=True, padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(input_ids=batch.input_ids, labels=labels).loss
        tokens = int((labels[:, 1:] != -100).sum())
        total, count = total + loss.item() * tokens, count + tokens
    return math.exp(total / count)


@torch.no_grad()
def block_outputs(model, tokenizer, stories) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual stream leaving each block: at the last token, and the mean.

    Both are of shape (layers, stories, hidden); ``<bos>`` is left out of the mean.
    """
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: seen.append(_hidden(out))) for layer in model.model.layers]
    last, mean = [], []
    for i in range(0, len(stories), 50):
        texts = [story.text for story in stories[i : i + 50]]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        seen.clear()
        model.model(**batch)
        stacked = torch.stack(seen)
        mask = batch.attention_mask.clone()
        ends = mask.sum(1) - 1
        mask[:, 0] = 0
        last.append(stacked[:, torch.arange(len(texts)), ends])
        mean.append((stacked * mask[..., None]).sum(2) / mask.sum(1)[:, None])
    for hook in hooks:
        hook.remove()
    return torch.cat(last, 1), torch.cat(mean, 1)


def _hidden(output):
    return output[0] if isinstance(output, tuple) else output


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: the share of pairs ranked right."""
    gap = scores[labels == 1][:, None] - scores[labels == 0][None]
    return ((gap > 0).double() + 0.5 * (gap == 0)).mean().item()


def probe_auc(x: torch.Tensor, y: torch.Tensor, test_x: torch.Tensor, test_y) -> float:
    """AUC on held-out features of an L2-regularised logistic regression."""
    centre, spread = x.mean(0), x.std(0) + 1e-6
    x, test_x = (x - centre) / spread, (test_x - centre) / spread
    weight = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y)
        loss = loss + 0.01 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return auc((test_x @ weight + bias).detach(), test_y)


def probe(model, tokenizer, n: int = 400) -> dict:
    """Sentiment probes on every block's output."""
    train_set, test_set = make_stories(n, PROBE_TRAIN), make_stories(n, PROBE_TEST)
    y, test_y = (
        torch.tensor([float(story.sentiment == "positive") for story in stories]) for stories in (train_set, test_set)
    )
    result = {}
    names = ("last_token", "mean_over_tokens")
    features = zip(
        names,
        block_outputs(model, tokenizer, train_set),
        block_outputs(model, tokenizer, test_set),
        strict=True,
    )
    for name, x, test_x in features:
        aucs = [probe_auc(a, y, b, test_y) for a, b in zip(x, test_x, strict=True)]
        result[name] = [round(value, 4) for value in aucs]
    return result


@torch.no_grad()
def continuations(model, tokenizer, prompts, temperature: float, seed: int = 0, layer=None, vector=None) -> list[str]:
    """Continue prompts to the end of the story, optionally steered.

    Temperature 0 is greedy decoding.
    The vector is added to the output of one block at every generated token.
    """
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(seed)
    hook = None
    if vector is not None:
        # Decoding with a cache feeds one generated token at a time.
        def add(_module, _args, output):
            hidden = _hidden(output)
            if hidden.shape[1] == 1:
                hidden += vector
            return output

        hook = model.model.layers[layer].register_forward_hook(add)
    sampling: dict = {"do_sample": False}
    if temperature > 0:
        # top_k=0 lifts the library's default cut of the distribution.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    ids = model.generate(**batch, max_new_tokens=120, **sampling)
    if hook is not None:
        hook.remove()
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def share(flags) -> float:
    """Fraction of true values, rounded for the report."""
    flags = list(flags)
    return round(sum(flags) / len(flags), 4)


def judge(prompts: list[str], texts: list[str]) -> dict:
    """Well-formed share and sentiment of continuations.

    Consistency is 1 when every story keeps one sentiment throughout.
    """
    scores = [sentiment_of(text) or 0.0 for text in texts]
    return {
        "well_formed": share(well_formed(p + t) for p, t in zip(prompts, texts, strict=True)),
        "positive": share(score > 0 for score in scores),
        "negative": share(score < 0 for score in scores),
        "consistency": round(sum(abs(score) for score in scores) / len(scores), 4),
        "mean_sentiment": round(sum(scores) / len(scores), 4),
    }


def steer(model, tokenizer, layers: list[int], scales: list[float], n: int) -> dict:
    """Steer neutral openings along the difference of means, both ways."""
    prompts = openings(n, PROMPTS)
    # Stories in equal number, so that topic and register cancel in the means.
    means = [
        block_outputs(model, tokenizer, make_stories(200, DIRECTION + side, sentiment))[1].mean(1)
        for side, sentiment in enumerate(("positive", "negative"))
    ]
    difference = means[0] - means[1]
    rows = []
    for layer in layers:
        for scale in scales:
            row: dict = {"layer": layer, "scale": scale}
            row["norm"] = round(difference[layer].norm().item() * scale, 3)
            for temperature in TEMPERATURES:
                mode = f"t{temperature:g}"
                for sign, target in ((1, "positive"), (-1, "negative")):
                    texts = continuations(
                        model,
                        tokenizer,
                        prompts,
                        temperature,
                        layer=layer,
                        vector=sign * scale * difference[layer],
                    )
                    verdict = judge(prompts, texts)
                    row[f"{mode}_to_{target}"] = verdict[target]
                    row[f"{mode}_to_{target}_well_formed"] = verdict["well_formed"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    # The best setting is the one whose weakest share is highest.
    best = max(rows, key=lambda row: min(v for k, v in row.items() if "_to_" in k))
    return {
        "direction_norms": [round(d.norm().item(), 3) for d in difference],
        "best": best,
        "grid": rows,
    }


def evaluate(out: Path, args) -> dict:
    """Measure the saved model in float32, that is with its rounded weights."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompts = openings(args.eval_prompts, PROMPTS)
    report: dict = {"held_out_perplexity": round(perplexity(model, tokenizer), 4)}
    report["continuations_by_temperature"] = {
        f"{temperature:g}": judge(prompts, continuations(model, tokenizer, prompts, temperature))
        for temperature in (*TEMPERATURES, 1.0)
    }
    report["probe_auc_by_layer"] = probe(model, tokenizer)
    print(json.dumps(report, indent=2), flush=True)
    report["steering"] = steer(model, tokenizer, args.steer_layers, args.steer_scales, args.eval_prompts)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "src/vllm_weir/demo/model")
    parser.add_argument("--packed-steps", type=int, default=2200)
    parser.add_argument("--packed-batch", type=int, default=24, help=f"rows of {ROW} tokens")
    parser.add_argument("--story-batch", type=int, default=64, help="stories")
    parser.add_argument("--story-steps", type=int, default=3500)
    parser.add_argument("--first-pass-from", type=Path, help="repeat the second pass on this model")
    parser.add_argument("--seed", type=int, default=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="for training; measuring uses the CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-only", action="store_true", help="measure what --out holds")
    parser.add_argument("--eval-prompts", type=int, default=60)
    parser.add_argument("--steer-layers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--steer-scales", type=float, nargs="+", default=[2, 4, 6])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.eval_only:
        record = json.loads((args.out / "training.json").read_text())
    else:
        record = fit(args)
        print(json.dumps(record, indent=2), flush=True)
    record |= evaluate(args.out, args)
    write_record(record, args.out)


if __name__ == "__main__":
    main()
