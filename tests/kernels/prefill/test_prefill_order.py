"""Results do not depend on the order in which threads and threadgroups run, to the bit."""

import hashlib

import numpy as np
import pytest

from tests.kernels.prefill import harness
from tests.kernels.prefill import test_prefill_conv as conv
from tests.kernels.prefill import test_prefill_moe as moe
from tests.kernels.prefill.test_prefill_barriers import CASES


def experts():
    e = moe.Experts("bf16", 18, 64, 32, 3, group=32)
    moe.check(e, moe.spread_ids(18, 2, 3), 16, "checked")


SCENARIOS = {name: case[1] for name, case in CASES.items()}
SCENARIOS |= {"moe_gemm": experts, "conv_prefill": conv.test_checked}


class Recorder:
    """A library that runs each kernel with `seed` and keeps a digest of all its buffers."""

    def __init__(self, library, seed, digests):
        self.library, self.seed, self.digests = library, seed, digests

    def __getitem__(self, kernel):
        def call(buffers, grid, threadgroup):
            self.library[kernel](buffers, grid, threadgroup, seed=self.seed)
            data = b"".join(np.asarray(b).tobytes() for b in buffers)
            self.digests.append((kernel, hashlib.sha256(data).hexdigest()))

        return call


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_bits_in_any_order(name, monkeypatch):
    original = harness._library
    runs = []
    for seed in (None, 1, 2):
        digests = []

        def library(file, host, constants, seed=seed, digests=digests):
            made = original(file, host, constants)
            return Recorder(made, seed, digests) if host == "checked" else made

        monkeypatch.setattr(harness, "_library", library)
        SCENARIOS[name]()
        runs.append(digests)
    assert runs[0] and runs[0] == runs[1] == runs[2]
