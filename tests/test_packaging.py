"""Distributions that lack a file: the source one must build, the wheel must hold the package."""

from __future__ import annotations

import ast
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


def _imported(path: Path) -> set[str]:
    """Top-level names of what a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_the_package_imports_nothing_that_is_not_installed():
    """benchmarks and tests are not in the wheel."""
    files = sorted((ROOT / "lily_mlx").rglob("*.py"))
    assert len(files) > 20
    found = {str(path): _imported(path) & {"benchmarks", "tests"} for path in files}
    assert not any(found.values()), {path: names for path, names in found.items() if names}
