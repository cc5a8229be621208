"""`python -m benchmarks ledger`: what a token and a prefill chunk of Qwen3.6-35B-A3B cost, counted.

Dispatches, dependency levels, barriers and bytes by kernel, from the Programs that a GPU would get
and from shapes alone: no weights, no GPU, no clock. Bytes are each byte once a launch: what a
launch reads again comes from the cache or it does not, which only a measurement can say.

The floor of a decode step is what no engine can do without: the weights that one token uses, the
DeltaNet state read and written, the keys and values read. The floor of a prefill chunk is its
distinct weights, once.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import mlx.nn as nn

import lily_mlx
from benchmarks import common
from lily_mlx import spec
from lily_mlx.shapes import qwen3_6_35b_a3b
from lily_mlx.trace import Trace, format_bytes

CONTEXTS = (0, 256, 4096, 32768, 131072)
CHUNKS = (512, 2048, 4096)
AIM = {"dispatches": 300, "levels": 270, "floor": 1.05}


def matrix_bytes(m: spec.Matrix, experts: int | None = None) -> int:
    """Bytes of a matrix of bf16 model, or of `experts` of its experts."""
    rows, columns, bits, group, count = m[:5]
    values = rows * columns * (count if experts is None else experts)
    return values * 2 if bits == 0 else values * bits // 8 + values // group * 4


def floor(shapes: dict[str, Any], context: int) -> dict[str, int]:
    """Bytes that a decode step cannot do without, by what they are; `context` tokens are cached."""
    hidden = shapes["head"][1]
    weights = (
        matrix_bytes(shapes["head"]) + matrix_bytes(shapes["embedding"]) // shapes["embedding"][0]
    )
    weights += 2 * hidden
    state = cache = 0
    for layer in shapes["layers"]:
        weights += 4 * hidden
        moe = layer["moe"]
        weights += sum(matrix_bytes(moe[k], moe["top_k"]) for k in ("gate", "up", "down"))
        weights += sum(matrix_bytes(moe[k]) for k in moe if k.startswith("shared") or k == "router")
        if "delta" in layer:
            d = layer["delta"]
            weights += sum(matrix_bytes(d[k]) for k in ("qkv", "z", "b", "a", "out"))
            channels = d["qkv"][0]
            weights += 2 * (channels * d["conv_width"] + d["value_heads"] + d["value_dim"])
            weights += 4 * d["value_heads"]
            state += 2 * 4 * d["value_heads"] * d["value_dim"] * d["key_dim"]
            state += 2 * 2 * (d["conv_width"] - 1) * channels
        else:
            a = layer["attention"]
            weights += sum(matrix_bytes(a[k]) for k in ("q", "k", "v", "out")) + 4 * a["head_dim"]
            cache += 2 * 2 * a["kv_heads"] * a["head_dim"]
    return {"weights": weights, "state": state, "cache": cache * (context + 1)}


def by_kernel(trace: Trace) -> list[dict[str, Any]]:
    """Launches and bytes of each kernel, the most bytes first."""
    found: dict[str, dict[str, Any]] = {}
    for d in trace.dispatches:
        row = found.setdefault(
            d["kernel"], {"kernel": d["kernel"], "dispatches": 0, "read": 0, "written": 0}
        )
        row["dispatches"] += 1
        row["read"] += d["read"]
        row["written"] += d["written"]
    return sorted(found.values(), key=lambda r: -(r["read"] + r["written"]))


def entry(trace: Trace, shapes: dict[str, Any], **what: Any) -> dict[str, Any]:
    """One Program's row of the ledger, without its floor."""
    r = trace.report
    return {
        **what,
        "dispatches": r["dispatches"],
        "levels": r["levels"],
        "barriers": r["barriers"],
        "pipelines": len(trace.pipelines),
        "read": r["read"],
        "written": r["written"],
        "bytes": r["read"] + r["written"],
        "distinct_weights": r["weights"],
        "arena": r["arena"],
        "kernels": by_kernel(trace),
    }


def decode_entry(made: nn.Module, shapes: dict[str, Any], context: int) -> dict[str, Any]:
    """The decode step after `context` tokens."""
    trace = lily_mlx.trace(made, "decode", context=context)
    row = entry(trace, shapes, kind="decode", context=context)
    row["floor"] = floor(shapes, context)
    row["over_floor"] = row["bytes"] / sum(row["floor"].values())
    hidden = 2 * shapes["head"][1]
    scratch = sum(
        a["traffic"] * (1 if a["access"] != "read_write" else 2)
        for d in trace.dispatches
        for a in d["arguments"]
        if "slot" in a and trace.kind_of(a["slot"]) == "scratch"
    )
    row["scratch"] = scratch
    row["notes"] = [
        f"{format_bytes(scratch)} of the sum are activations that pass from launch to launch "
        f"(the residual stream alone is {format_bytes(hidden)} a launch): they stay in the cache.",
    ]
    return row


