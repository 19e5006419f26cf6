"""The probes, gates and stop rules of a request, resolved against the engine's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.feature_gates import FeatureReads, FindSAE
from vllm_weir.frontend.admission.lowering import CheckSite
from vllm_weir.frontend.admission.reachable import Vocabulary, asked_of, resolve_tokens
from vllm_weir.frontend.admission.registries import ProbeRegistry
from vllm_weir.schema.gates import COSINE_PREFIX, SAE_PREFIX, StopRule, StopText, When
from vllm_weir.schema.hooks import Site, place_of
from vllm_weir.schema.instructions import VectorCollector
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.probe_base import ProbeBase
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.schema.resolved_probes import LINEAR, NO_ACTIVATION, CellLayout, ResolvedGate, ResolvedProbe
from vllm_weir.schema.set_activation import Reconstruction, SetActivation
from vllm_weir.schema.taps import STAGES, reads_in_time, tap_of
from vllm_weir.schema.user_hooks import Hook


class ProbeResolver:
    """Resolves what requests to an engine score."""

    def __init__(
        self,
        capabilities: EngineCapabilities,
        lookup: Callable[[str, str], np.ndarray],
        registry: ProbeRegistry,
        vocabulary: Vocabulary,
        has_token_ids: bool,
        check: CheckSite,
        find_sae: FindSAE,
    ) -> None:
        self._features = FeatureReads(find_sae, capabilities.num_layers)
        self._capabilities, self._lookup, self._registry = capabilities, lookup, registry
        self._vocabulary, self._has_token_ids, self._check = vocabulary, has_token_ids, check
        self._own: dict[str, AnyProbe] = {}
        self._probes: dict[str, ResolvedProbe] = {}
        self._rows: dict[str, np.ndarray] = {}

    def resolve(
        self,
        probes: Sequence[AnyProbe | str],
        stop_when: Sequence[StopText],
        interventions: Sequence[Intervention],
        given: int,
        admitted: AdmittedRequest,
    ) -> AdmittedRequest:
        """Resolve what one request scores: its probes, its rules, and the gates of the interventions that it undergoes.

        The first `given` of these are not its own; their gates mean registered probes. `admitted` has the
        interventions as they were lowered; returned is what it becomes, with probes in the order in which the request
        names them: first those in `probes`, then in gates, then in rules; last those that score every request.

        Raises:
            WeirError: naming the field, if the engine cannot do it exactly.
        """
        everyone, dose = self._registry.everyone, admitted.dose
        if not (probes or stop_when or dose or everyone or any(one.when is not None for one in interventions)):
            return admitted
        own = [
            self._registry.find(one, f"probes[{k}]").at(f"probes[{k}]") if isinstance(one, str) else one
            for k, one in enumerate(probes)
        ]
        self._own = {probe.name: probe for probe in own}
        for probe in own:
            self._add(probe)
        self._features.note([one for one in interventions if one.when is not None and one.when.sae])
        gates: dict[ResolvedGate, int] = {}
        gate_of = []
        for k, intervention in enumerate(interventions):
            if intervention.when is None:
                gate_of.append(-1)
                continue
            gate = self._gate(intervention, k >= given)
            gate_of.append(gates.setdefault(gate, len(gates)))
        stops = tuple(self._stop(rule) for rule in stop_when)
        told = len(self._probes)
        for one in everyone:
            self._add(one.probe.at(f"probes.{one.probe.name}"))
        names = list(self._probes)
        counted = tuple((names.index(one.probe.name), one) for one in everyone)
        resolved = tuple(self._probes.values())
        self._check_stages(resolved, [one for one in interventions if dose or one.when is not None])
        self._check_calls(interventions, [[*gates][k] if k >= 0 else None for k in gate_of])
        if dose:
            self._check_whole_rows(interventions)
        factors = CellLayout.of(resolved, tuple(gates)).factors if gates else ()
        gated = tuple(
            one if gate < 0 else one.gated(gate, factors[gate] + 1)
            for one, gate in zip(admitted.interventions, gate_of, strict=True)
        )
        return replace(
            admitted,
            interventions=gated,
            rows={**admitted.rows, **self._rows},
            asked=(*admitted.asked, *asked_of(own)),
            probes=resolved,
            gates=tuple(gates),
            stops=stops,
            told=told,
            counted=counted,
        )

    def _index(self, name: str, field: str, own: bool = True) -> int:
        """Return the index of the probe of a name; a registered one is added if the request has not listed it."""
        if not own or name not in self._own:
            try:
                probe = self._registry.find(name, field)
            except WeirError as e:
                if name.startswith(SAE_PREFIX):
                    raise WeirError(
                        "missing: say which feature of the autoencoder gates", field.removesuffix(".probe") + ".feature"
                    ) from None
                listed = f"the request lists {', '.join(self._own)}; " if own and self._own else ""
                raise WeirError(f"{listed}{e.message}", field) from None
            self._add(probe.at(field))
        return list(self._probes).index(name)

    def _add(self, probe: AnyProbe) -> None:
        """Resolve a probe, and enter it under its name."""
        resolved, rows = self._resolve(resolve_tokens(probe, self._vocabulary))
        known = self._probes.setdefault(probe.name, resolved)
        if known != resolved:
            raise WeirError(
                f"a registered probe that scores this request is called {probe.name!r} too; name the request's own "
                "otherwise",
                self._own[probe.name].path + ".name" if probe.name in self._own else probe.path,
            )
        self._rows.update(rows)

    def _resolve(self, probe: ProbeBase) -> tuple[ResolvedProbe, dict[str, np.ndarray]]:
        capabilities, site = self._capabilities, probe.site
        if probe.positions.needs_token_ids and not self._has_token_ids:
            raise WeirError("the prompt is given as embeddings, so it has no token ids", f"{probe.path}.positions")
        if site not in capabilities.sites and 0 < capabilities.num_layers <= site.layer:
            raise WeirError(
                f"block {site.layer} does not exist: the model has blocks 0..{capabilities.num_layers - 1}",
                f"{probe.path}.layer",
            )
        self._check(site, probe.path, f"{probe.path}.layer")
        if (parts := len(capabilities.shards.get(site, ()))) > 1:
            raise WeirError(
                f"{site} cannot be scored here: tensor-parallel workers hold its rows in {parts} parts, and a score "
                "needs them together; start the engine with tensor_parallel_size=1, or probe the residual stream",
                f"{probe.path}.hook",
            )
        return probe.resolve(capabilities.shape(site), self._lookup)

    def _gate(self, intervention: Intervention, own: bool) -> ResolvedGate:
        when: When = intervention.when
        if when.controller:
            return self._controlled(intervention, when, own)
        if when.metric == "cosine":
            index = self._cosine(when, own)
        else:
            index = self._feature(intervention) if when.sae else self._index(when.probe, f"{when.path}.probe", own)
        probe = list(self._probes.values())[index]
        output = _output(
            probe, when.output, f"{when.path}.output", f"say which one gates: output=0..{probe.outputs - 1}"
        )
        layers = intervention.resolve_layers(self._capabilities.num_layers)
        _check_order(probe, intervention, layers, self._capabilities.traits.speculative)
        threshold = float(np.float32(when.threshold))
        sharpness = float(np.float32(when.sharpness or 0.0))
        return ResolvedGate(index, output, threshold, when.above is not None, when.latch, when.delay, sharpness)

    def _cosine(self, when: When, own: bool) -> int:
        """Return the index of what gives the cosine similarities of rows with the weight of a gate's probe."""
        field = f"{when.path}.probe"
        probe = self._own.get(when.probe) if own else None
        if probe is None:
            probe = self._registry.find(when.probe, field).at(field)
        resolved, rows = self._resolve(resolve_tokens(probe, self._vocabulary))
        if resolved.kind != LINEAR:
            raise WeirError(
                f"{when.probe!r} is no linear probe, so it has no direction; leave metric out", f"{when.path}.metric"
            )
        collector, units = VectorCollector(), []
        for row in (rows[digest].astype(np.float64) for digest in resolved.rows):
            if not (norm := np.linalg.norm(row)):
                raise WeirError(f"{when.probe!r} has a weight of length zero, which has no direction", field)
            units.append(collector.add(row / norm))
        name = COSINE_PREFIX + when.probe
        found = replace(
            resolved,
            name=name,
            rows=tuple(units),
            offsets=(0.0,) * len(units),
            activation=NO_ACTIVATION,
            cosine=True,
        )
        if self._probes.setdefault(name, found) != found:
            raise WeirError(f"a probe of this request is called {name!r}; name it otherwise", field)
        self._rows.update(collector.rows)
        return list(self._probes).index(name)

    def _feature(self, intervention: Intervention) -> int:
        """Return the index of what gives the activation of the feature that gates an intervention."""
        name, probe, before, threshold = self._features.probe(intervention)
        if name not in self._probes:
            try:
                resolved, rows = self._resolve(probe)
            except WeirError as e:
                raise WeirError(e.message, f"{probe.path}.probe") from None
            self._probes[name] = replace(resolved, name=name, before=before, threshold=threshold)
            self._rows.update(rows)
        return list(self._probes).index(name)

    def _controlled(self, intervention: Intervention, when: When, own: bool) -> ResolvedGate:
        """Return the gate of a sync controller, whose probes are added to the request."""
        if self._capabilities.traits.speculative:
            raise WeirError(
                "a controller decides on a token after the pass of the one before, and speculative decoding verifies "
                "several tokens in one pass; gate by a probe (above= or below=), or start the engine without "
                "speculative_config",
                when.path,
            )
        field = f"{when.path}.probe"
        reads = []
        for one in self._registry.read_by(when.controller, field):
            if isinstance(one, str):
                reads.append(self._index(one, field, own))
            else:
                self._add(one.at(field))
                reads.append(list(self._probes).index(one.name))
        if intervention.positions.kind != "generated":
            raise WeirError(
                "a controller decides on a token after the pass of the one before, which of a prompt's tokens may be "
                "the same pass; let it act at positions='generated'",
                f"{intervention.path}.positions",
            )
        return ResolvedGate(reads[0], 0, 0.0, delay=1, controller=when.controller, reads=tuple(reads))

    def _stop(self, rule: StopText) -> StopRule:
        index = self._index(rule.name, rule.path)
        probe = list(self._probes.values())[index]
        output = _output(probe, rule.output, rule.path, f"say which: {rule.name}[0]..{rule.name}[{probe.outputs - 1}]")
        if probe.positions.kind in ("prompt", "last_prompt"):
            raise WeirError(
                f"{rule.name!r} scores the prompt alone, and generation ends with a token whose score says so; give "
                "the probe positions='generated' or 'all'",
                rule.path,
            )
        return StopRule(rule.name, index, output, rule.op, float(np.float32(rule.threshold)))

    def _check_whole_rows(self, measured: Sequence[Intervention]) -> None:
        """Raise WeirError unless a worker has whole rows wherever a dose is measured."""
        for one in measured:
            for layer in one.resolve_layers(self._capabilities.num_layers):
                site = Site(one.hook, layer)
                if (parts := len(self._capabilities.shards.get(site, ()))) > 1:
                    raise WeirError(
                        f"the dose of {one.op} at {site} cannot be measured here: tensor-parallel workers hold its "
                        f"rows in {parts} parts, and it takes their norms; leave dose out, or start the engine with "
                        "tensor_parallel_size=1",
                        "dose",
                    )

    def _check_stages(self, probes: Sequence[ResolvedProbe], gated: Sequence[Intervention]) -> None:
        """Raise WeirError unless one pipeline stage has all that is scored, gated and measured."""
        holders: frozenset[int] | None = None
        for probe in probes:
            holders = self._common(holders, probe.site, f"the probe {probe.name!r} reads", "probes")
        for one in gated:
            for layer in one.resolve_layers(self._capabilities.num_layers):
                what, field = ("measured", "dose") if one.when is None else ("gated", one.when.path)
                holders = self._common(holders, Site(one.hook, layer), f"a {what} {one.op} acts at", field)

    def _check_calls(self, interventions: Sequence[Intervention], gates: Sequence[ResolvedGate | None]) -> None:
        """Raise WeirError if something is called at a tap with rows on which a probe of that tap has to decide first.

        What is called at a tap is called before its probes score.
        """
        undecided: set[Site] = set()
        for one, gate in zip(interventions, gates, strict=True):
            if one.hook != "resid_pre":
                continue
            sites = {Site(one.hook, layer) for layer in one.resolve_layers(self._capabilities.num_layers)}
            called = isinstance(one, (Hook, Reconstruction)) or (isinstance(one, SetActivation) and one.sae is not None)
            if called and (first := min(undecided & sites, key=place_of, default=None)) is not None:
                raise WeirError(
                    f"this is given the row of {first} after an intervention there whose gate reads what leaves the "
                    "block before, which is not decided by then; put it before that one, or let the gate's probe read "
                    "an earlier hook point",
                    one.path,
                )
            if gate is not None and not gate.controller:
                tap, stage = divmod(list(self._probes.values())[gate.probe].column, STAGES)
                undecided |= {site for site in sites if stage and tap == tap_of(site)}

    def _common(self, holders: frozenset[int] | None, site: Site, what: str, field: str) -> frozenset[int] | None:
        workers = self._capabilities.workers.get(site)
        if workers is None:
            return holders
        common = workers if holders is None else holders & workers
        if not common:
            raise WeirError(
                f"{what} {site}, which is on another pipeline stage than the request's other probes and gated or "
                "measured interventions; keep them on one stage, or start the engine with pipeline_parallel_size=1",
                field,
            )
        return common


