"""Write activations into a dataset, compressed, and read them back: by request, by site, and shuffled for training.

The rows are made up, so that this runs without a model; the second half shows what a training loop would do.
"""

import tempfile
from pathlib import Path

import torch

import vllm_weir as weir
from vllm_weir.storage import Batch, convert

D, LAYERS = 256, (0, 4, 8)


def write(path: Path) -> None:
    """Twenty requests of 30 to 49 tokens; a writer that is started again holds what was finished before."""
    with weir.open_writer(path, "sharded", compress="full8") as writer:
        for i in range(20):
            request = f"request-{i}"
            if writer.holds(request):
                continue
            positions = torch.arange(30 + i)
            for layer in LAYERS:
                rows = torch.randn(len(positions), D, dtype=torch.bfloat16) * (1 + layer)
                writer.write(Batch(request, "resid_post", layer, positions, positions % 97, rows))
            writer.finish_request(request, {"prompt_tokens": 25})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "acts"
        write(path)
        write(path)  # finds everything there already

        ds = weir.load(path)
        print(ds.layout, "|", len(ds), "requests |", ds.count(), "rows |", ds.header["method"])
        print("one request:", ds["request-3"]["resid_post", 4].shape)
        last = ds.rows(("resid_post", 8), positions="last_prompt")
        print("last prompt tokens:", last.rows.shape, "of", len(last.request_index.unique()), "requests")

        seen = 0
        for batch in ds.torch(("resid_post", 8), batch_size=128, buffer_rows=512, seed=1):
            seen += len(batch)  # a training step would go here
        print("an epoch has every row once:", seen == ds.count(("resid_post", 8)))

        small = Path(folder) / "small"
        convert(path, small, "packed", compress={"method": "rp8", "k": 64}, again=True)
        projected = weir.load(small).rows(("resid_post", 8), "request-3", space="projected").rows
        print("projected:", projected.shape)


if __name__ == "__main__":
    main()
