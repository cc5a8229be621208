"""Runs a Program on the Metal host: the launches that a GPU would get, from the same source."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lily_mlx import _ext
from metal.host import toolchain
from metal.host.compiler import Source


def host_encoder(
    program: _ext.Program, folder: Path, *, checked: bool = True, workers: int = 1, seed: int = 0
) -> _ext.HostEncoder:
    """A HostEncoder with a library for each pipeline of `program`; sources are in `folder`.

    checked: faults (races, touches outside the declared ranges, ...) raise RuntimeError.
    seed: not 0 shuffles threads, threadgroups and the dispatches of one level.
    """
    encoder = _ext.HostEncoder(
        str(toolchain.runtime()), checked=checked, workers=workers, seed=seed
    )
    for pipeline in program.pipelines:
        source = Source(folder / pipeline["file"])
        names = [k.name for k in source.check()]
        values = source.constant_values(pipeline["constants"])
        library = source.library(values, checked=checked, contract="fast")
        stub = f"stub_{names.index(pipeline['kernel'])}"
        encoder.add(pipeline["key"], str(library), stub)
    return encoder


def bind(program: _ext.Program, arrays: dict[str, np.ndarray], scalars: dict | None = None):
    """Bindings of numpy arrays (each its own buffer) by slot name, with an arena of NaN bytes.

    Returns (bindings, what must stay alive while they are used).
    """
    bindings = _ext.Bindings(program)
    for name, array in arrays.items():
        address = array.ctypes.data
        bindings.bind(program.find_slot(name), id=address, bytes=array.nbytes, base=address)
    arena = np.full(program.arena_bytes + 256, 0xFF, np.uint8)
    address = (arena.ctypes.data + 255) // 256 * 256
    bindings.bind_arena(id=address, bytes=program.arena_bytes, base=address)
    for name, value in (scalars or {}).items():
        bindings.set(program.find_scalar(name), value)
    return bindings, arena


def overstated(
    program: _ext.Program, bindings: _ext.Bindings, encoder: _ext.HostEncoder
) -> list[str]:
    """Declared bytes that the last checked run did not move: reports would count too much.

    A byte that is declared is moved at least once, so each argument loads (stores) at least its
    declared traffic; an access that never happens also costs levels that are not needed.
    """
    moved = {(d, a): (loaded, stored) for d, a, loaded, stored in encoder.moved}
    found = []
    for i in range(len(program)):
        d = program.describe(i, bindings)
        for a in d["arguments"]:
            if "slot" not in a:
                continue
            loaded, stored = moved[i, a["index"]]
            for verb, did, access in (("reads", loaded, "read"), ("writes", stored, "write")):
                if access in a["access"].split("_") and did < a["traffic"]:
                    found.append(
                        f"dispatch {i} '{d['label']}' {verb} {did} bytes of {a['name']}, "
                        f"{a['traffic']} are declared"
                    )
    return found
