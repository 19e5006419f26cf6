"""Tiny random models in HuggingFace format, one per (family, shape).

A model is made to be a good witness rather than a good model: activations stay O(1) through the depth, norms and
biases are non-trivial (an ignored one shows), blocks add more to the stream than the embedding does (a skipped block
shows), and logits are spread out so that a greedy argmax does not hang on the last bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

WORDS = 510
"""Token i < WORDS is the word `w<i>`; the special tokens follow."""
BOS, EOS, PAD, UNK = range(WORDS, WORDS + 4)
VOCAB = WORDS + 4  # not a multiple of 64: vLLM pads the vocabulary, and the padding must not leak

# The recipe is the version: an edit to this file makes new directories, and nobody has to remember to bump a number.
VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]

_LLAMA_A = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4)
_LLAMA_B = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=3)

# Head sizes are 32 or 64: vLLM's CPU attention takes no smaller ones.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "a": dict(_LLAMA_A, num_key_value_heads=2, tie_word_embeddings=False),
        "b": dict(_LLAMA_B, num_key_value_heads=3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    },
    "qwen2": {
        "a": dict(_LLAMA_A, num_key_value_heads=2, tie_word_embeddings=True),
        "b": dict(_LLAMA_A, num_hidden_layers=5, num_key_value_heads=1, tie_word_embeddings=False),
    },
    "qwen3": {  # "a": heads wider than hidden_size / num_heads
        "a": dict(_LLAMA_A, num_hidden_layers=3, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True),
        "b": dict(_LLAMA_B, num_hidden_layers=5, num_key_value_heads=3, head_dim=32, tie_word_embeddings=False),
    },
    "mistral": {  # "a": a window shorter than the tests' prompts
        "a": dict(
            _LLAMA_A,
            num_hidden_layers=3,
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=16,
            tie_word_embeddings=False,
        ),
        "b": dict(
            _LLAMA_B,
            num_hidden_layers=4,
            num_key_value_heads=3,
            head_dim=32,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
    },
    "gemma2": {  # soft caps, post-norms, alternating windows; embeddings always tied and multiplied by sqrt(d)
        "a": dict(_LLAMA_A, num_key_value_heads=2, head_dim=32, sliding_window=16, query_pre_attn_scalar=32),
        "b": dict(_LLAMA_B, num_key_value_heads=1, head_dim=64, sliding_window=64, query_pre_attn_scalar=48),
    },
    "gemma3": {  # query / key norms, two rotary bases
        "a": dict(
            _LLAMA_A,
            num_hidden_layers=5,
            num_key_value_heads=1,
            head_dim=64,
            sliding_window=16,
            query_pre_attn_scalar=64,
            layer_types=(["sliding_attention", "sliding_attention", "full_attention"] * 2)[:5],
        ),
        "b": dict(
            _LLAMA_B,
            num_key_value_heads=3,
            head_dim=32,
            sliding_window=64,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    },
    "gpt2": {
        "a": dict(n_embd=128, n_layer=4, n_head=4, n_positions=512),
        "b": dict(n_embd=64, n_layer=3, n_head=1, n_positions=512, n_inner=160),
    },
    # "a": an MLP of a width of its own, since vLLM's CPU kernels are kept in a process by the shape of the weight.
    # "b": embeddings narrower than the stream, so projections sit before block 0 and after the last.
    "opt": {
        "a": dict(
            hidden_size=128,
            ffn_dim=320,
            num_hidden_layers=4,
            num_attention_heads=4,
            word_embed_proj_dim=128,
            max_position_embeddings=512,
        ),
        "b": dict(
            hidden_size=96,
            ffn_dim=160,
            num_hidden_layers=3,
            num_attention_heads=3,
            word_embed_proj_dim=64,
            max_position_embeddings=512,
        ),
    },
}

INNER_RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    # Rows inside a block that are wider than the stream, by a factor that is no whole number.
    "llama": {"wide": dict(_LLAMA_A, intermediate_size=448, num_hidden_layers=3, num_key_value_heads=2)},
    # Heads that are together wider than the stream; two windows.
    "gemma2": {
        "wide": dict(
            _LLAMA_A,
            hidden_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=16,
            query_pre_attn_scalar=48,
            attn_logit_softcapping=3.0,  # it bends every score
        )
    },
    "mixtral": {
        "a": dict(
            _LLAMA_A,
            num_hidden_layers=3,
            num_key_value_heads=2,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            tie_word_embeddings=False,
        )
    },
}
"""For what lies inside attention and MLP; not in `MODELS`, whose tests ask for every one."""
INNER_MODELS = {"llama": "wide", "gemma2": "wide", "qwen3": "a", "mixtral": "a", "gpt2": "a"}
"""Family -> shape: grouped keys; soft caps and windows; normed heads; routed experts; one packed projection."""
NO_GATE = frozenset({"mlp_pre_linear"})
NO_NEURONS = frozenset({"mlp_pre", "mlp_pre_linear", "mlp_post"})
NO_ROUTER = frozenset({"router_logits", "expert_ids", "expert_weights"})
INNER_LACKS = dict.fromkeys(INNER_MODELS, NO_ROUTER) | {"gpt2": NO_ROUTER | NO_GATE, "mixtral": NO_NEURONS}
"""Family -> the points inside a block that it has not."""

FAMILIES: tuple[str, ...] = tuple(RECIPES)
MODELS: tuple[tuple[str, str], ...] = tuple((family, shape) for family in RECIPES for shape in RECIPES[family])

_session_root: Path | None = None


def head_size(family: str, shape: str) -> int:
    """The size of a model's attention heads."""
    recipe = RECIPES[family][shape]
    if "head_dim" in recipe:
        return recipe["head_dim"]
    names = ("n_embd", "n_head") if "n_embd" in recipe else ("hidden_size", "num_attention_heads")
    width, heads = (recipe[name] for name in names)
    return width // heads


