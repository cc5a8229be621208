"""Ways to launch one dispatch: the Metal host on the CPU, or PTX on an NVIDIA GPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lily_mlx import kernels, ptx
from metal.host import cuda
from metal.host.toolchain import HostError


class Host:
    """The Metal host; needs clang 19."""

    def __init__(self, host: str = "cpu"):
        self.host = host
        self._library = cache(self._compile)

    def _compile(self, file: str, constants: tuple[tuple[str, Any], ...]) -> Any:
        from metal.host import Library

        return Library(kernels.folder() / file, constants=dict(constants), host=self.host)

    def __call__(self, d: dict[str, Any], arrays: dict[int, np.ndarray], key: str) -> None:
        library = self._library(d["file"], tuple(sorted(d["constants"].items())))
        values = {a["index"]: a["value"] for a in d["arguments"] if "value" in a}
        library[d["kernel"]]({**arrays, **values}, tuple(d["grid"]), tuple(d["threadgroup"]))


class Gpu:
    """PTX from the package and from further archives; needs numpy and the NVIDIA driver."""

    def __init__(self, *archives: Path):
        cuda.driver()
        self.entries: dict[str, tuple[str, str]] = {}
        for path in (ptx.PACKAGED, *archives):
            ptx.register(self._add, path)
        self._program = cache(lambda text: cuda.Program(text.encode()))
        manifest = json.loads((kernels.folder() / "manifest.json").read_text())
        self.arguments = {k["kernel"]: k["arguments"] for k in manifest}

    def _add(self, key: str, text: str, entry: str) -> None:
        self.entries[key] = (text, entry)

    def __call__(self, d: dict[str, Any], arrays: dict[int, np.ndarray], key: str) -> None:
        if key not in self.entries:
            raise HostError(
                f"{d['kernel']} ({d['label']}) is not compiled with these constants; where "
                "clang is, python -m tests.gpu.kernels make FILE, and give run that file."
            )
        text, entry = self.entries[key]
        written = {a["index"] for a in d["arguments"] if a.get("access", "read") != "read"}
        values = {a["index"]: a["value"] for a in d["arguments"] if "value" in a}
        # Arrays that are only read are not copied back; their memory may be written elsewhere.
        shared = {id(_base(a)) for i, a in arrays.items() if i in written}
        arguments: list[Any] = []
        for a in sorted(self.arguments[d["kernel"]], key=lambda a: a["index"]):
            if a["space"] == "threadgroup":
                raise HostError(f"{d['kernel']}: threadgroup arguments are not launched here.")
            if a["space"] == "constant" and "size" in a:  # a reference: the value itself
                arguments.append(_bytes(values[a["index"]], a["size"]))
            elif a["index"] in arrays:
                array = arrays[a["index"]]
                if id(_base(array)) not in shared:
                    array = array.view()
                    array.flags.writeable = False
                arguments.append(array)
            else:
                arguments.append(None)
        self._program(text).launch(entry, arguments, tuple(d["grid"]), tuple(d["threadgroup"]))


def _base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _bytes(value: Any, size: int) -> bytes:
    if isinstance(value, bytes):
        return value
    made = (np.float32 if isinstance(value, float) else np.int32)(value).tobytes()
    if len(made) != size:
        raise HostError(f"the value {value!r} has {len(made)} bytes, the kernel takes {size}.")
    return made
