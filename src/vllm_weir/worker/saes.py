"""The sparse autoencoders that a worker holds on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.sae import activations, transfer
from vllm_weir.sae.autoencoder import SAE, without_decoder
from vllm_weir.sae.cross_layer import split_key
from vllm_weir.util.memory import available_bytes

SPARE = 256 << 20
"""Bytes of the device that are left free where no setting says how many autoencoders may take."""


class WorkerSAEs(Mapping[str, SAE]):
    """Autoencoders on the device, by the key under which the caller's process loaded them.

    A key stands for one autoencoder for ever: loaded again, a name has another one. So a request
    never meets other weights than it was admitted with. One that is unloaded stays until the last
    request that holds it ends.

    `limit`: most bytes of all of them; None for what the device has free.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self._limit = device, limit
        self._saes: dict[str, SAE] = {}
        self._held: dict[str, dict[str, SAE]] = {}
        """Request -> the autoencoders that it holds, by key."""

    def __getitem__(self, key: str) -> SAE:
        return self._saes[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._saes)

    def __len__(self) -> int:
        return len(self._saes)

    @property
    def nbytes(self) -> int:
        every = (sae for held in (self._saes, *self._held.values()) for sae in held.values())
        return sum({id(one): one.nbytes for sae in every for one in sae.tensors.values()}.values())

    def load(self, key: str, path: str) -> dict[str, Any]:
        """Put the autoencoder of a file (`vllm_weir.sae.transfer`) onto the device.

        Nothing happens if there is one under the key.

        Returns ``{"bytes"}``, those of all that are on the device; or ``{"error", "field"}``, since what a worker
        raises reaches the caller as a text alone.
        """
        try:
            if key not in self._saes:
                self._saes[key] = self._copied(transfer.read(Path(path)))
        except WeirError as e:
            return {"error": e.message, "field": e.field}
        return {"bytes": self.nbytes}

    def unload(self, key: str) -> None:
        """Forget a key, if it is there; the memory is free once no request holds the autoencoder."""
        self._saes.pop(key, None)

    def hold(self, request_id: str, key: str) -> SAE:
        """Return an autoencoder, which stays on the device until the request is released.

        The key may be that of one block of a cross-layer transcoder (`block_key`). Raises WeirError if there is none
        under the key.
        """
        own = self._held.get(request_id, {})  # of one that joins again after a preemption
        whole, layer = split_key(key)
        sae = self._saes.get(whole) or own.get(key)
        if sae is not None and sae.layers and layer is not None:
            sae = sae.block(layer)
        if sae is None:
            raise WeirError("its autoencoder was unloaded while the request waited; send it again", "features")
        self._held.setdefault(request_id, {})[key] = sae
        return sae

    def find(self, key: str) -> SAE:
        """Return an autoencoder that some request holds."""
        return next(held[key] for held in self._held.values() if key in held)

    def release(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def _copied(self, mapped: SAE) -> SAE:
        """Return an autoencoder with its weights on the device; raise WeirError if there is no room."""
        mapped = without_decoder(mapped)
        self._check_room(mapped.nbytes)
        try:
            tensors = {name: tensor.to(self._device, copy=True) for name, tensor in mapped.tensors.items()}
            sae = SAE(mapped.config, tensors)
            if self._device.type == "cuda":
                # A kernel for so many features is compiled now rather than in the first request.
                one = sae.block(sae.layers[0]) if sae.layers else sae
                row = torch.zeros(1, one.d_in, dtype=next(iter(one.tensors.values())).dtype, device=self._device)
                activations.top(one.config, one.tensors, row, min(32, one.d_sae))
        except torch.OutOfMemoryError:
            raise WeirError(self._full(mapped.nbytes, "the device is full"), "settings.sae_bytes") from None
        return sae

    def _check_room(self, size: int) -> None:
        if self._limit is not None:
            if self.nbytes + size > self._limit:
                raise WeirError(
                    self._full(size, f"{self.nbytes} of the {self._limit} bytes are taken"), "settings.sae_bytes"
                )
        elif size > (free := _free_bytes(self._device) - SPARE):
            raise WeirError(self._full(size, f"the device has {max(free, 0)} bytes free"), "settings.sae_bytes")

    def _full(self, size: int, why: str) -> str:
        return (
            f"it takes {size} bytes, and {why}; unload others, or start the engine with a larger setting sae_bytes, "
            "which is kept free of the KV cache"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
