"""The registry of probes: what requests and gates may name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.probes import AnyProbe

MAX_NAMES = 10_000


class RegisteredProbe(NamedTuple):
    """A probe under its name.

    Attributes:
        probe: with arrays for vectors.
        everyone: whether it scores every request.
        alerts: of one that scores every request, for each output the score above which a server
            counts an alert, or None; empty for none.
        buckets: upper bounds of the histogram in which a server counts its scores, ascending.
    """

    probe: AnyProbe
    everyone: bool = False
    alerts: tuple[float | None, ...] = ()
    buckets: tuple[float, ...] = ()


class ProbeRegistry:
    """Probes by name.

    A name is looked up when a request is admitted; changing it later does not change the request.

    Args:
        controllers: name of a sync controller -> the probes that it reads, or their names.

    Attributes:
        controllers: likewise.
        everyone: the probes of every request, by name.
        version: grows whenever a name changes its meaning.
    """

    def __init__(
        self,
        probes: Mapping[str, RegisteredProbe] | None = None,
        controllers: Mapping[str, tuple[AnyProbe | str, ...]] | None = None,
    ) -> None:
        self._by_name: dict[str, RegisteredProbe] = dict(probes or {})
        self.controllers = dict(controllers or {})
        self.version = 0
        self.everyone = self._for_everyone()

    def with_probes(self, probes: Mapping[str, RegisteredProbe]) -> ProbeRegistry:
        return ProbeRegistry(probes, self.controllers)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def registered(self) -> Mapping[str, RegisteredProbe]:
        return self._by_name

    def load(self, probes: Mapping[str, RegisteredProbe]) -> None:
        self._by_name = dict(probes)
        self._changed()

    def put(self, registered: RegisteredProbe) -> None:
        """Register a probe under its name, replacing any other."""
        name = registered.probe.name
        if len(self._by_name) >= MAX_NAMES and name not in self._by_name:
            raise WeirError(f"{MAX_NAMES} probes are registered already; unregister some", "name")
        self._by_name[name] = registered
        self._changed()

    def _changed(self) -> None:
        self.everyone = self._for_everyone()
        self.version += 1

    def find(self, name: str, field: str) -> AnyProbe:
        """Return the probe under a name; raise WeirError naming `field` if there is none."""
        if name not in self._by_name:
            listed = sorted(self._by_name)
            known = "none is (weir.register_probe does that, or PUT /v1/probes/NAME)"
            if listed:
                more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
                known = f"registered are {', '.join(listed[:20])}{more}"
            raise WeirError(f"no probe is registered under {brief(name)!r}; {known}", field)
        return self._by_name[name].probe

    def read_by(self, controller: str, field: str) -> tuple[AnyProbe | str, ...]:
        """Return what a sync controller reads; raise WeirError naming `field` if there is none of the name."""
        if controller not in self.controllers:
            known = f"there are {', '.join(sorted(self.controllers))}" if self.controllers else "there is none"
            raise WeirError(
                f"the engine has no sync controller {brief(controller)!r}; {known} (they are named in the setting "
                "controllers)",
                field,
            )
        return self.controllers[controller]

    def _for_everyone(self) -> tuple[RegisteredProbe, ...]:
        return tuple(one for _, one in sorted(self._by_name.items()) if one.everyone)

    def by_name_only(self) -> ProbeRegistry:
        """Return a registry of the same probes, of which none scores every request."""
        return self.with_probes({name: one._replace(everyone=False) for name, one in self._by_name.items()})

    def infos(self) -> dict[str, dict[str, Any]]:
        return {name: _info(one) for name, one in sorted(self._by_name.items())}


def _info(registered: RegisteredProbe) -> dict[str, Any]:
    probe = registered.probe
    told = {key: value for key, value in probe.plain_fields().items() if key not in (*probe.biases, "name")}
    out = {"kind": probe.kind, "outputs": probe.outputs, **told}
    if registered.everyone:
        out["everyone"] = True
    return out
