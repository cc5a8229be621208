"""A measurement's report as text and as files: figures, tables, the comparison's words."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily_mlx.machine import busy


def number(value: float | None) -> str:
    """A figure with three significant digits, `-` for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - int(math.floor(math.log10(abs(value)))))
    return f"{value:,.{min(digits, 2)}f}"


def render_grid(groups: list[tuple[str, list[str]]], lines: list[list[str]]) -> str:
    """A plain text table under two lines of headings.

    Args:
        groups: each group's title and the headings of its columns, left to right.
        lines: the cells, one list a row; the first column is left-aligned.
    """
    names = [name for _, columns in groups for name in columns]
    widths = [max(len(line[i]) for line in [names, *lines]) for i in range(len(names))]
    titles, start = [], 0
    for title, columns in groups:
        inside = slice(start, start + len(columns))
        room = sum(widths[inside]) + 2 * (len(columns) - 1)
        if len(title) > room:
            widths[start] += len(title) - room
            room = len(title)
        titles.append(f"{title:^{room}}" if start else f"{title:{room}}")
        start += len(columns)

    def row(cells: list[str]) -> str:
        first = f"{cells[0]:{widths[0]}}"
        return "  ".join(
            [first] + [f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)]
        )

    rule = ["-" * w for w in widths]
    return "\n".join(
        line.rstrip() for line in ["  ".join(titles), row(names), row(rule), *map(row, lines)]
    )


def same_words(check: dict[str, Any] | None) -> str:
    """A check in a few words: `same`, or where the engines part and whose choice float32 makes."""
    if check is None or "same" not in check:
        return "-"
    if check["same"]:
        return "same"
    words = f"differ at {check['at'] + 1}"
    if "float32_agrees" in check:
        words += f" (float32: {' and '.join(check['float32_agrees']) or 'neither'})"
    return words


def table(report: dict[str, Any]) -> tuple[list[tuple[str, list[str]]], list[list[str]]]:
    """Headings and rows of the comparison, for :func:`render_grid`."""
    names = report["engines"]
    two = len(names) == 2
    ratio_column = ["ratio"] if two else []
    groups = [
        ("", [""]),
        ("prefill tok/s", names + ratio_column),
        ("decode tok/s", names + ratio_column),
        ("peak MB", list(names)),
    ]
    if two:
        groups.append(("", ["tokens"]))
    checks = {c["cell"]: c for c in report["checks"]}
    lines = []
    for row in report["rows"]:
        line = [row["label"]]
        for what in ("prefill", "decode"):
            line += [number(row["engines"][n][f"{what}_tps"]) for n in names]
            if two:
                ratio = row[f"{what}_ratio"]
                line.append("-" if ratio is None else f"{number(ratio)}x")
        line += [number(row["engines"][n]["peak_bytes"] / 1e6) for n in names]
        if two:
            line.append(same_words(checks.get(row["label"])))
        lines.append(line)
    return groups, lines


def _difference_text(check: dict[str, Any], decode: Callable[[list[int]], str] | None) -> str:
    words = []
    for name, top in check["top"].items():
        shown = ", ".join(
            f"{t['token']}{' ' + repr(decode([t['token']])) if decode else ''} {t['logprob']:.3f}"
            for t in top
        )
        words.append(f"  {name:8} {shown}")
    if "float32" in check:
        words.append(f"  float32  {check['float32']}")
    what = "the last token" if check["same"] else "the first difference"
    head = f"{check['cell']}, token {check['at'] + 1} ({what}), log-probabilities of the top 5:"
    return "\n".join([head, *words])


def render(report: dict[str, Any], decode: Callable[[list[int]], str] | None = None) -> str:
    """The report as text: the table, then notes, then each difference.

    Args:
        decode: turns token ids into text, to show the tokens of a difference.
    """
    settings = report["settings"]
    many = settings["rounds"] > 1
    parts = [
        render_grid(*table(report)),
        (f"Medians of {settings['rounds']} rounds" if many else "One round")
        + f"; {settings['decode_tokens']} tokens decoded "
        f"greedily; prompts: {settings['prompts']}.",
    ]
    if busy(report):
        parts.append(
            f"The machine was busy: load average {report['load_before']} before the run. "
            "Measure again when it is idle."
        )
    if not report["shared_weights"]:
        parts.append("The engines hold weights of their own: peak memory counts both models.")
    noisy = [
        f"{row['label']} {name} {what} {entry[f'{what}_spread']:.0%}"
        for row in report["rows"]
        for name, entry in row["engines"].items()
        for what in ("prefill", "decode")
        if (entry[f"{what}_spread"] or 0) > 0.1
    ]
    if noisy:
        parts.append("Spread over 10 % between rounds: " + "; ".join(noisy) + ".")
    for check in report["checks"]:
        unsteady = [name for name, same in check["repeatable"].items() if not same]
        if unsteady:
            parts.append(
                f"{check['cell']}: {' and '.join(unsteady)} wrote other tokens in another round."
            )
        if "top" in check:
            parts.append(_difference_text(check, decode))
    return "\n\n".join(parts)


def write_atomically(path: str | Path, data: str | bytes) -> None:
    """Write a file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(report: dict[str, Any], path: str | Path) -> None:
    """Write a report as JSON, whole or not at all."""
    write_atomically(path, json.dumps(report, indent=1) + "\n")
