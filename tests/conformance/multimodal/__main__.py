"""``python -m tests.conformance.multimodal [ARCH ...]``: every multimodal model, a process each, and docs/models.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.multimodal.finding import RESULTS, Finding, load, save
from tests.conformance.multimodal.more_recipes import ALL_RECIPES


def main() -> int:
    """The command; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.multimodal", description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="ARCH", help=f"default: {', '.join(ALL_RECIPES)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where findings are written; another on a GPU")
    arguments = parser.parse_args()
    names = arguments.architectures or list(ALL_RECIPES)
    with tempfile.TemporaryDirectory(prefix="weir-multimodal-") as scratch:
        for name in names:
            out = Path(scratch) / f"{name}.json"
            subprocess.run([sys.executable, "-m", "tests.conformance.multimodal.run_one", name, str(out)], check=False)
            finding = (
                Finding(**json.loads(out.read_text())) if out.exists() else Finding(name, "?", failed="it crashed")
            )
            save([finding], arguments.results, keep=ALL_RECIPES)
            print(finding, flush=True)
    return int(any(bad(one) for one in load(arguments.results).values()))


def bad(finding: Finding) -> bool:
    """Whether a finding is a failure: something is off, or stopped what could be run."""
    recipe = ALL_RECIPES[finding.architecture]
    errors = [error for error in (finding.text, finding.items, finding.steered, finding.lens) if error is not None]
    return any(error > 1e-5 for error in errors) or bool(finding.failed and not recipe.no_media)


if __name__ == "__main__":
    sys.exit(main())
