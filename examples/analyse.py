"""Compare and draw stored activations (made up: a stream that grows, with one loud token and a direction in it)."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import vllm_weir as weir
from vllm_weir import analysis
from vllm_weir.storage import Batch

TEXT = "The gardener went to the market and bought a small red lamp for Anna , who was very happy about it ."
WORDS = TEXT.split(" ")
D, LAYERS = 128, 16


def rows(direction: torch.Tensor) -> dict[int, torch.Tensor]:
    """A random walk through the layers; the first token is loud, "happy" carries the direction from layer 5 on."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(len(WORDS), D, generator=generator)
    topic = torch.randn(D, generator=generator)
    out = {}
    for layer in range(LAYERS):
        stream = stream * 1.06 + 0.45 * torch.randn(len(WORDS), D, generator=generator) + 0.12 * topic
        if layer == 2:
            stream[0] += 160 * torch.nn.functional.one_hot(torch.tensor(7), D)
        if layer >= 5:
            stream[WORDS.index("happy") :] += 0.8 * direction
        out[layer] = stream.clone()
    return out


def main(target: Path) -> None:
    direction = torch.randn(D, generator=torch.Generator().manual_seed(1))
    direction[7] = 0  # where the first token is loud
    direction /= direction.norm()
    positions = torch.arange(len(WORDS))
    with tempfile.TemporaryDirectory() as folder:
        with weir.open_writer(folder + "/acts", "npz", compress="full8") as writer:
            for layer, x in rows(direction).items():
                writer.write(Batch("story", "resid_post", layer, positions, positions, x))
            writer.finish_request("story", {"prompt_tokens": 12})

        layer4 = analysis.quick_load(folder + "/acts", "story", layer=4)
        print("layer 4:", layer4.shape, "| market / lamp:", round(analysis.compare_tokens(layer4, layer4, 5, 11), 2))
        loader = analysis.ActivationLoader(folder + "/acts")
        story = loader.load_request("story", reconstruct=True)[0]
        statistics = analysis.compute_layer_statistics(story)
        print(
            "mean norm of a row: layer 0",
            round(statistics[0]["row_norm"], 1),
            "| layer 15",
            round(statistics[15]["row_norm"], 1),
        )
        acts = weir.load(folder + "/acts")["story"]
        along = direction.double().numpy()
        pictures = [
            analysis.plot_heat_map(acts, target / "norms_by_token.png", tokens=WORDS),
            analysis.plot_heat_map(
                acts, target / "direction.html", tokens=WORDS, value=lambda x: x @ along, label="along the direction"
            ),
            analysis.plot_norms(acts, target / "norms_by_layer.png"),
            analysis.plot_similarity(acts, target / "tokens.png", layer=8, tokens=WORDS),
            analysis.plot_similarity(acts, target / "layers.png"),
            analysis.plot_timeline(
                acts, target / "timeline.png", tokens=WORDS, prompt_tokens=12, value=lambda x: np.asarray(x @ along),
                label="along the direction",
            ),
        ]  # fmt: skip
    print("pictures:", ", ".join(path.name for path in pictures))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/analyse"))
