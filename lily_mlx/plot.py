"""The picture of a comparison. Needs matplotlib, which the package's `plot` extra brings."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from lily_mlx.machine import busy
from lily_mlx.report import number, write_atomically

COLOURS = {"lily": "#7a4fa3", "stock": "#9aa5b1"}
LABELS = {"lily": "lily_mlx", "stock": "stock mlx-lm"}
MISSING = "No plot: matplotlib is not installed; `pip install matplotlib` brings it."


def available() -> bool:
    """Is matplotlib installed?"""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _figure_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def _panel(axes: Any, report: dict[str, Any], what: str, title: str) -> None:
    names = report["engines"]
    rows = [r for r in report["rows"] if r["engines"][names[0]][f"{what}_tps"] is not None]
    width = 0.8 / len(names)
    top = 0.0
    for index, name in enumerate(names):
        values = [row["engines"][name][f"{what}_tps"] for row in rows]
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(rows))]
        bars = axes.bar(places, values, width * 0.94, color=COLOURS[name], label=LABELS[name])
        axes.bar_label(bars, [_figure_text(v) for v in values], fontsize=8, padding=1)
        top = max(top, *values)
    labels = []
    for row in rows:
        ratio = row.get(f"{what}_ratio")
        labels.append(row["label"] + (f"\n{number(ratio)}x" if ratio is not None else ""))
    axes.set_xticks(range(len(rows)), labels, fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("tokens a second", fontsize=8)
    axes.set_ylim(0, top * 1.15)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08)


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Draw a comparison's medians, prefill and decode side by side, into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = report["engines"]
    panels = [("prefill", "Prefill (until the first token)"), ("decode", "Decode")]
    panels = [
        (what, title)
        for what, title in panels
        if any(row["engines"][names[0]][f"{what}_tps"] is not None for row in report["rows"])
    ]
    figure = Figure(figsize=(4.6 * len(panels), 3.5), dpi=150, layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (what, title) in zip(places, panels, strict=True):
        _panel(axes, report, what, title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper right",
        ncols=len(names),
        fontsize=8,
        frameon=False,
    )
    machine, model = report["machine"], report["model"]
    where = machine["device_name"] + " GPU" if machine["device"] == "gpu" else machine["cpu"]
    cores = "" if machine["device"] == "gpu" else f", {machine['cores']} cores"
    load = report["load_before"]
    warning = f"; the machine was busy (load {load})" if busy(report) else ""
    figure.supxlabel(
        f"{model['name']} model, {model['bytes'] / 1e6:,.1f} MB; {where}{cores}; "
        f"mlx {report['versions'].get('mlx')}, mlx-lm {report['versions'].get('mlx-lm')}; "
        f"median of {report['settings']['rounds']} rounds{warning}",
        fontsize=7,
        color="#555555",
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomically(path, buffer.getvalue())