def prefill_entry(made: nn.Module, shapes: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A chunk of `tokens` tokens with nothing before it."""
    trace = lily_mlx.trace(made, "prefill", tokens=tokens)
    row = entry(trace, shapes, kind="prefill", tokens=tokens)
    attention = [l["attention"] for l in shapes["layers"] if "attention" in l]
    sdpa = sum(2 * tokens * a["head_dim"] * (2 * a["heads"] + 2 * a["kv_heads"]) for a in attention)
    row["kernels"].append(
        {"kernel": "mx.fast.scaled_dot_product_attention (MLX's own)",
         "dispatches": len(attention), "read": sdpa, "written": 0}
    )  # fmt: skip
    row["floor"] = {"weights": trace.report["weights"]}
    row["over_floor"] = row["bytes"] / sum(row["floor"].values())
    row["bytes_a_token"] = row["bytes"] / tokens
    labels = trace.report["by_label"]
    down = labels["experts down"]["written"]
    row["notes"] = [
        f"{format_bytes(2 * down)} are the experts' fp32 down products, written, and read once by "
        "the combination, which keeps their order fixed; rounding them to bf16 would halve it and "
        "is not what the reference does.",
        "norms and residuals are MLX's ops on a GPU and stand here as our kernels of the same "
        "bytes; attention is MLX's and not in the sum; the floor is the chunk's distinct weights, "
        "the rest are activations: their share grows with the chunk.",
    ]
    return row


def forms(made: nn.Module) -> list[dict[str, Any]]:
    """Launches, levels and bytes of a token at zero context, with fusions undone."""
    switches = ["fuse_norm", "fuse_projections", "fuse_residual", "fuse_delta", "fuse_route"]
    rows = []
    for off in ([], *([s] for s in switches), switches):
        r = lily_mlx.trace(made, "decode", **dict.fromkeys(off, False)).report
        name = "all undone" if len(off) > 1 else f"{off[0]} undone" if off else "fused"
        rows.append(
            {"form": name, "dispatches": r["dispatches"], "levels": r["levels"],
             "bytes": r["read"] + r["written"]}
        )  # fmt: skip
    return rows


def collect() -> dict[str, Any]:
    """The whole ledger."""
    made = qwen3_6_35b_a3b()
    shapes = spec.model(made.language_model)
    rows = [decode_entry(made, shapes, c) for c in CONTEXTS]
    rows += [prefill_entry(made, shapes, t) for t in CHUNKS]
    notes = []
    first = rows[0]
    for name in ("dispatches", "levels"):
        verdict = "reached" if first[name] < AIM[name] else "not reached"
        notes.append(f"aim: under {AIM[name]} {name} a token: {first[name]}, {verdict}.")
    over = first["over_floor"]
    verdict = "reached" if over <= AIM["floor"] else "not reached"
    notes.append(
        f"aim: at most {AIM['floor']} of the floor's bytes at zero context: {over:.4f}, {verdict}; "
        f"what is above it: {first['notes'][0]}"
    )
    notes.append(
        "launches read the residual and router rows once here; each threadgroup reads them again, "
        "from the cache."
    )
    return {
        "model": "Qwen3.6-35B-A3B, shapes alone",
        "rows": rows,
        "forms": forms(made),
        "notes": notes,
    }


def render(ledger: dict[str, Any]) -> str:
    """The ledger for people."""
    lines = [ledger["model"], ""]
    head = ("program", "dispatches", "levels", "barriers", "read", "written", "floor", "over floor")
    table = [head]
    for r in ledger["rows"]:
        where = f"decode at {r['context']}" if r["kind"] == "decode" else f"prefill {r['tokens']}"
        table.append(
            (where, str(r["dispatches"]), str(r["levels"]), str(r["barriers"]),
             format_bytes(r["read"]), format_bytes(r["written"]),
             format_bytes(sum(r["floor"].values())), f"{r['over_floor']:.4f}")
        )  # fmt: skip
    widths = [max(len(row[c]) for row in table) for c in range(len(head))]
    lines += [
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    for r in ledger["rows"]:
        where = f"decode at {r['context']}" if r["kind"] == "decode" else f"prefill {r['tokens']}"
        parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in r["floor"].items())
        lines += ["", f"{where}: floor {parts}; arena {format_bytes(r['arena'])}"]
        for k in r["kernels"]:
            lines.append(
                f"  {k['kernel']:48} {k['dispatches']:4}  read {format_bytes(k['read']):>9}  "
                f"written {format_bytes(k['written']):>9}"
            )
        lines += [f"  note: {n}" for n in r["notes"]]
    lines += ["", "decode at 0, what each fusion saves:"]
    for f in ledger["forms"]:
        lines.append(
            f"  {f['form']:24} {f['dispatches']:4} dispatches  {f['levels']:4} levels  "
            f"{format_bytes(f['bytes'])}"
        )
    return "\n".join([*lines, "", *ledger["notes"]])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)

    def body() -> None:
        ledger = collect()
        json.dump(ledger, sys.stdout, indent=1) if args.json else print(render(ledger))

    common.guarded("ledger", body, args.traceback)
