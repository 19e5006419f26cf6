"""Rows at the tokens of an image, and steering there alone.

Two pictures are shown to a model that sees. Their rows at the image's positions are captured, and the difference of
their means is added to what the model makes of one of them, at its image alone.

python examples/images.py [MODEL]        # any of docs/models.md that takes images
"""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import torch
from PIL import Image, ImageDraw
from vllm import LLM, SamplingParams

import vllm_weir as weir

IMAGE = {"modality": "image"}
LAYER = 1


def chat(colour: str) -> list[dict[str, Any]]:
    """A question about a picture of a disc."""
    picture = Image.new("RGB", (112, 112), "white")
    ImageDraw.Draw(picture).ellipse((20, 20, 90, 90), fill=colour)
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is the disc?"}]
    return [{"role": "user", "content": parts}]


def main(model: str) -> None:
    eager = not torch.cuda.is_available()
    llm = LLM(model, dtype="float32" if eager else "auto", max_model_len=512, enforce_eager=eager,
              kv_cache_memory_bytes=256 << 20, limit_mm_per_prompt={"image": 1})  # fmt: skip
    plain = SamplingParams(max_tokens=8, temperature=0)
    read = weir.params(plain, capture=weir.Capture("resid_post", LAYER, IMAGE))
    red, blue = llm.chat([chat("red"), chat("blue")], read, use_tqdm=False)
    rows = [out.activations["resid_post", LAYER].float() for out in (red, blue)]
    at = red.activations.positions_of("resid_post", LAYER).tolist()
    shape = tuple(rows[0].shape)
    print(f"{len(red.prompt_token_ids)} tokens; the image has {len(at)}, from {at[0]} to {at[-1]}: rows {shape}")

    bluer = weir.Add(rows[1].mean(0) - rows[0].mean(0), LAYER, 4.0, positions=IMAGE)
    (steered,) = llm.chat(chat("red"), weir.params(plain, interventions=bluer), use_tqdm=False)
    print(f"red: {red.outputs[0].text!r}; steered: {steered.outputs[0].text!r}; blue: {blue.outputs[0].text!r}")
    print(f"rows changed: {steered.receipt.steered[0]}")

    try:
        llm.chat([{"role": "user", "content": "No picture."}], read, use_tqdm=False)
    except weir.WeirError as error:
        print(f"refused: {error}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-VL-3B-Instruct")
