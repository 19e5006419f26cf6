"""Reading the hidden states that vLLM's own ``extract_hidden_states`` writes, and those of the layout ``speculators``.

A file is ``<request>.safetensors`` with ``hidden_states`` [tokens, layers, d] and ``token_ids``
[tokens]. vLLM's does not say which layers it has, Weir's does. Layer id k, as given to vLLM
(``eagle_aux_hidden_state_layer_ids``), is the stream *entering* block k (or leaving the last, if k
is the number of blocks): ``resid_post[k - 1]``, or ``resid_pre[0]`` if k is 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.atomic_file import store_errors
from vllm_weir.storage.index import Index, IndexBuilder, short_names
from vllm_weir.storage.layouts.per_request import plain_header
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.record_blocks import FileBlock
from vllm_weir.storage.safetensors_io import read_container

SUFFIX = ".safetensors"


def site_of(layer_id: int) -> Site:
    return Site("resid_post", layer_id - 1) if layer_id else Site("resid_pre", 0)


def read_hidden_states(store: ObjectStore, names: dict[str, int], layer_ids: Sequence[int] | None) -> Index:
    """Read the index of such files; `layer_ids` may be None for those that say them."""
    if layer_ids is not None:
        _check_ids(layer_ids)
    builder = IndexBuilder("vllm")
    files = [name for name in sorted(names) if name.endswith(SUFFIX)]
    request_names = short_names(name.removesuffix(SUFFIX) for name in files)
    for name in files:
        _add(builder, store, name, names, layer_ids, request_names[name.removesuffix(SUFFIX)])
    return builder.build()


def _check_ids(ids: Sequence[int]) -> None:
    if not ids or len(set(ids)) != len(ids) or not all(type(i) is int and i >= 0 for i in ids):
        raise WeirError("layer_ids is a list of distinct ints, at least 0", "layer_ids")


def _ids_in(store: ObjectStore, name: str, metadata: Mapping[str, str]) -> list[int]:
    """Return the layer ids that a file says."""
    if "layer_ids" not in metadata:
        raise WeirError(
            f"{store.url} holds hidden states of vLLM's extract_hidden_states, which do not say their layers; pass "
            "layer_ids=, the eagle_aux_hidden_state_layer_ids that vLLM was given",
            "layer_ids",
        )
    try:
        ids = json.loads(metadata["layer_ids"])
        _check_ids(ids)
    except (ValueError, TypeError, RecursionError):
        raise store.error(name, "damaged: its metadata is not valid") from None
    return list(ids)


def _add(
    builder: IndexBuilder,
    store: ObjectStore,
    name: str,
    names: dict[str, int],
    layer_ids: Sequence[int] | None,
    request_name: str,
) -> None:
    _refuse_unfinished(store, name, names)
    container = read_container(store, name, names[name])
    states, tokens = container.tensors.get("hidden_states"), container.tensors.get("token_ids")
    if states is None or tokens is None:
        raise store.error(name, "has no hidden_states and token_ids; it was not written by extract_hidden_states")
    if len(states.shape) != 3 or tokens.dtype != "I64" or len(tokens.shape) != 1:
        raise store.error(name, f"hidden_states are [tokens, layers, d], found {list(states.shape)}")
    n, layers, _ = states.shape
    ids = _ids_in(store, name, container.metadata) if layer_ids is None else list(layer_ids)
    if layers != len(ids):
        raise WeirError(f"{store.describe(name)} holds {layers} layers, got {len(ids)} ids", "layer_ids")
    if tokens.shape[0] not in (n, 0):
        raise store.error(name, f"has {n} rows and {tokens.shape[0]} tokens")
    header = plain_header(store, name, states, states.shape[2:])
    token_ids = np.frombuffer(store.read(name, tokens.start, tokens.end), "<i8")
    # A file of the layout `speculators` says them.
    request = builder.add_request(
        container.metadata.get("request", request_name), container.metadata.get("metadata", "")
    )
    block = builder.add_block(FileBlock(store, name, header, names[name]))
    width = builder.blocks[block].width
    for i, layer_id in enumerate(ids):
        builder.add_run(
            request, site_of(layer_id), block, states.start + i * width, np.arange(n),
            token_ids if len(token_ids) else None, stride=layers * width,
        )  # fmt: skip


def _refuse_unfinished(store: ObjectStore, name: str, names: dict[str, int]) -> None:
    """Raise WeirError for a file that vLLM is still writing, which it shows by a lock."""
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
