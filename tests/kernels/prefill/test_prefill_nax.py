"""The GEMMs on Metal 4 tensor operations: the same checks as on simdgroup_matrix."""

import pytest

from tests.kernels.prefill import test_prefill_moe as moe
from tests.kernels.prefill import test_prefill_qgemm as dense
from tests.kernels.prefill.harness import TYPES

NAX = "nax_"


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", [32, 64])
def test_dense(a, block):
    for rows in (1, block - 1, block, block + 1):
        dense.gemm(a, rows, 68, 64, block=block, prefix=NAX)
    dense.gemm(a, 5, 3, 128, block=block, output="fp32", prefix=NAX)
    dense.gemm(a, 5, 100, 128, block=block, prefix=NAX)
    dense.multi(a, 35, (64, 0, 70, 1), 64, block=block, prefix=NAX)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("block", [32, 64])
def test_experts(a, block):
    e = moe.Experts(a, 37, 128, 64, 3)
    moe.check(e, moe.spread_ids(37, 2, 3), block, prefix=NAX)


@pytest.mark.parametrize("block", [32, 64])
def test_checked(block):
    dense.gemm("bf16", 3, 68, 64, block=block, host="checked", prefix=NAX)
    dense.multi("bf16", 3, (64, 1, 3, 5), 64, block=block, host="checked", prefix=NAX)
    e = moe.Experts("bf16", 5, 64, 64, 2)
    moe.check(e, moe.spread_ids(5, 1, 2), block, "checked", prefix=NAX)
