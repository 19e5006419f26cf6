"""What a release says of itself agrees, its workflow can be read, and both distributions build."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import vllm_weir as weir
from tests.support.machine import module, needs
from tests.support.markdown import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / "scripts" / "release.py"


def test_one_place_has_the_version():
    command = [sys.executable, RELEASE, "version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert told == weir.__version__ and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "vllm_weir.__version__"}
    assert f"\nversion: {told}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", told]


def test_the_pythons_are_those_that_the_tests_run_on():
    setup = (ROOT / "scripts" / "setup_env.py").read_text()
    pythons = re.findall(r"\((3), (\d+)\)", re.search(r"^PYTHONS = (.*)$", setup, re.M)[1])
    named = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"] if "Python :: 3." in one]
    assert named == [".".join(one) for one in pythons]
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["smoke"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_can_be_read_and_may_do_little(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and set(job.get("needs", "").split()) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for name in re.findall(r"\b(?:scripts|\.ci)/[\w./]+", step.get("run", "")):
                assert (ROOT / name).is_file()
    publishing = [job for job in workflow["jobs"].values() if "permissions" in job]
    assert all(job["permissions"] == {"id-token": "write"} and job["environment"] for job in publishing)


def test_dependabot_keeps_actions_and_packages_new():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert {one["package-ecosystem"] for one in updates} == {"github-actions", "pip"}
    for one in updates:
        assert (ROOT / one["directory"].lstrip("/")).is_dir()


@pytest.mark.thorough
@needs(module("build"), module("twine"), module("cyclonedx_py"))
def test_both_distributions_build_and_are_whole():
    subprocess.run([sys.executable, RELEASE, "build"], check=True, cwd=ROOT)
