"""Runs the decode kernels on the Metal host, with the constants and buffers that metal/README.md
tabulates.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from reference import Dtype, Weight

from metal.host import Library

METAL = Path(__file__).resolve().parents[3] / "metal"

# For the tests of the checks: passed on to every launch, and, when a list, given what each launch
# left in its buffers.
run_options: dict = {}
record: list[bytes] | None = None


@cache
def _library(file: str, constants: tuple, host: str) -> Library:
    return Library(METAL / file, constants=dict(constants), host=host)


def launch(
    file: str,
    name: str,
    constants: dict[int, int | float | bool],
    buffers: dict[int, np.ndarray],
    grid: tuple[int, ...],
    threads: int,
    host: str,
) -> None:
    """Runs one kernel over `grid` threadgroups of `threads` threads, writing outputs in place."""
    library = _library(file, tuple(sorted(constants.items())), host)
    grid = (*grid, 1, 1)[:3]
    library[name](buffers, grid, (threads, 1, 1), **run_options)
    if record is not None:
        record.extend(b.tobytes() for b in buffers.values() if isinstance(b, np.ndarray))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def weight_buffers(w: Weight, first: int) -> dict[int, np.ndarray]:
    """Buffers first (codes), first + 1 (scales), first + 2 (biases); unquantized rows have only the
    first.
    """
    if w.scales is None:
        return {first: w.w}
    return {first: w.w, first + 1: w.scales, first + 2: w.biases}


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


SYNC = dict(lanes=2, r=1)
"""What the tensor-core form's blocks of 16 rows are to who counts rows (gemv_sync.h)."""
