"""PTX of MLX's kernels and of small ones gives the CPU host's values, on an NVIDIA GPU."""

import numpy as np
import pytest

from metal.host import HostError, Library, cuda

from . import calibration, gpu_compare, test_driver


@pytest.fixture
def gpu():
    try:
        return cuda.driver()
    except cuda.NoDevice as reason:
        pytest.skip(str(reason))


def test_gives_the_cpu_hosts_values(gpu, tmp_path):
    try:
        calibration.headers()
    except calibration.Unavailable as reason:
        pytest.skip(str(reason))
    gpu_compare.make(tmp_path)
    assert gpu_compare.run(tmp_path) == []


def test_same_call_on_the_gpu(gpu):
    memory = np.arange(96, dtype=np.float32)
    Library(source=test_driver.SOURCE, constants={3: True, 4: 2}, host="cuda")["in_place"](
        [memory[32:64]] * 2, 1, 32
    )
    assert (
        np.array_equal(memory[32:64], np.arange(33, 65)) and memory[31] == 31 and memory[64] == 64
    )


def test_without_a_gpu_the_reason_is_typed():
    try:
        cuda.driver()
    except cuda.NoDevice:
        with pytest.raises(HostError, match="NVIDIA"):
            Library(source=test_driver.SOURCE, host="cuda")
    else:
        pytest.skip("there is a GPU")


def test_every_calibration_kernel_assembles():
    from metal.host import cuda_tools

    if cuda_tools.ptxas() is None:
        pytest.skip(cuda_tools.NO_PTXAS)
    try:
        libraries = {
            name: calibration.library(name)
            for name in ("quantized", "sdpa", "softmax", "gated_delta")
        }
    except calibration.Unavailable as reason:
        pytest.skip(str(reason))
    for name, library in libraries.items():
        text = library.source.ptx(library.constants, contract="fast", arch="sm_80").read_text()
        _, usage = cuda_tools.assemble(text, "sm_80")
        assert set(usage) == set(library.kernels)
        assert all(u.spill_stores == u.spill_loads == 0 for u in usage.values()), (name, usage)
