"""Reading what vLLM's own ``extract_hidden_states`` writes: ``<request>.safetensors`` with ``hidden_states``
[tokens, layers, d] and ``token_ids`` [tokens].

The files do not say which layers they hold. The ids given to vLLM (``eagle_aux_hidden_state_layer_ids``) count the
stream *entering* block k (k = number of blocks: leaving the last): k > 0 is ``resid_post[k - 1]``, 0
is ``resid_pre[0]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.index import Index, IndexBuilder, short_names
from vllm_weir.storage.layouts.per_request import plain_header
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock
from vllm_weir.storage.safetensors_io import read_container
from vllm_weir.storage.store_errors import store_errors

SUFFIX = ".safetensors"


def site_of(layer_id: int) -> Site:
    """The site of one of vLLM's layer ids."""
    return Site("resid_post", layer_id - 1) if layer_id else Site("resid_pre", 0)


def read_native(store: ObjectStore, names: dict[str, int], layer_ids: Sequence[int] | None) -> Index:
    """The index of such files. `layer_ids`: as given to vLLM, in that order."""
    if layer_ids is None:
        raise WeirError(
            f"{store.url} holds hidden states of vLLM's extract_hidden_states, which do not say their layers; pass "
            "layer_ids=, the eagle_aux_hidden_state_layer_ids that vLLM was given",
            "layer_ids",
        )
    ids = list(layer_ids)
    if not ids or len(set(ids)) != len(ids) or not all(type(i) is int and i >= 0 for i in ids):
        raise WeirError("layer_ids is a list of distinct ints, from 0", "layer_ids")
    out = IndexBuilder("vllm")
    files = [name for name in sorted(names) if name.endswith(SUFFIX)]
    called = short_names(name.removesuffix(SUFFIX) for name in files)
    for name in files:
        _add(out, store, name, names, ids, called[name.removesuffix(SUFFIX)])
    return out.build()


def _add(out: IndexBuilder, store: ObjectStore, name: str, names: dict[str, int], ids: list[int], called: str) -> None:
    _refuse_unfinished(store, name, names)
    container = read_container(store, name, names[name])
    states, tokens = container.tensors.get("hidden_states"), container.tensors.get("token_ids")
    if states is None or tokens is None:
        raise store.error(name, "has no hidden_states and token_ids; it was not written by extract_hidden_states")
    if len(states.shape) != 3 or tokens.dtype != "I64" or len(tokens.shape) != 1:
        raise store.error(name, f"hidden_states are [tokens, layers, d], found {list(states.shape)}")
    n, layers, _ = states.shape
    if layers != len(ids):
        raise WeirError(f"{store.describe(name)} holds {layers} layers, got {len(ids)} ids", "layer_ids")
    if tokens.shape[0] not in (n, 0):
        raise store.error(name, f"has {n} rows and {tokens.shape[0]} tokens")
    header = plain_header(store, name, states)
    values = np.frombuffer(store.read(name, tokens.start, tokens.end), "<i8")
    request = out.request(called)
    block = out.block(FileBlock(store, name, header, names[name]))
    width = out.blocks[block].width
    for i, layer_id in enumerate(ids):
        out.run(
            request, site_of(layer_id), block, states.start + i * width, np.arange(n),
            values if len(values) else None, stride=layers * width,
        )  # fmt: skip


def _refuse_unfinished(store: ObjectStore, name: str, names: dict[str, int]) -> None:
    """vLLM holds a lock beside a file while it writes it."""
    if not store.local or f"{name}.lock" not in names:
        return
    with store_errors("open", store.describe(f"{name}.lock")):
        fd = os.open(store.path(f"{name}.lock"), os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise store.error(name, "is still being written by vLLM") from None
