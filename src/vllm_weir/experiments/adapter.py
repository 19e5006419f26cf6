"""`Adapter`: a LoRA adapter that experiments run under."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.guard.request_extras import lora_request

if TYPE_CHECKING:
    import torch

    from vllm_weir.frontend.engine import Engine

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's option ``max_lora_rank`` can have."""
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in a folder, as peft writes it."""

    path: str  # of the folder
    name: str  # for people
    digest: str  # hash of its configuration and weights, to which results belong
    config: Mapping[str, Any]  # its ``adapter_config.json``
    given: Any = None  # the ``LoRARequest`` that names it; None if a path does

    @classmethod
    def parse(cls, lora: Any) -> Adapter | None:
        """Read an adapter, vLLM's ``LoRARequest`` or the path of a folder; None for none. WeirError names ``lora``."""
        if lora is None:
            return None
        given = getattr(lora, "lora_path", lora)
        if not isinstance(given, (str, os.PathLike)):
            raise WeirError(f"expected a LoRARequest or the path of an adapter, got {type(lora).__name__}", "lora")
        folder = Path(given).expanduser().absolute()
        try:
            config = json.loads((folder / CONFIG).read_bytes())
            files = sorted(file for file in folder.iterdir() if file.name == CONFIG or file.stem == WEIGHTS)
            found = hashlib.blake2b(digest_size=16)
            for file in files:
                with open(file, "rb") as data:
                    found.update(f"{file.name}\0{hashlib.file_digest(data, 'sha256').hexdigest()}\0".encode())
        except (OSError, ValueError) as e:
            raise WeirError(f"{brief(str(given), 200)} is no folder of an adapter: {str(e)[:200]}", "lora") from None
        if not isinstance(config, dict) or not isinstance(config.get("r"), int) or len(files) < 2:
            raise WeirError(f"{brief(str(given), 200)} has no {WEIGHTS}.* of a LoRA adapter beside {CONFIG}", "lora")
        request = None if given is lora else lora
        return cls(str(folder), getattr(lora, "lora_name", folder.name), found.hexdigest(), config, request)

    @property
    def engine_options(self) -> dict[str, Any]:
        highest = max([self.config["r"], *(self.config.get("rank_pattern") or {}).values()])
        return {"enable_lora": True, "max_lora_rank": next((rank for rank in RANKS if rank >= highest), RANKS[-1])}

    def load(self, engine: Engine) -> dict[str, Any]:
        """Load it into an engine; return what `Engine.stream` and ``LLM.generate`` run under it with.

        WeirError says why the engine does not take it.

        Its name and number follow from the digest: what the engine has loaded or cached of other files under
        the name that was given does not count.
        """
        name, number = f"{self.name}-{self.digest[:16]}", int(self.digest[:7], 16) + 1
        request = lora_request(name, number, self.path, self.given)
        engine.add_adapter(request)
        return {"lora_request": request}

    @contextlib.contextmanager
    def merged(self, network: torch.nn.Module) -> Iterator[None]:
        """Add its weights to those of a transformers model, until the context ends."""
        kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        try:
            for path, (first, second) in self._products().items():
                weight = self._weight(network, path)
                added = (second.to(weight) @ first.to(weight)) * self._scale(path)
                added = added.T if self.config.get("fan_in_fan_out") else added
                if added.shape != weight.shape:
                    raise WeirError(
                        f"its weights for {path} are {list(added.shape)}, the twin's {list(weight.shape)}", "lora"
                    )
                kept.append((weight, weight.data))
                weight.data = weight.data + added
            yield
        finally:
            for weight, data in kept:
                weight.data = data

    def _products(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return path of a layer -> its matrices A [rank, in] and B [out, rank]."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        unusual = [name for name in ("use_dora", "lora_bias", "modules_to_save") if self.config.get(name)]
        if unusual or self.config.get("bias", "none") != "none":
            raise WeirError(f"the twin takes no adapter with {', '.join(unusual) or 'bias'}", "lora")
        try:
            tensors = load_file(f"{self.path}/{WEIGHTS}.safetensors")
        except (OSError, SafetensorError) as e:
            raise WeirError(f"the twin takes its weights from {WEIGHTS}.safetensors: {str(e)[:200]}", "lora") from None
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if (match := _NAME.fullmatch(name)) is None or tensor.ndim != 2:
                raise WeirError(
                    f"it has {name}, which is no matrix of a layer's product, so no twin can have it", "lora"
                )
            found.setdefault(match[1], {})[match[2]] = tensor
        if odd := next((path for path, pair in found.items() if len(pair) < 2), None):
            raise WeirError(f"it has one of the two matrices of {odd}", "lora")
        return {path: (pair["A"], pair["B"]) for path, pair in found.items()}

    def _scale(self, path: str) -> float:
        """Return the factor of a layer's product, by peft's rules."""

        def of(pattern: str, usual: str) -> Any:
            entries = (self.config.get(pattern) or {}).items()
            return next((value for key, value in entries if re.match(rf"(.*\.)?({key})$", path)), self.config[usual])

        rank, alpha = of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _weight(self, network: torch.nn.Module, path: str) -> torch.nn.Parameter:
        """Return the weight of a layer, which no other layer may share."""
        try:
            weight = network.get_parameter(f"{path}.weight")
        except AttributeError:
            raise WeirError(f"it has weights for {path}, which the twin does not have", "lora") from None
        if sum(one is weight for _, one in network.named_parameters(remove_duplicate=False)) > 1:
            raise WeirError(f"it has weights for {path}, which the twin shares with another layer", "lora")
        return weight


def options_under(lora: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of ``vllm.LLM``, and what else it needs for an adapter that is as for `Adapter.parse`."""
    adapter = Adapter.parse(lora)
    return options if adapter is None else adapter.engine_options | options
