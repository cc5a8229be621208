"""Each kernel of a decode step at the shapes of Qwen3.6-35B-A3B, on an NVIDIA GPU, against numpy.

python -m tests.gpu.kernels make FILE     with clang: the PTX that the package does not carry
python -m tests.gpu.kernels run [FILE]    with a GPU: needs the package, numpy and the driver
python -m tests.gpu.kernels host          with clang: the same on the CPU (minutes)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "tests"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from lily_mlx import ptx, spec  # noqa: E402
from lily_mlx.shapes import qwen3_6_35b_a3b  # noqa: E402
from metal.host.toolchain import HostError  # noqa: E402

from . import dispatches, executors  # noqa: E402

# (tokens in the cache after the step, rows of the cache or None: as few as hold them)
CONTEXTS = ((1, None), (255, None), (256, None), (1025, None), (5000, None), (3, 5120),
            (131072, None))  # fmt: skip


def shapes() -> dict[str, Any]:
    return spec.model(qwen3_6_35b_a3b().language_model)


def outcomes(run: dispatches.Executor) -> Iterator[tuple[str, dispatches.Outcome]]:
    """Everything once, then attention at every context."""
    dims = shapes()
    for i, (context, capacity) in enumerate(CONTEXTS):
        rows = capacity or dispatches.capacity_of(context)
        for outcome in dispatches.run_program(
            dims, run, context, rows, lambda label, i=i: i == 0 or _attention(label)
        ):
            where = f"{context} tokens of {rows}" if _attention(outcome.label) else ""
            yield where, outcome


def _attention(label: str) -> bool:
    return label in ("attention", "attention prepare", "attention merge")


def make(path: Path) -> None:
    """Compile what the package does not carry."""
    capacities = [rows or dispatches.capacity_of(context) for context, rows in CONTEXTS]
    found = ptx.decode_pipelines(shapes(), capacities)
    missing = ptx.not_packaged(found)
    count = ptx.build(missing.values(), path)
    print(f"{path}: {len(missing)} of {len(found)} pipelines are not in the package, "
          f"{count} of them new")  # fmt: skip


def run(executor: dispatches.Executor) -> list[str]:
    """Print a line a dispatch; the names of those that failed."""
    failed, total, begin = [], 0, time.perf_counter()
    for where, outcome in outcomes(executor):
        total += 1
        print(outcome, where, flush=True)
        if not outcome.passed:
            failed.append(f"{outcome.label} {where}".strip())
    seconds = time.perf_counter() - begin
    print(f"{total - len(failed)} passed, {len(failed)} failed in {seconds:.0f} s")
    return failed


def main(words: list[str]) -> None:
    try:
        if words[:1] == ["make"] and len(words) == 2:
            make(Path(words[1]))
        elif words[:1] == ["run"] and len(words) <= 2:
            sys.exit(1 if run(executors.Gpu(*map(Path, words[1:]))) else 0)
        elif words == ["host"]:
            sys.exit(1 if run(executors.Host()) else 0)
        else:
            raise HostError(__doc__)
    except HostError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
