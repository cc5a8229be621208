"""Why the extension does not load, in one sentence; and the proof that arrays cross the border."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import mlx.core as mx

MLX_VERSION = "0.32.4"
"""The one MLX that this release is built for: MLX's C++ interface changes in patch releases."""


def explain(error: ImportError) -> ImportError:
    """The ImportError to raise when `_ext` cannot be imported."""
    try:
        installed = version("mlx")
    except PackageNotFoundError:
        installed = mx.__version__
    if installed != MLX_VERSION:
        return ImportError(
            f"lily_mlx is built for mlx {MLX_VERSION}, but mlx {installed} is installed; "
            f"run: pip install mlx=={MLX_VERSION}"
        )
    return ImportError(
        f"lily_mlx's extension cannot be loaded ({error}); build it again with: "
        "pip install --force-reinstall --no-deps lily_mlx"
    )


def check_extension(ext: ModuleType) -> None:
    """Refuse an extension built for another MLX, or one whose types MLX does not share.

    Raises:
        ImportError: with the way out.
    """
    loaded = ext.loaded_mlx()
    if not loaded.startswith(ext.built_for_mlx):
        raise ImportError(
            f"lily_mlx was built for mlx {ext.built_for_mlx}, but mlx {loaded} is loaded; "
            f"run: pip install mlx=={ext.built_for_mlx}"
        )
    x = mx.array([1.0, 2.0])
    try:
        same = ext.echo(x).tolist() == [1.0, 2.0]
    except TypeError:
        same = False
    if not same:
        raise ImportError(
            "mlx arrays do not cross into lily_mlx's extension (it was built with another "
            "nanobind than mlx was); build it again with: "
            "pip install --force-reinstall --no-deps lily_mlx"
        )
