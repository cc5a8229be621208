"""Runs kernels on the Metal host, with the constants and buffers that metal/README*.md tabulate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from metal.host import Library
from metal.manifest import language

from .reference import BF16, FP16, Dtype, Weight

METAL = Path(__file__).resolve().parents[2] / "metal"
FILES = {k["kernel"]: k["file"] for k in json.loads((METAL / "manifest.json").read_text())}
HOSTS = ("cpu", "checked")
halves = pytest.mark.parametrize("a", [BF16, FP16], ids=lambda a: a.name)

# For the tests of the checks: options of every checked launch, and, when a list, what each left in
# its buffers.
run_options: dict = {}
record: list[bytes] | None = None


def headers() -> list[str]:
    """The kernels' headers, as they include each other."""
    files = (f.relative_to(METAL) for f in METAL.rglob("*.h"))
    return sorted(f.as_posix() for f in files if f.parts[0] != "host")


@cache
def library(file: str, constants: tuple, host: str) -> Library:
    metal = language(Path(file))
    return Library(METAL / file, constants=dict(constants), host=host, metal=metal)


def launch(
    name: str,
    buffers: Mapping[int, np.ndarray] | Sequence[np.ndarray],
    grid: int | tuple[int, ...],
    threads: int,
    host: str = "cpu",
    constants: Mapping[int, int | float | bool] | None = None,
) -> None:
    """Runs one kernel over `grid` threadgroups of `threads` threads, writing outputs in place.

    buffers: by index; numbers stand for what a kernel takes by value.
    """
    kernels = library(FILES[name], tuple(sorted((constants or {}).items())), host)
    grid = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    options = run_options if host == "checked" else {}
    kernels[name](buffers, grid, (threads, 1, 1), **options)
    if record is not None and host == "checked":
        given = buffers.values() if isinstance(buffers, Mapping) else buffers
        record.extend(b.tobytes() for b in given if isinstance(b, np.ndarray))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def params(*values: int | float) -> np.ndarray:
    """A parameter struct (metal/params.h): int32, or float32 where the value is a Python float."""
    fields = [np.float32(v) if isinstance(v, float) else np.int32(v) for v in values]
    return np.array([f.view(np.int32) for f in fields])


def weight_buffers(w: Weight, first: int) -> dict[int, np.ndarray]:
    """Buffers first (codes), first + 1 (scales), first + 2 (biases); unquantized rows have only the
    first.
    """
    if w.scales is None:
        return {first: w.w}
    return {first: w.w, first + 1: w.scales, first + 2: w.biases}


def bound(w: Weight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, biases) for a kernel that binds them always."""
    return (w.w, w.w, w.w) if w.scales is None else (w.w, w.scales, w.biases)


def weight_format(w: Weight) -> dict[int, int]:
    """The constants of the kernels of several rows: bits and group."""
    return {0: w.bits, 1: w.group}


# By the prefix of a GEMM's name: by the rows of a block, its (columns, threads).
UNITS = {
    "": dict.fromkeys((16, 32, 64), (64, 128)),
    "nax_": dict.fromkeys((32, 64), (64, 128)),
    "mma_": {16: (128, 128), 32: (128, 128), 64: (256, 256)},
}


def multi(
    name: str,
    x: np.ndarray,
    weights: Sequence[Weight | None],
    out: Dtype,
    leading: Sequence[int],
    columns: int,
    blocks: int,
    threads: int,
    host: str,
) -> list[np.ndarray]:
    """The products of x [rows, K] with up to four matrices side by side, as values.

    weights: None stands for no matrix.
    leading: fields of the parameters before the matrices' rows.
    columns, blocks: weight rows that a threadgroup makes, blocks of rows of x.
    """
    weights = [*weights, None, None, None][:4]
    rows = [0 if w is None else len(w.values) for w in weights]
    ys = [out.store(np.full((len(x), max(n, 1)), 7.0)) for n in rows]
    buffers = [x]
    for w, y in zip(weights, ys, strict=True):
        buffers += [*((x, x, x) if w is None else bound(w)), y]
    groups = sum(ceil_div(n, columns) for n in rows)
    constants = weight_format(next(w for w in weights if w is not None))
    buffers.append(params(*leading, *rows))
    launch(name, buffers, (groups, blocks), threads, host, constants)
    for n, y in zip(rows, ys, strict=True):
        assert n or (out.load(y) == 7).all(), "an absent matrix was written"
    return [out.load(y) for n, y in zip(rows, ys, strict=True) if n]


def gemv_constants(
    k: int,
    weights: list[Weight],
    *,
    lanes: int = 32,
    r: int = 1,
    u: int = 1,
    split: int = 1,
    simdgroups: int = 4,
    blocks: int = 1,
    norm: bool = False,
    residual: bool = False,
    write_x: bool = False,
    eps: float = 1e-6,
) -> dict[int, int | float | bool]:
    rows = [w.values.shape[0] for w in weights] + [0] * 4
    bits = [w.bits for w in weights] + [weights[0].bits] * 4
    c: dict[int, int | float | bool] = {0: k, 9: weights[0].group}
    c.update({1 + i: rows[i] for i in range(4)})
    c.update({5 + i: bits[i] for i in range(4)})
    c.update({10: lanes, 11: r, 12: u, 13: split, 14: simdgroups, 15: blocks})
    c.update({16: norm, 17: residual, 18: write_x, 19: eps})
    c.update({22 + i: rows[i] > 0 for i in (1, 2, 3)})
    c.update({26 + i: rows[i] > 0 and bits[i] <= 8 for i in range(4)})
    return c


def gemv_grid(c: dict) -> int:
    """Threadgroups that cover every block of rows."""
    block_rows = c[11] * (32 // c[10])
    blocks = sum(ceil_div(c[1 + i], block_rows) for i in range(4))
    return ceil_div(ceil_div(blocks, c[15]) * c[13], c[14])


def kmax(k: int) -> int:
    return next(m for m in (2048, 4096, 8192) if k <= m)


def gemv_name(a: Dtype, out: Dtype, k: int) -> str:
    middle = a.name if out.name == a.name else f"{a.name}_{out.name}"
    return f"gemv_{middle}_k{kmax(k)}"


MMA = dict(lanes=2, r=1)
"""What the tensor-core form's blocks of 16 rows are to who counts rows (gemv_mma.h)."""
