"""Builds the extension with CMake, against the MLX of the build environment."""

import platform
import re
import tomllib
from pathlib import Path

from mlx.extension import CMakeBuild, CMakeExtension
from setuptools import setup

with open(Path(__file__).with_name("pyproject.toml"), "rb") as file:
    REQUIRES = tomllib.load(file)["build-system"]["requires"]
MLX = next(m[1] for m in (re.fullmatch(r"mlx==([\d.]+)", r) for r in REQUIRES) if m)


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
    extras_require={
        "cpu": [f"mlx[cpu]=={MLX}"],
        "cuda12": [f"mlx[cuda12]=={MLX}"],
        "cuda13": [f"mlx[cuda13]=={MLX}"],
        "plot": ["matplotlib>=3.8"],
        "test": ["pytest>=8", "matplotlib>=3.8"],
    },
    ext_modules=[CMakeExtension("lily_mlx._ext")],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
)
