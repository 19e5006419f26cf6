"""Train a probe and a sparse autoencoder on rows that an engine computes meanwhile, with no file between.

python examples/train_on_stream.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader
from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYER = 3
OPENINGS = ["Tom went to the", "Anna took the boat", "It was early and", "The garden was", "Then they", "A dog ran"]


def requests(count: int) -> Iterator[tuple[str, SamplingParams]]:
    """Stories of the model itself. The generator is asked for the next one when the trainer has room for it."""
    for seed in range(count):
        sampling = SamplingParams(max_tokens=48, seed=seed)
        capture = weir.Capture("resid_post", layers=LAYER, positions="all")
        yield OPENINGS[seed % len(OPENINGS)], weir.params(sampling, capture=capture)


def train(loader: DataLoader, d: int, full_stop: int) -> None:
    probe, encoder, decoder = torch.nn.Linear(d, 1), torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)
    parameters = [*probe.parameters(), *encoder.parameters(), *decoder.parameters()]
    optimiser = torch.optim.Adam(parameters, 3e-3)
    scale = None
    for batch in loader:
        rows = batch.rows["resid_post", LAYER].float()
        scale = rows.norm(dim=1).mean() / d**0.5 if scale is None else scale
        rows = rows / scale
        # The probe tells whether the next token ends the sentence; the last row of a story has no next one here.
        inside = batch.requests[1:] == batch.requests[:-1]
        ends = (batch.token_ids[1:] == full_stop).float()
        logits = probe(rows[:-1]).squeeze(1)
        probe_loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[inside], ends[inside])
        # The autoencoder keeps the 32 most active features of each row.
        active = torch.relu(encoder(rows))
        top = active.topk(32, dim=1)
        rebuilt = decoder(torch.zeros_like(active).scatter(1, top.indices, top.values))
        error = (rebuilt - rows).square().sum() / (rows - rows.mean(0)).square().sum()
        optimiser.zero_grad()
        (probe_loss + error).backward()
        optimiser.step()
        if batch.cursor.batch in (1, 2) or batch.cursor.batch % 10 == 0:
            accuracy = ((logits > 0) == ends.bool())[inside].float().mean()
            print(f"batch {batch.cursor.batch}: probe right at {accuracy:.0%}, unexplained by the SAE {error:.2f}")
    print("read up to", batch.cursor)


def main(model: str) -> None:
    eager = not torch.cuda.is_available()  # on a CPU compiling takes longer than this example
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    (full_stop,) = llm.get_tokenizer().encode(".", add_special_tokens=False)
    d = weir.engine(llm).capabilities.d_model
    with weir.stream_rows(llm, requests(120), batch_size=256, ahead_bytes=32 << 20) as rows:
        train(DataLoader(rows, batch_size=None, num_workers=2), d, full_stop)


# The loader's workers and vLLM's processes may import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
