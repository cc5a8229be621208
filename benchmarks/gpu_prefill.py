"""`python -m benchmarks gpu_prefill`: prefill on an NVIDIA GPU at the shapes of Qwen3.6-35B-A3B.

Lily and stock mlx-lm hold the same random weights and alternate in one process. Timed from the call
until the caches of the chunk have been computed; each length is warmed first. Stock's DeltaNet runs
token by token there, so its long prompts take minutes: `--stock-up-to` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks import gpu

LENGTHS = (256, 512, 2048, 4096)
CHUNK = 2048


def prefill_rate(model: nn.Module, length: int) -> float:
    """Tokens a second of a prompt in chunks of 2048, from empty caches."""
    ids = mx.random.randint(0, model.language_model.args.vocab_size, (1, length))
    mx.eval(ids)
    caches = model.make_cache()
    mx.synchronize()
    start = time.perf_counter()
    for at in range(0, length, CHUNK):
        model(ids[:, at : at + CHUNK], cache=caches)
        mx.eval([c.state for c in caches])
    mx.synchronize()
    return length / (time.perf_counter() - start)


def closeness(ours: nn.Module, stock: nn.Module, length: int = 96) -> dict[str, float]:
    """Logits of a prompt: largest difference over the largest logit, and agreeing top-1."""
    ids = mx.random.randint(0, ours.language_model.args.vocab_size, (1, length))
    a = ours(ids, cache=ours.make_cache())[0].astype(mx.float32)
    b = stock(ids, cache=stock.make_cache())[0].astype(mx.float32)
    same = (mx.argmax(a, -1) == mx.argmax(b, -1)).astype(mx.float32).mean().item()
    return {
        "largest_difference": (mx.abs(a - b).max() / mx.abs(b).max()).item(),
        "same_top_1": same,
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_prefill", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--stock-up-to", type=int, default=512)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    if mx.default_device().type != mx.DeviceType.gpu:
        sys.exit("python -m benchmarks gpu_prefill needs an MLX build with a GPU; see README.md.")
    ours, stock = gpu.both_models()
    report: dict[str, Any] = {"device": mx.device_info().get("device_name"), "rows": []}
    report["closeness"] = closeness(ours, stock)
    print("lily against stock on a prompt of 96 tokens:", report["closeness"], flush=True)
    print(f"{'tokens':>8} {'lily tok/s':>11} {'stock tok/s':>12} {'ratio':>6}", flush=True)
    for length in arguments.lengths:
        prefill_rate(ours, length)
        row: dict[str, Any] = {"tokens": length, "lily": prefill_rate(ours, length)}
        if length <= arguments.stock_up_to:
            prefill_rate(stock, min(length, 64))
            row["stock"] = prefill_rate(stock, length)
        report["rows"].append(row)
        s = row.get("stock")
        print(f"{length:8} {row['lily']:11.1f} {s or 0:12.1f} {row['lily'] / s if s else 0:6.1f}",
              flush=True)  # fmt: skip
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
