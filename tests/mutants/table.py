"""The table of faults: `faults/AREA.toml`, one entry a fault."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults")
PACKAGE = Path("src/vllm_weir")


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` (below `src/vllm_weir/`) the text `old`, found exactly once, becomes `new`."""

    id: str
    area: str
    file: str
    fault: str
    tests: tuple[str, ...]
    old: str
    new: str

    @property
    def path(self) -> Path:
        """The changed file, relative to the repository."""
        return PACKAGE / self.file

    def original(self) -> str:
        """The file's text.

        Raises:
            LookupError: if there is no such file.
        """
        if not (ROOT / self.path).is_file():
            raise LookupError(f"no file {self.path}")
        return (ROOT / self.path).read_text()

    def applied(self) -> str:
        """The file's text with the fault.

        Raises:
            LookupError: unless `old` is there exactly once.
        """
        text = self.original()
        if (found := text.count(self.old)) != 1:
            raise LookupError(f"`old` is found {found} times in {self.path}")
        return text.replace(self.old, self.new)


def load() -> dict[str, Mutant]:
    """All faults by id, in the order of the table."""
    table: dict[str, Mutant] = {}
    for file in sorted(FAULTS.glob("*.toml")):
        for name, entry in tomllib.loads(file.read_text()).items():
            assert name not in table, f"two faults are called {name}"
            table[name] = Mutant(name, file.stem, **entry | {"tests": tuple(entry["tests"])})
    return table