def make_model(family: str, shape: str = "a", root: str | Path | None = None) -> Path:
    """The directory of a tiny random model; made on first use, found again after.

    Without `root`, in `temporary_root()`.
    """
    recipe = (RECIPES.get(family, {}) | INNER_RECIPES.get(family, {}))[shape]
    home = Path(root) if root is not None else temporary_root()
    target = home / f"{family}-{shape}-{VERSION}"
    if (target / "config.json").exists():
        return target
    home.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a parallel test process never sees half a model.
    scratch = Path(tempfile.mkdtemp(prefix=f".{family}-{shape}-", dir=home))
    try:
        _write(family, f"{family}-{shape}", recipe, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def make_tokenizer(root: str | Path) -> None:
    """Write the word-level tokenizer all the models share: `"w3 w7"` is `[3, 7]`, nothing is added."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    special = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD, "<unk>": UNK}
    vocab = {f"w{i}": i for i in range(WORDS)} | special
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Words are added tokens too, found before any model of tokenization runs: transformers rebuilds Qwen2's tokenizers
    # as byte-level BPE whatever the files say, and this alone survives it.
    tokenizer.add_tokens([AddedToken(f"w{i}", single_word=True, lstrip=True, normalized=False) for i in range(WORDS)])
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(Path(root) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 512,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (Path(root) / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def temporary_root() -> Path:
    """Where the models of this process live, as long as it does."""
    global _session_root
    if _session_root is None:
        import atexit

        _session_root = Path(tempfile.mkdtemp(prefix="weir-models-"))
        # Only the process that made it removes it, not a forked child.
        owner = os.getpid()
        atexit.register(lambda path: os.getpid() == owner and shutil.rmtree(path, ignore_errors=True), _session_root)
    return _session_root


def _write(family: str, name: str, recipe: dict[str, Any], where: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    common: dict[str, Any] = dict(vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    if family not in ("gpt2", "opt"):
        common["max_position_embeddings"] = 512
    config = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(family, family), **(common | recipe))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, name, gemma=family.startswith("gemma"))
    model.save_pretrained(where)
    make_tokenizer(where)


# What a block's matrices multiply a normed row by. Above 1, so that blocks outweigh the embeddings: a model that merely
# echoes its last token would pass tests that it should not.
_GAIN = 1.5
# The deviation of the logits: wide enough that the best token leads by far more than rounding.
_LOGITS = 4.0
_FINAL_NORMS = ("model.norm.weight", "transformer.ln_f.weight", "model.decoder.final_layer_norm.weight")


@torch.no_grad()
def _fill(model: torch.nn.Module, name: str, gemma: bool) -> None:
    """Random weights, each from its own seed, so that a change to one leaves the others as they were."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # Gemma multiplies its embeddings by sqrt(d) on the way in, and its norms by 1 + weight.
    embedding_std = (0.2 if gemma else 2.0) / math.sqrt(embeddings.shape[1])
    tied = embeddings is head
    head_std = embedding_std if tied else _LOGITS / math.sqrt(head.shape[1])
    final_gain = _LOGITS / (head_std * math.sqrt(head.shape[1]))

    for path, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{path}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        module = model.get_submodule(path.rpartition(".")[0])
        if path.endswith("bias"):
            value = 0.1 * noise
        elif parameter.ndim == 1:
            value = (1.0 + 0.2 * noise) * (final_gain if path in _FINAL_NORMS else 1.0) - (1.0 if gemma else 0.0)
        elif parameter is embeddings or parameter is head:
            value = noise * (embedding_std if parameter is embeddings else head_std)
            value[WORDS:] *= 0.1  # a special token never wins a greedy argmax: no request ends early
        elif isinstance(module, torch.nn.Embedding):  # learned positions, on a par with the tokens
            value = noise * embedding_std
        else:
            fan_in = (
                parameter.shape[0] if type(module).__name__ == "Conv1D" else parameter.shape[-1]
            )  # GPT-2: [in, out]
            value = noise * (_GAIN / math.sqrt(fan_in))
        parameter.copy_(value)
