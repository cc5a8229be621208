"""Kernels made for Qwen3.5/3.6 MoE, as MLX primitives inside mlx-lm's own model classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# mlx.core first: it loads libmlx and registers the types that the extension names.
import mlx.core as mx

try:
    from lily_mlx import _ext
except ImportError as error:
    from lily_mlx._build_check import explain

    raise explain(error) from None  # the sentence holds all that the linker said

from lily_mlx._build_check import check_extension
from lily_mlx._version import __version__

check_extension(_ext)

BUNDLED_MODEL = Path(__file__).parent / "bundled"
"""The folder of the small trained model that comes with the package."""

# Looked up on first use, so that `import lily_mlx` does not load transformers.
_LAZY = {
    "load": "lily_mlx.loading",
    "generate": "lily_mlx.generation",
    "stream_generate": "lily_mlx.generation",
    "generate_step": "lily_mlx.decode",
    "Model": "lily_mlx.model",
    "ModelArgs": "lily_mlx.model",
    "trace": "lily_mlx.trace",
}

__all__ = ["BUNDLED_MODEL", "__version__", "backend_info", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        module = importlib.import_module(_LAZY[name])
        return module if module.__name__ == f"lily_mlx.{name}" else getattr(module, name)
    raise AttributeError(f"module 'lily_mlx' has no attribute {name!r}")


def backend_info() -> dict[str, str]:
    """What runs the primitives here: the device of MLX, and how the CPU reference was built."""
    from lily_mlx import kernels
    from lily_mlx.selection import device_name

    return {
        "device": f"{mx.default_device()} ({device_name()})",
        "backend": f"{kernels.backend()} (switch: {kernels.BACKEND}=metal-host)",
        "reference": f"{_ext.instruction_set()}, {_ext.num_threads()} threads",
        "extension": f"built for mlx {_ext.built_for_mlx}",
    }


def _start() -> None:
    from lily_mlx import kernels

    if _ext.gpu_target() != "cpu":  # primitives look kernels up then
        kernels.load()
    kernels.start_from_environment()


_start()
