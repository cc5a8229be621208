"""The Metal kernels: where their sources are, and the Metal host that runs them on the CPU.

The environment switch `LILY_MLX_BACKEND=metal-host` makes every primitive on the CPU run its
Program, the very list of launches that an Apple GPU would get, with the Metal kernels compiled by
`metal.host`; shapes without a kernel run the reference and are counted (see `report`). It needs a
checkout and clang 19 and is made for tests, not for speed. `LILY_MLX_METAL_HOST=checked` also finds
races, touches outside the declared ranges and reads of bytes that nothing has written, many times
slower.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lily_mlx import _ext

BACKEND = "LILY_MLX_BACKEND"
"""The environment variable of the switch; "metal-host", or unset for the reference."""
HOST = "LILY_MLX_METAL_HOST"
"""The environment variable that chooses the host: "cpu" (the default) or "checked"."""


@functools.cache
def folder() -> Path:
    """The folder of the kernel sources and their manifest.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    package = Path(__file__).resolve().parent
    for place in (package / "metal", package.parent / "metal"):
        if (place / "manifest.json").is_file():
            return place
    raise FileNotFoundError(
        f"no kernels at {package / 'metal'} or {package.parent / 'metal'}; reinstall lily_mlx, or "
        "in a checkout run python -m metal.manifest."
    )


@functools.cache
def load() -> None:
    """Put the kernels into the registry that the primitives build their Programs from, once."""
    _ext.kernels().load(str(folder()))


def _host_module() -> Any:
    try:
        from metal.host import compiler, toolchain
    except ImportError as error:
        raise RuntimeError(
            f"{BACKEND}=metal-host needs metal/host: run in the root of a checkout ({error})."
        ) from error
    return compiler, toolchain


@functools.cache
def _source(file: str) -> Any:
    compiler, _ = _host_module()
    source = compiler.Source(folder() / file, metal="4.0" if file.endswith("_nax.metal") else "3.1")
    # MLX's arrays on the CPU start at multiples of 8 bytes.
    source.flags.append("-fmax-type-align=8")
    return source


def compile_pipeline(
    file: str, kernel: str, constants: dict[str, Any], checked: bool
) -> tuple[str, str]:
    """(library, name of the launch stub) of one kernel with its function constants."""
    source = _source(file)
    names = [k.name for k in source.check()]
    values = source.constant_values(constants)
    library = source.library(values, checked=checked, contract="fast")
    return str(library), f"stub_{names.index(kernel)}"


def start_metal_host(
    checked: bool = False,
    seed: int = 0,
    step: dict[str, Any] | None = None,
    target: str = "metal",
    layers: dict[str, Any] | None = None,
) -> None:
    """Run Programs with the Metal host from now on.

    Args:
        checked: find faults; they raise RuntimeError where the result is evaluated.
        seed: not 0 shuffles threads, threadgroups and the dispatches of one level.
        step: options of the decode step's Program, e.g. {"fuse_norm": False}.
        target: whose kernels: "metal", "metal_nax" (with Metal 4's tensor operations) or "cuda".
        layers: options of the layers' Programs, e.g. {"scan": "block"}.
    """
    load()
    _, toolchain = _host_module()
    _ext.set_layer_options(layers or {})
    _ext.set_metal_host(
        str(toolchain.runtime()),
        checked,
        seed,
        functools.partial(compile_pipeline, checked=checked),
        step or {},
        target,
    )


def stop_metal_host() -> None:
    """Run the reference again."""
    _ext.set_layer_options({})
    _ext.set_metal_host(None)


@contextlib.contextmanager
def metal_host(**options: Any) -> Iterator[None]:
    """The Metal host inside a with block; options as of `start_metal_host`."""
    start_metal_host(**options)
    try:
        yield
    finally:
        stop_metal_host()


def start_from_environment() -> None:
    """Heed the switch. Raises ValueError for a value that is not known."""
    backend = os.environ.get(BACKEND, "")
    if backend == "":
        return
    if backend != "metal-host":
        raise ValueError(f"{BACKEND}={backend!r} is not known; use metal-host, or unset it.")
    host = os.environ.get(HOST, "cpu")
    if host not in ("cpu", "checked"):
        raise ValueError(f"{HOST}={host!r} is not known; use cpu or checked.")
    start_metal_host(checked=host == "checked")


def backend() -> str:
    """What runs the primitives on the CPU: "reference", "metal-host" or "metal-host, checked"."""
    if not _ext.metal_host():
        return "reference"
    return "metal-host" + (", checked" if os.environ.get(HOST) == "checked" else "")


def report() -> list[tuple[str, str, str, int]]:
    """What ran under the Metal host: (kind, kernel or "reference", reason, times)."""
    return _ext.run_counts()


def reset_report() -> None:
    """Count from 0 again."""
    _ext.reset_run_counts()
