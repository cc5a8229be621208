"""`python -m benchmarks ablate`: each choice of the kernels' article against what it replaces.

An arm undoes one choice. It runs in turn with the production form in one process, in alternating
order; a row has medians of tokens a second, their ratio and whether the choice pays here. On a GPU
at the shapes of Qwen3.6-35B-A3B with random weights, on a CPU with the bundled model the arms that
exist there: the reference has neither fusions nor forms. An arm that a device does not have says
why. The article's own figures are not at hand, so the table has no column for them.

    python -m benchmarks ablate --make FILE      with clang-19: the arms' PTX; no GPU is used
    python -m benchmarks ablate --ptx FILE       on an NVIDIA GPU
    python -m benchmarks ablate                  on an Apple GPU or a CPU
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream

import lily_mlx
from benchmarks import common, gpu
from lily_mlx import _ext, decode, kernels, layers, ptx, selection, spec
from lily_mlx.report import write_json
from lily_mlx.shapes import qwen3_6_35b_a3b

CHUNK = 2048
"""Tokens of a prefill chunk of the production form."""
PAYS = 1.01
"""The least ratio that counts as a gain: runs in turn differ by less."""
MOST_ROUNDS, CELL_SECONDS, TOKENS = 7, 20.0, 64


@dataclass(frozen=True)
class Arm:
    """One choice undone.

    Attributes:
        name: of the arm.
        what: what it changes.
        kind: "decode" or "prefill".
        at: tokens in the caches, or of the prompt (the last of which is a decode step).
        step: options of the decode step.
        layers: options of the layers' Programs.
        against: options of the decode step on both sides, where the production form of a target
            leaves nothing to undo.
        way: what the benchmark itself does: "item", "route" or "whole".
        missing: why a target does not have the arm, by target.
    """

    name: str
    what: str
    kind: str
    at: tuple[int, ...]
    step: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    against: dict[str, Any] = field(default_factory=dict)
    way: str = ""
    missing: dict[str, str] = field(default_factory=dict)

    def why_not(self, target: str) -> str:
        """Why a target does not have this arm; empty where it does."""
        if target == "cpu" and self.way not in ("item", "whole"):
            return "the reference on the CPU has no such form"
        return self.missing.get(target, "")


METAL = ("metal", "metal_nax")
_NOT_METAL = dict.fromkeys(METAL, "a form of NVIDIA's GPUs")
# On NVIDIA above 1,024 tokens its tensor cores attend: what their kernel replaces is undone there.
_LANES = {"mma": False}

ARMS = (
    Arm("norm apart", "RMS norm in a dispatch of its own", "decode", (256,),
        step={"fuse_norm": False}),
    Arm("projections apart", "a dispatch for each projection of a row", "decode", (256,),
        step={"fuse_projections": False}),
    Arm("residual apart", "the residual in a dispatch after out_proj and o_proj", "decode", (256,),
        step={"fuse_residual": False}),
    Arm("delta apart", "convolution, delta update and gated norm in three dispatches", "decode",
        (256,), step={"fuse_delta": False}),
    Arm("serial levels", "each dispatch waits for the end of the one before", "decode", (256,),
        step={"serial_levels": True},
        missing=dict.fromkeys(METAL, "the fused form is one chain of launches already")),
    Arm("serial levels, unfused", "the same where projections share a level", "decode", (256,),
        step={"serial_levels": True}, against={"fuse_projections": False}),
    Arm("lanes alone", "no tensor cores", "decode", (256, 32768), step={"mma": False},
        missing=_NOT_METAL),
    Arm("nothing ahead", "the pick asks for no weights of the next layer", "decode", (256,),
        step={"ahead": 0}, missing=_NOT_METAL),
    Arm("uncoalesced KV reads", "each lane reads a row of the cache", "decode", (32768,),
        step={"coalesced": False}, against=_LANES),
    Arm("unpacked KV reads", "a query head a threadgroup", "decode", (32768,), step={"pack": 1},
        against=_LANES),
    Arm("always-general attention", "splits of equal length in a long cache", "decode", (65536,),
        step={"fixed_block_from": -1}, missing={"cuda": "its splits are always of equal length"}),
    Arm("token through the CPU", "the CPU reads each token and feeds it to the next step", "decode",
        (256,), way="item"),
    Arm("dequantized apart", "a GEMM's weights become plain in dispatches before it", "prefill",
        (513, 2049), layers={"dequantize": True}),
    Arm("16-row blocks", "blocks of 16 rows in the experts' GEMMs", "prefill", (1025, 2049),
        layers={"block_rows": 16},
        missing={"metal_nax": "its tensor operations take blocks of 32 and 64 rows"}),
    Arm("block-based scan", "the scan stages 16 tokens at a time", "prefill", (2049,),
        layers={"scan": "block"}),
    Arm("scan with its norm", "the gated norm in the scan's kernel", "prefill", (2049,),
        layers={"scan": "norm"}, missing=dict.fromkeys(METAL, "it is the production form")),
    Arm("scan without its norm", "the gated norm in a dispatch of its own", "prefill", (2049,),
        layers={"scan": "apart"}, missing={"cuda": "it is the production form"}),
    Arm("routing read by the CPU", "the CPU reads the router's logits and picks the experts",
        "prefill", (513, 2049), way="route"),
    Arm("unchunked prefill", f"the whole prompt at once, not {CHUNK:,} tokens", "prefill",
        (4097, 16385), way="whole"),
)  # fmt: skip


def programs(arm: Arm, target: str, shapes: dict[str, Any], at: int) -> list[_ext.Program]:
    """What an arm and the form that it is measured against launch, from shapes alone."""
    if arm.kind == "decode":
        both = (arm.against, arm.against | arm.step)
        return [_ext.step_program(target, shapes, capacity(at), o).program for o in both]
    rows = at - 1 if arm.way == "whole" else min(at - 1, CHUNK)
    return [_ext.chunk_program(target, shapes, rows, arm.layers).program]


def capacity(context: int) -> int:
    """Rows of keys and values that `gpu.caches_at` makes."""
    return (context + 512) // 256 * 256


def make(path: Path) -> None:
    """Compile what the arms run on an NVIDIA GPU and the package does not carry."""
    kernels.load()
    shapes = spec.model(qwen3_6_35b_a3b().language_model)
    few = {**shapes, "layers": shapes["layers"][2:4] + shapes["layers"][-2:]}
    found = {
        p["key"]: p
        for arm in ARMS
        if not arm.why_not("cuda")
        for at in arm.at
        for program in programs(arm, "cuda", few, at)
        for p in program.pipelines
    }
    found = ptx.not_packaged(found)
    count = ptx.build(found.values(), path)
    size = path.stat().st_size / 1e6
    print(f"{path}: {len(found)} pipelines, {count} of them new, {size:.1f} MB")


# ---- The arms that are no option of a Program


def through_cpu(
    prompt: mx.array, model: nn.Module, *, max_tokens: int, prompt_cache: list[Any]
) -> Iterator[tuple[int, mx.array]]:
    """Greedy decoding of a prompt of one token where each token becomes a number in between."""
    token = int(prompt[-1].item())
    for _ in range(max_tokens):
        with mx.stream(generation_stream):
            out = decode.step(model.language_model, mx.array([[token]]), prompt_cache)
        token = out[0].item()
        yield token, out[1]


def picked(logits: mx.array, top_k: int) -> mx.array:
    """The logits of the top_k of each row, read by the CPU; others so low that softmax gives 0."""
    values = np.array(logits)
    kept = np.argpartition(-values, top_k - 1, axis=-1)[..., :top_k]
    out = np.full_like(values, -1e30)
    np.put_along_axis(out, kept, np.take_along_axis(values, kept, -1), -1)
    return mx.array(out)


def routed_by_cpu(block: layers.SparseMoeBlock, x: mx.array) -> mx.array:
    """An MoE block whose experts the CPU picks; our kernels group the rows and do the rest."""
    if not block.norm_topk_prob:
        raise ValueError("probabilities over all experts need the logits that are left out.")
    logits, shared = layers.project(x, block.gate, block.shared_expert_gate, float32_out=True)
    return _ext.moe(x, block.layer(), picked(logits, block.top_k), shared)


@contextlib.contextmanager
def form(arm: Arm, undone: bool) -> Iterator[None]:
    """The arm's form inside a with block, or the one that it is measured against."""
    call = layers.SparseMoeBlock.__call__
    _ext.set_step_options(arm.against | (arm.step if undone else {}))
    _ext.set_layer_options(arm.layers if undone else {})
    if undone and arm.way == "route":
        layers.SparseMoeBlock.__call__ = routed_by_cpu
    try:
        yield
    finally:
        layers.SparseMoeBlock.__call__ = call
        _ext.set_step_options({})
        _ext.set_layer_options({})


