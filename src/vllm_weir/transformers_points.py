"""The hook points of a transformers model, found and verified as an engine's are.

`worker.discovery` knows no model by name: it runs a module tree with noise in it and takes for a
hook point only what the recorded tensors prove. It needs the attention layer to be a module that is
called with queries, keys and values. In transformers it is a function, so a module is put in its
place for the passes of discovery, and removed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.worker.discovery.anchors import Anchor, pick
from vllm_weir.worker.discovery.block_stack import description_of, find_tree
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.parts.recorder import AttentionShape, Features, LinearShape, PartModules
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.sites import map_sites

__all__ = ["Anchor", "ModuleTree", "SiteMap", "find_points", "pick"]
TOKENS = 8
"""Tokens of a probe pass."""
IMPLEMENTATION = "weir_probe"
"""Name under which transformers finds the attention function of the passes."""
CORE = "weir_attention"
"""Name of the module put into each module that calls attention."""


class AttentionCore(torch.nn.Module):
    """Stands for the attention function; what it returns is replaced by noise.

    Args:
        shape: of the queries, keys and values that the function is given.
    """

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return zeros [tokens, heads * d_v] for rows [tokens, heads * d_head]."""
        return query.new_zeros(len(query), self.shape.heads * self.shape.value_size)


def find_points(network: Any) -> tuple[ModuleTree, SiteMap]:
    """Find and verify the hook points of a causal language model of transformers.

    Raises:
        WeirError: if it has no list of blocks, or cannot be run with noise in it.
    """
    config, device = network.config.get_text_config(), next(network.parameters()).device
    ids = torch.arange(1, TOKENS + 1, device=device)[None] % config.vocab_size

    def run() -> None:
        network(input_ids=ids, use_cache=False)

    description = description_of(type(network).__name__, None)
    name = type(network).__name__
    try:
        with torch.no_grad(), _attention_as_module(network, run) as is_mixer:
            tree = find_tree(
                network,
                config.hidden_size,
                config.num_hidden_layers,
                description,
                is_mixer=is_mixer,
                is_embedding=lambda module: isinstance(module, torch.nn.Embedding),
                run=run,
            )
            return tree, map_sites(tree, run, torch.float32, description, PartModules(_attention, _linear, _experts))
    except WeirError:
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, IndexError) as e:
        raise WeirError(f"the probe pass through {name} failed ({type(e).__name__}: {str(e)[:300]})", "model") from e


def _attention(module: torch.nn.Module) -> AttentionShape | None:
    return module.shape if isinstance(module, AttentionCore) else None


def _linear(module: torch.nn.Module) -> LinearShape | None:
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Linear):
        wide, narrow = module.in_features, module.out_features
    elif isinstance(module, Conv1D):
        wide, narrow = module.weight.shape
    else:
        return None
    return LinearShape(Features.unsplit(wide), (Features.unsplit(narrow),))


def _experts(module: torch.nn.Module) -> int | None:
    """Return None: transformers computes experts one by one, so that no module is their kernel."""
    return None


@contextlib.contextmanager
def _attention_as_module(network: Any, run: Any) -> Iterator[Any]:
    """Let modules stand for attention; yield whether a module mixes tokens."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    owners: list[torch.nn.Module] = []

    def attend(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        core = module._modules.get(CORE)
        if core is None:
            core = AttentionCore(AttentionShape(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]))
            module.add_module(CORE, core)
            owners.append(module)
        tokens = query.shape[2]
        mixed = core(*(x[0].transpose(0, 1).reshape(tokens, -1) for x in (query, key, value)))
        return mixed.view(1, tokens, query.shape[1], -1), None

    before = network.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = attend
    ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION] = eager_mask
    try:
        network.set_attn_implementation(IMPLEMENTATION)
        run()
        yield lambda module: isinstance(module, AttentionCore) or _attends_by_itself(module, owners)
    finally:
        for module in owners:
            del module._modules[CORE]
        network.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION], ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION]


def _attends_by_itself(module: torch.nn.Module, owners: list[torch.nn.Module]) -> bool:
    """Return whether a module multiplies queries and keys itself, going by its class: Bloom's, Falcon's."""
    return not owners and type(module).__name__.endswith("Attention")
