"""The result of `python -m benchmarks gpu`: how its parts are joined, judged and printed.

A result holds, beside the heading of every result file: `decode` and `prefill`, rows of one context
each (lily, stock, lily_raised, stock_raised in tokens a second, ratio, repeatable, samples);
`left_out`, the cells that were not measured and why; `kernels_N` and `step_N`, the kernels of a
decode step at N tokens and that step's time; `copy_tb_s`; and the checks: `bundled_greedy`,
`bundled_forced`, `teacher_forced`, `forced_from_caches`, `prompt`, `repeated`.
"""

from __future__ import annotations

from typing import Any

from lily_mlx.report import number

ROWS = {"decode": "context", "prefill": "tokens"}
"""The parts that are lists of rows, and the field that tells their rows apart."""
RAISED = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "4000"}
"""MLX's limits on a command buffer, raised; MLX reads them once, when it starts."""

DECODE_RATIO, DECODE_RATES = 12.0, {4096: 500.0, 131072: 350.0}
PREFILL_RATIO, PREFILL_RATES = {512: 20.0}, {4096: 8000.0}
HEAD_SHARE = 0.7


WAYS = ("", "_raised")
"""Of MLX's limits: as they come, and raised. Each is a process of its own."""
RATES = tuple(f"{engine}{way}" for way in WAYS for engine in ("lily", "stock"))
"""The rates of a row, in tokens a second."""


def completed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with lily's lesser ratio to stock in one process; None where none has both."""
    ratios = [
        row[f"lily{way}"] / row[f"stock{way}"]
        for way in WAYS
        if row.get(f"lily{way}") and row.get(f"stock{way}")
    ]
    return {**row, "ratio": min(ratios, default=None)}


def put_row(report: dict[str, Any], part: str, row: dict[str, Any]) -> None:
    """Add a row in its place.

    Of one of the same context only the raised rates stay, since lily and stock are compared within
    one process; a row that brings nothing but those adds them.
    """
    key = ROWS[part]
    rows = {r[key]: r for r in report.get(part, [])}
    old = rows.get(row[key], {})
    if "lily" in row or "stock" in row:
        old = {k: v for k, v in old.items() if k.endswith("_raised")}
    rows[row[key]] = completed({**old, **row})
    report[part] = [rows[k] for k in sorted(rows)]


def add_raised(report: dict[str, Any], child: dict[str, Any]) -> None:
    """Enter the rates of a run under `RAISED`, and what it left out, beside those of this run."""
    for part, key in ROWS.items():
        for row in child.get(part, []):
            rates = {f"{name}_raised": row[name] for name in ("lily", "stock") if row.get(name)}
            if rates:
                put_row(report, part, {key: row[key], **rates})
    for cell in child.get("left_out", []):
        report["left_out"].append({**cell, "engine": f"{cell['engine']}_raised"})
    report["raised"] = {"environment": RAISED} | {p: child[p] for p in ROWS if p in child}


def samples(report: dict[str, Any], part: str, length: int, rate: str) -> list[float]:
    """What a rate of a row is the median of; empty where it is not kept."""
    engine, raised, _ = rate.partition("_raised")
    rows = (report.get("raised", {}) if raised else report).get(part, [])
    found = (r for r in rows if r[ROWS[part]] == length)
    return next(found, {}).get("samples", {}).get(engine, [])


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several; where two measured the same cell, the later one's row stays.

    Raises:
        ValueError: none, or results of different devices or versions of mlx.
    """
    if not results:
        raise ValueError("there is no result to merge.")
    out: dict[str, Any] = {}
    for result in results:
        for what in ("device", "mlx"):
            if what in out and result.get(what) != out[what]:
                raise ValueError(
                    f"results of {what} {out[what]!r} and {result.get(what)!r} are not one run."
                )
        kept = {k: v for k, v in result.items() if k not in (*ROWS, "left_out", "commands")}
        commands = out.get("commands", []) + result.get("commands", [result.get("command")])
        left_out = out.get("left_out", []) + result.get("left_out", [])
        rows = {part: out.get(part) for part in ROWS if part in out}
        out = {**out, **kept, **rows, "commands": commands}
        for part in ROWS:
            for row in result.get(part, []):
                put_row(out, part, row)
        out["left_out"] = [x for x in left_out if not _measured(out, x)]
    return out


def _measured(report: dict[str, Any], cell: dict[str, Any]) -> bool:
    rows = report.get(cell["part"], [])
    return any(r[ROWS[cell["part"]]] == cell["context"] and r.get(cell["engine"]) for r in rows)


def kernel_row(
    label: str, dispatches: int, seconds: float, moved: int, rate: float
) -> dict[str, Any]:
    """A kernel of a step: its time, its floor at the copy rate, and the bytes a second it reaches.

    Args:
        seconds: of all its dispatches in one step.
        moved: bytes that they declare.
        rate: bytes a second of a copy on this card.
    """
    floor = moved / rate
    return {
        "label": label,
        "dispatches": dispatches,
        "us": seconds * 1e6 / dispatches,
        "total_us": seconds * 1e6,
        "bytes": moved,
        "floor_us": floor * 1e6,
        "over_floor": seconds / floor if floor else None,
        "tb_s": moved / seconds / 1e12,
        "share_of_copy": moved / seconds / rate,
    }


def worst(kernels: list[dict[str, Any]], count: int = 3) -> list[dict[str, Any]]:
    """The kernels that cost a step the most time above their floors."""
    return sorted(kernels, key=lambda r: r["floor_us"] - r["total_us"])[:count]


def contexts_of_kernels(report: dict[str, Any]) -> list[int]:
    """The contexts whose steps have a table of kernels."""
    return sorted(int(k.removeprefix("kernels_")) for k in report if k.startswith("kernels_"))


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the project wants of these figures, and whether it got it; only what was measured."""
    out: list[dict[str, Any]] = []

    def want(what: str, wanted: Any, got: Any, met: bool) -> None:
        out.append({"what": what, "wanted": wanted, "got": got, "met": bool(met)})

    decode = {r["context"]: r for r in report.get("decode", [])}
    prefill = {r["tokens"]: r for r in report.get("prefill", [])}
    for part, rows in (("decode", decode), ("prefill", prefill)):
        ratios = {k: r["ratio"] for k, r in rows.items() if r.get("ratio")}
        if ratios:
            slowest = min(ratios, key=ratios.__getitem__)
            least = ratios[slowest]
            want(f"{part}: no length slower than stock (least at {slowest:,})", 1.0, least,
                 least >= 1)  # fmt: skip
            if part == "decode":
                want(f"decode: times stock at every context (least at {slowest:,})", DECODE_RATIO,
                     least, least >= DECODE_RATIO)  # fmt: skip
        equal = [r["repeatable"] for r in rows.values() if r.get("repeatable") is not None]
        if equal:
            want(f"{part}: repeated runs are bit-equal", True, all(equal), all(equal))
    for part, rows, rates in (
        ("decode", decode, DECODE_RATES),
        ("prefill", prefill, PREFILL_RATES),
    ):
        for context, rate in rates.items():
            got = rows.get(context, {}).get("lily")
            if got:
                want(f"{part}: tokens a second at {context:,}", rate, got, got >= rate)
    for context, ratio in PREFILL_RATIO.items():
        got = prefill.get(context, {}).get("ratio")
        if got:
            want(f"prefill: times stock at {context:,}", ratio, got, got >= ratio)
    for context in contexts_of_kernels(report)[:1]:
        for row in report[f"kernels_{context}"]:
            if row["label"] == "head":
                share = row["share_of_copy"]
                want("head: share of the copy rate", HEAD_SHARE, share, share >= HEAD_SHARE)
    if "bundled_greedy" in report:
        equal = report["bundled_greedy"]["equal"]
        want("bundled model: 64 greedy tokens equal the CPU's", True, equal, equal)
    if "repeated" in report:
        equal = report["repeated"]["equal"]
        want("logits of a repeated prompt are bit-equal", True, equal, equal)
    return out


