"""What the routines share: the model flags, result files, the machine's name."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily_mlx import compare
from lily_mlx.cli import _common
from lily_mlx.machine import load_average, machine, one_line, versions
from lily_mlx.prompts import PASSAGE
from lily_mlx.report import write_atomically, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
ENGINES = {"both": compare.ENGINES, "lily": ("lily",), "stock": ("stock",)}


def parser(routine: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flags that every routine has."""
    from lily_mlx import BUNDLED_MODEL

    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks {routine}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--model", default=str(BUNDLED_MODEL), help="model folder or repository (default: bundled)"
    )
    made.add_argument(
        "--label", help="the result's name in place of the model's and device's names"
    )
    made.add_argument(
        "--output-dir", type=Path, default=RESULTS, help="where results go (default: %(default)s)"
    )
    made.add_argument("--no-save", action="store_true", help="print only")
    _common.add_traceback_flag(made)
    return made


def prompt_text(file: str | None) -> str:
    """The text of ``file``, or the package's passage of English."""
    return PASSAGE if file is None else Path(file).read_text()


def device_name() -> str:
    """A short name for file names: cpu, or the GPU's name."""
    found = machine()
    name = found["device_name"] if found["device"] == "gpu" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit() -> str | None:
    """The revision of the sources, with a `+` when they differ from it; None outside git."""
    try:
        revision, changes = (
            subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "lily_mlx", "csrc", "metal"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changes else "")


def heading(routine: str, arguments: list[str]) -> dict[str, Any]:
    """What every result file begins with."""
    return {
        "routine": routine,
        "command": shlex.join(["python", "-m", "benchmarks", routine, *arguments]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "load_before": load_average(),
        "machine": machine(),
        "versions": versions(),
    }


def save(result: dict[str, Any], text: str, arguments: argparse.Namespace, model: str) -> None:
    """Print a result and keep it: NAME.json with every sample, NAME.txt with the table."""
    head = f"$ {result['command']}\n{result['date']}  {one_line(result['machine'])}\n"
    head += ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v) + "\n"
    if result["load_before"] is not None:
        head += f"load average before the run: {result['load_before']}\n"
    print(f"\n{head}\n{text}")
    if arguments.no_save:
        return
    name = arguments.label or f"{result['routine']}-{model}-{device_name()}"
    path = arguments.output_dir / f"{name}.json"
    write_json(result, path)
    write_atomically(path.with_suffix(".txt"), f"{head}\n{text}\n")
    print(f"\nWrote {path} and {path.with_suffix('.txt').name}.")


def guarded(routine: str, body: Callable[[], None], show_traceback: bool) -> None:
    _common.guarded(f"benchmarks {routine}", body, show_traceback)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
