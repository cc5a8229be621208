"""Distributions that lack a file: the source one must build, the wheel must hold the package."""

from __future__ import annotations

import fnmatch
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# setuptools takes these by itself.
ALWAYS = {"LICENSE", "MANIFEST.in", "README.md", "lily_mlx", "pyproject.toml", "setup.py"}


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in listed.stdout.splitlines()]


@pytest.fixture(scope="module")
def setuptools():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_the_source_distribution_takes_every_tracked_file(tracked):
    named = {
        word
        for line in (ROOT / "MANIFEST.in").read_text().splitlines()
        if line.startswith(("include ", "graft "))
        for word in line.split()[1:]
    }
    assert {path.parts[0] for path in tracked} - named - ALWAYS == set()


def test_every_package_and_its_data_are_in_the_wheel(tracked, setuptools):
    packages = {name.replace(".", "/") for name in setuptools["packages"]}
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
    ]
    for path in tracked:
        if path.parts[0] != "lily_mlx":
            continue
        if path.suffix == ".py" and str(path.parent) in packages:
            continue
        assert any(fnmatch.fnmatch(str(path), pattern) for pattern in patterns), path
