"""The kernels' PTX: built ahead of time from the Metal source, loaded by the NVIDIA driver.

A pipeline is a kernel with its function constants, which depend on the model's shapes; the package
carries the PTX of its own models' pipelines (`ptx_archive.PACKAGED`). `python -m lily_mlx.ptx`
builds that file; `--model DIR` puts what another model needs besides into the user's cache. Both
need a checkout with clang-19.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lily_mlx import ptx_archive
from lily_mlx.ptx_archive import PACKAGED, Archive, ArchiveError

ARCHITECTURE = "sm_80"


def register(kernels_added: Any, path: Path = PACKAGED) -> int:
    """Name every pipeline of an archive to the NVIDIA backend.

    Args:
        kernels_added: called with (key, text, entry) for each.

    Returns:
        How many there are.

    Raises:
        ArchiveError: it is damaged, or was compiled from other kernels than this package's.
    """
    archive = _usable(path)
    for key, (name, entry) in archive.pipelines.items():
        kernels_added(key, archive.texts[name], entry)
    return len(archive.pipelines)


def _usable(path: Path) -> Archive:
    from lily_mlx import kernels

    archive = ptx_archive.read(path)
    ptx_archive.check(archive, path, kernels.folder())
    return archive


def _usable_or_empty(path: Path) -> Archive:
    try:
        return _usable(path)
    except ArchiveError:
        return Archive()


def build(pipelines: Iterable[dict[str, Any]], path: Path, fresh: bool = False) -> int:
    """Compile pipelines into an archive. Those that it holds stay, unless they were compiled with
    other flags or from other sources.

    Args:
        pipelines: as `Program.pipelines` gives them: kernel, file, constants, key.
        path: the archive's file.
        fresh: nothing that it holds stays.

    Returns:
        How many are new or changed.

    Raises:
        metal.host.HostError: clang-19 or CUDA's device library is missing.
        ArchiveError: the file cannot be written.
    """
    from lily_mlx import kernels
    from metal.host import compiler, cuda_tools

    folder = kernels.folder()
    flags = [*compiler.FLAGS, *compiler.STRICT_FLAGS, *compiler.PTX_FLAGS, "-ffp-contract=fast"]
    compiled = {"architecture": ARCHITECTURE, "flags": " ".join(flags)}
    archive = Archive() if fresh else _usable_or_empty(path)
    if archive.compiled != compiled:
        archive = Archive(compiled)
    built = 0
    for pipeline in pipelines:
        source = compiler.Source(folder / pipeline["file"])
        source.check()
        values = source.constant_values(pipeline["constants"])
        text = source.ptx(values, contract="fast", arch=ARCHITECTURE).read_text()
        entry = cuda_tools.entry_name(pipeline["kernel"])
        alone = with_residency(only_entry(text, entry), entry, pipeline["constants"])
        name = f"{entry}-{ptx_archive.digest(alone.encode())[:12]}.ptx"
        built += archive.pipelines.get(pipeline["key"]) != (name, entry)
        archive.texts[name] = alone
        archive.pipelines[pipeline["key"]] = (name, entry)
        archive.sources |= ptx_archive.sources_of(pipeline["file"], folder)
    ptx_archive.write(archive, path)
    return built


RESIDENT = 16
"""Simdgroups of a tensor-core GEMV that a multiprocessor must hold at once."""


def with_residency(ptx: str, entry: str, constants: dict[str, Any]) -> str:
    """The registers of a tensor-core GEMV bounded so that RESIDENT of its simdgroups fit.

    Left to itself the assembler takes a few more than that, and half as many fit.
    """
    simdgroups = constants.get("kSimdgroups")
    if not entry.startswith(("mma_gemv_", "mma_head_")) or RESIDENT % simdgroups:
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
    # Labels and stacks carry the entry's number in its file, which other entries change.
    # Comments go, but for the marks that the backend reads (csrc/backend/cuda.cpp).
    text = re.sub(r"[ \t]*//(?![^\n]*griddepcontrol)[^\n]*", "", text)
    text = re.sub(r"\$L__BB\d+_|__local_depot\d+", lambda m: re.sub(r"\d+", "", m[0]), text)
    return re.sub(r"\n\s*\n+", "\n", text)


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

    refusal()  # names what there is to the backend
    return [key for key in keys if not _ext.cuda_has_kernel(key)]


@functools.cache
def refusal() -> str:
    """Why PTX that is there is not used, with the way out; "" where all of it is. The NVIDIA
    backend knows the rest from then on."""
    from lily_mlx import _ext

    problems = []
    for path in (PACKAGED, ptx_archive.user_archive()):
        if path == PACKAGED or path.exists():
            try:
                register(_ext.cuda_add_kernel, path)
            except ArchiveError as error:
                problems.append(str(error))
    return " ".join(problems)


CAPACITIES = (1024, 1280, 8192, 32768, 131072)
"""KV capacities that between them use every way to cut the cache."""


def packaged() -> dict[str, Any]:
    """The pipelines that the package carries, by key: those of the bundled model and of the shapes
    of Qwen3.6-35B-A3B."""
    import lily_mlx
    from lily_mlx.loading import load
    from lily_mlx.shapes import qwen3_6_35b_a3b

    bundled, _ = load(str(lily_mlx.BUNDLED_MODEL), lazy=True)
    return model_pipelines(bundled) | model_pipelines(qwen3_6_35b_a3b())


def model_pipelines(model: Any) -> dict[str, Any]:
    """The pipelines of a loaded model's decode step and layer primitives, by key."""
    from lily_mlx import spec

    shapes = spec.model(model.language_model)
    return decode_pipelines(shapes, CAPACITIES) | layer_pipelines(shapes)


def not_packaged(pipelines: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some pipelines, by key, that the package does not carry."""
    carried = _usable_or_empty(PACKAGED).pipelines
    return {key: pipeline for key, pipeline in pipelines.items() if key not in carried}


def main(argv: list[str] | None = None) -> None:
    """Compile what models run on an NVIDIA GPU: the package's own, or what --model needs besides;
    in a checkout, with clang-19."""
    from lily_mlx.loading import load

    parser = argparse.ArgumentParser(prog="lily_mlx.ptx", description=main.__doc__)
    parser.add_argument("--model", action="append", help="a model folder; may be repeated")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help=f"where the PTX goes: the package, or with --model "
                        f"{ptx_archive.user_archive()}, where it is looked for")  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        from metal.host import HostError
    except ImportError as error:
        sys.exit(f"PTX is compiled by metal/host: run this in the root of a checkout ({error}).")
    output = arguments.output or (ptx_archive.user_archive() if arguments.model else PACKAGED)
    try:
        if arguments.model:
            found: dict[str, Any] = {}
            for path in arguments.model:
                found |= model_pipelines(load(path, lazy=True)[0])
            found = not_packaged(found)
        else:
            found = packaged()
        count = build(found.values(), output, fresh=not arguments.model)
    except (ArchiveError, HostError, ValueError) as error:  # ValueError: a model's folder
        sys.exit(str(error))
    print(f"{output}: {len(found)} pipelines, {count} of them new")


if __name__ == "__main__":
    main()
