"""Runs kernels' PTX on an NVIDIA GPU and compares with the CPU host's values.

python -m tests.metal_host.gpu_compare make FOLDER   with clang: PTX, inputs, the CPU's outputs
python -m tests.metal_host.gpu_compare run FOLDER    with a GPU: needs numpy and the driver
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from metal.host import cuda
from metal.host.toolchain import HostError

TOLERANCE = 0.01  # of an output's largest value


def make(folder: Path) -> None:
    """Writes one .npz a case, the PTX files and index.json."""
    from metal.host import cuda_tools, launch

    from . import calibration, test_driver

    folder.mkdir(parents=True, exist_ok=True)
    index, sources = [], {}

    def add(name, library, kernel, buffers, grid, threadgroup, memory, outputs):
        source = library.source
        key = id(library)
        if key not in sources:
            sources[key] = f"kernels{len(sources)}.ptx"
            text = source.ptx(library.constants, contract="fast", arch="sm_80").read_text()
            (folder / sources[key]).write_text(text)
        info = library.kernels[kernel]
        grid, threadgroup = (
            launch.dimensions(grid, "grid"),
            launch.dimensions(threadgroup, "threadgroup"),
        )
        memory = launch.check_dispatch(info, threadgroup, memory)
        bound = {
            i: (p, np.array(a), w)
            for i, (p, a, w) in launch.bind(info, buffers, library.present).items()
        }
        arguments, shared = cuda.entry_arguments(info, bound, memory)
        saved, kinds, places = {}, [], {}
        order = [p.index for p in sorted(info.buffers, key=lambda p: p.index)]
        for n, a in enumerate(arguments):
            kinds.append("none" if a is None else "value" if isinstance(a, bytes) else "array")
            if a is not None:
                saved[f"in{n}"] = np.frombuffer(a, np.uint8) if isinstance(a, bytes) else a.copy()
            if n < len(order) and order[n] in outputs:
                places[order[n]] = n
        library[kernel](
            {i: a for i, (_, a, _) in bound.items()}
            | {i: None for i in buffers if buffers[i] is None},
            grid,
            threadgroup,
            memory or None,
        )
        for i, n in places.items():
            saved[f"out{n}"] = bound[i][1]
        np.savez_compressed(folder / f"{name.replace(' ', '_')}.npz", **saved)
        index.append(
            {
                "name": name,
                "ptx": sources[key],
                "entry": cuda_tools.entry_name(kernel),
                "grid": grid,
                "threadgroup": threadgroup,
                "shared": shared,
                "kinds": kinds,
                "outputs": list(places.values()),
            }
        )

    for name, build in calibration.CASES.items():
        case = build()
        add(
            name,
            calibration.library(case.source),
            case.kernel,
            case.buffers,
            case.grid,
            case.threadgroup,
            None,
            set(case.expected),
        )
    own = test_driver.Library(source=test_driver.SOURCE, constants={3: True, "bump": 2})
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    parameters = np.array([(60, 0.5)], np.dtype([("rows", np.int32), ("scale", np.float32)]))
    add(
        "struct by value",
        own,
        "scale",
        {0: x, 1: np.zeros_like(x), 2: parameters, 3: (7, 8, 9), 4: [1, 2, 3]},
        2,
        32,
        None,
        {1},
    )
    y = np.zeros((32, 4), np.uint16)
    add(
        "bfloat vectors",
        own,
        "narrow",
        {0: test_driver.bf16(x[:32]), 1: y, 2: np.zeros(1, np.uint16)},
        1,
        32,
        None,
        {1, 2},
    )
    add(
        "threadgroup arguments",
        own,
        "two_arguments",
        {0: np.zeros((2, 6, 8), np.float32)},
        (2, 3, 1),
        (4, 2, 2),
        {0: 64, 1: 64},
        {0},
    )
    add(
        "atomics",
        own,
        "counts",
        {0: np.zeros(4, np.uint32), 1: np.zeros(1, np.float32)},
        8,
        64,
        None,
        {0, 1},
    )
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    print(f"{folder}: {len(index)} cases, {len(sources)} PTX files")


def _float(a: np.ndarray) -> np.ndarray:
    return (
        (a.astype(np.uint32) << 16).view(np.float32)
        if a.dtype == np.uint16
        else a.astype(np.float64)
    )


def run(folder: Path) -> list[str]:
    """Compares every case; prints one line each; returns the names of those that differ."""
    _, arch = cuda.driver()
    programs: dict[str, cuda.Program] = {}
    failed = []
    index = json.loads((folder / "index.json").read_text())
    for case in index:
        if case["ptx"] not in programs:
            programs[case["ptx"]] = cuda.Program((folder / case["ptx"]).read_bytes())
        data = np.load(folder / f"{case['name'].replace(' ', '_')}.npz")
        arguments = [
            None
            if kind == "none"
            else data[f"in{n}"].tobytes()
            if kind == "value"
            else data[f"in{n}"].copy()
            for n, kind in enumerate(case["kinds"])
        ]
        programs[case["ptx"]].launch(
            case["entry"], arguments, case["grid"], case["threadgroup"], case["shared"]
        )
        worst, equal = 0.0, True
        for n in case["outputs"]:
            got, want = _float(arguments[n]), _float(data[f"out{n}"])
            scale = np.abs(want).max() or 1.0
            error = np.abs(got - want).max() / scale
            worst = max(worst, float(error)) if np.isfinite(error) else float("inf")
            equal = equal and np.array_equal(arguments[n], data[f"out{n}"])
        if not worst <= TOLERANCE:
            failed.append(case["name"])
        print(
            f"{'FAILED' if case['name'] in failed else 'ok':6} {case['name']:24} "
            + ("bit-equal" if equal else f"largest difference {worst:.1e} of the largest value")
        )
    print(f"{len(index) - len(failed)} passed, {len(failed)} failed on {arch}")
    return failed


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3 or sys.argv[1] not in ("make", "run"):
            raise HostError(__doc__)
        if sys.argv[1] == "make":
            make(Path(sys.argv[2]))
        else:
            sys.exit(1 if run(Path(sys.argv[2])) else 0)
    except HostError as error:
        sys.exit(str(error))
