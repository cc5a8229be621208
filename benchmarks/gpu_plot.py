"""The picture of a result of `python -m benchmarks gpu`: tokens a second by length."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from benchmarks import gpu_report
from lily_mlx.plot import COLOURS, LABELS
from lily_mlx.report import number, write_atomically

TITLES = {
    "decode": ("Decode", "tokens in the caches"),
    "prefill": ("Prefill (until the first token)", "tokens of the prompt"),
}


def length_name(tokens: int) -> str:
    """256, 4K, 128K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens}"


def _panel(axes: Any, result: dict[str, Any], part: str) -> None:
    key = gpu_report.ROWS[part]
    rows = result[part]
    for name, style, label in (
        ("stock_raised", "--", "the same, MLX's limits raised"),  # lily's lie on one another
        ("stock", "o-", LABELS["stock"]),
        ("lily", "o-", LABELS["lily"]),
    ):
        points = [(row[key], row[name]) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=COLOURS[name.split("_")[0]],
                      label=label, markersize=4)  # fmt: skip
    for row in rows:
        if row.get("ratio") and row.get("lily"):
            axes.annotate(f"{number(row['ratio'])}x", (row[key], row["lily"]), fontsize=7,
                          xytext=(0, 5), textcoords="offset points", ha="center")  # fmt: skip
    title, what = TITLES[part]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = [row[key] for row in rows]
    axes.set_xticks(lengths, [length_name(n) for n in lengths], fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    low, high = axes.get_ylim()
    axes.set_yticks([t * 10**e for e in range(6) for t in (1, 2, 5) if low <= t * 10**e <= high])
    axes.set_ylim(low, high * 1.3)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(what, fontsize=8)
    axes.set_ylabel("tokens a second", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw decode and prefill, what there is of them, into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the result has neither.
    """
    from matplotlib.figure import Figure

    parts = [part for part in gpu_report.ROWS if result.get(part)]
    if not parts:
        raise ValueError("this result has neither decode nor prefill to draw.")
    figure = Figure(figsize=(4.6 * len(parts), 3.5), dpi=150, layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        _panel(axes, result, part)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper right", ncols=3, fontsize=8,
                  frameon=False)  # fmt: skip
    figure.supxlabel(
        f"random 4-bit weights, {result['weights_gb']:.1f} GB; {result['device']}; "
        f"mlx {result['versions'].get('mlx')}, mlx-lm {result['versions'].get('mlx-lm')}; "
        "figures: times stock in one process, the lesser of the two",
        fontsize=7,
        color="#555555",
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomically(path, buffer.getvalue())
