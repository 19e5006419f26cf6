"""Units that read one hook point and write another: whether a request can have their activations set."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.scoring import CheckSite
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.set_activation import SetActivation
from vllm_weir.schema.taps import comes_before, tap_of


def check_units(interventions: Sequence[Intervention]) -> None:
    """Raise WeirError if the activation of a unit that reads elsewhere is replaced after it was changed.

    What is read does not show the change, so the second change would start from a number that the
    first one has made wrong. Additions may follow, since they do not depend on it.
    """
    changed: dict[str, list[Positions]] = {}
    for one in interventions:
        if not isinstance(one, SetActivation) or one.unit is None:
            continue
        earlier = changed.setdefault(one.unit, [])
        if one.add is None and any(_may_meet(one.positions, other) for other in earlier):
            raise WeirError(
                "an earlier SetFeature of this request changes the same feature of this transcoder, whose activation "
                "is read before either acts; give one SetFeature, put add after value or scale, or choose positions "
                "'prompt' and 'generated'",
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
