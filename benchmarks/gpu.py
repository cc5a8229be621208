"""`python -m benchmarks gpu`: an NVIDIA GPU at the shapes of Qwen3.6-35B-A3B, in one command.

Lily and stock mlx-lm hold the same random 4-bit weights and alternate in one process, one sequence,
greedy. The parts, in this order, each printed as it goes and kept in the result file at once:

  checks   64 greedy tokens of the bundled model against the CPU's; logits against stock's, forced
           token by token, on the bundled model and at these shapes; a repeated prompt, bit for bit
  kernels  each kernel of a decode step by itself: time, floor (its bytes at the rate of a copy in
           the same run), and their sum against the step's measured time
  layers   milliseconds of each layer of a prefill chunk, and of its parts
  decode   tokens a second from caches filled with random values
  prefill  tokens a second of a prompt, in chunks of 2048, until its first token is there
  raised   the same, in a process with MLX_MAX_OPS_PER_BUFFER=1000 and MLX_MAX_MB_PER_BUFFER=4000.
           A ratio is always of two engines that alternate in one process; of the two, the lesser
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step as stock_step
from mlx_lm.models import qwen3_5_moe
from mlx_lm.models.cache import KVCache

import lily_mlx
from benchmarks import common, gpu_checks, gpu_layers, gpu_report
from lily_mlx import _ext, decode, ptx, spec
from lily_mlx.report import write_json
from lily_mlx.shapes import qwen3_6_35b_a3b, qwen3_6_35b_a3b_config

PARTS = ("checks", "kernels", "layers", "decode", "prefill", "raised")
STEPS = {"lily": decode.generate_step, "stock": stock_step}
# Prompts up to these lengths are run once before they are timed.
LILY_WARM, STOCK_WARM = 4096, 1024
LAYER_ROWS = (512, 2048)
# A cell is run --rounds times, and on up to MOST_ROUNDS while all of it takes CELL_SECONDS: short
# ones vary most, by a tenth from run to run.
MOST_ROUNDS, CELL_SECONDS = 5, 8.0
RAISED_SECONDS = 60  # loading, and the first compilation of stock's kernels
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def _tiles(label: str, fields: str, *values: tuple[int, ...]) -> list[dict[str, int]]:
    return [{f"{label}.{f}": v for f, v in zip(fields.split(), row, strict=True)} for row in values]


def _attention(*values: tuple[int, int]) -> list[dict[str, int]]:
    return [{"splits": s, "attention.simdgroups": n} for s, n in values]


# Label -> other ways to run it.
SWEEP: dict[str, list[dict[str, Any]]] = {
    "all": [{"mma": False}, {"fuse_route": True}],
    "delta in": _tiles("delta in", "split simdgroups blocks", (8, 16, 3), (8, 8, 2)),
    "attention in": _tiles("attention in", "r u simdgroups blocks", (4, 2, 4, 1), (2, 2, 8, 1)),
    "delta out": _tiles("delta out", "r u split simdgroups", (2, 1, 4, 8), (4, 1, 4, 8),
                        (8, 1, 4, 16), (4, 2, 2, 16)),
    "attention out": _tiles("attention out", "r u split simdgroups", (2, 1, 4, 8), (2, 1, 4, 16)),
    "experts up": _tiles("experts up", "r u simdgroups", (1, 2, 16), (2, 2, 6), (2, 2, 8),
                         (1, 2, 8), (1, 2, 11)),
    "experts down": _tiles("experts down", "lanes r u", (8, 2, 2), (4, 2, 1), (8, 2, 1),
                           (16, 2, 1), (16, 1, 1)),
    "router": _tiles("router", "r split simdgroups", (1, 4, 16), (1, 2, 4), (1, 4, 8)),
    "route": [{"ahead": kilobytes} for kilobytes in (0, 4096, 6144, 12288)],
    "delta step": _tiles("delta step", "simdgroups", (8,), (32,)),
}  # fmt: skip
# Attention alone, by context.
ATTENTION_SWEEP = {
    256: _attention((8, 4), (32, 4)) + _tiles("attention merge", "simdgroups", (8,)),
    2048: _attention((33, 4), (66, 4), (66, 8)),
    8192: _attention((44, 4), (66, 8)),
    32768: _attention((66, 4), (132, 4)),
    131072: _attention((66, 8), (132, 8)),
}


def sweeps() -> list[tuple[int, dict[str, list[dict[str, Any]]]]]:
    """(Context, label -> ways) of a whole sweep."""
    return [(256, SWEEP)] + [(c, {"attention": ways}) for c, ways in ATTENTION_SWEEP.items()]


def build_sweep(path: Path) -> None:
    """Compile the kernels of a sweep, on a machine with clang-19, for --ptx there."""
    shapes = spec.model(qwen3_6_35b_a3b().language_model)
    found: dict[str, Any] = {}
    for context, sweep in sweeps():
        for ways in sweep.values():
            for options in ways:
                found |= ptx.decode_pipelines(shapes, [(context + 512) // 256 * 256], options)
    count = ptx.build(found.values(), path)
    size = path.stat().st_size / 1e6
    print(f"{path}: {len(found)} pipelines, {count} of them new, {size:.1f} MB")


def step_us(model: nn.Module, context: int, tokens: int = 40) -> float:
    """Microseconds a decode step, one after another as in generation; the better of two runs."""
    best = float("inf")
    for _ in range(2):
        rate, _ = decode_rate(decode.generate_step, model, context, tokens)
        best = min(best, 1e6 / rate)
    return best


def run_sweep(model: nn.Module) -> dict[str, Any]:
    """What each way to run a label does to the whole step: kernels overlap, so that their own times
    do not add up. In microseconds; less than 0 is better than the default."""
    report: dict[str, Any] = {}
    for context, sweep in sweeps():
        _ext.set_step_options({})
        default = step_us(model, context)
        print(f"default at {context}: {default:.1f} us a step", flush=True)
        for label, ways in sweep.items():
            for options in ways:
                shown = " ".join(f"{k.removeprefix(label + '.')}={v}" for k, v in options.items())
                _ext.set_step_options(options)
                try:
                    us = step_us(model, context) - default
                except RuntimeError as error:  # a way that this card refuses is named
                    print(f"{label:18} {context:7} {shown:40} refused: {error}", flush=True)
                    continue
                report.setdefault(f"{label} at {context}", {})[shown] = us
                print(f"{label:18} {context:7} {shown:40} {us:+8.1f}", flush=True)
    _ext.set_step_options({})
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


def caches_at(model: nn.Module, context: int, rows: int | None = None) -> list[Any]:
    """Caches that hold `context` tokens of random keys, values and states, of `rows` rows."""
    rows = rows or (context + 512) // 256 * 256
    caches = model.make_cache()
    args = model.language_model.args
    for cache, layer in zip(caches, model.layers, strict=True):
        if isinstance(cache, KVCache):
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


def prefill_rate(step: Any, model: nn.Module, length: int) -> tuple[float, mx.array]:
    """(tokens a second of a prompt until its first token is there, that token's logits)."""
    mx.random.seed(length)
    ids = mx.random.randint(0, model.language_model.args.vocab_size, (length,))
    mx.eval(ids)
    mx.clear_cache()
    mx.synchronize()
    start = time.perf_counter()
    generator = step(ids, model, max_tokens=1)
    _, logprobs = next(generator)
    seconds = time.perf_counter() - start
    mx.eval(logprobs)
    generator.close()
    return length / seconds, logprobs


def kernels(model: nn.Module, context: int, rate: float) -> list[dict[str, Any]]:
    """Each kernel of one step, timed by itself, against its bytes at `rate` bytes a second."""
    choice = model.language_model.decode_plan().choice
    if not choice:
        raise ValueError(f"the decode step does not run here: {choice.reason}")
    caches = caches_at(model, context)
    for token in (1, 2, 3):
        mx.eval(model(mx.array([[token]]), cache=caches))
    session = caches[0]._loan[0]
    moved: dict[str, int] = {}
    for d in lily_mlx.trace(model, "decode", context=context + 3, on="cuda").dispatches:
        moved[d["label"]] = moved.get(d["label"], 0) + d["read"] + d["written"]
    return [
        gpu_report.kernel_row(label, count, seconds, moved[label], rate)
        for label, count, seconds in session.state.profile()
    ]


def both_models(layers: int = 40) -> tuple[nn.Module, nn.Module]:
    """Lily's and stock's model of the 35B shapes, on the same random arrays."""
    ours = qwen3_6_35b_a3b(layers)
    random_weights(ours)
    stock = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(qwen3_6_35b_a3b_config(layers)))
    stock.set_dtype(mx.bfloat16)
    by_path = {path: module for path, module in ours.named_modules() if hasattr(module, "bits")}
    nn.quantize(stock, 64, 4, class_predicate=lambda path, m: path in by_path and {
        "group_size": by_path[path].group_size, "bits": by_path[path].bits})  # fmt: skip
    stock.update(ours.parameters())
    stock.eval()
    return ours, stock


