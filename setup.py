"""Builds the extension with CMake, against the MLX of the build environment."""

import platform
from pathlib import Path

from mlx.extension import CMakeBuild, CMakeExtension
from setuptools import setup
from setuptools.command.build_py import build_py

MLX = "0.32.4"


def mlx_requirement() -> str:
    """MLX with a backend that runs here: `pip install .` works on a plain Linux machine.

    On Linux MLX's backends are extras that exclude each other, so where an NVIDIA driver is
    loaded the user's choice of [cuda12] or [cuda13] decides.
    """
    if platform.system() == "Linux" and not Path("/proc/driver/nvidia/version").exists():
        return f"mlx[cpu]=={MLX}"
    return f"mlx=={MLX}"


class BuildPy(build_py):
    """Puts the kernel sources into the wheel; a checkout reads them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sources = Path("metal")
        target = Path(self.build_lib) / "lily_mlx" / "metal"
        self.mkpath(str(target))
        for pattern in ("*.h", "*.metal", "manifest.json"):
            for path in sorted(sources.glob(pattern)):
                self.copy_file(str(path), str(target / path.name))


setup(
    install_requires=[
        mlx_requirement(),
        "mlx-lm==0.32.2",
        "numpy",
        "safetensors",
        "transformers>=5.7.0",
    ],
    ext_modules=[CMakeExtension("lily_mlx._ext")],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
    zip_safe=False,
)
