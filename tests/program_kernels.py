"""Kernels that exist by name only, for Programs that no test runs."""

import pytest

from lily_mlx import _ext

MANIFEST = [
    {
        "kernel": "map_f32",
        "file": "map.metal",
        "constants": [{"id": 0, "name": "bits", "type": "int"}],
        "arguments": [
            {"index": 0, "name": "x", "space": "device", "access": "read", "type": "float*"},
            {"index": 1, "name": "y", "space": "device", "access": "read_write", "type": "float*"},
            {"index": 2, "name": "n", "space": "constant", "access": "read", "type": "int&"},
            {"index": 0, "name": "sums", "space": "threadgroup", "access": "read_write",
             "type": "float*"},
        ],
    },
    {
        "kernel": "move",
        "file": "map.metal",
        "constants": [],
        "arguments": [
            {"index": 0, "name": "x", "space": "device", "access": "read", "type": "uint*"},
            {"index": 1, "name": "z", "space": "device", "access": "read", "type": "uint*"},
            {"index": 2, "name": "y", "space": "device", "access": "read_write", "type": "uint*"},
        ],
    },
    {
        "kernel": "guarded",
        "file": "map.metal",
        "constants": [{"id": 3, "name": "has_mask", "type": "bool"}],
        "arguments": [
            {"index": 0, "name": "y", "space": "device", "access": "write", "type": "float*"},
            {"index": 1, "name": "mask", "space": "device", "access": "read", "type": "bool*",
             "condition": "has_mask"},
        ],
    },
]  # fmt: skip


@pytest.fixture
def registry():
    r = _ext.KernelRegistry()
    for entry in MANIFEST:
        r.add(entry)
    return r


@pytest.fixture
def move(registry):
    """move(program, y, x, z=None): a launch that reads x and z and writes y; (slot, offset, n)."""

    def add(program, y, x, z=None, **options):
        d = _ext.Dispatch(registry.at("move")).read("x", *x).read("z", *(z or x))
        d.read_write("y", *y) if options.get("update") else d.write("y", *y)
        return program.add(d.label(options.get("label", "move")))

    return add
