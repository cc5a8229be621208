"""`lily_mlx.info [MODEL]`: devices, versions, and which kernel serves which module."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from lily_mlx.cli import _common
from lily_mlx.machine import machine, one_line, versions


def group(report: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the entries that differ only in their layer's number.

    Args:
        report: a model's lily_report(): {path, kind, kernel, reason} for each module.

    Returns:
        One entry for each distinct module: path with `*` for the layer, count, and the layers.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in report:
        layers = re.findall(r"(?<=layers\.)\d+", entry["path"])
        path = re.sub(r"(?<=layers\.)\d+", "*", entry["path"])
        key = (path, entry["kind"], entry["kernel"], entry["reason"])
        merged = groups.setdefault(
            key,
            {"path": path, "kind": entry["kind"], "kernel": entry["kernel"],
             "reason": entry["reason"], "count": 0, "layers": []},
        )  # fmt: skip
        merged["count"] += 1
        merged["layers"] += [int(n) for n in layers]
    return list(groups.values())


def _spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def collect(model: str | None) -> dict[str, Any]:
    """Everything the command prints; ``model`` None leaves the modules out."""
    import lily_mlx

    found: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "backend": lily_mlx.backend_info(),
    }
    if model is not None:
        from lily_mlx.loading import load

        loaded, _ = load(model, lazy=True)
        found["model"] = {"path": model, "modules": group(loaded.lily_report())}
    return found


def render(found: dict[str, Any]) -> str:
    """The findings as text."""
    lines = [
        "machine   " + one_line(found["machine"]),
        "versions  " + ", ".join(f"{name} {v}" for name, v in found["versions"].items()),
    ]
    lines += [f"{name:9} {value}" for name, value in found["backend"].items()]
    if "model" in found:
        modules = found["model"]["modules"]
        served = sum(m["count"] for m in modules if m["kernel"])
        total = sum(m["count"] for m in modules)
        lines += ["", f"model     {found['model']['path']}",
                  f"          {served} of {total} modules have a lily kernel"]  # fmt: skip
        for m in modules:
            several = "layers" if len(m["layers"]) > 1 else "layer"
            layers = f" ({several} {_spans(m['layers'])})" if m["layers"] else ""
            count = f"{m['count']:4} x " if m["count"] > 1 else " " * 7
            verdict = m["kernel"] or f"stock: {m['reason']}"
            lines.append(f"{count}{m['path']} [{m['kind']}]{layers}: {verdict}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the findings, as text or JSON."""
    from lily_mlx import BUNDLED_MODEL

    parser = argparse.ArgumentParser(prog="lily_mlx.info", description=__doc__)
    parser.add_argument(
        "model", nargs="?", default=str(BUNDLED_MODEL), help="a model folder or repository"
    )
    parser.add_argument("--no-model", action="store_true", help="do not load a model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _common.add_traceback_flag(parser)
    arguments = parser.parse_args(_common.arguments_of(argv))

    def body() -> None:
        found = collect(None if arguments.no_model else arguments.model)
        print(json.dumps(found, indent=1) if arguments.json else render(found))

    _common.guarded("lily_mlx.info", body, arguments.traceback)


if __name__ == "__main__":
    main()
