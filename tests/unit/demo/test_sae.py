"""The sparse autoencoder that ships with the demo."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import vllm_weir as weir


def test_the_shipped_autoencoder():
    folder = Path(weir.demo_sae())
    sae = weir.SAE.load(folder)
    record = json.loads((folder / "training.json").read_text())
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1 << 20
    assert sae.site.hook == "resid_post" and (sae.d_in, sae.d_sae) == (256, 512) and sae.dtype == torch.float16
    assert all(torch.isfinite(tensor).all() for tensor in sae.tensors.values())
    assert record["held_out"]["explained_variance"] > 0.9 and record["held_out"]["l0"] < 20
    happy, sad = (record["moods"][mood] for mood in ("happy", "sad"))
    assert happy["feature"] != sad["feature"] and min(happy["auc"], sad["auc"]) > 0.95
    assert sae.feature_response(happy["feature"]).theta > 0