def forced_from_caches(ours: nn.Module, stock: nn.Module, context: int = 5000) -> dict[str, float]:
    """Logits of the two engines after the same random caches: every KV head and row counts."""
    found = gpu_checks.teacher_forced(ours, stock, caches_of=lambda m: caches_at(m, context))
    return {**found, "context": context}


class Clock:
    """The time that a run may take: a cell that would not fit is left out, and named."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


class Run:
    """One run's models, settings and result; the file is written after every row."""

    def __init__(self, arguments: argparse.Namespace, report: dict[str, Any]):
        self.arguments, self.report = arguments, report
        self.clock = Clock(arguments.seconds)
        self.models: dict[str, nn.Module] = {}
        report["left_out"] = []

    def save(self) -> None:
        if self.arguments.output:
            write_json(self.report, self.arguments.output)

    def load(self) -> None:
        """Both models' weights; `models` holds the engines that are measured."""
        ours, stock = both_models()
        for name, model in (("lily", ours), ("stock", stock)):
            if self.arguments.engine in ("both", name):
                self.models[name] = model
        self.report["weights_gb"] = mx.get_active_memory() / 1e9
        if "lily" in self.models:
            self.report["choice"] = str(ours.language_model.decode_plan().choice)
            say(f"decode step: {self.report['choice']}")

    def order(self, turn: int) -> list[str]:
        names = list(self.models)
        return names if turn % 2 == 0 else names[::-1]

    def turns(self) -> Iterator[int]:
        """The rounds of one cell, engines in turn in each."""
        begin = time.monotonic()
        for turn in range(max(self.arguments.rounds, MOST_ROUNDS)):
            took = time.monotonic() - begin
            next_one = took / max(turn, 1)
            if turn >= self.arguments.rounds and (
                took + next_one > CELL_SECONDS or next_one > self.clock.left()
            ):
                return
            yield turn

    def leave_out(self, part: str, engine: str, context: int, why: str) -> None:
        cell = {"part": part, "engine": engine, "context": context, "why": why}
        self.report["left_out"].append(cell)
        say(f"left out: {gpu_report.left_out_text(cell)}")

    def fits(self, part: str, engine: str, context: int, estimate: float) -> bool:
        """Whether a cell fits the time that is left; if not, it is named."""
        if estimate <= self.clock.left():
            return True
        self.leave_out(part, engine, context, f"about {estimate:.0f} s, with "
                       f"{max(self.clock.left(), 0):.0f} s of --seconds left")  # fmt: skip
        return False

    def put(
        self, part: str, context: int, rates: dict[str, list[float]], equal: list[bool]
    ) -> None:
        """Add a row: medians, and every sample; `equal` compares lily's later runs to its first."""
        row: dict[str, Any] = {gpu_report.ROWS[part]: context}
        row |= {name: statistics.median(r) for name, r in rates.items() if r}
        row |= {"repeatable": all(equal) if equal else None, "samples": rates}
        gpu_report.put_row(self.report, part, row)
        row = next(r for r in self.report[part] if r[gpu_report.ROWS[part]] == context)
        say(gpu_report.rows_text(part, row))
        self.save()

    def decode(self) -> None:
        a = self.arguments
        tokens = {"lily": a.tokens, "stock": a.stock_tokens}
        spent = dict.fromkeys(self.models, 0.0)
        say(f"\ndecode, caches filled with random values\n{gpu_report.rows_heading('decode')}")
        for i, context in enumerate(a.contexts):
            rates: dict[str, list[float]] = {name: [] for name in self.models}
            runs: list[list[int]] = []
            skipped = {n for n in self.models if not self.fits("decode", n, context, spent[n])}
            for turn in self.turns():
                for name in self.order(turn + i):
                    if name in skipped:
                        continue
                    mx.random.seed(context)
                    begin = time.monotonic()
                    rate, out = decode_rate(STEPS[name], self.models[name], context, tokens[name])
                    spent[name] = a.rounds * (time.monotonic() - begin)
                    rates[name].append(rate)
                    if name == "lily":
                        runs.append(out)
            if any(rates.values()):
                self.put("decode", context, rates, [r == runs[0] for r in runs[1:]])
            mx.clear_cache()

    def prefill(self) -> None:
        say(f"\nprefill, until the first token\n{gpu_report.rows_heading('prefill')}")
        warm = {"lily": LILY_WARM, "stock": STOCK_WARM}
        pace = dict.fromkeys(self.models, 0.0)  # seconds a token, of the run before
        for i, length in enumerate(self.arguments.lengths):
            rates: dict[str, list[float]] = {name: [] for name in self.models}
            logits: list[mx.array] = []
            # Attention's share grows with the length.
            planned = {n for n in self.models if self.prefills(n, length, 1.5 * pace[n] * length)}
            for turn in self.turns():
                for name in self.order(turn + i):
                    long = length > warm[name]
                    if name not in planned or (turn > 0 and self.once(name, long, pace, length)):
                        continue
                    step, model = STEPS[name], self.models[name]
                    if turn == 0 and (not long or i == 0):
                        prefill_rate(step, model, min(length, warm[name]))
                    rate, last = prefill_rate(step, model, length)
                    rates[name].append(rate)
                    pace[name] = 1 / rate
                    if name == "lily":
                        logits.append(last)
            if any(rates.values()):
                equal = [mx.array_equal(logits[0], other).item() for other in logits[1:]]
                self.put("prefill", length, rates, equal)

    def prefills(self, name: str, length: int, estimate: float) -> bool:
        """Whether a prompt is run at all; if not, it is named."""
        most = self.arguments.stock_up_to
        if name == "stock" and length > most:
            why = f"above --stock-up-to {most:,}: its DeltaNet runs token by token here"
            self.leave_out("prefill", name, length, why)
            return False
        return self.fits("prefill", name, length, estimate)

    def once(self, name: str, long: bool, pace: dict[str, float], length: int) -> bool:
        """Whether one run of a prompt must do: stock's long ones, and what no longer fits."""
        return (name == "stock" and long) or pace[name] * length > self.clock.left()

    def kernels(self) -> None:
        ours = self.models["lily"]
        rate = _ext.cuda_copy_rate()
        self.report["copy_tb_s"] = rate / 1e12
        say(f"\ncopy rate {rate / 1e12:.2f} TB/s")
        for context in self.arguments.kernels_at:
            step = decode_rate(STEPS["lily"], ours, context, self.arguments.tokens)[0]
            self.report[f"kernels_{context}"] = kernels(ours, context, rate)
            self.report[f"step_{context}"] = {"us": 1e6 / step}
            say(gpu_report.kernels_text(self.report, context))
            self.save()
            mx.clear_cache()

    def layers(self) -> None:
        ours, rows = self.models["lily"], LAYER_ROWS
        self.report["layers"] = {n: gpu_layers.layer_times(ours, n) for n in rows}
        say("\n" + "\n".join(gpu_layers.served(ours)))
        say(f"{'ms of a chunk of':20}" + "".join(f"{n:>10,}" for n in rows))
        for name in self.report["layers"][rows[0]]:
            times = "".join(f"{self.report['layers'][n][name]:10.3f}" for n in rows)
            say(f"{name:20}{times}")
        self.save()

    def checks(self) -> None:
        for name, check in (
            ("bundled_greedy", gpu_checks.bundled_greedy),
            ("bundled_forced", gpu_checks.bundled_forced),
        ):
            self.check(name, check())
        ours, stock = self.models["lily"], self.models.get("stock")
        self.check("repeated", gpu_checks.repeated(ours))
        if stock is not None:
            self.check("teacher_forced", gpu_checks.teacher_forced(ours, stock))
            self.check("forced_from_caches", forced_from_caches(ours, stock))
            self.check("prompt", gpu_checks.prompt(ours, stock))

    def check(self, name: str, result: dict[str, Any]) -> None:
        self.report[name] = result
        say(f"{name}: {result}")
        self.save()

    def raised(self) -> None:
        """The engines in a process of their own, since MLX reads these limits when it starts."""
        a = self.arguments
        left = self.clock.left() - 5
        if left < RAISED_SECONDS:
            why = f"needs a process and {RAISED_SECONDS} s or more; {max(left, 0):.0f} s are left"
            for engine in STEPS if a.engine == "both" else (a.engine,):
                for context in a.raised:
                    self.leave_out("decode", f"{engine}_raised", context, why)
            return
        settings = " ".join(f"{k}={v}" for k, v in gpu_report.RAISED.items())
        say(f"\nwith {settings}")
        mx.clear_cache()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "raised.json"
            words = [
                "--engine", a.engine, "--only", "decode", "prefill",
                "--contexts", *map(str, a.raised),
                "--lengths", *map(str, [n for n in a.raised if n <= a.stock_up_to] or a.raised[:1]),
                "--stock-up-to", str(a.stock_up_to),
                "--tokens", str(a.tokens), "--stock-tokens", str(a.stock_tokens),
                "--rounds", str(a.rounds), "--seconds", str(left), "--output", str(path),
            ]  # fmt: skip
            done = run_again(words, gpu_report.RAISED)
            if not path.exists():
                raise RuntimeError(f"the run with {settings} ended with {done} and no result.")
            gpu_report.add_raised(self.report, json.loads(path.read_text()))
        self.save()


