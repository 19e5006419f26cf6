"""The model that ships with Weir: where its files are, and the name by which commands and functions take it."""

from __future__ import annotations

from pathlib import Path

from vllm_weir.errors import WeirError

NAME = "demo"
HELP = "Directory or hub id of the model; demo is the one that ships with Weir."
"""What commands say of their argument MODEL."""
_FOLDER = Path(__file__).resolve().parent.parent / "demo"


def demo_model() -> str:
    """Return the directory of the small Llama that ships with Weir (HF format, bf16, tokenizer).

    It knows 1,039 whole words; any other becomes ``<unk>``.
    """
    return str(_FOLDER / "model")


def demo_sae() -> str:
    """Return the directory of the sparse autoencoder of the shipped model's stream, for `SAE.load`."""
    return str(_FOLDER / "sae")


def demo_mood() -> tuple[str, str]:
    return str(_FOLDER / "mood" / "vector.safetensors"), str(_FOLDER / "mood" / "probe.safetensors")


def check_folder(model: str) -> None:
    """Raise WeirError, naming ``model``, for a directory that does not exist: vLLM would ask the hub for it."""
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise WeirError(f"there is no folder {model}", "model")


def model_path(model: str) -> str:
    """Return the shipped model's directory for ``demo``, and any other name as it is.

    A folder of that name is ``./demo``.
    """
    return demo_model() if model == NAME else model
