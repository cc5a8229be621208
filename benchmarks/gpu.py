"""`python -m benchmarks gpu`: decode on an NVIDIA GPU at the shapes of Qwen3.6-35B-A3B.

Lily and stock mlx-lm hold the same random weights and alternate in one process, at contexts whose
caches are filled with random values. Greedy, one sequence. Then each kernel of a step by itself:
its time, the bytes that it declares, and their ratio to the card's copy rate of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step as stock_step
from mlx_lm.models import qwen3_5_moe
from mlx_lm.models.cache import KVCache

import lily_mlx
from benchmarks import ledger
from lily_mlx import _ext, decode, ptx, trace
from lily_mlx import kernels as metal

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def _tiles(label: str, fields: str, *values: tuple[int, ...]) -> list[dict[str, int]]:
    return [{f"{label}.{f}": v for f, v in zip(fields.split(), row, strict=True)} for row in values]


# Ways to run one row of products: depth of a block of rows, loads, simdgroups, blocks a simdgroup.
def _products(label: str, *values: tuple[int, int, int, int]) -> list[dict[str, int]]:
    return _tiles(label, "r u simdgroups blocks", *values)


def _attention(*values: tuple[int, int, int]) -> list[dict[str, int]]:
    return [{"pack": p, "splits": s, "attention.simdgroups": n} for p, s, n in values]


# Label -> other ways to run it.
SWEEP: dict[str, list[dict[str, Any]]] = {
    "delta in": _products("delta in", (4, 2, 12, 2), (4, 2, 6, 4), (4, 1, 8, 3), (2, 2, 12, 4),
                          (2, 2, 8, 6), (4, 2, 4, 3), (4, 2, 6, 2), (8, 1, 12, 1), (8, 1, 6, 2),
                          (8, 1, 6, 1)),
    "attention in": _products("attention in", (4, 2, 6, 3), (4, 1, 9, 1), (4, 1, 9, 2),
                              (2, 2, 12, 3), (8, 1, 9, 1), (4, 2, 4, 1)),
    "delta out": _tiles("delta out", "r u split simdgroups", (1, 2, 2, 8), (2, 2, 2, 8),
                        (1, 4, 1, 4)),
    "head": _products("head", (4, 2, 12, 40), (4, 2, 12, 20), (4, 2, 6, 20), (4, 1, 8, 8),
                      (8, 1, 8, 8), (4, 2, 4, 30), (4, 2, 4, 24), (4, 1, 4, 24), (4, 2, 8, 8)),
    "experts up": _tiles("experts up", "r u simdgroups", (2, 2, 9), (2, 2, 4), (2, 2, 8),
                         (2, 1, 6), (2, 1, 9), (4, 1, 9), (4, 1, 4), (1, 2, 12)),
    "experts down": _tiles("experts down", "lanes r u", (16, 8, 1), (8, 4, 2), (8, 4, 1)),
}  # fmt: skip
# Attention alone, by context.
ATTENTION_SWEEP = {
    256: _attention((2, 8, 4), (2, 16, 2), (2, 16, 4), (1, 8, 4))
    + _tiles("attention merge", "simdgroups", (8,)),
    131072: _attention((8, 132, 4), (8, 66, 8), (8, 264, 2), (4, 99, 4)),
}


def sweeps() -> list[tuple[int, dict[str, list[dict[str, Any]]]]]:
    """(Context, label -> ways) of a whole sweep."""
    return [(256, SWEEP)] + [(c, {"attention": ways}) for c, ways in ATTENTION_SWEEP.items()]


def build_sweep(folder: Path) -> None:
    """Compile the kernels of a sweep, on a machine with clang-19, for --ptx there."""
    shapes = trace.dims(ledger.model().language_model)
    found: dict[str, Any] = {}
    for context, sweep in sweeps():
        for ways in sweep.values():
            for options in ways:
                found |= ptx.decode_pipelines(shapes, [(context + 512) // 256 * 256], options)
    count = ptx.build(found.values(), metal.folder(), folder)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {len(found)} pipelines, {count} compiled now, {size / 1e6:.1f} MB")


def step_us(model: nn.Module, context: int, tokens: int = 40) -> float:
    """Microseconds a decode step, one after another as in generation; the better of two runs."""
    best = float("inf")
    for _ in range(2):
        rate, _ = decode_rate(decode.generate_step, model, context, tokens)
        best = min(best, 1e6 / rate)
    return best


def run_sweep(model: nn.Module, folder: Path | None) -> dict[str, Any]:
    """What each way to run a label does to the whole step: kernels overlap, so that their own times
    do not add up. In microseconds; less than 0 is better than the default."""
    if folder:
        ptx.register(_ext.cuda_add_kernel, folder)
    report: dict[str, Any] = {}
    for context, sweep in sweeps():
        _ext.set_cuda_decode_options(ptx.NVIDIA)
        default = step_us(model, context)
        print(f"default at {context}: {default:.1f} us a step", flush=True)
        for label, ways in sweep.items():
            for options in ways:
                shown = " ".join(f"{k.removeprefix(label + '.')}={v}" for k, v in options.items())
                _ext.set_cuda_decode_options(ptx.NVIDIA | options)
                try:
                    us = step_us(model, context) - default
                except RuntimeError as error:  # a way that this card refuses is named
                    print(f"{label:18} {context:7} {shown:40} refused: {error}", flush=True)
                    continue
                report.setdefault(f"{label} at {context}", {})[shown] = us
                print(f"{label:18} {context:7} {shown:40} {us:+8.1f}", flush=True)
    _ext.set_cuda_decode_options(ptx.NVIDIA)
    return report


def random_weights(model: nn.Module) -> None:
    """Fill a lazily made quantized model with random codes and small scales, on the device."""
    mx.random.seed(0)
    filled = []
    for name, value in tree_flatten(model.parameters()):
        if value.dtype == mx.uint32:
            new = mx.random.randint(0, 2**31 - 1, value.shape, dtype=mx.int32).view(mx.uint32)
            new = new ^ (new << 1)
        elif name.endswith("scales"):
            new = mx.random.uniform(0.5, 1.5, value.shape).astype(value.dtype) * 0.004
        elif name.endswith("biases"):
            eight = value.shape[-1] * 64 == 2048 and (
                "mlp.gate" in name or "shared_expert_gate" in name
            )
            new = mx.full(value.shape, -0.5 if eight else -0.03).astype(value.dtype)
        elif name.endswith("A_log"):
            new = mx.log(mx.random.uniform(0.1, 4.0, value.shape))
        elif "norm" in name:
            new = mx.random.uniform(0.9, 1.1, value.shape).astype(value.dtype)
        else:
            new = (mx.random.normal(value.shape) * 0.2).astype(value.dtype)
        mx.eval(new)
        filled.append((name, new))
    model.update(tree_unflatten(filled))
    model.eval()


def caches_at(model: nn.Module, context: int) -> list[Any]:
    """Caches that hold `context` tokens of random keys, values and states."""
    caches = model.make_cache()
    args = model.language_model.args
    for cache, layer in zip(caches, model.layers, strict=True):
        if isinstance(cache, KVCache):
            rows = (context + 512) // 256 * 256
            shape = (1, args.num_key_value_heads, rows, args.head_dim)
            cache.keys = mx.random.normal(shape).astype(mx.bfloat16)
            cache.values = mx.random.normal(shape).astype(mx.bfloat16)
            cache.offset = context
            mx.eval(cache.keys, cache.values)
        else:
            m = layer.linear_attn
            cache[0] = mx.random.normal((1, 3, m.conv_dim)).astype(mx.bfloat16)
            cache[1] = mx.random.normal((1, m.num_v_heads, m.head_v_dim, m.head_k_dim)) * 0.05
            mx.eval(cache[0], cache[1])
    return caches


def decode_rate(step: Any, model: nn.Module, context: int, tokens: int) -> tuple[float, list[int]]:
    """(tokens a second, the tokens), after the first two."""
    caches = caches_at(model, context)
    generator = step(mx.array([7]), model, max_tokens=tokens + 2, prompt_cache=caches)
    out = [next(generator)[0], next(generator)[0]]
    start = time.perf_counter()
    out += [token for token, _ in generator]
    return tokens / (time.perf_counter() - start), out


def kernels(model: nn.Module, context: int, rate: float) -> list[dict[str, Any]]:
    """Each kernel of one step: dispatches, time, declared bytes, floor at `rate`, time over it."""
    caches = caches_at(model, context)
    for token in (1, 2, 3):
        mx.eval(model(mx.array([[token]]), cache=caches))
    session = caches[0]._loan[0]
    report = lily_mlx.trace(model, "decode", context=context + 3).to_json()
    labels: dict[str, int] = {}
    for d in json.loads(report)["dispatches"] if isinstance(report, str) else report["dispatches"]:
        labels[d["label"]] = labels.get(d["label"], 0) + d["read"] + d["written"]
    rows = []
    for label, count, seconds in session.state.profile():
        floor = labels[label] / rate
        rows.append({"label": label, "dispatches": count, "us": seconds * 1e6 / count,
                     "total_us": seconds * 1e6, "bytes": labels[label],
                     "floor_us": floor * 1e6,
                     "over_floor": seconds / floor if floor else None})  # fmt: skip
    return rows


def teacher_forced(ours: nn.Module, stock: nn.Module, count: int = 16) -> dict[str, float]:
    """Largest difference of the two engines' logits over the largest logit, and agreeing top-1."""
    ids = mx.random.randint(0, 248320, (count,))
    a, b = ours.make_cache(), stock.make_cache()
    worst = same = 0.0
    for i in range(count):
        x, y = ours(ids[i].reshape(1, 1), cache=a)[0, 0], stock(ids[i].reshape(1, 1), cache=b)[0, 0]
        y = y.astype(mx.float32)
        worst = max(worst, (mx.abs(x - y).max() / mx.abs(y).max()).item())
        same += (mx.argmax(x) == mx.argmax(y)).item()
    return {"largest_difference": worst, "same_top_1": same / count}


