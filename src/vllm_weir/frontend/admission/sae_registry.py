"""The registry of sparse autoencoders: what an engine has loaded, by name."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.sae import transfer
from vllm_weir.sae.autoencoder import SAE, without_decoder
from vllm_weir.sae.cross_layer import block_key
from vllm_weir.sae.tensors import check_finite
from vllm_weir.schema.features import MAX_NAME, Reconstruct, SetFeature
from vllm_weir.schema.hooks import DERIVED_HOOKS
from vllm_weir.schema.intervention_kinds import OfAutoencoder
from vllm_weir.schema.read_outs import SAEInfo
from vllm_weir.schema.rows import row_width
from vllm_weir.schema.set_activation import Reconstruction, SetActivation

LEAST_COSINE = 0.01
"""Of a feature's encoder and decoder, for what is read back: beyond, the change would be 100 times what is read."""


class SharedSAE(NamedTuple):
    """An autoencoder as the processes of a server share it.

    Attributes:
        key: of the workers' copy.
        path: the file with its weights.
    """

    key: str
    path: str


class LoadedSAE:
    """An autoencoder that the workers hold.

    Attributes:
        name: under which requests name it.
        key: under which the workers keep it; no other one ever has it.
    """

    def __init__(self, name: str, key: str, sae: SAE | None = None, path: str = "") -> None:
        self.name, self.key, self._given, self._path = name, key, sae, path

    @classmethod
    def new(cls, name: str, sae: SAE) -> LoadedSAE:
        return cls(name, f"{name}#{secrets.token_hex(8)}", sae)

    @functools.cached_property
    def sae(self) -> SAE:
        """The autoencoder, on the CPU; mapped from its file if another process has loaded it."""
        return self._given.to("cpu") if self._given is not None else transfer.read(Path(self._path))

    @property
    def info(self) -> SAEInfo:
        """What is told of it."""
        sae = self.sae
        size = without_decoder(sae).nbytes
        return SAEInfo(self.name, sae.site, sae.d_sae, sae.architecture, size, sae.labels, sae.layers)

    def block(self, layer: int | None, field: str) -> tuple[SAE, str]:
        """Return the autoencoder, or one block of a cross-layer transcoder, and the key that workers have for it.

        Raises:
            WeirError: naming `field`, if there is no such block, or it is not said which one is meant.
        """
        sae = self.sae
        if sae.layers and layer is None:
            told = f"blocks {sae.layers[0]} to {sae.layers[-1]}"
            raise WeirError(f"{self.name!r} is a cross-layer transcoder, with features at {told}; say which", field)
        if not sae.layers and layer not in (None, sae.site.layer):
            raise WeirError(f"{self.name!r} has its features at block {sae.site.layer}, got {brief(layer)}", field)
        if not sae.layers or layer is None:
            return sae, self.key
        try:
            return sae.block(layer), block_key(self.key, layer)
        except WeirError as e:
            raise WeirError(e.message, field) from None


