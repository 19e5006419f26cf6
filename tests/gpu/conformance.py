"""What no CPU runs, and one of each kind of tap, judged on a GPU; under nine minutes with the defaults.

PYTHONPATH=src:. python tests/gpu/conformance.py --out DIR [ARCH ...] [--jobs 4] [--limit 170] [--total 520]

DIR gets `h200-0.26.json`, the verdicts so far after each of them, and `failures.log`, the ends of the logs of those
that do not conform. `python -m tests.conformance docs --merge DIR/h200-0.26.json` puts them into the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

STARTED = time.monotonic()
TAIL = 12_000
"""Characters of a log that are kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="ARCH", help="default: all that zoo/gpu.py runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=4, help="at a time, each with an engine of its own on the GPU")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds for one architecture")
    parser.add_argument("--total", type=float, default=520.0, help="seconds for all of them")
    parser.add_argument("--bfloat16", action="store_true", help="all in bfloat16")
    given = parser.parse_args()
    from tests.conformance.pool import line, run_all
    from tests.conformance.verdict import CANNOT, CONFORMS, Verdict, save_results
    from tests.conformance.zoo import Entry
    from tests.conformance.zoo.gpu import GPU, NOT_THERE, in_bfloat16

    entries = {entry.architecture: entry for entry in GPU}
    unknown = set(given.architectures) - set(entries)
    if unknown:
        parser.error(f"not in zoo/gpu.py: {', '.join(sorted(unknown))}")
    chosen = [entries[name] for name in given.architectures or entries if given.architectures or name not in NOT_THERE]
    if given.bfloat16:
        chosen = [in_bfloat16(entry) for entry in chosen]
    # Whatever stops stock vLLM is a verdict here.
    chosen = [dataclasses.replace(entry, verdict=CANNOT, reason=entry.reason or "?") for entry in chosen]
    results = given.out / "h200-0.26.json"
    given.out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(prefix="weir-conformance-") as scratch:
        logs = Path(scratch)

        def again(verdict: Verdict) -> Entry | None:
            """In bfloat16 what stock vLLM does not run in fp32."""
            if verdict.verdict != CANNOT or verdict.dtype != "float32":
                return None
            print(f"{verdict.architecture}: not in fp32: {verdict.reason}", flush=True)
            keep_log(verdict)
            entry = next(e for e in chosen if e.architecture == verdict.architecture)
            return in_bfloat16(entry)

        def keep_log(verdict: Verdict) -> None:
            with (given.out / "failures.log").open("a") as kept:
                for log in logs.glob(f"{verdict.architecture}*.log"):
                    kept.write(f"\n===== {log.stem}: {line(verdict)}\n")
                    kept.write(log.read_text(errors="replace")[-TAIL:])

        def done(verdict: Verdict) -> None:
            save_results([verdict], results)
            if verdict.verdict != CONFORMS:
                keep_log(verdict)

        until = STARTED + given.total
        found = run_all(chosen, logs, given.jobs, limit=given.limit, until=until, retry=True, again=again, done=done)
    table(found)


def table(verdicts) -> None:
    """Print what was found."""
    print(f"\n{'architecture':32}{'verdict':12}{'dtype':10}{'bound':8}{'reference':14}{'stock':9}worst per hook point")
    for v in verdicts:
        cells = []
        for hook, found in v.hooks.items():
            errors = [found[way] for way in ("capture", "steer") if found[way] is not None]
            cells.append(f"{hook} {max(errors):.0e} {found['layers']}/{found['of']}" if errors else f"{hook} -")
        stock = "-" if v.stock_error is None else f"{v.stock_error:.0e}"
        head = f"{v.architecture:32}{v.verdict:12}{v.dtype:10}{v.bound:<8.0e}{v.checked:14}{stock:9}"
        print(head + "; ".join(cells) + ("" if v.steady else " (stock vLLM is not steady)"), v.reason)
    good = sum(v.verdict == "conforms" for v in verdicts)
    print(f"{good} of {len(verdicts)} conform, {time.monotonic() - STARTED:.0f} s")


if __name__ == "__main__":
    main()