def both_models() -> tuple[nn.Module, nn.Module]:
    """Lily's and stock's model of the 35B shapes, on the same random arrays."""
    ours = ledger.model()
    random_weights(ours)
    stock = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(ledger.SHAPES))
    stock.set_dtype(mx.bfloat16)
    by_path = {path: module for path, module in ours.named_modules() if hasattr(module, "bits")}
    nn.quantize(stock, 64, 4, class_predicate=lambda path, m: path in by_path and {
        "group_size": by_path[path].group_size, "bits": by_path[path].bits})  # fmt: skip
    stock.update(ours.parameters())
    stock.eval()
    return ours, stock


def bundled_greedy() -> dict[str, Any]:
    """64 greedy tokens of the bundled model, token by token, against those of the CPU reference."""
    from lily_mlx.loading import load

    golden = json.loads(
        (Path(__file__).parent.parent / "tests/goldens/bundled_greedy.json").read_text()
    )
    model, _ = load(str(lily_mlx.BUNDLED_MODEL))
    text_model, caches = model.language_model, model.make_cache()
    token, out = None, []
    for i in golden["prompt"]:
        token, _ = decode.step(text_model, mx.array([[i]]), caches)
    for _ in golden["greedy"]:
        out.append(token.item())
        token, _ = decode.step(text_model, token, caches)
    same = [a == b for a, b in zip(out, golden["greedy"], strict=True)]
    return {"equal": all(same), "first_difference": None if all(same) else same.index(False)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--stock-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sweep", action="store_true", help="time other splits and tiles instead")
    parser.add_argument("--ptx", type=Path, help="a folder with the kernels of --sweep")
    parser.add_argument("--build", action="store_true", help="compile them into --ptx; no GPU used")
    arguments = parser.parse_args(argv)
    if arguments.build:
        if not arguments.ptx:
            parser.error("--build needs --ptx FOLDER, where the kernels go")
        build_sweep(arguments.ptx)
        return
    if mx.default_device().type != mx.DeviceType.gpu:
        sys.exit("python -m benchmarks gpu needs an MLX build with a GPU; see README.md.")

    if arguments.sweep:
        ours = ledger.model()
        random_weights(ours)
        report = run_sweep(ours, arguments.ptx)
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        return

    greedy = bundled_greedy()
    print("bundled model, 64 greedy tokens against the CPU's:", greedy, flush=True)

    ours, stock = both_models()
    report: dict[str, Any] = {"note": "lily alone" if arguments.no_stock else "lily and stock in one run",
        "bundled_greedy": greedy,
                              "device": mx.device_info().get("device_name"),
                              "mlx": mx.__version__, "weights_gb": mx.get_active_memory() / 1e9,
                              "choice": str(ours.language_model.decode_plan().choice)}  # fmt: skip
    print(report, flush=True)
    rate = _ext.cuda_copy_rate()
    report["copy_tb_s"] = rate / 1e12
    print(f"copy rate {rate / 1e12:.2f} TB/s", flush=True)
    if not arguments.no_stock:
        report["teacher_forced"] = teacher_forced(ours, stock)
        print("lily against stock, teacher-forced:", report["teacher_forced"], flush=True)

    rows = []
    print(f"{'context':>8} {'lily tok/s':>11} {'stock tok/s':>12} {'ratio':>6}", flush=True)
    for i, context in enumerate(arguments.contexts):
        rates: dict[str, list[float]] = {"lily": [], "stock": []}
        again: list[list[int]] = []
        for round_ in range(arguments.rounds):
            order = ["lily"] if arguments.no_stock else ["lily", "stock"]
            for name in order if (round_ + i) % 2 == 0 else order[::-1]:
                mx.random.seed(context)
                if name == "lily":
                    r, tokens = decode_rate(decode.generate_step, ours, context, arguments.tokens)
                    again.append(tokens)
                else:
                    r, _ = decode_rate(stock_step, stock, context, arguments.stock_tokens)
                rates[name].append(r)
        row = {"context": context, "repeatable": all(t == again[0] for t in again)}
        row |= {name: statistics.median(r) for name, r in rates.items() if r}
        rows.append(row)
        s = row.get("stock")
        print(f"{context:8} {row['lily']:11.1f} {s or 0:12.1f} {row['lily'] / s if s else 0:6.1f} "
              f"{'' if row['repeatable'] else 'NOT REPEATABLE'}", flush=True)  # fmt: skip
    report["decode"] = rows
    for context in (256, 131072) if 131072 in arguments.contexts else arguments.contexts[:1]:
        table = kernels(ours, context, rate)
        report[f"kernels_{context}"] = table
        print(
            f"\none step at {context}: {'kernel':>18} {'n':>4} {'us':>8} {'total':>8} {'floor':>8} "
            f"{'x':>6}"
        )
        for r in sorted(table, key=lambda r: -r["total_us"]):
            print(f"{r['label']:>36} {r['dispatches']:4} {r['us']:8.2f} {r['total_us']:8.1f} "
                  f"{r['floor_us']:8.1f} {r['over_floor'] or 0:6.2f}")  # fmt: skip
        print(f"{'sum':>36} {'':4} {'':8} {sum(r['total_us'] for r in table):8.1f} "
              f"{sum(r['floor_us'] for r in table):8.1f}", flush=True)  # fmt: skip
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