# ---- The measurement


def rate(arm: Arm, undone: bool, model: nn.Module, at: int, tokens: int) -> float:
    """Tokens a second of one run."""
    with form(arm, undone):
        if arm.kind == "decode":
            mx.random.seed(at)
            step = through_cpu if undone and arm.way == "item" else decode.generate_step
            return gpu.decode_rate(step, model, at, tokens)[0]
        chunk = at if undone and arm.way == "whole" else CHUNK
        step = functools.partial(decode.generate_step, prefill_step_size=chunk)
        return gpu.prefill_rate(step, model, at)[0]


def measure(
    arm: Arm, model: nn.Module, at: int, rounds: int, tokens: int, clock: gpu.Clock
) -> dict[str, Any]:
    """One row: both forms in turn, after a run of each that warms up."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    for undone in (False, True):
        rate(arm, undone, model, at, min(tokens, 8))
    begin = time.monotonic()
    for turn in range(MOST_ROUNDS):
        for undone in (False, True) if turn % 2 == 0 else (True, False):
            samples[undone].append(rate(arm, undone, model, at, tokens))
        took = time.monotonic() - begin
        if turn + 1 >= rounds and (took > CELL_SECONDS or took > clock.left()):
            break
    production, without = (statistics.median(samples[u]) for u in (False, True))
    return {
        "arm": arm.name, "what": arm.what, "kind": arm.kind, "at": at, "against": arm.against,
        "production": production, "without": without, "ratio": production / without,
        "pays": production / without >= PAYS,
        "samples": {"production": samples[False], "without": samples[True]},
    }  # fmt: skip


def run(
    model: nn.Module, target: str, report: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """All arms of a target; each row is printed and kept as it is there."""
    clock = gpu.Clock(arguments.seconds)
    report |= {"rows": [], "left_out": []}

    def save() -> None:
        write_json(report, arguments.output)

    def leave_out(arm: Arm, at: int | None, why: str) -> None:
        report["left_out"].append({"arm": arm.name, "what": arm.what, "at": at, "why": why})
        gpu.say(f"{arm.name:24} left out: {why}")

    for arm in ARMS:
        if arguments.only and arm.name not in arguments.only:
            continue
        if why := arm.why_not(target):
            leave_out(arm, None, why)
            continue
        for at in arm.at:
            if clock.left() <= 0:
                leave_out(arm, at, f"{arguments.seconds:.0f} s of --seconds are over")
                continue
            try:
                row = measure(arm, model, at, arguments.rounds, arguments.tokens, clock)
            except RuntimeError as error:  # kernels that nobody compiled, or memory
                leave_out(arm, at, str(error))
                continue
            report["rows"].append(row)
            gpu.say(line(row))
            mx.clear_cache()
            save()
    save()


# ---- The table

HEADING = f"{'arm':24} {'':8} {'at':>7} {'production':>11} {'without':>9} {'ratio':>7}  verdict"


def verdict(row: dict[str, Any]) -> str:
    """Whether what the arm undoes pays on this device."""
    return "pays" if row["pays"] else "does not pay here"


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    both = " ".join(f"{k}={v}" for k, v in row["against"].items())
    return (
        f"{row['arm']:24} {row['kind']:8} {row['at']:7,} {row['production']:11,.1f} "
        f"{row['without']:9,.1f} {row['ratio']:6.3f}x  {verdict(row)}"
        + (f" (both with {both})" if both else "")
    )


def text(report: dict[str, Any]) -> str:
    """The whole table, tokens a second, and what there is none of."""
    lines = [HEADING, *map(line, report["rows"]), ""]
    changes = dict.fromkeys((row["arm"], row["what"]) for row in report["rows"])
    lines += [f"{name}: {what}." for name, what in changes]
    reasons: dict[str, list[str]] = {}
    for x in report["left_out"]:
        at = "" if x["at"] is None else f" at {x['at']:,}"
        reasons.setdefault(x["why"], []).append(x["arm"] + at)
    lines += [f"left out: {'; '.join(names)}: {why}." for why, names in reasons.items()]
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [arm.name for arm in ARMS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="ARM",
                        help=f"of {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3,
                        help="least runs of a form; short ones get more (%(default)s)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=TOKENS, help="decoded (%(default)s)")
    parser.add_argument("--seconds", type=float, default=540, metavar="S",
                        help="leave out what begins later (%(default)s)")  # fmt: skip
    parser.add_argument("--ptx", type=Path, metavar="FILE", help="PTX of the arms, from --make")
    parser.add_argument("--make", type=Path, metavar="FILE", help="compile it; no GPU is used")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="the result (results/ablate-MODEL-DEVICE.json)")  # fmt: skip
    return parser


def main(argv: list[str]) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.tokens < 1:
        parser.error("--rounds and --tokens are 1 or more")
    if arguments.make:
        make(arguments.make)
        return
    target = selection.target()
    if target is None:
        parser.error("this build has no kernels for MLX's default device; see README.md")
    if arguments.ptx:
        if target != "cuda":
            parser.error("--ptx is for an NVIDIA GPU")
        ptx.register(_ext.cuda_add_kernel, arguments.ptx)
    if target == "cpu":
        model, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))
        name = "bundled"
    else:
        model, name = qwen3_6_35b_a3b(), "35b"
        gpu.random_weights(model)
    if not arguments.output:
        arguments.output = common.RESULTS / f"ablate-{name}-{common.device_name()}.json"
    report = common.heading("ablate", gpu.without_output(argv))
    size = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    report["model"] = {"name": name, "bytes": size}
    gpu.say(f"{HEADING} (tokens a second)")
    run(model, target, report, arguments)
    gpu.say(f"\n{text(report)}\n\nWrote {arguments.output}.")
