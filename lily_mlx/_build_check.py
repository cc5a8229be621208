"""Why the extension does not load, in one sentence; and the proof that arrays cross the border."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from types import ModuleType

import mlx.core as mx


def _required() -> str:
    try:
        found = [re.match(r"mlx(?:\[\w+\])?==([\d.]+)", r) for r in requires("lily_mlx") or ()]
    except PackageNotFoundError:  # a checkout that nobody installed
        return ""
    return next((m[1] for m in found if m), "")


MLX_VERSION = _required()
"""The one MLX that this release is built for: MLX's C++ interface changes in patch releases."""


_BACKENDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
_REBUILD = "install lily_mlx again (in its checkout: pip install -e .)"


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _reinstall(wanted: str) -> str:
    """The command for another MLX; on Linux libmlx is in a backend's package, which goes along."""
    extras = [extra for name, extra in _BACKENDS.items() if _installed(name) is not None]
    with_extras = f"[{','.join(extras)}]" if extras else ""
    return f'pip install "mlx{with_extras}=={wanted}"'


def explain(error: ImportError) -> ImportError:
    """The ImportError to raise when `_ext` cannot be imported."""
    installed = _installed("mlx") or mx.__version__
    if MLX_VERSION and installed != MLX_VERSION:
        return ImportError(
            f"lily_mlx is built for mlx {MLX_VERSION}, but mlx {installed} is installed; "
            f"run: {_reinstall(MLX_VERSION)}"
        )
    return ImportError(f"lily_mlx's extension cannot be loaded ({error}); {_REBUILD}")


def check_extension(ext: ModuleType) -> None:
    """Refuse an extension built for another MLX, or one whose types MLX does not share.

    Raises:
        ImportError: with the way out.
    """
    loaded = ext.loaded_mlx()
    # A build of MLX from source adds to its version: 0.32.4+abc, 0.32.4.dev1.
    if not re.match(rf"{re.escape(ext.built_for_mlx)}(?!\d)", loaded):
        raise ImportError(
            f"lily_mlx was built for mlx {ext.built_for_mlx}, but mlx {loaded} is loaded; "
            f"run: {_reinstall(ext.built_for_mlx)}"
        )
    x = mx.array([1.0, 2.0])
    try:
        same = ext.echo(x).tolist() == [1.0, 2.0]
    except TypeError:
        same = False
    if not same:
        raise ImportError(
            "mlx arrays do not cross into lily_mlx's extension (it was built with another "
            f"nanobind than mlx was); {_REBUILD}"
        )
