"""Finds clang-19, builds the plugin and the runtime once, and keeps the cache.

The cache is $XDG_CACHE_HOME/lily_mlx/metal-host (or ~/.cache/...). Its entries are folders named by
a hash of everything that went into them; each is built beside its place and renamed into it, so
several processes may build at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
PLUGIN_SOURCES = ("metal.cpp", "tokens.cpp", "lint.cpp", "kernels.cpp", "trace.cpp")
RUNTIME_SOURCES = ("fibers.cpp", "checks.cpp")


class HostError(Exception):
    """A kernel cannot be compiled or run; the message names what to change."""


class CompileError(HostError):
    """The source breaks a rule of Metal or of this project; the text holds file, line and rule."""


@functools.cache
def clang() -> str:
    """Path of clang++ 19; raises HostError with what to install."""
    for name in (
        os.environ.get("LILY_METAL_CLANG", ""),
        "clang++-19",
        "/usr/lib/llvm-19/bin/clang++",
    ):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise HostError(
        "the Metal host needs clang 19 with its development files: install clang-19, llvm-19-dev "
        "and libclang-19-dev (on Debian: metal/host/install-deps.sh)"
    )


@functools.cache
def llvm_include() -> str:
    """Folder of the LLVM and clang headers that belong to clang()."""
    config = shutil.which("llvm-config-19") or "/usr/lib/llvm-19/bin/llvm-config"
    if os.path.exists(config):
        folder = subprocess.run(
            [config, "--includedir"], capture_output=True, text=True
        ).stdout.strip()
        if os.path.exists(f"{folder}/clang/Sema/Sema.h"):
            return folder
    raise HostError(
        "the Metal host builds a clang plugin and misses clang 19's headers: install llvm-19-dev "
        "and libclang-19-dev (on Debian: metal/host/install-deps.sh)"
    )


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "lily_mlx" / "metal-host"


def digest(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()[:32]


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The folder of `key` in the cache; `build` fills a fresh one when it is not there yet."""
    place = cache_folder() / key
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=place.parent))
    try:
        build(fresh)
        try:
            os.rename(fresh, place)
        except OSError:
            if not place.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place


def call(command: list[str], what: str) -> str:
    """Runs a compiler; returns what it said. Raises CompileError with its messages."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = "\n".join(
        line for line in (done.stderr + done.stdout).split("\n") if "/wrap.cpp:1:" not in line
    )
    if done.returncode:
        raise CompileError(f"{what}:\n{said.strip()}")
    return said


@functools.cache
def _version() -> str:
    return subprocess.run([clang(), "--version"], capture_output=True, text=True).stdout


@functools.cache
def processor() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as f:
            lines = {
                line
                for line in f
                if line.startswith(("model name", "flags", "Features", "CPU part"))
            }
    except OSError:
        lines = set()
    return platform.machine() + "".join(sorted(lines))


def _sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


@functools.cache
def identity() -> str:
    """Hash of the compiler and of what the host tool adds to it."""
    files = [p for f in ("frontend", "include") for p in _sources(HERE / f)]
    return digest(_version(), *(p.read_bytes() for p in [*files, HERE / "compiler.py"]))


@functools.cache
def plugin() -> Path:
    """The clang plugin, built on first use (about half a minute)."""
    compiler, headers = clang(), llvm_include()
    folder = HERE / "frontend"
    texts = [p.read_bytes() for p in _sources(folder)]

    def build(place: Path) -> None:
        flags = ["-std=c++17", "-O1", "-fPIC", "-fno-rtti", "-fno-exceptions", "-isystem", headers]
        jobs = [
            subprocess.Popen(
                [compiler, *flags, "-c", str(folder / name), "-o", str(place / f"{name}.o")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in PLUGIN_SOURCES
        ]
        said = [job.communicate()[0] for job in jobs]
        if any(job.returncode for job in jobs):
            raise HostError("the clang plugin does not build:\n" + "\n".join(said))
        objects = [str(place / f"{name}.o") for name in PLUGIN_SOURCES]
        call(
            [compiler, "-shared", *objects, "-o", str(place / "msl.so")], "linking the clang plugin"
        )
        for name in objects:
            os.remove(name)

    return cached("plugin-" + digest(_version(), *texts), build) / "msl.so"


@functools.cache
def runtime() -> Path:
    """The fiber runtime, built on first use."""
    compiler = clang()
    folder = HERE / "runtime"
    texts = [p.read_bytes() for p in _sources(folder)]

    def build(place: Path) -> None:
        flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"]
        files = [str(folder / name) for name in RUNTIME_SOURCES]
        call(
            [
                compiler,
                *flags,
                "-ftls-model=initial-exec",
                *files,
                "-o",
                str(place / "runtime.so"),
                "-pthread",
            ],
            "building the fiber runtime",
        )

    return cached("runtime-" + digest(_version(), platform.machine(), *texts), build) / "runtime.so"
