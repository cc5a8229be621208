"""Builds the extension with CMake, against the MLX of the build environment."""

import platform
from pathlib import Path

from mlx.extension import CMakeBuild, CMakeExtension
from setuptools import setup

MLX = "0.32.4"


def mlx_requirement() -> str:
    """MLX with a backend that runs here: `pip install .` works on a plain Linux machine.

    On Linux MLX's backends are extras that exclude each other, so where an NVIDIA driver is
    loaded the user's choice of [cuda12] or [cuda13] decides.
    """
    if platform.system() == "Linux" and not Path("/proc/driver/nvidia/version").exists():
        return f"mlx[cpu]=={MLX}"
    return f"mlx=={MLX}"


setup(
    install_requires=[
        mlx_requirement(),
        "mlx-lm==0.32.2",
        "numpy",
        "safetensors",
        "transformers>=5.7.0",
    ],
    ext_modules=[CMakeExtension("lily_mlx._ext")],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
)
