"""The package's PTX is what its kernels compile to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lily_mlx import kernels, ptx


def test_the_package_has_what_its_models_run():
    index = json.loads((ptx.FOLDER / "index.json").read_text())
    assert set(index) == set(ptx.packaged())
    files = {name for name, _ in index.values()}
    assert files == {path.name for path in ptx.FOLDER.glob("*.ptx")}


def test_it_is_not_stale(tmp_path: Path):
    """Compiled again it is the same text, so long as the compiler is the same."""
    toolchain = pytest.importorskip("metal.host.toolchain")
    try:
        ptx.build(ptx.packaged().values(), kernels.folder(), tmp_path)
    except toolchain.HostError as error:
        pytest.skip(f"no compiler for PTX here: {error}")
    made = json.loads((tmp_path / "index.json").read_text())
    index = json.loads((ptx.FOLDER / "index.json").read_text())
    stale = {entry for key, (name, entry) in made.items() if index[key][0] != name}
    assert not stale, "stale: run python -m lily_mlx.ptx"