def run_again(words: list[str], environment: dict[str, str]) -> int:
    """This command in a child process with other environment variables; its exit status."""
    command = [sys.executable, "-m", "benchmarks", "gpu", *words]
    return subprocess.run(command, env=os.environ | environment, cwd=common.ROOT).returncode


def say(text: str) -> None:
    print(text, flush=True)


def numbers(
    parser: argparse.ArgumentParser, name: str, default: tuple[int, ...], what: str
) -> None:
    shown = " ".join(map(str, default))
    parser.add_argument(
        name, type=int, nargs="+", default=list(default), metavar="N", help=f"{what} ({shown})"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"what to run, of {', '.join(PARTS)} (all)")  # fmt: skip
    parser.add_argument("--engine", choices=("both", "lily", "stock"), default="both")
    numbers(parser, "--contexts", CONTEXTS, "decode: tokens in the caches")
    numbers(parser, "--lengths", CONTEXTS, "prefill: tokens of the prompt")
    numbers(parser, "--kernels-at", (256, 131072), "contexts whose kernels are timed one by one")
    numbers(parser, "--raised", CONTEXTS, "contexts measured with raised limits too")
    parser.add_argument("--stock-up-to", type=int, default=8192, metavar="N",
                        help="longest prompt of stock's prefill (%(default)s)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="lily decodes (%(default)s)")
    parser.add_argument("--stock-tokens", type=int, default=16, help="stock decodes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2,
                        help="least runs of a cell; short ones get more (%(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=540, metavar="S",
                        help="leave out what would take longer in all (%(default)s)")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="the result (benchmarks/results/gpu-35b-DEVICE.json)")  # fmt: skip
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE",
                        help="measure nothing: join these results into --output")  # fmt: skip
    parser.add_argument("--sweep", action="store_true", help="time other splits and tiles instead")
    parser.add_argument("--ptx", type=Path, metavar="FILE", help="PTX beside the package's")
    parser.add_argument("--build", action="store_true", help="compile them into --ptx; no GPU used")
    return parser