class SAERegistry:
    """The autoencoders of an engine by name.

    A name is looked up when a request is admitted.

    Attributes:
        version: grows whenever a name changes its meaning.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, LoadedSAE] = {}
        self._claimed: set[str] = set()
        self.version = 0

    def load(self, shared: Mapping[str, SharedSAE]) -> None:
        """Replace everything by what the processes of a server share."""
        before = {loaded.key: loaded for loaded in self._by_name.values()}
        self._by_name = {
            name: before.get(one.key) or LoadedSAE(name, one.key, path=one.path) for name, one in shared.items()
        }
        self.version += 1

    def put(self, loaded: LoadedSAE) -> None:
        self._by_name[loaded.name] = loaded
        self.version += 1

    @contextmanager
    def removed(self, name: str) -> Iterator[LoadedSAE]:
        """Take out the autoencoder under a name, for good unless the block fails; raise WeirError if there is none."""
        loaded = self.find(name, "name")
        del self._by_name[name]
        self.version += 1
        self._claimed.add(name)  # nothing else is loaded under it meanwhile
        try:
            yield loaded
        except BaseException:
            self.put(loaded)
            raise
        finally:
            self._claimed.discard(name)

    def infos(self) -> list[SAEInfo]:
        return [loaded.info for _, loaded in sorted(self._by_name.items())]

    @contextmanager
    def claimed(self, name: object) -> Iterator[None]:
        """Keep a name for an autoencoder that is being loaded; raise WeirError if none can be loaded under it."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise WeirError(f"a name is a string of 1 to {MAX_NAME} characters", "name")
        if name in self._by_name or name in self._claimed:
            raise WeirError(f"an autoencoder is loaded as {brief(name)!r}; unload it, or choose another name", "name")
        self._claimed.add(name)
        try:
            yield
        finally:
            self._claimed.discard(name)

    def find(self, name: str, field: str) -> LoadedSAE:
        """Return the autoencoder under a name; raise WeirError naming `field` if there is none."""
        loaded = self._by_name.get(name)
        if loaded is None:
            known = f"loaded are {', '.join(sorted(self._by_name)[:20])}" if self._by_name else "none is"
            raise WeirError(f"no autoencoder is loaded as {brief(name)!r}; {known} (weir.load_sae does that)", field)
        return loaded

    def resolve(self, asked: OfAutoencoder) -> SetActivation | Reconstruction:
        """Return what an intervention does at the hook point that its autoencoder writes, of one block or several.

        Raises:
            WeirError: naming the field, if there is no such autoencoder or feature, or if it cannot
                be set alone.
        """
        name_field = f"{asked.path}.name"
        loaded = self.find(asked.name, name_field)
        if isinstance(asked, Reconstruct):
            return _reconstruction(loaded, asked)
        sae, key = loaded.block(asked.layer, f"{asked.path}.layer")
        try:
            if asked.read_back:
                return _read_back(sae, key, asked)
            return (_set if asked.add is None else _added)(sae, key, asked)
        except WeirError as e:
            own = e.field in ("feature", "value", "read_back")
            raise WeirError(e.message, f"{asked.path}.{e.field}" if own else name_field) from None


def _added(sae: SAE, key: str, asked: SetFeature) -> SetActivation:
    """Return the addition to an activation, which is the same whatever the activation is.

    So it needs no encoder: every architecture has it, and transcoders have it where they write.
    """
    return _intervention(sae, key, asked, None, sae.decoder_direction(asked.feature), add=asked.add)


def _set(sae: SAE, key: str, asked: SetFeature) -> SetActivation:
    """Return how an activation is replaced, or multiplied."""
    target = {"value": asked.value, "scale": asked.scale}
    if sae.config.encodes_rows:
        u = sae.decoder_direction(asked.feature)
        return _intervention(sae, key, asked, None, u, sae=key, feature=asked.feature, **target)
    response = sae.feature_response(asked.feature)
    return _intervention(sae, key, asked, response.w, response.u, bias=response.b, threshold=response.theta, **target)


def _read_back(sae: SAE, key: str, asked: SetFeature) -> SetActivation:
    """Return the change along the decoder's row after which the encoder reads the value.

    Of a row h that is ``(value - p) / (w . u)`` units, p being ``w . h + b``, active or not.
    """
    value = asked.value or 0.0
    if sae.config.encodes_rows or sae.config.is_transcoder:
        raise WeirError(
            f"what a {sae.architecture} SAE reads of the changed row is no function of this change alone; leave it out",
            "read_back",
        )
    response = sae.feature_response(asked.feature)
    if 0 < value <= response.theta:
        raise WeirError(f"feature {asked.feature} is 0, or above its threshold of {response.theta:g}", "value")
    w, u = response.w.astype(np.float64), response.u.astype(np.float64)
    seen, whole = float(w @ u), float(np.linalg.norm(w) * np.linalg.norm(u))
    if not seen > LEAST_COSINE * whole:
        raise WeirError(
            f"the encoder of feature {asked.feature} reads {seen:.3g} of each unit that its decoder adds, so no "
            "reasonable change is read back; leave it out",
            "read_back",
        )
    # A value of 0 leaves rows alone in which the feature is 0 already.
    threshold = response.theta if value == 0 else -1e38
    return _intervention(
        sae, key, asked, response.w, u / seen, bias=response.b, threshold=threshold, value=value, read_back=True
    )