def _output(probe: ResolvedProbe, output: int | None, field: str, say: str) -> int:
    """Return which score of a probe is meant."""
    if output is None and probe.outputs > 1:
        raise WeirError(f"{probe.name!r} gives {probe.outputs} scores; {say}", field)
    if output is not None and output >= probe.outputs:
        scores = "one score" if probe.outputs == 1 else f"{probe.outputs} scores"
        raise WeirError(f"{probe.name!r} gives {scores}, counted from 0; there is no {output}", field)
    return output or 0


def _check_order(probe: ResolvedProbe, intervention: Intervention, layers: Sequence[int], speculative: bool) -> None:
    """Raise WeirError unless a probe's score is known where an intervention acts.

    If `speculative`, generated tokens, too, share a pass.
    """
    acting = [Site(intervention.hook, layer) for layer in layers]
    early = [site for site in acting if not reads_in_time(probe.column, site)]
    when = intervention.when
    if not early or (when.delay and intervention.positions.kind == "generated" and not speculative):
        return
    first = min(early, key=place_of)
    if when.delay and speculative:
        raise WeirError(
            f"{probe.name!r} reads {probe.site}, where a token comes after {first}: speculative decoding verifies "
            "several tokens in one pass, so the score of the one before is not known in time; act at a later block "
            "than the probe's, or start the engine without speculative_config",
            when.path,
        )
    if when.delay:
        raise WeirError(
            f"{probe.name!r} reads {probe.site}, where a token comes after {first}: at a token of the prompt the score "
            "of the one before is not known in time; let it act at positions='generated', or at a later block",
            f"{when.path}.delay",
        )
    raise WeirError(
        f"{probe.name!r} reads {probe.site}, which has to come before {first}, where this acts; let it act at a later "
        "hook point or block, let the probe read an earlier one, or take the score of the token before (delay=1)",
        f"{when.path}.probe",
    )