def main(argv: list[str]) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.tokens < 1 or arguments.stock_tokens < 1:
        parser.error("--rounds, --tokens and --stock-tokens are 1 or more")
    if arguments.build:
        if not arguments.ptx:
            parser.error("--build needs --ptx FILE, where the kernels go")
        build_sweep(arguments.ptx)
        return
    if arguments.merge:
        if not arguments.output:
            parser.error("--merge needs --output FILE, where the joined result goes")
        report = gpu_report.merged([json.loads(path.read_text()) for path in arguments.merge])
        write_json(report, arguments.output)
        say(gpu_report.text(report))
        return
    needs_lily = sorted({"kernels", "layers", "checks"} & set(arguments.only))
    if arguments.engine == "stock":
        if set(arguments.only) == set(PARTS):
            arguments.only = ["decode", "prefill"]
        elif needs_lily:
            parser.error(f"--only {needs_lily[0]} needs lily; leave --engine stock out")
    if mx.default_device().type != mx.DeviceType.gpu:
        sys.exit("python -m benchmarks gpu needs an MLX build with a GPU; see README.md.")

    if arguments.ptx:
        ptx.register(_ext.cuda_add_kernel, arguments.ptx)
    if arguments.sweep:
        ours = qwen3_6_35b_a3b()
        random_weights(ours)
        report = run_sweep(ours)
        if arguments.output:
            write_json(report, arguments.output)
        return

    if not arguments.output:
        arguments.output = common.RESULTS / f"gpu-35b-{common.device_name()}.json"
    # The command as anyone would give it: where this run's file went is nobody's concern.
    report = common.heading("gpu", without_output(argv))
    report["device"] = mx.device_info().get("device_name")
    report["mlx"] = mx.__version__
    report["environment"] = {k: os.environ[k] for k in gpu_report.RAISED if k in os.environ}
    measure(arguments, report)
    if arguments.engine != "stock":
        say("\n" + gpu_report.text(report))
    say(f"\nWrote {arguments.output}.")


def without_output(argv: list[str]) -> list[str]:
    """The arguments but --output, in one word or two."""
    at = argv.index("--output") if "--output" in argv else len(argv)
    return [a for a in argv[:at] + argv[at + 2 :] if not a.startswith("--output=")]


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the parts that are asked for, in the order of PARTS."""
    run = Run(arguments, report)
    if set(arguments.only) != {"raised"}:
        run.load()
    for part in PARTS:
        if part in arguments.only and not (part == "raised" and arguments.engine == "lily"):
            getattr(run, part)()
    report["targets"] = gpu_report.targets(report)
    run.save()
