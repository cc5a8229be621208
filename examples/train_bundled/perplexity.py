"""Held-out perplexity of a converted model, in windows of 512 tokens, all positions counted.

python perplexity.py --work WORK MODEL [--engine stock] [--windows N]
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lily_mlx.loading import load

LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of an MLX model")
    parser.add_argument("--work", type=Path, required=True, help="folder with heldout.bin")
    parser.add_argument("--engine", choices=["lily", "stock"], default="lily")
    parser.add_argument("--windows", type=int, help="only the first so many")
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    ids = np.fromfile(args.work / "heldout.bin", dtype=np.uint16).astype(np.int32)
    starts = np.arange(0, len(ids) - LENGTH - 1, LENGTH)[: args.windows]
    model, _ = load(args.model, engine=args.engine)
    begun, total, count = time.monotonic(), 0.0, 0
    for i in range(0, len(starts), args.batch):
        rows = mx.array(np.stack([ids[s : s + LENGTH + 1] for s in starts[i : i + args.batch]]))
        logits = model(rows[:, :-1]).astype(mx.float32)
        total += nn.losses.cross_entropy(logits, rows[:, 1:], reduction="sum").item()
        count += rows.shape[0] * LENGTH
    loss, seconds = total / count, time.monotonic() - begun
    print(f"{args.model}: loss {loss:.4f}, perplexity {math.exp(loss):.2f} a token, ", end="")
    print(f"{count:,d} tokens in {seconds:.0f} s")


if __name__ == "__main__":
    main()
