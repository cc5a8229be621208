"""copy_rows: caches that grow, that are shared, and that begin as zeros."""

import numpy as np
import pytest

from metal.host import Library

UNIT = 16


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    "src_units, dst_units", [(0, 5), (1, 1), (255, 256), (256, 257), (300, 513)]
)
def test_rows_are_copied_and_padded_with_zeros(rows, src_units, dst_units):
    kernel = Library("metal/copy.metal", host="checked")["copy_rows"]
    source = np.random.default_rng(0).integers(1, 2**32, (rows, src_units * 4), dtype=np.uint32)
    target = np.full((rows, dst_units * 4), 7, np.uint32)
    kernel(
        [source if src_units else np.zeros(4, np.uint32), target,
         np.uint32(src_units), np.uint32(dst_units)],
        ((dst_units + 255) // 256, rows), 256, writes={1}, outputs={1},
    )  # fmt: skip
    assert np.array_equal(target[:, : src_units * 4], source)
    assert not target[:, src_units * 4 :].any()
