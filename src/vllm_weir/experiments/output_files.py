"""What the commands of experiments know of the files that they will write, before an engine is started."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_weir.analysis.plot_style import check_matplotlib, check_suffix
from vllm_weir.errors import WeirError, brief


def check_output(path: str, field: str) -> None:
    target = Path(path)
    if target.is_dir():
        raise WeirError(f"{brief(path, 200)} is a folder; name a file", field)
    if not target.parent.is_dir():
        raise WeirError(f"there is no folder {brief(str(target.parent), 200)}", field)
    if not os.access(target.parent, os.W_OK):
        raise WeirError(f"the folder {brief(str(target.parent), 200)} cannot be written to", field)


def check_plot(path: str, field: str = "plot") -> None:
    """Raise WeirError naming `field` unless a plot can be drawn and has the name of one; its folder may be missing."""
    check_suffix(path, field)
    check_matplotlib()
    if Path(path).parent.exists():
        check_output(path, field)
