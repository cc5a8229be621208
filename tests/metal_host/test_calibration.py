"""MLX's own kernels, unchanged: they type-check without a warning, agree with a float32 reference,
and the checked host finds nothing in them."""

import numpy as np
import pytest

from . import calibration


@pytest.fixture(autouse=True)
def available():
    try:
        calibration.headers()
        calibration.gated_delta_source()
    except calibration.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", calibration.CASES)
def test_agrees_with_float32(name):
    case = calibration.CASES[name]()
    outputs, _ = case.run(calibration.library(case.source))
    assert case.error(outputs) < case.tolerance


# What the checked host rightly finds in MLX's kernels.
KNOWN = {
    # The last simdgroups of a ragged row count move back and write some rows twice, equal values.
    "qmv ragged rows": {"device-race"},
}


@pytest.mark.parametrize("name", calibration.CASES)
def test_checked_host_finds_no_fault(name):
    case = calibration.CASES[name]()
    compiled = calibration.library(case.source, "checked")
    for seed in (None, 7):
        outputs, result = case.run(
            compiled, outputs=set(case.expected), seed=seed, on_fault="return"
        )
        assert {f.kind for f in result.faults} == KNOWN.get(name, set()), [
            str(f) for f in result.faults
        ]
        assert case.error(outputs) < case.tolerance


def test_packed_and_explicit_tree_gated_delta_are_bit_equal_without_contraction():
    compiled = calibration.library("gated_delta", contract="off")
    packed, _ = calibration.CASES["gated_delta_packed"]().run(compiled)
    tree, _ = calibration.CASES["gated_delta_xtree"]().run(compiled)
    assert all(np.array_equal(packed[i], tree[i]) for i in packed)


def test_traffic_of_qmv_fast_is_its_weights_once():
    case = calibration.CASES["qmv_fast"]()
    _, result = case.run(calibration.library("quantized", "checked"), traffic=True)
    w = case.buffers[0]
    assert result.traffic[0].load_bytes == w.nbytes and result.traffic[4].store_bytes == 2 * 64
    assert (
        result.traffic[0].load_lines == 2 * result.traffic[0].load_accesses
    )  # 256 bytes a simdgroup
    assert (
        result.traffic[1].load_bytes == result.traffic[2].load_bytes == case.buffers[1].nbytes * 4
    )
