"""The kernels' PTX: built ahead of time from the Metal source, loaded by the NVIDIA driver.

A pipeline is a kernel with its function constants, which depend on the model's shapes; the package
carries the PTX of the pipelines that `ptx_kernels/index.json` names. `python -m
lily_mlx.ptx --model DIR` adds those of another model (from a checkout, with clang-19).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "ptx_kernels"
ARCHITECTURE = "sm_80"


def register(kernels_added: Any, folder: Path = FOLDER) -> int:
    """Name every packaged pipeline to the NVIDIA backend.

    Args:
        kernels_added: called with (key, file, entry) for each.

    Returns:
        How many there are; 0 when none was built.
    """
    index = folder / "index.json"
    if not index.exists():
        return 0
    entries = json.loads(index.read_text())
    for key, (name, entry) in entries.items():
        kernels_added(key, str(folder / name), entry)
    return len(entries)


def build(pipelines: Iterable[dict[str, Any]], sources: Path, folder: Path = FOLDER) -> int:
    """Compile pipelines that are not in `folder` yet.

    Args:
        pipelines: as `Program.pipelines` gives them: kernel, file, constants, key.
        sources: the folder of the .metal files.
        folder: gets one .ptx a pipeline, and index.json.

    Returns:
        How many were compiled.

    Raises:
        metal.host.HostError: clang-19 or CUDA's device library is missing.
    """
    from metal.host import cuda_tools
    from metal.host.compiler import Source

    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index.json"
    entries = json.loads(index.read_text()) if index.exists() else {}
    built = 0
    for pipeline in pipelines:
        source = Source(sources / pipeline["file"])
        source.check()
        values = source.constant_values(pipeline["constants"])
        text = source.ptx(values, contract="fast", arch=ARCHITECTURE).read_text()
        entry = cuda_tools.entry_name(pipeline["kernel"])
        alone = with_residency(only_entry(text, entry), entry, pipeline["constants"])
        name = f"{entry}-{hashlib.sha256(alone.encode()).hexdigest()[:12]}.ptx"
        if entries.get(pipeline["key"]) == [name, entry] and (folder / name).exists():
            continue
        _write(folder / name, alone)
        entries[pipeline["key"]] = [name, entry]
        built += 1
    _write(index, json.dumps(dict(sorted(entries.items())), indent=0) + "\n")
    used = {name for name, _ in entries.values()}
    for stale in folder.glob("*.ptx"):
        if stale.name not in used:
            stale.unlink()
    return built


RESIDENT = 16
"""Simdgroups of a tensor-core GEMV that a multiprocessor must hold at once."""


def with_residency(ptx: str, entry: str, constants: dict[str, Any]) -> str:
    """The registers of a tensor-core GEMV bounded so that RESIDENT of its simdgroups fit.

    Left to itself the assembler takes a few more than that, and half as many fit.
    """
    simdgroups = constants.get("kSimdgroups")
    if not entry.startswith(("sync_gemv_", "sync_head_")) or RESIDENT % simdgroups:
        return ptx
    bound = f".maxntid {32 * simdgroups}, 1, 1\n.minnctapersm {RESIDENT // simdgroups}"
    return re.sub(rf"(\.entry {entry}\([^)]*\))", rf"\1\n{bound}", ptx, count=1)


def only_entry(ptx: str, entry: str) -> str:
    """A module with one of its entries, and whatever stands outside all of them.

    Raises:
        ValueError: there is no such entry.
    """
    start = re.compile(r"^(?:\s*//[^\n]*\n)*\s*\.visible \.entry (\w+)", re.M)
    kept, position, found = [], 0, False
    for match in start.finditer(ptx):
        if match.start() < position:
            continue
        end = ptx.index("\n}", match.end()) + 2
        kept.append(ptx[position : match.start()])
        if match[1] == entry:
            kept.append(ptx[match.start() : end])
            found = True
        position = end
    kept.append(ptx[position:])
    if not found:
        raise ValueError(f"no entry {entry} in this PTX")
    text = "".join(kept)
    # Threadgroup variables of the other entries stand outside them.
    variable = re.compile(r"^[^\n]*\.shared \.align \d+ \.b8 (\w+)\[\d+\];\n", re.M)
    used = set(re.findall(r"\w+", variable.sub("", text)))
    text = variable.sub(lambda m: m[0] if m[1] in used else "", text)
    return text


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def decode_pipelines(
    shapes: dict[str, Any], capacities: Iterable[int], options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The pipelines of a decode step on an NVIDIA GPU, by key.

    Args:
        shapes: as `lily_mlx.spec.model` gives them.
        capacities: rows of keys and values.
        options: changes to the options that the NVIDIA backend starts with.
    """
    from lily_mlx import _ext, kernels

    kernels.load()
    found = _ext.step_pipelines("cuda", shapes, list(capacities), options or {})
    return {p["key"]: p for p in found}


def layer_pipelines(shapes: dict[str, Any]) -> dict[str, Any]:
    """The pipelines of a model's layer primitives on an NVIDIA GPU, by key, for any rows."""
    from lily_mlx import _ext, kernels

    kernels.load()
    return {p["key"]: p for p in _ext.layer_pipelines("cuda", shapes)}


def missing(keys: Iterable[str]) -> list[str]:
    """Those of the pipelines that nobody has compiled."""
    from lily_mlx import _ext

    _register_once()
    return [key for key in keys if not _ext.cuda_has_kernel(key)]


@functools.cache
def _register_once() -> None:
    from lily_mlx import _ext

    register(_ext.cuda_add_kernel)


CAPACITIES = (1024, 1280, 8192, 32768, 131072)
"""KV capacities that between them use every way to cut the cache."""


def packaged() -> dict[str, Any]:
    """The pipelines that the package carries, by key: those of the bundled model and of the shapes
    of Qwen3.6-35B-A3B. From a checkout."""
    import lily_mlx
    from benchmarks import ledger
    from lily_mlx.loading import load

    bundled, _ = load(str(lily_mlx.BUNDLED_MODEL), lazy=True)
    return model_pipelines(bundled) | model_pipelines(ledger.model())


def model_pipelines(model: Any) -> dict[str, Any]:
    """The pipelines of a loaded model's decode step and layer primitives, by key."""
    from lily_mlx import spec

    shapes = spec.model(model.language_model)
    return decode_pipelines(shapes, CAPACITIES) | layer_pipelines(shapes)


def main(argv: list[str] | None = None) -> None:
    """Compile what models run on an NVIDIA GPU: the package's own, or those of --model besides."""
    from lily_mlx import kernels
    from lily_mlx.loading import load

    parser = argparse.ArgumentParser(prog="lily_mlx.ptx", description=main.__doc__)
    parser.add_argument("--model", action="append", help="a model folder; may be repeated")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the PTX goes")
    arguments = parser.parse_args(argv)
    if arguments.model:
        found: dict[str, Any] = {}
        for path in arguments.model:
            found |= model_pipelines(load(path, lazy=True)[0])
    else:
        found = packaged()
        (arguments.output / "index.json").unlink(missing_ok=True)  # others' kernels go
    count = build(found.values(), kernels.folder(), arguments.output)
    print(f"{arguments.output}: {len(found)} pipelines, {count} written")


if __name__ == "__main__":
    main()
