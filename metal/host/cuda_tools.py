"""CUDA's assembler and device library, where they are installed; what ptxas says of each kernel."""

from __future__ import annotations

import functools
import glob
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .toolchain import CompileError, HostError, cached, digest

NO_PTXAS = (
    "ptxas is not installed (it is part of CUDA and of the PyPI package nvidia-cuda-nvcc): "
    "PTX only, no registers"
)


def entry_name(kernel: str) -> str:
    """Name of a kernel's entry in PTX."""
    return re.sub(r"\W", "_", kernel)


def _find(*ends: str) -> str | None:
    roots = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    roots += sorted(
        glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*")), reverse=True
    )
    for root in filter(None, roots):
        for end in ends:
            path = os.path.join(root, end)
            if os.path.isfile(path):
                return path
    return None


@functools.cache
def ptxas() -> str | None:
    return shutil.which("ptxas") or _find("bin/ptxas")


@functools.cache
def libdevice() -> str | None:
    return _find("nvvm/libdevice/libdevice.10.bc")


@dataclass(frozen=True)
class Usage:
    """What ptxas gives a kernel: registers a thread; bytes of stack, spills and shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def assemble(ptx: str, arch: str) -> tuple[bytes, dict[str, Usage]]:
    """PTX -> (cubin, usage by entry). Raises HostError without ptxas, CompileError on bad PTX."""
    tool = ptxas()
    if tool is None:
        raise HostError(NO_PTXAS)

    def build(place: Path) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
            source.write(ptx)
            source.flush()
            done = subprocess.run(
                [tool, "-v", f"-arch={arch}", source.name, "-o", str(place / "kernels.cubin")],
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise CompileError(f"ptxas for {arch}:\n{done.stderr or done.stdout}")
        (place / "usage.txt").write_text(done.stdout + done.stderr)

    folder = cached("cubin-" + digest(tool, arch, ptx), build)
    usage = {}
    for m in re.finditer(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        (folder / "usage.txt").read_text(),
        re.S,
    ):
        shared = re.search(r"(\d+) bytes smem", m[6])
        usage[m[1]] = Usage(
            int(m[5]), int(m[2]), int(m[3]), int(m[4]), int(shared[1]) if shared else 0
        )
    return (folder / "kernels.cubin").read_bytes(), usage
