"""A file of texts to a dataset of activations: interrupted, gone on with, and read back.

python examples/extract_texts.py [MODEL]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

import vllm_weir as weir

TEXTS = [f"{name} went to the {place}." for name in ("Tom", "Anna", "Mrs Bennett") for place in ("garden", "market")]


def main(model: str) -> None:
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": not torch.cuda.is_available()}
    with tempfile.TemporaryDirectory() as folder:
        texts, out = Path(folder) / "texts.jsonl", Path(folder) / "acts"
        lines = [{"text": text} for text in TEXTS] + [{"text": ""}, {"text": "word " * 300}]
        texts.write_text("".join(json.dumps(line) + "\n" for line in lines))

        # The last two records are no good: they are listed. With on_error="fail", the default, the run would end there.
        summary = weir.extract(texts, model, out, layers=[1, 3], compress="full8", on_error="skip", engine=engine)
        print(f"{summary.requests} of {summary.records} records, {summary.rows} rows, {summary.bytes} bytes")
        for index, why in summary.skipped.items():
            print(f"skipped record {index}: {why.removeprefix(folder)}")

        # All is there, so no engine is started. After a kill the same call does what is left.
        again = weir.extract(texts, model, out, layers=[1, 3], compress="full8", on_error="skip", engine=engine)
        print(f"again: {again.requests} done, {again.held} were there already")
        try:
            weir.extract(texts, model, out, layers=[2], compress="full8", on_error="skip", engine=engine)
        except weir.WeirError as e:
            print("refused:", e.field)

        ds = weir.load(out)
        last = ds.rows(("resid_post", 3), positions="last_prompt")
        print("last tokens of", len(ds), "texts:", list(last.rows.shape))
        first = sorted(ds.requests)[0]  # ids sort as the records do
        print("record", ds.metadata(first)["record"], "at all tokens:", list(ds[first]["resid_post", 3].shape))


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