# ---- As text


def rows_text(part: str, row: dict[str, Any]) -> str:
    """A row of decode or prefill as a line."""
    cells = [f"{row[ROWS[part]]:>8,}"]
    for name in RATES:
        cells.append(f"{number(row.get(name)):>12}")
    cells.append(f"{number(row.get('ratio')):>8}")
    repeatable = row.get("repeatable")
    cells.append({True: "equal", False: "NOT EQUAL", None: "one run"}[repeatable])
    return "  ".join(cells)


def rows_heading(part: str) -> str:
    names = [
        f"{'lily tok/s':>12}",
        f"{'stock tok/s':>12}",
        f"{'lily raised':>12}",
        f"{'stock raised':>12}",
        f"{'ratio':>8}",
    ]
    return "  ".join([f"{ROWS[part]:>8}", *names, "repeated"])


def kernels_text(report: dict[str, Any], context: int) -> str:
    """The table of one step's kernels, its sum, and the step's measured time."""
    kernels = report[f"kernels_{context}"]
    lines = [f"{f'one step at {context:,}':>22} {'n':>4} {'us each':>9} {'us':>9} {'floor us':>9} "
             f"{'x floor':>8} {'TB/s':>6} {'of copy':>8}"]  # fmt: skip
    for r in sorted(kernels, key=lambda r: -r["total_us"]):
        lines.append(f"{r['label']:>22} {r['dispatches']:4} {r['us']:9.2f} {r['total_us']:9.1f} "
                     f"{r['floor_us']:9.1f} {number(r['over_floor']):>8} {r['tb_s']:6.2f} "
                     f"{r['share_of_copy']:8.1%}")  # fmt: skip
    step = report.get(f"step_{context}")
    total, floor = (sum(r[k] for r in kernels) for k in ("total_us", "floor_us"))
    lines.append(f"{'sum':>22} {'':4} {'':9} {total:9.1f} {floor:9.1f}")
    if step:
        lines.append(f"{'the step, measured':>22} {'':4} {'':9} {step['us']:9.1f}")
    lost = ", ".join(f"{r['label']} {r['total_us'] - r['floor_us']:.0f} us" for r in worst(kernels))
    return "\n".join([*lines, f"most time above the floor: {lost}"])


def targets_text(report: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return str(value) if isinstance(value, bool) else number(value)

    return "\n".join(
        f"{'met   ' if t['met'] else 'MISSED'}  {t['what']}: {shown(t['got'])}, "
        f"wanted {shown(t['wanted'])}"
        for t in targets(report)
    )


def text(report: dict[str, Any]) -> str:
    """Everything that a result says, as tables."""
    parts = []
    for part in ROWS:
        if report.get(part):
            lines = [part, rows_heading(part), *(rows_text(part, r) for r in report[part])]
            parts.append("\n".join(lines))
    parts += [kernels_text(report, context) for context in contexts_of_kernels(report)]
    if report.get("left_out"):
        parts.append("left out\n" + "\n".join(left_out_text(x) for x in report["left_out"]))
    parts.append(targets_text(report))
    return "\n\n".join(parts)


def left_out_text(cell: dict[str, Any]) -> str:
    return f"{cell['part']} of {cell['engine']} at {cell['context']:,}: {cell['why']}"
