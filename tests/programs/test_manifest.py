"""The manifest says what the kernel sources say, and every source reaches a runtime compiler."""

import json

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


def test_loading_twice_does_nothing():
    kernels.load()
    kernels.load()
