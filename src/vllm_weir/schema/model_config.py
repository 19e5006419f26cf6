"""What ``config.json`` tells of a model, against what is asked of it: seconds before an engine could say the same."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import STREAM_HOOKS, layers_of
from vllm_weir.util.shipped import check_folder, model_path

_OVERRIDES = ("config_format", "hf_config_path", "hf_overrides")
"""Options of ``vllm.LLM`` with which the model is another one than its ``config.json`` describes."""
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models that take more than text describe the part that reads it."""
_LAYERS, _WIDTH = ("num_hidden_layers", "n_layer", "n_layers"), ("hidden_size", "n_embd", "d_model")
_HEADS = re.compile(r"(?:.*_)?(?:heads?|heads_per_layer)")


class ModelConfig(NamedTuple):
    """Facts of a model; None for what its ``config.json`` does not say.

    Attributes:
        layers: number of blocks.
        heads: the most heads that a hook point has.
        width: of the stream.
    """

    layers: int | None = None
    heads: int | None = None
    width: int | None = None

    @classmethod
    def read(cls, model: str, options: Mapping[str, Any]) -> ModelConfig:
        """Read what is on this machine.

        Args:
            model: directory or hub id, or ``demo``.
            options: of ``vllm.LLM``.

        Raises:
            WeirError: naming ``model``, for a directory that does not exist.
        """
        check_folder(model)
        path = _path(model_path(model), options.get("revision"))
        if path is None or not os.path.isfile(path) or any(options.get(name) for name in _OVERRIDES):
            return cls()
        try:
            config = json.loads(Path(path).read_bytes())
        except (OSError, ValueError):
            return cls()  # vLLM will say it
        while isinstance(config, dict) and (part := next((name for name in _TEXT if name in config), None)):
            config = config[part]
        if not isinstance(config, dict) or config.get("is_encoder_decoder"):
            return cls()
        heads = [n for name, value in config.items() if _HEADS.fullmatch(name) for n in _ints(value)]
        known = {"num_attention_heads", "n_head", "n_heads"} & set(config)
        return cls(_first(config, _LAYERS), max(heads) if heads and known else None, _first(config, _WIDTH))

    def check_layers(self, hook: str, layers: Any, field: str = "layers") -> None:
        """Raise WeirError for a block that the model lacks; `layers` is as `parse_layers` returns it."""
        if self.layers is not None:
            layers_of(hook, layers, self.layers, field)

    def check_heads(self, heads: Any, field: str = "heads") -> None:
        """Raise WeirError for a head, of those listed, that no hook point of the model has."""
        if self.heads is None or isinstance(heads, str):
            return
        for head in _ints(heads):
            if head >= self.heads:
                raise WeirError(f"head {head} does not exist: the model has heads 0..{self.heads - 1}", field)

    def check_width(self, hook: str, width: int, field: str) -> None:
        """Raise WeirError if rows of a hook point cannot have this width."""
        if self.width is not None and hook in STREAM_HOOKS and width % self.width:
            raise WeirError(f"it reads {width} values, and a row of {hook} has {self.width}", field)


def _path(model: str, revision: str | None) -> str | None:
    """Return where a model's ``config.json`` is on this machine, if it is."""
    if not model:
        return None
    if Path(model).expanduser().is_dir():
        return os.path.join(Path(model).expanduser(), "config.json")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None  # no id: a file, say
    return found if isinstance(found, str) else None


def _ints(value: Any) -> Iterator[int]:
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if type(one) is int:
            yield one


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = [config[name] for name in names if type(config.get(name)) is int]
    return max(found, default=None)
