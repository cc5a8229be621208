import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lily_mlx import kernels  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Programs of the CPU's primitives, whatever device there is; the switch is off afterwards."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    kernels.load()
    kernels.reset_report()
    yield
    kernels.stop_metal_host()
    mx.set_default_device(before)
