"""Makes the Metal host's compiler available before the tests that need it are collected."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config) -> None:
    """On Debian or Ubuntu, as root, install clang 19 where it is missing.

    Elsewhere nothing happens here: a test that needs it fails with the sentence that says what to
    install.
    """
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return
    done = subprocess.run(
        ["sh", str(ROOT / "metal" / "host" / "install-deps.sh")], capture_output=True, text=True
    )
    if done.returncode != 0:
        print(f"metal/host/install-deps.sh failed:\n{done.stdout}{done.stderr}")
