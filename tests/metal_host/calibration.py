"""MLX's and mlx-lm's own Metal kernels, which are known to compile and to be right on a Mac, as
test cases: source, inputs, float32 reference. The headers come from the mlx-metal wheel."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from metal.host import Library
from metal.host.toolchain import cached

from .arrays import bf16, f32, quantized

VERSION = "0.32.4"
KERNELS = "mlx/backend/metal/kernels"


class Unavailable(Exception):
    """The wheel or mlx-lm cannot be had here; the text says which."""


@cache
def headers() -> Path:
    """Include folder of the mlx-metal wheel. Raises Unavailable."""

    def build(place: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--platform",
            "macosx_26_0_arm64",
            f"mlx-metal=={VERSION}",
            "-d",
            str(place),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"pip cannot fetch mlx-metal {VERSION}: {done.stderr.strip()[-200:]}")
        [wheel] = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as z:
            z.extractall(place, [n for n in z.namelist() if n.startswith(f"mlx/include/{KERNELS}")])
        wheel.unlink()

    return cached(f"mlx-metal-{VERSION}", build) / "mlx" / "include"


def _instance(name: str, kernel: str, *arguments) -> str:
    return f'instantiate_kernel("{name}", {kernel}, {", ".join(map(str, arguments))})\n'


def _include(*names: str) -> str:
    return "".join(f'#include "{KERNELS}/{n}"\n' for n in names)


QUANTIZED = _include("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h") + "".join(
    [
        _instance("qmv_fast", "affine_qmv_fast", "bfloat16_t", 64, 4, "false"),
        _instance("qmv", "affine_qmv", "bfloat16_t", 64, 4, "false"),
        _instance("gather_qmv", "affine_gather_qmv", "bfloat16_t", 64, 4),
        _instance("qmm_t", "affine_qmm_t", "bfloat16_t", 64, 4, "false", "false"),
        _instance("qmm_n", "affine_qmm_n", "bfloat16_t", 64, 4, "false"),
    ]
)
NAX = _include(
    "utils.h", "steel/gemm/gemm.h", "steel/gemm/nax.h", "steel/gemm/loader.h", "quantized_nax.h"
) + "".join(
    [
        _instance(
            "qmm_t_nax", "affine_qmm_t_nax", "bfloat16_t", 64, 4, "true", "false", 64, 64, 64, 2, 2
        ),
        _instance("qmm_n_nax", "affine_qmm_n_nax", "bfloat16_t", 64, 4, "false", 64, 64, 64, 2, 2),
    ]
)
SDPA = _include("utils.h", "sdpa_vector.h") + "".join(
    [
        _instance("sdpa_vector", "sdpa_vector", "bfloat16_t", 256, 256),
        _instance("sdpa_2pass_1", "sdpa_vector_2pass_1", "bfloat16_t", 256, 256),
        _instance("sdpa_2pass_2", "sdpa_vector_2pass_2", "bfloat16_t", 256),
    ]
)
SOFTMAX = (
    _include("utils.h")
    + "#define SOFTMAX_N_READS 4\n"
    + _include("softmax.h")
    + "".join(
        [
            _instance("block_softmax", "softmax_single_row", "bfloat16_t", "float"),
            _instance("looped_softmax", "softmax_looped", "bfloat16_t", "float"),
        ]
    )
)


def gated_delta_source() -> str:
    """The three scalar-gate kernels of mlx-lm, in the signature that metal_kernel writes."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None:
        raise Unavailable("mlx-lm is not installed")
    tree = ast.parse(
        (Path(spec.submodule_search_locations[0]) / "models" / "gated_delta.py").read_text()
    )
    names = {
        "gated_delta": "_make_gated_delta_kernel",
        "gated_delta_xtree": "_make_gated_delta_kernel_xtree",
        "gated_delta_packed": "_make_gated_delta_packed_kernel",
    }
    values = {
        "mask_source": "true",
        "g_comment": "",
        "g_setup": "auto g_ = g + b_idx * T * Hv;",
        "g_access": "g_[hv_idx]",
        "g_advance": "g_ += Hv;",
    }
    text = _include("utils.h")
    for name, function in names.items():
        [body] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
        [found] = [
            n.value
            for n in ast.walk(body)
            if isinstance(n, ast.Assign) and n.targets[0].id == "source"
        ]
        source = eval(compile(ast.Expression(found), "gated_delta.py", "eval"), {}, values)
        parameters = [
            f"const device {t}* {n} [[buffer({i})]]"
            for i, (n, t) in enumerate(
                [
                    ("q", "InT"),
                    ("k", "InT"),
                    ("v", "InT"),
                    ("g", "float"),
                    ("beta", "InT"),
                    ("state_in", "StT"),
                ]
            )
        ]
        parameters += [
            "const constant int& T [[buffer(6)]]",
            "device InT* y [[buffer(7)]]",
            "device StT* state_out [[buffer(8)]]",
        ]
        for builtin, kind in [
            ("thread_position_in_grid", "uint3"),
            ("thread_position_in_threadgroup", "uint3"),
            ("thread_index_in_simdgroup", "uint"),
        ]:
            if builtin in source:
                parameters.append(f"{kind} {builtin} [[{builtin}]]")
        text += (
            "template <typename InT, typename StT, int Dk, int Dv, int Hk, int Hv>\n"
            f"[[kernel]] void {name}_(\n    " + ",\n    ".join(parameters) + f") {{\n{source}\n}}\n"
        )
        text += _instance(name, name + "_", "bfloat16_t", "float", 128, 128, 2, 4)
    return text


