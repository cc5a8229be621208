"""python -m metal.manifest: writes metal/manifest.json, what the kernels expect of a launch.

The C++ side reads no Metal: it checks each dispatch against this list of kernels with their
function constants, arguments and threadgroup memory. `--check` writes nothing and fails when the
file is not what the sources say.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from metal.host.compiler import Source
from metal.host.manifest import KernelInfo
from metal.host.toolchain import HostError

FOLDER = Path(__file__).resolve().parent


def language(file: Path) -> str:
    """The Metal version that a kernel file needs: tensor operations came with 4.0."""
    return "4.0" if file.stem.endswith("_nax") else "3.1"


def entry(info: KernelInfo, file: str, constants: dict[str, tuple[int, str]]) -> dict[str, Any]:
    """One kernel's entry; `constants` is Source.constants, name -> (id, type)."""
    names = {i: (name, kind) for name, (i, kind) in constants.items()}
    # Ids below 0 stand for constants that the source derives from others.
    used = {i for i in info.constants if i >= 0}
    arguments = []
    for p in (*info.buffers, *info.threadgroup):
        argument: dict[str, Any] = {
            "index": p.index,
            "name": p.name,
            "space": p.space,
            "access": "read" if p.const else "read_write",
            "type": p.type,
        }
        if p.condition:
            argument["condition"] = p.condition
            if p.condition in constants:
                used.add(constants[p.condition][0])
        if p.reference and p.space == "constant":
            argument["size"] = p.size
        arguments.append(argument)
    return {
        "kernel": info.name,
        "file": file,
        "constants": [
            {"id": i, "name": names[i][0], "type": names[i][1]} for i in sorted(used) if i in names
        ],
        "arguments": sorted(arguments, key=lambda a: (a["space"] == "threadgroup", a["index"])),
        "threadgroup_bytes": info.threadgroup_bytes,
        "max_threads": info.max_threads,
    }


def collect(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The entries of every *.metal file of `folder`. Raises HostError for an invalid source."""
    entries = []
    for file in sorted(folder.glob("**/*.metal")):
        source = Source(file, metal=language(file))
        kernels = source.check()
        entries += [
            entry(k, file.relative_to(folder).as_posix(), source.constants) for k in kernels
        ]
    return entries


def render(entries: list[dict[str, Any]]) -> str:
    """JSON with a line a kernel, so that a change of one shows as one line."""
    return "[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m metal.manifest", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the file is out of date")
    args = parser.parse_args(argv)
    path = FOLDER / "manifest.json"
    try:
        text = render(collect())
    except HostError as error:
        print(error, file=sys.stderr)
        return 2
    if args.check:
        if path.read_text() != text:
            print(f"{path} is out of date: run python -m metal.manifest", file=sys.stderr)
            return 1
        return 0
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_text(text)
    os.replace(fresh, path)
    print(f"{path}: {text.count(chr(10)) - 2} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
