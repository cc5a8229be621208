"""Makes the Metal host's compiler available before the tests that need it are collected."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from program_kernels import move, registry  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parent.parent
GPU = ROOT / "tests" / "gpu"
# Without a network apt-get would try its servers for minutes.
APT = """Acquire::Retries "0";
Acquire::http::Timeout "5";
Acquire::https::Timeout "5";
"""


def pytest_configure(config) -> None:
    """On Debian or Ubuntu, as root, install clang 19 where it is missing.

    Elsewhere nothing happens here: a test that needs it fails with the sentence that says what to
    install. Those of tests/gpu do without.
    """
    if shutil.which("apt-get") is None or os.geteuid() != 0 or only_gpu(config):
        return
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
        settings.write(APT)
        settings.flush()
        done = subprocess.run(
            ["sh", str(ROOT / "metal" / "host" / "install-deps.sh")],
            env={**os.environ, "APT_CONFIG": settings.name},
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        print(f"metal/host/install-deps.sh failed:\n{done.stdout}{done.stderr}")


def only_gpu(config) -> bool:
    """Whether the run asks for nothing but tests/gpu."""
    places = [
        (config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args
    ]
    return bool(places) and all(place.is_relative_to(GPU) for place in places)
