"""TransformerLens's names: what each is there, by hooks on transformers' modules, is what Weir's rows are.

The definitions are those of TransformerLens 4.3 as `TransformerBridge.boot_transformers` loads a model: which
module's argument or result a hook point is, and what it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import vllm_weir as weir
from tests.conformance.zoo import ZOO, build
from tests.engine.common import directory, sampling, tokens
from tests.support.engines import get_llm
from tests.support.measure import rel_err, rounding

pytestmark = pytest.mark.engine
BOUND = rounding()


class Parts(NamedTuple):
    """Where a family of transformers keeps what TransformerLens hooks; places in a block are relative to it.

    Attributes:
        embed: whose result is hook_embed.
        mid: the norm that is given hook_resid_mid; "" for a parallel block.
        attn, mlp: whose results are hook_attn_out and hook_mlp_out: the module's own, or its post-norm's.
        embed_scale, residual_scale: what the model multiplies these results by before they reach the stream.
    """

    embed: str
    blocks: str
    mid: str
    attn: str
    mlp: str
    final: str
    embed_scale: float = 1.0
    residual_scale: float = 1.0


_GEMMA = Parts(
    "model.embed_tokens",  # which multiplies by the root of the width itself
    "model.layers",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
    "model.norm",
)
_LLAMA = Parts("model.embed_tokens", "model.layers", "post_attention_layernorm", "self_attn", "mlp", "model.norm")
FAMILIES = {
    "llama": _LLAMA,
    "gpt2": Parts("transformer.wte", "transformer.h", "ln_2", "attn", "mlp", "transformer.ln_f"),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "GraniteForCausalLM": _LLAMA._replace(embed_scale=1.7, residual_scale=0.8),
    "GPTNeoXForCausalLM": Parts(
        "gpt_neox.embed_in", "gpt_neox.layers", "", "attention", "mlp", "gpt_neox.final_layer_norm"
    ),
    # Of its blocks nothing: transformers has another GELU there than vLLM.
    "BloomForCausalLM": Parts("transformer.word_embeddings_layernorm", "transformer.h", "", "", "", ""),
}


def by_definition(model: torch.nn.Module, parts: Parts, ids: Sequence[int]) -> dict[str, Tensor]:
    """What TransformerLens's hooks are given over `ids` [n]: name -> [n, d]."""
    found: dict[str, Tensor] = {}
    handles = []

    def result(path: str, *names: str, scale: float = 1.0) -> None:
        def after(_module, _args, _kwargs, out):
            value = scale * (out[0] if isinstance(out, tuple) else out)
            found.update(dict.fromkeys(names, value.reshape(-1, value.shape[-1])))

        handles.append(model.get_submodule(path).register_forward_hook(after, with_kwargs=True))

    def argument(path: str, *names: str) -> None:
        def before(_module, args, kwargs):
            value = args[0] if args else kwargs["hidden_states"]
            found.update(dict.fromkeys(names, value.reshape(-1, value.shape[-1]).clone()))

        handles.append(model.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True))

    result(parts.embed, "hook_embed", scale=parts.embed_scale)
    blocks = len(model.get_submodule(parts.blocks)) if parts.final else 1
    for n in range(blocks):
        path, name = f"{parts.blocks}.{n}", f"blocks.{n}"
        argument(path, f"{name}.hook_resid_pre", f"{name}.hook_in")
        if not parts.final:
            continue
        if parts.mid:
            argument(f"{path}.{parts.mid}", f"{name}.hook_resid_mid")
        result(f"{path}.{parts.attn}", f"{name}.hook_attn_out", scale=parts.residual_scale)
        result(f"{path}.{parts.mlp}", f"{name}.hook_mlp_out", scale=parts.residual_scale)
        result(path, f"{name}.hook_resid_post", f"{name}.hook_out")
    if parts.final:
        result(parts.final, "ln_final.hook_out")
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def before_the_weight(norm: torch.nn.Module, final: Tensor, gemma: bool) -> Tensor:
    """What the documentation says `ln_final.hook_normalized` is, from `final_norm`."""
    bias = getattr(norm, "bias", None)
    weight = 1 + norm.weight if gemma else norm.weight
    return ((final if bias is None else final - bias) / weight).detach()


FAST = ("llama", "gpt2", "gemma2")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in FAMILIES]
)
def test_every_name_is_what_transformer_lens_computes(root, family):
    from transformers import AutoModelForCausalLM

    parts = FAMILIES[family]
    where = build(ZOO[family], root / family) if family in ZOO else directory(root, family)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager").eval()
    truth = by_definition(model, parts, tokens(19))
    assert len(truth) == 3 if family == "BloomForCausalLM" else len(truth) > 20
    # In processes of their own: for some of these vLLM changes transformers' classes.
    arguments = {"in_process": False, "skip_tokenizer_init": True} if family in ZOO else {}
    llm = get_llm(where, block_size=32, max_num_seqs=16, **arguments)
    asked = weir.params(sampling(1), capture=[weir.Capture(name) for name in truth])
    acts = llm.generate({"prompt_token_ids": tokens(19)}, asked, use_tqdm=False)[0].activations
    for name, rows in truth.items():
        assert rel_err(acts[name], rows) <= BOUND, name
    if parts.final:
        last, norm = acts["resid_post", len(model.get_submodule(parts.blocks)) - 1], model.get_submodule(parts.final)
        centred = last - last.mean(-1, keepdim=True) if getattr(norm, "bias", None) is not None else last
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        normalised = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        undone = before_the_weight(norm, acts["final_norm"], family.startswith("gemma"))
        assert rel_err(undone, normalised) <= BOUND
        assert rel_err(acts["final_norm"], normalised) > 0.1, "the two differ, so the name is refused"