ALIGNED = {200: True, 201: True, 202: True}
PLAIN_ATTENTION = {20: False, 21: False, 22: False, 23: False, 24: False, 25: False, 26: 32}
SOURCES: dict[str, tuple[Callable[[], str], dict, str]] = {
    "quantized": (lambda: QUANTIZED, ALIGNED, "3.1"),
    "nax": (lambda: NAX, ALIGNED, "4.0"),
    "sdpa": (lambda: SDPA, PLAIN_ATTENTION, "3.1"),
    "softmax": (lambda: SOFTMAX, {}, "3.1"),
    "gated_delta": (gated_delta_source, {}, "3.1"),
}


@cache
def library(
    name: str, host: str = "cpu", first: Path | None = None, contract: str = "fast"
) -> Library:
    """One source of SOURCES, compiled. first: a folder whose headers come before the wheel's."""
    text, constants, metal = SOURCES[name]
    include = [str(p) for p in (first, headers()) if p]
    return Library(
        source=text(),
        constants=constants,
        host=host,
        include=include,
        metal=metal,
        rules="metal",
        contract=contract,
    )


@dataclass
class Case:
    """A dispatch and the float32 outputs that it must give, within `tolerance` of the largest."""

    source: str
    kernel: str
    buffers: dict
    grid: tuple
    threadgroup: tuple
    expected: dict[int, np.ndarray]
    tolerance: float = 0.01
    keywords: dict = field(default_factory=dict)

    def run(self, compiled: Library, **keywords):
        """-> (outputs by index, as float32; the dispatch's Result)."""
        buffers = {i: b.copy() if isinstance(b, np.ndarray) else b for i, b in self.buffers.items()}
        result = compiled[self.kernel](buffers, self.grid, self.threadgroup, **keywords)
        return {i: f32(buffers[i]) for i in self.expected}, result

    def error(self, outputs) -> float:
        """Largest difference from the reference, as a share of the largest value."""
        return max(
            float(np.abs(outputs[i].reshape(e.shape) - e).max() / np.abs(e).max())
            for i, e in self.expected.items()
        )


def _absent(first: int, last: int) -> dict:
    return {i: None for i in range(first, last + 1)}


