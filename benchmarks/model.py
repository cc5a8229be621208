"""Whole-model speed: `python -m benchmarks model --engine both`.

Both engines run in one process on the same weight arrays, in turn, in an order that alternates
from round to round; each cell is warmed first (see lily_mlx/compare.py). On a GPU, stock runs
once more in a process of its own with MLX's command buffers made longer, since part of a gain
over stock could be had by that setting alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from lily_mlx import compare
from lily_mlx.cli import _common
from lily_mlx.cli.compare import length
from lily_mlx.machine import machine
from lily_mlx.report import number, render, render_grid

CPU = {"prompt_lengths": [16, 64, 256], "decode_tokens": 32}
GPU = {"prompt_lengths": [256, 1024, 4096], "decode_tokens": 64}
LONG_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "4000"}


def build_parser() -> argparse.ArgumentParser:
    parser = common.parser("model", __doc__)
    parser.add_argument("--engine", choices=common.ENGINES, default="both")
    parser.add_argument("--prompt-lengths", type=length, nargs="+", metavar="N")
    parser.add_argument("--contexts", type=length, nargs="+", metavar="N", default=[])
    parser.add_argument("--decode-tokens", type=length, metavar="N")
    parser.add_argument("--rounds", type=_common.positive, default=3)
    parser.add_argument("--prefill-step-size", type=_common.positive, default=2048)
    parser.add_argument("--text", metavar="FILE", help="prompts from this file")
    parser.add_argument("--synthetic", action="store_true", help="prompts of hashed ids, no text")
    parser.add_argument("--float32", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--strict", action="store_true", help="fail when a module has no kernel")
    return parser


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """The report of compare on what the arguments ask for, and the tokenizer's decode."""
    defaults = GPU if machine()["device"] == "gpu" else CPU
    decode_tokens = arguments.decode_tokens or defaults["decode_tokens"]
    lengths = arguments.prompt_lengths or ([] if arguments.contexts else defaults["prompt_lengths"])
    engines = compare.load_engines(
        arguments.model, common.ENGINES[arguments.engine], arguments.strict
    )
    cells = compare.make_cells(lengths, arguments.contexts, decode_tokens, engines[0].max_positions)
    text = None if arguments.synthetic else common.prompt_text(arguments.text)
    prompts = compare.Prompts(engines[0], text)
    report = compare.run(
        engines,
        cells,
        prompts,
        arguments.model,
        decode_tokens,
        arguments.rounds,
        arguments.float32,
        arguments.prefill_step_size,
        common.progress,
    )
    return report, engines[0].tokenizer.decode


def stock_with_long_buffers(given: list[str]) -> dict[str, Any]:
    """The rows of stock in a fresh process whose MLX fills longer command buffers."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*given, "--engine", "stock", "--output-dir", folder, "--label", "stock"]
        subprocess.run(
            [sys.executable, "-m", "benchmarks", "model", *words],
            env={**os.environ, **LONG_BUFFERS},
            cwd=common.ROOT,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        report = json.loads((Path(folder) / "stock.json").read_text())
    return {"environment": LONG_BUFFERS, "rows": report["rows"]}


def _variant_table(variant: dict[str, Any]) -> str:
    setting = " ".join(f"{k}={v}" for k, v in variant["environment"].items())
    lines = [
        [
            row["label"],
            *(number(row["engines"]["stock"][f"{w}_tps"]) for w in ("prefill", "decode")),
        ]
        for row in variant["rows"]
    ]
    groups = [("", [""]), ("stock", ["prefill tok/s", "decode tok/s"])]
    return f"Stock in its own process with {setting}:\n" + render_grid(groups, lines)


def main(given: list[str]) -> None:
    arguments = build_parser().parse_args(given)

    def body() -> None:
        heading = common.heading("model", given)
        report, decode = measure(arguments)
        result = {**report, **heading}
        text = render(report, decode)
        already_long = all(os.environ.get(k) == v for k, v in LONG_BUFFERS.items())
        if arguments.engine != "lily" and machine()["device"] == "gpu" and not already_long:
            result["stock_long_buffers"] = stock_with_long_buffers(given)
            text += "\n\n" + _variant_table(result["stock_long_buffers"])
        common.save(result, text, arguments, report["model"]["name"])

    common.guarded("model", body, arguments.traceback)
