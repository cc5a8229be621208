"""`python -m benchmarks gpu_gemm`: prefill's GEMMs alone on an NVIDIA GPU, at the 35B's shapes.

    python -m benchmarks gpu_gemm --make FOLDER     with clang-19: PTX of several blocks
    python -m benchmarks gpu_gemm FOLDER            with a GPU: needs numpy and the driver

Each block's time, TFLOP/s and error of a few rows against float64 on weights rounded to bf16. Flops
are those of the rows that are there; the experts' rows are drawn as a router's would be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

# rows, columns, row groups, column groups of GemmBlock; the first three are the package's.
BLOCKS = [(16, 128, 1, 4), (32, 128, 1, 4), (64, 256, 1, 8), (64, 128, 1, 4), (64, 128, 1, 8),
          (32, 128, 1, 8)]  # fmt: skip
# name: (depth, weight rows)
DENSE = {
    "delta in": (2048, 12352), "delta out": (4096, 2048), "attention in": (2048, 9216),
    "shared down": (512, 2048), "router": (2048, 257),
}  # fmt: skip
ROWS = (64, 128, 256, 512, 1024, 2048)
EXPERTS, TOP_K, HIDDEN, WIDTH, GROUP = 256, 8, 2048, 512, 64
TOKENS = (2048, 1024, 512, 256, 64)


def make(folder: Path) -> None:
    from metal.host.compiler import METAL, Source

    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for block in BLOCKS:
        name = "x".join(map(str, block))
        text = "".join(
            f'#include "{h}.h"\n'
            for h in ("gemm_mma", "qgemm", "qgemm_instances", "moe_gemm", "moe_gemm_instances")
        )
        kind = f"GemmBlock<{', '.join(map(str, block))}>"
        text += f"typedef {kind} Block;\n"
        for output, o in (("bf16", "bfloat"), ("fp32", "float")):
            text += f'INSTANTIATE_QGEMM("", "bf16", bfloat, "{output}", {o}, 0, Block, MmaTile)\n'
        text += 'INSTANTIATE_MOE_GEMM("", "bf16", bfloat, 0, Block, MmaTile)\n'
        file = folder / f"{name}.metal"
        file.write_text(text)
        source = Source(file, include=[str(METAL)], rules="metal")
        source.check()
        values = source.constant_values({"kBits": 4, "kGroup": GROUP})
        ptx = source.ptx(values, contract="fast", arch="sm_80").read_text()
        (folder / f"{name}.ptx").write_text(ptx)
        index.append({"block": block, "ptx": f"{name}.ptx"})
    (folder / "index.json").write_text(json.dumps(index) + "\n")
    print(f"{folder}: {len(index)} blocks")


def bf16(x: np.ndarray) -> np.ndarray:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def fp32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


class Weights:
    """Random codes of 4 bits, [rows, depth], with scales and biases."""

    def __init__(self, rng: np.random.Generator, rows: int, depth: int):
        self.codes = rng.integers(0, 2**32, (rows, depth // 8), dtype=np.uint32)
        self.scales = bf16(rng.uniform(0.3, 1.0, (rows, depth // GROUP)) / 8 / np.sqrt(depth))
        self.biases = bf16(-7.5 * fp32(self.scales))
        for a in (self.codes, self.scales, self.biases):
            a.flags.writeable = False

    def rounded(self, first: int, last: int) -> np.ndarray:
        words = self.codes[first:last, :, None] >> (4 * np.arange(8, dtype=np.uint32))
        codes = (words & 15).reshape(last - first, -1).astype(np.float32)
        scales, biases = (np.repeat(fp32(a[first:last]), GROUP, 1)
                          for a in (self.scales, self.biases))  # fmt: skip
        return fp32(bf16(codes * scales + biases)).astype(np.float64)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.codes, self.scales, self.biases]


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


class Bench:
    def __init__(self, folder: Path, repeat: int):
        from metal.host import cuda

        self.repeat, self.report = repeat, []
        self.programs = [
            (entry["block"], cuda.Program((folder / entry["ptx"]).read_bytes()))
            for entry in json.loads((folder / "index.json").read_text())
        ]

    def time(self, what: str, flops: float, launch: Any, check: Any) -> None:
        for block, program in self.programs:
            try:
                seconds = launch(block, program)
            except Exception as problem:
                print(f"{what:24} {block}: {problem}", flush=True)
                continue
            row = {"what": what, "block": block, "us": seconds * 1e6,
                   "tflops": flops / seconds / 1e12, "error": check()}  # fmt: skip
            self.report.append(row)
            name = "x".join(map(str, block))
            figures = f"{row['us']:9.1f} us {row['tflops']:7.1f} TFLOP/s  error {row['error']:.1e}"
            print(f"{what:24} {name:14} {figures}", flush=True)

    def dense(self, rng: np.random.Generator, what: str, depth: int, n: int, rows: int) -> None:
        weights = Weights(rng, n, depth)
        x, y = bf16(rng.standard_normal((rows, depth))), np.zeros((rows, n), np.uint16)
        x.flags.writeable = False
        some = np.unique(np.r_[0:3, rows // 2, rows - 3 : rows])
        want = fp32(x[some]).astype(np.float64) @ weights.rounded(0, min(n, 512)).T

        def launch(block: list[int], program: Any) -> float:
            y[:] = 0
            grid = (-(-n // block[1]), -(-rows // block[0]), 1)
            arguments = [x, *weights.arrays, x, y, ints(rows, n, depth, 0)]
            threads = (32 * block[2] * block[3], 1, 1)
            return program.launch("qgemm_bf16_bf16_m0", arguments, grid, threads,
                                  repeat=self.repeat)  # fmt: skip

        self.time(what, 2.0 * rows * n * depth, launch, lambda: error(fp32(y[some])[:, :512], want))

    def experts(self, rng: np.random.Generator, gate: Weights, up: Weights, down: Weights,
                tokens: int) -> None:  # fmt: skip
        popular = rng.standard_normal(EXPERTS) * 0.5
        scores = popular + rng.gumbel(size=(tokens, EXPERTS))
        ids = np.argsort(-scores, 1)[:, :TOP_K].reshape(-1)
        order = np.argsort(ids, kind="stable").astype(np.uint32)
        counts = np.bincount(ids, minlength=EXPERTS)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        x = bf16(rng.standard_normal((tokens, HIDDEN)))
        act = np.zeros((ids.size, WIDTH), np.uint16)
        out = np.zeros((ids.size, HIDDEN), np.float32)
        for a in (order, offsets, x):
            a.flags.writeable = False
        expert = int(np.argmax(counts))
        first = int(offsets[expert])
        some = np.arange(first, min(first + 4, int(offsets[expert + 1])))
        span = slice(expert * WIDTH, (expert + 1) * WIDTH)
        row = fp32(x[order[some] // TOP_K]).astype(np.float64)
        g, u = (row @ w.rounded(span.start, span.stop).T for w in (gate, up))
        want_act = g / (1 + np.exp(-g)) * u
        back = down.rounded(expert * HIDDEN, (expert + 1) * HIDDEN)

        def blocks(rows: int) -> np.ndarray:
            entries = [(e, s) for e in range(EXPERTS)
                       for s in range(int(offsets[e]), int(offsets[e + 1]), rows)]  # fmt: skip
            most = min(-(-ids.size // rows) + EXPERTS, ids.size)
            entries += [(0xFFFFFFFF, 0)] * (most - len(entries))
            return np.array(entries, np.uint32)

        def launch_up(block: list[int], program: Any) -> float:
            act[:] = 0
            table = blocks(block[0])
            grid, threads = (-(-WIDTH // (block[1] // 2)), len(table), 1), 32 * block[2] * block[3]
            arguments = [x, *gate.arrays, *up.arrays, order, offsets, table, act,
                         ints(ids.size, WIDTH, HIDDEN, TOP_K, 1)]  # fmt: skip
            return program.launch("moe_gate_up_bf16_m0", arguments, grid, (threads, 1, 1),
                                  repeat=self.repeat)  # fmt: skip

        def launch_down(block: list[int], program: Any) -> float:
            out[:] = 0
            table = blocks(block[0])
            grid, threads = (-(-HIDDEN // block[1]), len(table), 1), 32 * block[2] * block[3]
            arguments = [act, *down.arrays, order, offsets, table, out, ints(HIDDEN, WIDTH)]
            return program.launch("moe_down_bf16_m0", arguments, grid, (threads, 1, 1),
                                  repeat=self.repeat)  # fmt: skip

        flops = 2.0 * ids.size * HIDDEN * WIDTH

        def down_error() -> float:
            return error(out[order[some]], fp32(act[some]).astype(np.float64) @ back.T)

        what = f"experts up, {tokens}"
        self.time(what, 2 * flops, launch_up, lambda: error(fp32(act[some]), want_act))
        self.time(f"experts down, {tokens}", flops, launch_down, down_error)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_gemm", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="compile there instead; no GPU used")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.make:
        return make(arguments.folder)
    from metal.host.cuda import NoDevice

    try:
        bench = Bench(arguments.folder, arguments.repeat)
    except NoDevice as reason:
        sys.exit(str(reason))
    rng = np.random.default_rng(0)
    for what, (depth, n) in DENSE.items():
        for rows in ROWS:
            bench.dense(rng, f"{what}, {rows}", depth, n, rows)
    gate, up = (Weights(rng, EXPERTS * WIDTH, HIDDEN) for _ in range(2))
    down = Weights(rng, EXPERTS * HIDDEN, WIDTH)
    for tokens in TOKENS:
        bench.experts(rng, gate, up, down, tokens)
    if arguments.output:
        arguments.output.write_text(json.dumps(bench.report, indent=1) + "\n")
