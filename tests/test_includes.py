"""Includes of csrc point one way: primitives, run and model, ops, program."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
PROGRAM = {
    "program", "schedule", "kernels", "spec", "choice", "layer_options", "builder",
    "layer_program",
}  # fmt: skip


def includes(folder, stems=None):
    """(file, what it includes with quotes) of a folder's files."""
    for file in sorted((CSRC / folder).glob("*")):
        if file.suffix in (".h", ".cpp") and (stems is None or file.stem in stems):
            yield file.name, set(re.findall(r'^#include "([^"]+)"', file.read_text(), re.M))


@pytest.mark.parametrize(
    "folder, stems, allowed",
    [
        (".", PROGRAM, r"(reference|mlx)/.*types\.h"),
        ("ops", None, r"(ops/|\.\./metal/params\.h|reference/types\.h)"),
        (".", {"model"}, r"ops/"),
        (".", {"run"}, r"(ops/|mlx/|backend/(gpu|host)\.h|run\.h)"),
        ("primitives", None,
         r"(ops/|mlx/|primitives/|reference/|backend/(gpu|host)\.h|run\.h|model\.h)"),
    ],
)  # fmt: skip
def test_lower_layers_do_not_know_the_upper_ones(folder, stems, allowed):
    own = {f"{s}.h" for s in PROGRAM | (stems or set())}
    found = list(includes(folder, stems))
    assert found
    for name, included in found:
        wrong = {i for i in included - own if not re.match(allowed, i)}
        assert not wrong, (name, wrong)


def test_nothing_includes_the_metal_host():
    for folder in (".", "ops", "primitives", "backend", "reference"):
        for name, included in includes(folder):
            assert not any("metal/host" in i for i in included), name
