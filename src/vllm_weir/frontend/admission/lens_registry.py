"""The registry of lenses: the files of fitted lenses by name."""

from __future__ import annotations

import os
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.lenses.files import LensFile, open_lens
from vllm_weir.schema.features import MAX_NAME
from vllm_weir.schema.named_hooks import nearest

MAX_NAMES = 10_000


class LensRegistry:
    """Lenses by name, of one process. A name is looked up when a request is admitted."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def put(self, name: object, path: str | os.PathLike, capabilities: EngineCapabilities) -> LensFile:
        """Name the lens of a path, in the place of any other of the name.

        Raises:
            WeirError: if the name cannot be used, the path has no lens, or the lens does not fit the model.
        """
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise WeirError(f"a name is a string of 1 to {MAX_NAME} characters", "name")
        if len(self._paths) >= MAX_NAMES and name not in self._paths:
            raise WeirError(f"{MAX_NAMES} lenses are named already; unload some", "name")
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
        return {name: _info(open_lens(path)) for name, path in sorted(self._paths.items())}


def _info(lens: LensFile) -> dict[str, Any]:
    told = {"kind": lens.kind, "layers": list(lens.layers), "d_model": lens.d_model}
    return told if lens.n_prompts is None else told | {"n_prompts": lens.n_prompts}
