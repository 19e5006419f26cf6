"""Gates by features of sparse autoencoders: the probe whose score is a feature's activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.sae_registry import LoadedSAE
from vllm_weir.schema.gates import When, feature_name
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.probes import Probe
from vllm_weir.schema.taps import tap_of

EVERYWHERE = Positions.parse("all")


class FindSAE(Protocol):
    """Returns the autoencoder under a name; raises WeirError naming the field if there is none."""

    def __call__(self, name: str, field: str) -> LoadedSAE: ...


class _Read(NamedTuple):
    """A feature of an autoencoder, the hook point where it is read, and whether before the interventions there."""

    probe: str
    feature: int
    site: Site
    before: bool


class FeatureReads:
    """The features that gate interventions of one request."""

    def __init__(self, find: FindSAE, num_layers: int) -> None:
        self._find, self._num_layers = find, num_layers
        self._positions: dict[_Read, Positions] = {}
        self._names: dict[str, _Read] = {}

    def note(self, gated: Sequence[Intervention]) -> None:
        """Note what the request's gates read, before any is asked for.

        A feature is read where its interventions act, and everywhere if earlier positions count or these differ.
        """
        for one in gated:
            wanted = EVERYWHERE if one.when.latch or one.when.delay else one.positions
            read = self._read(one)
            if self._positions.setdefault(read, wanted) != wanted:
                self._positions[read] = EVERYWHERE

    def probe(self, gated: Intervention) -> tuple[str, Probe, bool, float]:
        """Return the name of the probe of the feature that gates an intervention, and the probe.

        Beside these: whether it reads before the interventions there, and above what the feature is active.

        Raises:
            WeirError: naming the field, if there is no such feature, or its activation is not a function of one
                product with the row.
        """
        when: When = gated.when
        read, sae = self._read(gated), self._loaded(when).sae
        name = feature_name(read.probe, read.feature)
        if self._names.setdefault(name, read) != read:
            name = feature_name(read.probe, read.feature, f"{read.site}{' before' * read.before}")
        if sae.config.encodes_rows:
            raise WeirError(
                f"whether a feature of this {sae.architecture} SAE is active depends on the whole row, and a gate "
                "reads one product with it; gate by an autoencoder with thresholds (JumpReLU, BatchTopK), or by a "
                "probe",
                f"{when.path}.probe",
            )
        try:
            response = sae.feature_response(read.feature)
        except WeirError as e:
            field = "feature" if e.field == "feature" else "probe"
            raise WeirError(e.message, f"{when.path}.{field}") from None
        hook, layer = read.site
        probe = Probe(
            "feature", np.asarray(response.w), response.b, hook, layer, positions=self._positions[read], head=sae.head,
            path=when.path,
        )  # fmt: skip
        return name, probe, read.before, response.theta

    def _loaded(self, when: When) -> LoadedSAE:
        loaded = self._find(when.sae, f"{when.path}.probe")
        if loaded.sae.layers:
            raise WeirError(
                f"{when.sae!r} is a cross-layer transcoder, and a gate names no block; load that block alone",
                f"{when.path}.probe",
            )
        return loaded

    def _read(self, gated: Intervention) -> _Read:
        """Return where a gate reads: where the autoencoder does, as early as the intervention needs it.

        What leaves a block and what enters the next one are the same rows, of one tap.
        """
        when: When = gated.when
        site = self._loaded(when).sae.site
        acting = [Site(gated.hook, layer) for layer in gated.resolve_layers(self._num_layers)]
        beside = [one for one in acting if tap_of(one) == tap_of(site)]
        first = min(beside, key=lambda one: one.hook == "resid_pre", default=None)
        if first is None or (first.hook == "resid_pre" != site.hook):
            return _Read(when.probe, when.feature or 0, site, False)
        return _Read(when.probe, when.feature or 0, first, True)
