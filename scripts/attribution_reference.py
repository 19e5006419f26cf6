#!/usr/bin/env python3
"""Write what TransformerLens's attribution patching makes of a model, for the tests to compare with.

    pip install --no-deps --target DIR -r scripts/constraints/transformer_lens.txt
    PYTHONPATH=DIR python scripts/attribution_reference.py MODEL --out FILE

Without MODEL it is the model that ships with Weir, and FILE is the reference of the tests. The gradients are
TransformerLens's own (`cache_activation_and_gradient`), and an estimate is its `(clean - corrupt) . gradient`.

`resid_mid` is the one exception: TransformerLens 4.3 hooks the input of the MLP's norm, so its gradient there leaves
out the path around the MLP. The gradient at `hook_attn_out`, a term of that sum, is the whole one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "unit" / "experiments" / "attribute" / "transformer_lens.json"
DEMO = ROOT / "src" / "vllm_weir" / "demo" / "model"
NAMES = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "mlp_post": "mlp.hook_post",
}
BY_HEAD = ("q", "k", "v", "z")
CLEAN = [1, 41, 87, 12, 305, 9, 611, 44, 820, 17, 230, 52]
CORRUPT = [1, 41, 90, 12, 305, 14, 498, 44, 820, 17, 231, 52]
TOKENS = (101, 212)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(DEMO))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pair", help="JSON: [clean ids, corrupt ids, [a, b]]")
    args = parser.parse_args()
    clean, corrupt, (a, b) = json.loads(args.pair) if args.pair else (CLEAN, CORRUPT, TOKENS)
    args.out.write_text(json.dumps(reference(args.model, clean, corrupt, a, b)) + "\n")


def reference(model: str, clean: list[int], corrupt: list[int], a: int, b: int) -> dict:
    """Return the estimates of logit(a) - logit(b), hook point -> [layers, positions(, heads)], and what made them."""
    from importlib.metadata import version

    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis.attribution_patching import cache_activation_and_gradient

    bridge = TransformerBridge.boot_transformers(model, device="cpu", dtype=torch.float32)
    bridge.eval()
    layers = int(bridge.cfg.n_layers)
    names = {f"blocks.{layer}.{name}" for layer in range(layers) for name in NAMES.values()}

    def metric(logits):
        return logits[0, -1, a] - logits[0, -1, b]

    def run(ids):
        return cache_activation_and_gradient(bridge, torch.tensor([ids]), metric, names_filter=names.__contains__)

    source, base = run(clean), run(corrupt)
    estimates = {}
    for hook, name in NAMES.items():
        rows = []
        for layer in range(layers):
            at = f"blocks.{layer}.{name}"
            slope = base.gradients[f"blocks.{layer}.hook_attn_out" if hook == "resid_mid" else at][0]
            difference = (source.activations[at] - base.activations[at])[0]
            product = (difference * slope.view_as(difference)).flatten(1)
            if hook in BY_HEAD:
                heads = bridge.cfg.n_heads if hook in ("q", "z") else bridge.cfg.n_key_value_heads or bridge.cfg.n_heads
                product = product.view(len(clean), heads, -1)
            rows.append(product.sum(-1).tolist())
        estimates[hook] = rows
    weights = Path(model) / "model.safetensors"
    return {
        "made_by": "scripts/attribution_reference.py",
        "versions": {name: version(name) for name in ("transformer_lens", "torch", "transformers")},
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "clean": clean, "corrupt": corrupt, "a": a, "b": b,
        "metric": {"clean": float(source.metric), "corrupt": float(base.metric)},
        "estimates": estimates,
    }  # fmt: skip


if __name__ == "__main__":
    main()
