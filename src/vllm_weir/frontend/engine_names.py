"""`EngineNames`: what names stand for in an engine, and what holds for all its requests."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.registries import (
    HookRegistry,
    LensRegistry,
    ProbeRegistry,
    RegisteredProbe,
    check_hook,
)
from vllm_weir.frontend.admission.sae_registry import SAERegistry
from vllm_weir.frontend.admission.vector_registry import (
    NamedVector,
    RegistryBackend,
    RegistryContents,
    VectorRegistry,
)
from vllm_weir.frontend.known_engine import KnownEngine
from vllm_weir.lenses.files import LensFile
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.intervention_kinds import AnyIntervention, Kept, OfAutoencoder
from vllm_weir.schema.named_hooks import Use
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.schema.request import WIRE_KEY, WIRE_VERSION
from vllm_weir.schema.user_hooks import Hook

T = TypeVar("T")


class EngineNames:
    """Vectors, autoencoders and probes of one engine by name, and the interventions of every request.

    Args:
        forget: called, with the lock held, when other interventions than before are of every
            request.

    Attributes:
        hooks: by name; of this process alone.
        lenses: files of fitted lenses by name; likewise.
        always: interventions of every request, before its own.
        global_hooks: functions that are called for every request, see `admit`.
        source: the store, shared by a server's processes, from which `refresh` loads all of these;
            None if there is none.
        lock: held while names are looked up or changed: controllers change them in threads of their
            own. Whoever holds it does not change `source`, whose lock is taken before it.
    """

    def __init__(self, engine: KnownEngine, forget: Callable[[], None]) -> None:
        self.vectors = VectorRegistry()
        self.saes = SAERegistry()
        self.probes = ProbeRegistry()
        self.hooks = HookRegistry()
        self.lenses = LensRegistry()
        self.always: tuple[Kept, ...] = ()
        self.global_hooks: tuple[Hook, ...] = ()
        self.source: RegistryBackend | None = None
        self.lock = threading.RLock()
        self._engine, self._forget = engine, forget
        self._contents: RegistryContents | None = None
        self._local = threading.local()
        """`made`: the changes of a thread that may have to be undone, as (before, after)."""
        self._scoring: tuple[AnyProbe, ...] = ()
        """Probes of every request that controllers have declared and the engine does not know yet."""

    @property
    def version(self) -> tuple[int, int, int]:
        return self.vectors.version, self.saes.version, self.probes.version

    @property
    def universal(self) -> bool:
        self.refresh()
        return bool(self.always or self.global_hooks or self.probes.everyone or self._scoring)

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

    def _replace_always(self, interventions: Sequence[Kept]) -> None:
        self.always = tuple(interventions)
        self._forget()

    def change(self, edit: Callable[[RegistryContents], RegistryContents]) -> None:
        """Replace what names stand for by what `edit` makes of it, in all processes of a server.

        If `edit` raises, nothing changes. It may call `refresh`, and is not to change `saes`.
        """
        made: list[tuple[RegistryContents, RegistryContents]] = []

        def noted(contents: RegistryContents) -> RegistryContents:
            made[:] = [(contents, edit(contents))]
            return made[0][1]

        if self.source is not None:
            self.source.change(noted)
            self.refresh()
        else:
            with self.lock:
                named, probes = self.vectors.named, self.probes.registered
                before = RegistryContents(0, named, self.vectors.modules, self.always, probes=probes)
                after = noted(before)
                if after.vectors is not named:
                    self.vectors.load(after)
                if after.probes is not probes:
                    self.probes.load(after.probes)
                if after.always is not before.always:
                    self._replace_always(after.always)
        if (own := getattr(self._local, "made", None)) is not None:
            own += made

    def set_always(self, interventions: Sequence[AnyIntervention]) -> None:
        """Set the interventions of every request from now on; raise WeirError if the engine cannot do them."""

        def edit(contents: RegistryContents) -> RegistryContents:
            self.refresh()  # names stand for what they do while the state is locked
            always = self.settled(interventions, everyone=True) if interventions else ()
            return replace(contents, always=always, tiers=0)

        self.change(edit)

    def set_global_hooks(self, hooks: Sequence[Hook]) -> None:
        """Set functions that are called for every request from now on; raise WeirError if the engine cannot do them."""
        with self.lock:
            if hooks:
                admitted = admit({}, self._engine.require_capabilities(), registered=hooks)
                self._engine.check_holds(admitted)
            self.global_hooks = tuple(hooks)
            self._forget()

    def put_vector(self, name: str, vector: Any) -> str:
        """Register a vector, see `vllm_weir.api.register`."""
        self.refresh()
        parsed = self.vectors.parse(name, vector)

        def edit(contents: RegistryContents) -> RegistryContents:
            if name in contents.modules:
                raise WeirError(f"a module is named {name!r}; choose another name", "name")
            return replace(contents, vectors={**contents.vectors, name: NamedVector({None: parsed})})

        self.change(edit)
        return parsed.digest

    def remove_vector(self, name: str) -> None:
        """Unregister a vector; raise WeirError if there is none of the name."""

        def edit(contents: RegistryContents) -> RegistryContents:
            if name not in contents.vectors:
                raise WeirError(f"no vector is registered under {name!r}", "name")
            return replace(contents, vectors={key: one for key, one in contents.vectors.items() if key != name})

        self.change(edit)

    def add_scoring(self, probes: Sequence[AnyProbe | str]) -> None:
        """Let probes that a controller declares score every request, once the engine is known.

        Raise WeirError if the engine cannot serve one.
        """
        for probe in probes:
            if isinstance(probe, str):
                raise WeirError(f"{probe!r} is a name; give the probe itself, which scores every request", "probes")
            if self._engine.capabilities is None:
                self._scoring = (*self._scoring, probe)
            else:
                self.register_probe(probe, everyone=True)

    def add_waiting(self) -> None:
        """Let the probes score every request that waited until the engine is known.

        Raise WeirError if the engine cannot serve one.
        """
        waiting, self._scoring = self._scoring, ()
        self.add_scoring(waiting)

    @contextmanager
    def added_scoring(self, probes: Sequence[AnyProbe | str]) -> Iterator[None]:
        """Do what `add_scoring` does; if that or what comes in the context fails, undo it and all that was changed.

        What is undone are the changes of this thread; what others have set for every request meanwhile
        stays. The lock is not held: what comes in the context may change `source`.
        """
        made: list[tuple[RegistryContents, RegistryContents]] = []
        waiting, self._local.made = self._scoring, made
        try:
            self.add_scoring(probes)
            yield
        except BaseException:
            self._local.made, self._scoring = None, waiting
            if made:
                self.change(functools.partial(_undone, made))
            raise
        finally:
            self._local.made = None

    def register_probe(self, probe: AnyProbe, everyone: bool = False) -> None:
        """Register a probe under its name, replacing any other; see `vllm_weir.api.register_probe`.

        Raise WeirError if the engine cannot serve it, or what gates interventions of every request.
        """
        if everyone and probe.positions.kind == "modality":
            raise WeirError(
                f"not every prompt has {probe.positions.modality}; choose positions by their place, or let "
                "requests name the probe",
                "probe.positions",
            )

        def edit(contents: RegistryContents) -> RegistryContents:
            self.refresh()
            probes = self.probes.with_probes(contents.probes)
            probes.put(RegisteredProbe(probe.at("probe").with_arrays(self.vectors.find), everyone))
            if self._engine.capabilities is not None and self._engine.refusal is None:
                self.check_probe(probe.name, probes)
                self.settled(contents.always, everyone=True, probes=probes)
            return replace(contents, probes=probes.registered)

        self.change(edit)

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

        Raise WeirError if there is no such name, or an intervention of every request is gated by it.
        """
        self.refresh()
        self.probes.find(name, "name")
        self.change_probes({name: None})

    def change_probes(self, changes: Mapping[str, RegisteredProbe | None]) -> None:
        """Put registered probes under names, None for none, in all processes of a server.

        Raise WeirError if an intervention of every request is gated by a probe that would go; then nothing changes.
        """
        dropped = [name for name, one in changes.items() if one is None]
        if not changes:
            return

        def edit(contents: RegistryContents) -> RegistryContents:
            for name in dropped:
                refuse_gating(name, contents.always)
            return replace(contents, probes=_changed(contents.probes, changes))

        self.change(edit)
        self._scoring = tuple(probe for probe in self._scoring if probe.name not in dropped)

    def register_hook(self, name: str, hook: Any) -> None:
        """Register a hook, or a function, under a name; see `vllm_weir.api.register_hook`."""
        checked = check_hook(name, hook)
        if self._engine.capabilities is not None and self._engine.refusal is None:
            self.settled([with_fields(checked, when=None, path="hook")])  # a request may bring the probe that gates it
        with self.lock:
            self.hooks.put(name, checked)
            self._forget()  # what is kept of requests keeps functions, too

    def unregister_hook(self, name: str) -> None:
        with self.lock:
            self.hooks.remove(name)
            self._forget()

    def load_lens(self, name: str, path: str | os.PathLike) -> LensFile:
        with self.lock:
            found = self.lenses.put(name, path, self._engine.require_capabilities())
            self._forget()
        return found

    def unload_lens(self, name: str) -> None:
        with self.lock:
            self.lenses.remove(name)
            self._forget()

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
            vectors: where names are looked up; default: the engine's.
            everyone: whether every request undergoes them, whatever its prompt.
            probes: where the probes that gate them are looked up; default: the engine's.

        Raises:
            WeirError: if the engine cannot do them.
        """
        capabilities, find = self._engine.require_capabilities(), (vectors or self.vectors).find
        named = (self.hooks.resolve(one, find) if isinstance(one, Use) else one for one in interventions)
        settled = [self.saes.resolve(one) if isinstance(one, OfAutoencoder) else one for one in named]
        gating = self.probes if probes is None else probes
        admitted = admit(
            {}, capabilities, True, find, settled, vocabulary=self._engine.vocabulary, saes=self.saes, probes=gating
        )
        for one in admitted.by_position:
            one.check_rows(everyone=everyone)
        self._engine.check_holds(admitted)
        return tuple(one.with_arrays(find) for one in settled)


def _undone(made: Sequence[tuple[RegistryContents, RegistryContents]], contents: RegistryContents) -> RegistryContents:
    """Return contents without some changes, which are given as (before, after), the earliest first.

    A probe that gates what others have set for every request stays.
    """
    gating = {one.when.probe for one in contents.always if one.when is not None}
    for before, after in reversed(made):
        if [one.to_json() for one in contents.always] == [one.to_json() for one in after.always]:
            contents = replace(contents, always=before.always, tiers=before.tiers)
            gating = {one.when.probe for one in contents.always if one.when is not None}
        dropped = {name: before.probes.get(name) for name in after.probes if name not in gating}
        moved = {name: before.vectors.get(name) for name in {**before.vectors, **after.vectors}}
        contents = replace(
            contents,
            probes=_changed(contents.probes, {n: one for n, one in dropped.items() if one is not after.probes[n]}),
            vectors=_changed(contents.vectors, {n: v for n, v in moved.items() if v is not after.vectors.get(n)}),
        )
    return contents


def _changed(named: Mapping[str, T], changes: Mapping[str, T | None]) -> dict[str, T]:
    return {name: one for name, one in {**named, **changes}.items() if one is not None}


def refuse_gating(name: str, always: Sequence[Kept]) -> None:
    if any(one.when is not None and one.when.probe == name for one in always):
        raise WeirError(
            f"an intervention of every request is gated by {name!r}; replace that (weir.set_global) or clear it first",
            "name",
        )
