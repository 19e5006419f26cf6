"""Features of a file of texts as Parquet, and a page on those that are most active.

python examples/extract_features.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow.dataset
import torch
from demo.stories import make_stories

import vllm_weir as weir
from vllm_weir.analysis import sae_report


def main() -> None:
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": not torch.cuda.is_available()}
    with tempfile.TemporaryDirectory() as folder:
        texts, out, page = Path(folder) / "stories.jsonl", Path(folder) / "features", Path("report.html")
        texts.write_text("".join(json.dumps({"text": story.text}) + "\n" for story in make_stories(40, seed=7)))

        # The autoencoder is loaded on the workers, and only ids and values leave the device.
        summary = weir.extract(texts, weir.demo_model(), out, sae={"mood": weir.demo_sae()}, engine=engine)
        print(f"{summary.requests} stories, {summary.rows} tokens")

        ds = weir.load_features(out)
        story = ds[0]
        print(ds.info.sae, "at", ds.info.site, "|", len(story), "tokens,", len(story.ids), "active features in story 0")
        ids, values = story.row(len(story) - 1)
        print("last token:", [(int(i), round(float(v), 2)) for i, v in zip(ids[:3], values[:3], strict=True)])

        # The files are plain Parquet: a row for each token, with a list of features and one of values.
        table = pyarrow.dataset.dataset(out, format="parquet", exclude_invalid_files=True).to_table()
        print(table.num_rows, "rows of", ", ".join(table.column_names))

        report = sae_report(weir.demo_sae(), ds, page, top=20)
        for feature in report.features[:3]:
            token = max(feature.contexts[0].tokens, key=lambda token: token.value)
            print(f"feature {feature.feature}: {feature.density:.1%} of tokens, most on {token.text!r}")
        print(page.name, page.stat().st_size > 100_000)


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main()