def _intervention(sae: SAE, key: str, asked: SetFeature, w: Any, u: Any, /, **target: Any) -> SetActivation:
    """Return a change at the hook point that an autoencoder writes; for a transcoder also where it reads.

    `w` is None where no product with the row tells the activation. A block of a cross-layer transcoder has a row of `u`
    for each block that it writes.
    """
    first, writes = sae.out_site.layer, sae.config.writes
    unit: dict[str, Any] = {"heads": sae.head} if sae.site == sae.out_site else {"read": sae.site}
    return SetActivation(
        np.atleast_2d(u)[0] if w is None else w,
        dict(enumerate(u, first)) if writes else u,
        range(first, first + writes) if writes else first,
        sae.out_site.hook,
        positions=asked.positions,
        when=asked.when,
        path=asked.path,
        unit=f"{key}:{asked.feature}",
        **unit,
        **target,
    )


def _reconstruction(loaded: LoadedSAE, asked: Reconstruct) -> Reconstruction:
    sae = loaded.sae
    if sae.config.is_transcoder:
        raise WeirError(
            f"{loaded.name!r} is a transcoder, which reads rows of {sae.site.hook} and reconstructs those of "
            f"{sae.out_site.hook}; only an autoencoder of one hook point replaces its rows",
            f"{asked.path}.name",
        )
    return Reconstruction(
        loaded.key,
        sae.site.layer,
        sae.site.hook,
        error=asked.error,
        positions=asked.positions,
        heads=sae.head,
        when=asked.when,
        path=asked.path,
    )


def check_fits(sae: SAE, capabilities: EngineCapabilities) -> None:
    """Raise WeirError unless the engine serves the hook point that an autoencoder reads, with rows of its width.

    Weights that are not finite are refused, too.
    """
    for layer in sae.layers:
        check_fits(sae.block(layer), capabilities)
    if sae.layers:
        return
    site = sae.site
    why = capabilities.sites.get(site, f"the model has {capabilities.num_layers} blocks and no such point")
    if not why and site.hook in DERIVED_HOOKS:
        why = "it is derived from other rows, and autoencoders read rows that are there"
    if why:
        raise WeirError(f"{site} is refused: {why}", "sae.site")
    shape = capabilities.shape(site)
    if sae.head is not None and sae.head >= shape[0]:
        raise WeirError(f"it reads head {sae.head}, and {site} has {shape[0]} heads", "sae.head")
    width = shape[-1] if sae.head is not None else row_width(shape)
    if sae.d_in != width:
        row = "a head" if sae.head is not None else "a row"
        raise WeirError(f"it reads {sae.d_in} values, and {row} of {site} has {width}", "sae.d_in")
    if sae.config.is_transcoder:
        _check_output(sae, capabilities)
    check_finite(sae.tensors, "sae")


def _check_output(sae: SAE, capabilities: EngineCapabilities) -> None:
    """Raise WeirError unless rows of the hook point that a transcoder reconstructs have its width, if it is served."""
    site, last = sae.out_site, sae.out_site.layer + max(sae.config.writes - 1, 0)
    if last >= capabilities.num_layers:
        raise WeirError(f"it writes up to block {last}, and the model has {capabilities.num_layers}", "sae.layers")
    if not capabilities.sites.get(site, "missing") and sae.d_out != (width := row_width(capabilities.shape(site))):
        raise WeirError(f"it reconstructs {sae.d_out} values, and a row of {site} has {width}", "sae.d_out")
