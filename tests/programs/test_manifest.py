"""The manifest says what the kernel sources say, and every source reaches a runtime compiler."""

import json
import re
from pathlib import Path

from lily_mlx import _ext, kernels
from metal import manifest


def test_the_manifest_is_up_to_date():
    assert json.loads((manifest.FOLDER / "manifest.json").read_text()) == manifest.collect()


def test_every_kernel_is_registered_with_its_source():
    listed = json.loads((kernels.folder() / "manifest.json").read_text())
    registry = _ext.kernels()
    assert sorted(e["kernel"] for e in listed) == registry.names()
    names = set()
    for file in {e["file"] for e in listed}:
        name, text = registry.source(file)
        assert text.isascii() and '#include "' not in text
        names.add(name)
    assert len(names) == len({e["file"] for e in listed})


def test_no_mac_compiles_what_only_nvidia_has():
    """The NVIDIA header is reached from the _mma files alone."""
    folder = manifest.FOLDER

    def includes(file: Path) -> set[str]:
        found = re.findall(r'#include [<"]([^>"]+)[>"]', file.read_text())
        return set(found).union(*(includes(folder / f) for f in found if (folder / f).exists()))

    users = {f.stem for f in folder.rglob("*.metal") if "nvidia_simdgroup" in includes(f)}
    assert users and all(name.endswith("_mma") for name in users)


def test_loading_twice_does_nothing():
    kernels.load()
    kernels.load()
