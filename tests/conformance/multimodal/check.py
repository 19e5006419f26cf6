"""Every served point of a multimodal model against transformers: prompts of text alone, of one item, and of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vllm_weir as weir
from tests.conformance.checks import by_expert
from tests.conformance.multimodal.oracle import MediaOracle
from tests.conformance.multimodal.recipe import Recipe
from tests.support.measure import rel_err

Site = tuple[str, int]
MUTUAL = ("pattern", "attn_scores")
"""Refused for prompts with items whose tokens see each other."""
ROTATED = ("q", "k", "q_rot", "k_rot")
PROCESSORS_NAMES = {"image": "images", "audio": "audio", "video": "videos"}
FPS = 2.0
"""Frames a second of videos."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its items, by modality.

    Attributes:
        text: with a mark for each item.
        unmarked: what vLLM is given instead, where it puts marks itself; "" elsewhere.
    """

    text: str
    items: Mapping[str, tuple[Any, ...]]
    unmarked: str = ""

    @property
    def for_vllm(self) -> dict[str, Any]:
        """As `LLM.generate` takes it."""
        data = {m: [film(one) if m == "video" else one for one in some] for m, some in self.items.items() if some}
        return {"prompt": self.unmarked or self.text} | ({"multi_modal_data": data} if data else {})


def picture(size: tuple[int, int], seed: int = 0) -> Any:
    """A picture of noise, (width, height) pixels."""
    from PIL import Image

    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def sound(seed: int = 0, seconds: float = 0.4, rate: int = 16_000) -> Any:
    """Noise, at 16 kHz."""
    return np.random.default_rng(seed).standard_normal(int(seconds * rate)).astype(np.float32)


def frames(size: tuple[int, int], seed: int = 0, count: int = 4) -> np.ndarray:
    """A video of noise, [frames, height, width, 3]."""
    width, height = size
    return np.random.default_rng(seed).integers(0, 255, (count, height, width, 3), dtype=np.uint8)


def film(video: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """A video and what vLLM is told of it."""
    count = len(video)
    told = {"fps": FPS, "duration": count / FPS, "total_num_frames": count, "frames_indices": list(range(count))}
    return video, told | {"video_backend": "opencv", "do_sample_frames": False}


def _item(modality: str, size: tuple[int, int], seed: int) -> Any:
    if modality == "audio":
        return sound(seed)
    return picture(size, seed) if modality == "image" else frames(size, seed, 4 + 2 * seed)


def prompts(recipe: Recipe) -> list[Prompt]:
    """Text alone; one item in the middle; two items, the first at the start. Or one in front, twice."""
    (modality, mark), *_ = recipe.media.items()
    items = [_item(modality, size, n) for n, size in enumerate(recipe.sizes)]
    words = [" ".join(f"w{(7 * k + 11 * n) % 500}" for k in range(12)) for n in range(3)]
    if recipe.one_in_front:
        both = zip(words[1:], items, strict=True)
        return [Prompt(words[0], {}), *(Prompt(f"{mark}{text}", {modality: (one,)}, text) for text, one in both)]
    return [
        Prompt(words[0], {}),
        Prompt(f"w1 w2 w3 {mark} {words[1]}", {modality: (items[0],)}),
        Prompt(f"{mark} w5 w6 {mark} {words[2]}", {modality: (items[1], items[0])}),
    ]


class Reference:
    """What transformers computes for a recipe's prompts.

    Attributes:
        oracle: the model.
    """

    def __init__(self, recipe: Recipe, where: Path, on_cpu: bool = True) -> None:
        self.recipe = recipe
        self.oracle = MediaOracle(where, recipe.mutual if on_cpu else (), recipe.from_zero)

    def ids(self, prompt: Prompt) -> list[int]:
        """Take up a prompt; its token ids, placeholders expanded."""
        items: dict[str, Any] = {PROCESSORS_NAMES[m]: list(some) for m, some in prompt.items.items() if some}
        if "videos" in items:
            told = [film(one)[1] for one in items["videos"]]
            items["video_metadata"] = [{k: v for k, v in one.items() if k != "do_sample_frames"} for one in told]
        return self.oracle.prompt(prompt.text, **items)

    def media_positions(self, prompt: Prompt) -> list[int]:
        """The positions that hold embeddings of items: those of the placeholder's token."""
        config, modality = self.oracle.model.config, next(iter(self.recipe.media))
        names = (f"{modality}_token_id", f"{modality}_token_index")
        token = next(v for name in names if (v := getattr(config, name, None)) is not None)
        return [p for p, one in enumerate(self.ids(prompt)) if one == token]

    def rows(self, prompt: Prompt, generated: Sequence[int], steer: Any = None) -> dict[Site, torch.Tensor]:
        """Every point's rows; `steer`: (hook, layer, vector, positions), added there."""
        ids = [*self.ids(prompt), *generated][:-1]
        rows = by_expert((self.oracle.points(ids) if steer is None else self.oracle.steer(ids, *steer))[0])
        if self.recipe.interleaved:
            for site in [site for site in rows if site[0] in ROTATED]:
                rows[site] = torch.cat([rows[site][..., ::2], rows[site][..., 1::2]], -1)
        return rows


def captures(sites: Sequence[Site], positions: Any = "all") -> list[weir.Capture]:
    """Captures of sites."""
    hooks = {hook: [layer for name, layer in sites if name == hook] for hook, _ in sites}
    return [weir.Capture(hook, layers=layers, positions=positions) for hook, layers in hooks.items()]


def rows_error(completion: Any, rows: Mapping[Site, torch.Tensor], positions: Sequence[int] | None = None) -> float:
    """How far a completion's rows are from the reference's, at exactly `positions` (None: at all)."""
    activations = completion.activations
    mine = by_expert({tuple(site): activations[site].float() for site in activations.sites})
    worst = 0.0
    for site, got in mine.items():
        expected = rows[site] if positions is None else rows[site][list(positions)]
        at = list(range(len(rows[site]))) if positions is None else list(positions)
        assert activations.positions_of(*site).tolist() == at, site
        keys = slice(0, got.shape[-1]) if site[0] in MUTUAL else slice(None)
        assert got.shape == expected[..., keys].shape, (site, got.shape, expected.shape)
        worst = max(worst, rel_err(got, expected[..., keys]))
    return worst
