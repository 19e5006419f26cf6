"""One architecture from its tiny model to its verdict: `python -m tests.conformance.run_one ARCH [--out FILE]`."""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.conformance.engine import Engine, device_name, set_environment
from tests.conformance.verdict import CANNOT, CONFORMS, FAILS, REFUSED, Verdict
from tests.conformance.zoo import VARIANTS, ZOO, Entry, build


def run_one(entry: Entry, where: Path, *, retry: bool = False, lens: bool = False) -> Verdict:
    """The verdict on one architecture; `where` is an empty directory for its model.

    Args:
        retry: run what the zoo says cannot be run, too.
        lens: check the lens alone.
    """
    start, checked = time.monotonic(), "transformers" if _has_oracle(entry) else "identities"
    verdict = Verdict(entry.name, bound=entry.bound, dtype=entry.dtype, checked=checked, differs=entry.differs)
    if entry.verdict and not retry:
        verdict.verdict, verdict.reason = entry.verdict, entry.reason
        verdict.checked = "by running it" if entry.tried else "by reading its source"
    else:
        _run(entry, where, verdict, lens)
    import vllm

    verdict.vllm, verdict.backend = vllm.__version__, device_name()
    verdict.seconds = round(time.monotonic() - start, 1)
    return verdict


def run_stock(entry: Entry, where: Path) -> None:
    """The batch by stock vLLM without Weir, to see whether it gets through; `where` as above."""
    import os

    import torch

    os.environ["VLLM_PLUGINS"] = ""
    torch.set_num_threads(1)
    build(entry, where)
    Engine(entry, where).ask(plain=True)


def _run(entry: Entry, where: Path, verdict: Verdict, lens: bool) -> None:
    import torch

    from tests.conformance.remote import RemoteOracle

    torch.set_num_threads(1)
    build(entry, where)
    oracle = RemoteOracle(where) if _has_oracle(entry) else None
    try:
        try:
            engine = Engine(entry, where)
            verdict.model_class = engine.model_class
            stock = engine.ask(plain=True)
            if device_name() != "cpu":
                verdict.steady = all(a.same(b) for a, b in zip(stock, engine.ask(plain=True)))
        except Exception as e:  # noqa: BLE001 - whatever stops stock vLLM is the verdict; only what is expected passes
            verdict.verdict, verdict.reason = CANNOT if entry.verdict else FAILS, _brief(e)
            traceback.print_exc()
            return
        _judge(entry, engine, oracle, stock, verdict, lens)
    finally:
        if oracle is not None:
            oracle.close()


def _has_oracle(entry: Entry) -> bool:
    return entry.oracle and not entry.identities


def _judge(entry: Entry, engine: Engine, oracle: Any, stock: Any, verdict: Verdict, lens: bool) -> None:
    import vllm_weir as weir
    from tests.conformance.against_identities import check_identities
    from tests.conformance.against_oracle import check_oracle, stock_error
    from tests.conformance.checks import Wrong, check_refusals
    from tests.conformance.lens import check_lens
    from tests.conformance.oracle import NoPoint

    try:
        try:
            sites = weir.sites(engine.llm)
        except weir.WeirError as e:
            verdict.verdict, verdict.reason = REFUSED, str(e)
            return
        if not any(site.supported for site in sites):
            verdict.verdict, verdict.reason = REFUSED, next(iter(sites)).reason
            check_refusals(engine, sites)
            return
        if oracle is not None:
            verdict.stock_error = stock_error(stock, oracle)
            if verdict.stock_error > entry.bound:
                if not entry.apart:
                    raise Wrong(f"requests without keys of Weir's are {verdict.stock_error:.1e} from transformers")
                verdict.checked, verdict.note, oracle = "identities", entry.apart, None
                verdict.bound = max(entry.bound, entry.apart_bound)
        if lens:
            verdict.verdict = CONFORMS
        elif oracle is not None:
            check_oracle(engine, oracle, sites, stock, verdict.bound, verdict)
        else:
            check_identities(engine, sites, stock, verdict.bound, verdict)
        check_lens(engine, oracle, verdict)
    except NoPoint as e:
        verdict.verdict, verdict.reason = FAILS, f"Weir serves points, but the reference finds none: {e}"
    except Exception as e:  # noqa: BLE001 - anything unforeseen is a failure, and says so
        verdict.verdict, verdict.reason = FAILS, _brief(e)
        traceback.print_exc()


def _brief(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    return text if kind == "Wrong" else f"{kind}: {text} ({Path(place.filename).name})"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    entries = ZOO | VARIANTS
    parser.add_argument("architecture", choices=sorted(entries), metavar="ARCH[:VARIANT]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--retry", action="store_true", help="also what the zoo says cannot be run")
    parser.add_argument("--lens", action="store_true", help="the lens alone")
    arguments = parser.parse_args()
    set_environment()
    with tempfile.TemporaryDirectory(prefix="weir-zoo-") as scratch:
        verdict = run_one(
            entries[arguments.architecture], Path(scratch) / "model", retry=arguments.retry, lens=arguments.lens
        )
    if arguments.out:
        verdict.save(arguments.out)
    print(verdict)


if __name__ == "__main__":
    main()
