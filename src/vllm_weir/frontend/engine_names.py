"""`EngineNames`: what names stand for in an engine, and what holds for all its requests."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.probe_registry import ProbeRegistry, RegisteredProbe
from vllm_weir.frontend.admission.sae_registry import SAERegistry
from vllm_weir.frontend.admission.vector_registry import RegistryBackend, RegistryContents, VectorRegistry
from vllm_weir.frontend.known_engine import KnownEngine
from vllm_weir.schema.features import SetFeature
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.intervention_kinds import AnyIntervention
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.schema.request import WIRE_KEY, WIRE_VERSION


class EngineNames:
    """Vectors, autoencoders and probes of one engine by name, and the interventions of every request.

    Args:
        engine: what can be served.
        forget: called, with the lock held, when other interventions than before are of every
            request.

    Attributes:
        vectors: vectors and modules by name.
        saes: sparse autoencoders by name.
        probes: by name.
        always: interventions of every request, before its own.
        source: the store, shared by a server's processes, from which `refresh` loads all of these;
            None if there is none.
        lock: held while names are looked up or changed: controllers change them in threads of their
            own. Whoever holds it does not change `source`, whose lock is taken before it.
    """

    def __init__(self, engine: KnownEngine, forget: Callable[[], None]) -> None:
        self.vectors = VectorRegistry()
        self.saes = SAERegistry()
        self.probes = ProbeRegistry()
        self.always: tuple[Intervention, ...] = ()
        self.source: RegistryBackend | None = None
        self.lock = threading.RLock()
        self._engine, self._forget = engine, forget
        self._contents: RegistryContents | None = None
        self._scoring: tuple[AnyProbe, ...] = ()
        """Probes of every request that controllers have declared and the engine does not know yet."""

    @property
    def version(self) -> tuple[int, int, int]:
        """Changes whenever a name changes its meaning."""
        return self.vectors.version, self.saes.version, self.probes.version

    @property
    def universal(self) -> bool:
        """Whether requests that name nothing are steered or scored, too."""
        self.refresh()
        return bool(self.always or self.probes.everyone or self._scoring)

    def refresh(self) -> None:
        """Load what other processes of the server have changed."""
        if self.source is None or (contents := self.source.read()) is self._contents:
            return
        with self.lock:
            self._contents = contents
            self.vectors.load(contents)
            self.saes.load(contents.saes)
            self.probes.load(contents.probes)
            self._replace_always(contents.always)

    def _replace_always(self, interventions: Sequence[Intervention]) -> None:
        self.always = tuple(interventions)
        self._forget()

    def set_always(self, interventions: Sequence[AnyIntervention]) -> None:
        """Set the interventions of every request from now on.

        Raises:
            WeirError: if the engine cannot do them.
        """
        with self.lock:
            self._replace_always(self.settled(interventions, everyone=True))

    def put_vector(self, name: str, vector: Any) -> str:
        """Register a vector, see `vllm_weir.api.register`."""
        with self.lock:
            return self.vectors.put(name, vector)

    def remove_vector(self, name: str) -> None:
        """Unregister a vector; raise WeirError if there is none of the name."""
        with self.lock:
            self.vectors.remove(name)

    def add_scoring(self, probes: Sequence[AnyProbe | str]) -> None:
        """Let probes that a controller declares score every request, once the engine is known.

        Raises:
            WeirError: if the engine cannot serve one.
        """
        for probe in probes:
            if isinstance(probe, str):
                raise WeirError(f"{probe!r} is a name; give the probe itself, which scores every request", "probes")
            if self._engine.capabilities is None:
                self._scoring = (*self._scoring, probe)
            elif self.source is None:
                self.register_probe(probe, everyone=True)
            else:
                one = {probe.name: RegisteredProbe(probe, True)}
                self.check_probe(probe.name, self.probes.with_probes(one))
                self.source.change(functools.partial(_with_probes, one))

    def add_waiting(self) -> None:
        """Let the probes score every request that waited until the engine is known.

        Raises:
            WeirError: if the engine cannot serve one.
        """
        waiting, self._scoring = self._scoring, ()
        self.add_scoring(waiting)

    @contextmanager
    def added_scoring(self, probes: Sequence[AnyProbe | str]) -> Iterator[None]:
        """Do what `add_scoring` does, and undo it if that or what comes in the context fails.

        The lock is not held meanwhile: what comes in the context may change `source`.
        """
        self.refresh()
        names = [probe.name for probe in probes if not isinstance(probe, str)]
        before, waiting = {one: self.probes.registered.get(one) for one in names}, self._scoring
        try:
            self.add_scoring(probes)
            yield
        except BaseException:
            self.change_probes(before)
            self._scoring = waiting
            raise

    def register_probe(self, probe: AnyProbe, everyone: bool = False) -> None:
        """Register a probe under its name, replacing any other; see `vllm_weir.api.register_probe`.

        Args:
            probe: its vectors may be registered ones.
            everyone: whether it scores every request.

        Raises:
            WeirError: if the engine cannot serve it, or what gates interventions of every request.
        """
        with self.lock:
            if everyone and probe.positions.kind == "modality":
                raise WeirError(
                    f"not every prompt has {probe.positions.modality}; choose positions by their place, or let "
                    "requests name the probe",
                    "probe.positions",
                )
            probes = self.probes.with_probes(self.probes.registered)
            probes.put(RegisteredProbe(probe.at("probe").with_arrays(self.vectors.find), everyone))
            if self._engine.capabilities is not None and self._engine.refusal is None:
                self.check_probe(probe.name, probes)
                self.settled(self.always, everyone=True, probes=probes)
            self.probes.put(probes.registered[probe.name])

    def check_probe(self, name: str, probes: ProbeRegistry) -> None:
        """Raise WeirError unless the engine can serve a probe of a registry."""
        admitted = admit(
            {WIRE_KEY: {"v": WIRE_VERSION, "probes": [name]}},
            self._engine.require_capabilities(),
            lookup=self.vectors.find,
            vocabulary=self._engine.vocabulary,
            probes=probes,
        )
        self._engine.check_holds(admitted)

    def unregister_probe(self, name: str) -> None:
        """Unregister a probe; requests admitted with it keep it.

        Raises:
            WeirError: if there is no such name, or an intervention of every request is gated by it.
        """
        self.refresh()
        self.probes.find(name, "name")
        self.change_probes({name: None})

    def change_probes(self, changes: Mapping[str, RegisteredProbe | None]) -> None:
        """Put other probes under names, in all processes of a server.

        Args:
            changes: name -> a probe that was registered before; None for none.

        Raises:
            WeirError: if an intervention of every request is gated by a probe that would go; then
                nothing changes.
        """
        dropped = [name for name, one in changes.items() if one is None]
        if not changes:
            return
        if self.source is None:
            with self.lock:
                for name in dropped:
                    refuse_gating(name, self.always)
                self.probes.load(_changed(self.probes.registered, changes))
        else:

            def edit(contents: RegistryContents) -> RegistryContents:
                for name in dropped:
                    refuse_gating(name, contents.always)
                return replace(contents, probes=_changed(contents.probes, changes))

            self.source.change(edit)
            self.refresh()
        self._scoring = tuple(probe for probe in self._scoring if probe.name not in dropped)

    def settled(
        self,
        interventions: Sequence[AnyIntervention],
        vectors: VectorRegistry | None = None,
        everyone: bool = False,
        probes: ProbeRegistry | None = None,
    ) -> tuple[Intervention, ...]:
        """Return interventions with names replaced by what they stand for now.

        The probes that gate them keep their names: a request is gated by what is registered when it
        is admitted.

        Args:
            interventions: as they were given.
            vectors: where names are looked up; default: the engine's.
            everyone: whether every request undergoes them, whatever its prompt.
            probes: where the probes that gate them are looked up; default: the engine's.

        Raises:
            WeirError: if the engine cannot do them.
        """
        capabilities, find = self._engine.require_capabilities(), (vectors or self.vectors).find
        settled = [self.saes.resolve(one) if isinstance(one, SetFeature) else one for one in interventions]
        gating = self.probes if probes is None else probes
        admitted = admit({}, capabilities, True, find, settled, vocabulary=self._engine.vocabulary, probes=gating)
        for rows in admitted.by_position:
            if everyone:
                rows.check_everyone()
            else:
                rows.check()
        self._engine.check_holds(admitted)
        return tuple(one.with_arrays(find) for one in settled)


def _with_probes(probes: Mapping[str, RegisteredProbe], contents: RegistryContents) -> RegistryContents:
    return replace(contents, probes={**contents.probes, **probes})


def _changed(
    probes: Mapping[str, RegisteredProbe], changes: Mapping[str, RegisteredProbe | None]
) -> dict[str, RegisteredProbe]:
    return {name: one for name, one in {**probes, **changes}.items() if one is not None}


def refuse_gating(name: str, always: Sequence[Intervention]) -> None:
    """Raise WeirError if an intervention of every request is gated by the probe of this name."""
    if any(one.when is not None and one.when.probe == name for one in always):
        raise WeirError(
            f"an intervention of every request is gated by {name!r}; replace that (weir.set_global) or clear it first",
            "name",
        )