def _qmv(kernel: str, k: int, n: int) -> Case:
    rng = np.random.default_rng(1)
    w, s, b, values = quantized(rng, n, k)
    x = bf16(rng.normal(size=(1, k)))
    buffers = {0: w, 1: s, 2: b, 3: x, 4: np.zeros((1, n), np.uint16), 5: k, 6: n, **_absent(7, 14)}
    return Case(
        "quantized", kernel, buffers, (1, -(-n // 8), 1), (32, 2, 1), {4: f32(x) @ values.T}
    )


def _gather_qmv() -> Case:
    rng = np.random.default_rng(2)
    experts, k, n, rows = 4, 512, 64, 3
    w, s, b, values = quantized(rng, experts, n, k)
    x = bf16(rng.normal(size=(rows, 1, k)))
    chosen, order = np.array([3, 0, 3], np.uint32), np.arange(rows, dtype=np.uint32)
    buffers = {
        0: w,
        1: s,
        2: b,
        3: x,
        4: order,
        5: chosen,
        6: np.zeros((rows, 1, n), np.uint16),
        7: k,
        8: n,
        9: 1,
        10: (rows, 1, k),
        11: (k, k, 1),
        12: 1,
        13: (experts, n, k // 8),
        14: (n * k // 8, k // 8, 1),
        15: (n * k // 64, k // 64, 1),
        16: (n * k // 64, k // 64, 1),
        17: 1,
        18: (rows,),
        19: (1,),
        20: (1,),
    }
    expected = np.stack([f32(x[i]) @ values[e].T for i, e in enumerate(chosen)])
    return Case("quantized", "gather_qmv", buffers, (1, n // 8, rows), (32, 2, 1), {6: expected})


def _qmm(source: str, kernel: str, m: int, k: int, n: int, block: int) -> Case:
    rng = np.random.default_rng(3)
    transposed = "_t" in kernel
    w, s, b, values = quantized(rng, *((n, k) if transposed else (k, n)))
    x = bf16(rng.normal(size=(m, k)))
    buffers = {
        0: w,
        1: s,
        2: b,
        3: x,
        4: np.zeros((m, n), np.uint16),
        5: k,
        6: n,
        7: m,
        **_absent(8, 15),
    }
    expected = f32(x) @ (values.T if transposed else values)
    return Case(
        source, kernel, buffers, (-(-n // block), -(-m // block), 1), (32, 2, 2), {4: expected}
    )


HEADS, KV_HEADS, DIM, LENGTH, BLOCKS = 16, 2, 256, 75, 32


@cache
def _attention():
    rng = np.random.default_rng(4)
    q = bf16(rng.normal(size=(HEADS, DIM)))
    k, v = (bf16(rng.normal(size=(KV_HEADS, LENGTH, DIM))) for _ in range(2))
    scores = np.einsum("hgd,hnd->hgn", f32(q).reshape(KV_HEADS, -1, DIM), f32(k)) * DIM**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hgn,hnd->hgd", p / p.sum(-1, keepdims=True), f32(v)).reshape(HEADS, DIM)
    return q, k, v, scores.reshape(HEADS, LENGTH), out


def _sdpa() -> Case:
    q, k, v, _, out = _attention()
    head, row = LENGTH * DIM, DIM
    buffers = {
        0: q,
        1: k,
        2: v,
        3: np.zeros((HEADS, DIM), np.uint16),
        4: HEADS // KV_HEADS,
        5: LENGTH,
        6: head,
        7: row,
        8: head,
        9: row,
        10: DIM**-0.5,
    }
    return Case("sdpa", "sdpa_vector", buffers, (HEADS, 1, 1), (1024, 1, 1), {3: out})


def _sdpa_blocks():
    """What the first pass gives per head and block of keys: output, sum and maximum."""
    q, k, v, scores, _ = _attention()
    partial, sums, maxima = (
        np.zeros((HEADS, BLOCKS, DIM), np.float32),
        np.zeros((HEADS, BLOCKS)),
        np.zeros((HEADS, BLOCKS)),
    )
    for h in range(HEADS):
        for b in range(BLOCKS):
            s = scores[h, b::BLOCKS]
            maxima[h, b] = s.max()
            p = np.exp(s - s.max())
            sums[h, b] = p.sum()
            partial[h, b] = p @ f32(v)[h // (HEADS // KV_HEADS), b::BLOCKS]
    return partial, sums.astype(np.float32), maxima.astype(np.float32)


def _sdpa_first() -> Case:
    q, k, v, _, _ = _attention()
    partial, sums, maxima = _sdpa_blocks()
    head, row = LENGTH * DIM, DIM
    buffers = {
        0: q,
        1: k,
        2: v,
        3: np.zeros((HEADS, BLOCKS, DIM), np.uint16),
        4: np.zeros((HEADS, BLOCKS), np.float32),
        5: np.zeros((HEADS, BLOCKS), np.float32),
        7: LENGTH,
        8: head,
        9: row,
        10: head,
        11: row,
        12: DIM**-0.5,
    }
    return Case(
        "sdpa",
        "sdpa_2pass_1",
        buffers,
        (KV_HEADS, 1, BLOCKS),
        (32, HEADS // KV_HEADS, 1),
        {3: partial, 4: sums, 5: maxima},
    )


def _sdpa_second() -> Case:
    partial, sums, maxima = _sdpa_blocks()
    buffers = {
        0: bf16(partial),
        1: sums,
        2: maxima,
        3: np.zeros((HEADS, DIM), np.uint16),
        4: BLOCKS,
    }
    return Case("sdpa", "sdpa_2pass_2", buffers, (HEADS, 1, 1), (1024, 1, 1), {3: _attention()[-1]})


def _softmax(kernel: str, rows: int, size: int, threads: int) -> Case:
    x = bf16(np.random.default_rng(5).normal(size=(rows, size)) * 3)
    e = np.exp(f32(x) - f32(x).max(-1, keepdims=True))
    return Case(
        "softmax",
        kernel,
        {0: x, 1: np.zeros_like(x), 2: size},
        (rows,),
        (threads,),
        {1: e / e.sum(-1, keepdims=True)},
    )


@cache
def _recurrence():
    rng = np.random.default_rng(6)
    steps, key_heads, heads, dk, dv = 4, 2, 4, 128, 128
    q, k = (
        bf16(rng.normal(size=(steps, key_heads, dk)) * 0.1),
        rng.normal(size=(steps, key_heads, dk)),
    )
    k = bf16(k / np.linalg.norm(k, axis=-1, keepdims=True))
    v, g = (
        bf16(rng.normal(size=(steps, heads, dv))),
        rng.uniform(0.5, 1.0, (steps, heads)).astype(np.float32),
    )
    beta, state = (
        bf16(rng.uniform(0.1, 0.9, (steps, heads))),
        (rng.normal(size=(heads, dv, dk)) * 0.1).astype(np.float32),
    )
    s, y, per = state.astype(np.float64), np.zeros((steps, heads, dv)), heads // key_heads
    for t in range(steps):
        kt, qt = np.repeat(f32(k)[t], per, 0), np.repeat(f32(q)[t], per, 0)
        s = s * g[t][:, None, None]
        delta = (f32(v)[t] - np.einsum("hvk,hk->hv", s, kt)) * f32(beta)[t][:, None]
        s = s + delta[:, :, None] * kt[:, None, :]
        y[t] = np.einsum("hvk,hk->hv", s, qt)
    return (q, k, v, g, beta, state, steps), y, s


def _gated_delta(kernel: str) -> Case:
    inputs, y, state = _recurrence()
    buffers = {
        **dict(enumerate(inputs)),
        7: np.zeros(y.shape, np.uint16),
        8: np.zeros(state.shape, np.float32),
    }
    rows, group = (8, (32, 2, 1)) if kernel.endswith("packed") else (1, (32, 4, 1))
    return Case(
        "gated_delta",
        kernel,
        buffers,
        (1, 128 // rows // group[1], 4),
        group,
        {7: y.astype(np.float32), 8: state.astype(np.float32)},
    )


CASES: dict[str, Callable[[], Case]] = {
    "qmv_fast": lambda: _qmv("qmv_fast", 1024, 64),
    "qmv": lambda: _qmv("qmv", 576, 40),
    "qmv ragged rows": lambda: _qmv("qmv", 576, 37),
    "gather_qmv": _gather_qmv,
    "qmm_t": lambda: _qmm("quantized", "qmm_t", 40, 128, 64, 32),
    "qmm_t ragged": lambda: _qmm("quantized", "qmm_t", 19, 128, 40, 32),
    "qmm_t ragged columns": lambda: _qmm("quantized", "qmm_t", 32, 128, 40, 32),
    "qmm_n": lambda: _qmm("quantized", "qmm_n", 40, 128, 64, 32),
    "qmm_n ragged depth": lambda: _qmm("quantized", "qmm_n", 40, 80, 64, 32),
    "qmm_t_nax": lambda: _qmm("nax", "qmm_t_nax", 100, 128, 128, 64),
    "qmm_n_nax": lambda: _qmm("nax", "qmm_n_nax", 100, 128, 128, 64),
    "sdpa_vector": _sdpa,
    "sdpa_2pass_1": _sdpa_first,
    "sdpa_2pass_2": _sdpa_second,
    "block_softmax": lambda: _softmax("block_softmax", 3, 250, 64),
    "looped_softmax": lambda: _softmax("looped_softmax", 2, 5000, 1024),
    "gated_delta": lambda: _gated_delta("gated_delta"),
    "gated_delta_xtree": lambda: _gated_delta("gated_delta_xtree"),
    "gated_delta_packed": lambda: _gated_delta("gated_delta_packed"),
}
