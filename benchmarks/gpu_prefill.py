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
from lily_mlx import _ext, ops, ptx
from lily_mlx.layers import project

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


def layer_times(model: nn.Module, rows: int, repeat: int = 8) -> dict[str, float]:
    """Milliseconds of each kind of layer, and of its parts, for a chunk of `rows` from no cache."""
    delta, attention = model.layers[0], model.layers[3]
    hidden = model.language_model.args.hidden_size
    x = mx.random.normal((1, rows, hidden)).astype(mx.bfloat16)
    mixer, parts = delta.linear_attn, {}
    in_proj = [mixer[f"in_proj_{name}"] for name in ("qkv", "z", "b", "a")]
    qkv, z, b, a = project(x, *in_proj)
    mixed = mx.random.normal(z.shape).astype(mx.bfloat16)
    mx.eval(x, qkv, z, b, a, mixed)

    def scan() -> mx.array:
        return ops.gated_delta(
            qkv, z, b, a, mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight, 1e-6,
            key_heads=mixer.num_k_heads, value_heads=mixer.num_v_heads,
            key_dim=mixer.head_k_dim, value_dim=mixer.head_v_dim)[0]  # fmt: skip

    calls: dict[str, Any] = {
        "linear_attn": lambda: mixer(x),
        "  in projections": lambda: project(x, *in_proj)[0],
        "  scan": scan,
        "  out projection": lambda: project(mixed, mixer.out_proj)[0],
        "self_attn": lambda: attention.self_attn(x, mask="causal"),
        "mlp": lambda: delta.mlp(x),
        "norm": lambda: delta.input_layernorm(x),
    }
    for name, call in calls.items():
        for _ in range(2):  # the first warms up
            mx.synchronize()
            start = time.perf_counter()
            mx.eval([call() for _ in range(repeat)])
            mx.synchronize()
            parts[name] = (time.perf_counter() - start) / repeat * 1e3
    return parts


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
    parser.add_argument("--ptx", type=Path, help="a folder of PTX beside the package's")
    parser.add_argument("--no-stock", action="store_true")
    arguments = parser.parse_args(argv)
    if mx.default_device().type != mx.DeviceType.gpu:
        sys.exit("python -m benchmarks gpu_prefill needs an MLX build with a GPU; see README.md.")
    if arguments.ptx:
        ptx.register(_ext.cuda_add_kernel, arguments.ptx)
    ours, stock = gpu.both_models()
    for part, name in ((ours.layers[0], "linear_attn"), (ours.layers[3], "self_attn"),
                       (ours.layers[0], "mlp")):  # fmt: skip
        for at, kind, choice in part[name].report(mx.bfloat16):
            print(f"{name}.{at} {kind}: {choice.kernel or choice.reason}", flush=True)
    report: dict[str, Any] = {"device": mx.device_info().get("device_name"), "rows": []}
    if not arguments.no_stock:
        report["closeness"] = closeness(ours, stock)
        print("lily against stock on a prompt of 96 tokens:", report["closeness"], flush=True)
    report["layers"] = {rows: layer_times(ours, rows) for rows in (512, 2048)}
    for name, ms in report["layers"][2048].items():
        print(f"{name:20} {report['layers'][512][name]:8.3f} ms of 512, {ms:8.3f} ms of 2048 rows",
              flush=True)  # fmt: skip
    print(f"{'tokens':>8} {'lily tok/s':>11} {'stock tok/s':>12} {'ratio':>6}", flush=True)
    for length in arguments.lengths:
        prefill_rate(ours, length)
        row: dict[str, Any] = {"tokens": length, "lily": prefill_rate(ours, length)}
        if length <= arguments.stock_up_to and not arguments.no_stock:
            prefill_rate(stock, min(length, 64))
            row["stock"] = prefill_rate(stock, length)
        report["rows"].append(row)
        s = row.get("stock")
        print(f"{length:8} {row['lily']:11.1f} {s or 0:12.1f} {row['lily'] / s if s else 0:6.1f}",
              flush=True)  # fmt: skip
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
