"""What probes, hooks and lenses are registered under names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.lenses.files import LensFile, open_lens
from vllm_weir.schema.named_hooks import MAX_NAME, Use, nearest
from vllm_weir.schema.probes import AnyProbe
from vllm_weir.schema.user_hooks import Hook

MAX_NAMES = 10_000


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise WeirError(f"a name is a string of 1 to {MAX_NAME} characters", "name")
    return name


def _check_room(name: str, known: Collection[str], problem: str) -> None:
    if len(known) >= MAX_NAMES and name not in known:
        raise WeirError(f"{MAX_NAMES} {problem}", "name")


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
        _check_room(name, self._by_name, "probes are registered already; unregister some")
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
        return {name: _probe_info(one) for name, one in sorted(self._by_name.items())}


def _probe_info(registered: RegisteredProbe) -> dict[str, Any]:
    probe = registered.probe
    told = {key: value for key, value in probe.plain_fields().items() if key not in (*probe.biases, "name")}
    out = {"kind": probe.kind, "outputs": probe.outputs, **told}
    if registered.everyone:
        out["everyone"] = True
    return out


class HookRegistry:
    """Hooks by name, of one process: code is not shared with others.

    A name is looked up when a request is admitted; changing it later does not change the request.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Hook] = {}

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def put(self, name: str, hook: Hook) -> None:
        _check_room(name, self._by_name, "hooks are registered already; unregister some")
        self._by_name[name] = hook

    def remove(self, name: str) -> None:
        self.find(name, "name")
        del self._by_name[name]

    def find(self, name: str, field: str) -> Hook:
        """Return the hook under a name; raise WeirError naming `field` if there is none."""
        hook = self._by_name.get(name) if isinstance(name, str) else None
        if hook is None:
            known = nearest(name, self._by_name, "registered are") if self._by_name else "none is"
            how = "weir.register_hook does that, or weir serve --weir-hook NAME=module:attribute"
            raise WeirError(f"no hook is registered under {brief(name)!r}; {known} ({how})", field)
        return hook

    def resolve(self, use: Use, lookup: Callable[[str, str], np.ndarray]) -> Hook:
        """Return what a `Use` does; raise WeirError naming the field that is wrong."""
        return use.resolve(self.find(use.name, f"{use.path}.name"), lookup)

    def infos(self) -> dict[str, dict[str, Any]]:
        return {name: _hook_info(hook) for name, hook in sorted(self._by_name.items())}


def check_hook(name: object, hook: object) -> Hook:
    """Return a hook, or that of a function alone, under the name that it is to have; raise WeirError for others."""
    _checked_name(name)
    return hook if isinstance(hook, Hook) else Hook(hook, path="hook")


def _hook_info(hook: Hook) -> dict[str, Any]:
    args = {
        name: {"dtype": value[0], "shape": list(value[1])} if isinstance(value, tuple) else value
        for name, value in hook.args.items()
    }
    layers = hook.layers if isinstance(hook.layers, str) else list(hook.layers)
    told = {"function": hook.function.name, "hook": hook.hook, "layers": layers, "args": args, "mode": hook.mode}
    return told | {"positions": hook.positions.to_json(), "state": list(hook.state)}


class LensRegistry:
    """Lenses by name, of one process. A name is looked up when a request is admitted."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def put(self, name: object, path: str | os.PathLike, capabilities: EngineCapabilities) -> LensFile:
        """Name the lens of a path, in the place of any other of the name.

        Raises:
            WeirError: if the name cannot be used, the path has no lens, or the lens does not fit the model.
        """
        name = _checked_name(name)
        _check_room(name, self._paths, "lenses are named already; unload some")
        if capabilities.no_lens:
            raise WeirError(capabilities.no_lens, "name")
        path = os.path.abspath(path)
        lens = open_lens(path, "path")
        lens.check_fits(capabilities.num_layers, capabilities.d_model, "path")
        self._paths[name] = path
        return lens

    def remove(self, name: str) -> None:
        """Forget a name; raise WeirError if there is none."""
        self.find(name, "name")
        del self._paths[name]

    def find(self, name: str, field: str) -> str:
        """Return the path of the lens under a name; raise WeirError naming `field` if there is none."""
        path = self._paths.get(name)
        if path is None:
            known = nearest(name, self._paths, "named are") if self._paths else "none is"
            how = "weir.load_lens does that, or weir serve --weir-lens NAME=PATH"
            raise WeirError(f"no lens is named {brief(name)!r}; {known} ({how})", field)
        return path

    def infos(self) -> dict[str, dict[str, Any]]:
        """Return name -> what is told of each lens, as JSON data."""
        return {name: _lens_info(open_lens(path)) for name, path in sorted(self._paths.items())}


def _lens_info(lens: LensFile) -> dict[str, Any]:
    told = {"kind": lens.kind, "layers": list(lens.layers), "d_model": lens.d_model}
    return told if lens.n_prompts is None else told | {"n_prompts": lens.n_prompts}
