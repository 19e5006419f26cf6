"""`python -m tests.conformance [ARCH[:VARIANT] ...] [--jobs 1] [--out DIR]` runs the suite; `... docs` writes
docs/models.md, `... variants` runs only the further configurations.

What a GPU found (`tests/gpu/conformance.py`) joins the page from the file that `--gpu-results` names; `--merge FILE`
puts the verdicts of another such run into it first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.conformance.docs import write_docs
from tests.conformance.multimodal.finding import load
from tests.conformance.pool import run_all
from tests.conformance.verdict import CONFORMS, FAILS, load_results, save_results
from tests.conformance.zoo import VARIANTS, ZOO

RESULTS = Path(__file__).parent / "results" / "cpu-0.32.json"
GPU_RESULTS = Path(__file__).parent / "results" / "h200-0.26.json"
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> int:
    """The command; 1 if anything fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument(
        "architectures", nargs="*", metavar="ARCH", help="default: all; `docs`: only write the table; `variants`"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a directory for one JSON and one log per architecture")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the table's source, updated with this run")
    parser.add_argument("--gpu-results", type=Path, default=GPU_RESULTS, help="what a GPU found, for the table")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="with `docs`: what a GPU found since")
    parser.add_argument("--lens", action="store_true", help="the lens alone; the rest of the table stays")
    parser.add_argument("--retry", action="store_true", help="also what the zoo says cannot be run")
    arguments = parser.parse_args()
    if arguments.architectures == ["docs"]:
        if arguments.merge:
            save_results(load_results(arguments.merge).values(), arguments.gpu_results, keep=ZOO)
        results, on_gpu = load_results(arguments.results), load_results(arguments.gpu_results)
        write_docs(results, on_gpu, DOCS, multimodal=load().values())
        return 0
    known = ZOO | VARIANTS
    names = sorted(VARIANTS) if arguments.architectures == ["variants"] else arguments.architectures or sorted(known)
    unknown = set(names) - set(known)
    if unknown:
        parser.error(f"not in the zoo: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="weir-conformance-") as scratch:
        out = arguments.out or Path(scratch)
        verdicts = run_all(
            [known[name] for name in names], out, arguments.jobs, retry=arguments.retry, lens=arguments.lens
        )
    if arguments.lens:
        before = load_results(arguments.results)
        verdicts = [
            replace(before[v.architecture], lens=v.lens) if v.lens and v.verdict == CONFORMS else v for v in verdicts
        ]
    save_results(verdicts, arguments.results, keep=known)
    failed = [v.architecture for v in verdicts if v.verdict == FAILS]
    print(f"{sum(v.verdict == CONFORMS for v in verdicts)} of {len(verdicts)} conform, {len(failed)} fail", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
