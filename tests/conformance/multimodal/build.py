"""The checkpoint of a recipe: weights, tokenizer and processor, as a model from the hub has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conformance.multimodal.recipe import Recipe
from tests.conformance.zoo.build import fill, rename
from tests.support.models import BOS, EOS, PAD, UNK, WORDS

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }} {% else %}PLACEHOLDER{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def build(recipe: Recipe, where: Path) -> Path:
    """Write the checkpoint of a recipe into the directory `where` and return it."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    where.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(recipe, where)
    config = AutoConfig.for_model(recipe.model_type, **recipe.config(recipe.ids))
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    fill(model, recipe.architecture)
    model.save_pretrained(where)
    if recipe.rename:
        rename(where / "model.safetensors", recipe.rename)
    if recipe.transposed:
        transpose(where / "model.safetensors", recipe.transposed)
    written = json.loads((where / "config.json").read_text())
    written["architectures"] = [recipe.architecture]
    (where / "config.json").write_text(json.dumps(written, indent=1))
    processor = recipe.processor(tokenizer, config)
    placeholder = next(iter(recipe.media.values()))
    processor.chat_template = tokenizer.chat_template = CHAT_TEMPLATE.replace("PLACEHOLDER", placeholder)
    processor.save_pretrained(where)
    return where


def transpose(checkpoint: Path, parts: Sequence[str]) -> None:
    """Transpose the last two dimensions of a checkpoint's tensors whose names have one of the parts."""
    tensors = load_file(checkpoint)
    for name in tensors:
        if any(part in name for part in parts):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, checkpoint, {"format": "pt"})


def make_tokenizer(recipe: Recipe, where: Path) -> Any:
    """Write the word-level tokenizer of `tests.support.models` with the recipe's special tokens, and return it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    special = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD, "<unk>": UNK}
    vocab = {f"w{i}": i for i in range(WORDS)} | special | recipe.ids
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(f"w{i}", single_word=True, normalized=False) for i in range(WORDS)])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in [*special, *recipe.ids]]
    )
    tokenizer.save(str(where / "tokenizer.json"))
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 1024,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_special_tokens": dict(recipe.names),
        "clean_up_tokenization_spaces": False,
    }
    (where / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return AutoTokenizer.from_pretrained(where)
