"""Units, whose activations are set: whether a request can have that, and which act together with a reconstruction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.scoring import CheckSite
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.set_activation import Reconstruction, SetActivation
from vllm_weir.schema.taps import comes_before, tap_of


def joined(interventions: Sequence[Intervention], dose: bool) -> tuple[Intervention, ...]:
    """Return interventions, of which those that set a feature directly before a reconstruction act together with it.

    All of them read the row that is reconstructed, so the reconstruction is that of the activations as they are set.
    `dose`: whether relative doses are measured.

    Raises:
        WeirError: if a feature that an autoencoder reconstructs is set elsewhere, where it would start from a row
            that shows another activation than the one that is decoded.
    """
    out = list(interventions)
    for k, one in enumerate(interventions):
        if not isinstance(one, Reconstruction) or one.error:
            continue
        first = k
        while first and _sets_feature_of(one, out[first - 1]) and out[first - 1].positions == one.positions:
            first -= 1
            out[first] = _joining(out[first], dose)
        for other in itertools.chain(interventions[:first], interventions[k + 1 :]):
            if _sets_feature_of(one, other) and _may_meet(one.positions, other.positions):
                raise WeirError(
                    "this sets a feature of an autoencoder whose Reconstruct acts at some of the same positions; put "
                    "it directly before the Reconstruct, with the same positions, or give both positions that do not "
                    "meet ('prompt' and 'generated')",
                    other.path,
                )
    return tuple(out)


def _sets_feature_of(one: Reconstruction, other: Intervention) -> bool:
    return isinstance(other, SetActivation) and (other.unit or "").rpartition(":")[0] == one.sae


def _joining(one: Intervention, dose: bool) -> Intervention:
    assert isinstance(one, SetActivation)
    if one.read_back:
        raise WeirError(
            "before a Reconstruct the activation that is decoded is set; leave read_back out", f"{one.path}.read_back"
        )
    if dose:
        raise WeirError("a feature that is set in a Reconstruct has no dose of its own; leave dose out", "dose")
    return with_fields(one, joins=True)


def check_units(interventions: Sequence[Intervention]) -> None:
    """Raise WeirError if a unit is set after it was changed, by one that does not read the changed row.

    That is one that reads elsewhere, or acts together with others: the second change would start from a number that
    the first one has made wrong. Additions may follow, since they do not depend on it.
    """
    changed: dict[str, list[Positions]] = {}
    for one in interventions:
        if not isinstance(one, SetActivation) or one.unit is None or (one.read is None and not one.joins):
            continue
        earlier = changed.setdefault(one.unit, [])
        if one.add is None and any(_may_meet(one.positions, other) for other in earlier):
            raise WeirError(
                "an earlier SetFeature of this request changes this feature, whose activation is read before both; "
                "give one SetFeature, put add after value or scale, or choose positions 'prompt' and 'generated'",
                f"{one.path}.feature",
            )
        earlier.append(one.positions)


def _may_meet(first: Positions, second: Positions) -> bool:
    """Return whether two selectors may select one position."""
    kinds = {first.kind, second.kind}
    if kinds in ({"prompt", "generated"}, {"last_prompt", "generated"}):
        return False
    if kinds == {"list"} and min(*first.numbers, *second.numbers) >= 0:
        return not set(first.numbers).isdisjoint(second.numbers)
    return True


def check_source(one: SetActivation, source: Site, capabilities: EngineCapabilities, check: CheckSite) -> None:
    """Raise WeirError unless the activation `source` that an intervention replaces is known where it acts."""
    field = f"{one.path}.name"
    check(source, one.path, field)
    if (parts := len(capabilities.shards.get(source, ()))) > 1:
        raise WeirError(
            f"it reads {source}, whose rows tensor-parallel workers hold in {parts} parts; give add, or start the "
            "engine with tensor_parallel_size=1",
            field,
        )
    for layer in one.resolve_layers(capabilities.num_layers):
        acts = Site(one.hook, layer)
        if not comes_before(tap_of(source), tap_of(acts)):
            raise WeirError(f"it reads {source}, which does not come before {acts}, where it writes; give add", field)
        readers, writers = (capabilities.workers.get(site) for site in (source, acts))
        if readers is not None and writers is not None and readers != writers:
            raise WeirError(
                f"it reads {source} and writes {acts}, which are on different pipeline stages; give add, or start the "
                "engine with pipeline_parallel_size=1",
                field,
            )
