"""Every threadgroup barrier of the prefill kernels is needed: the checked host misses each."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from metal.host import KernelFault, Library
from tests.kernels.prefill import harness
from tests.kernels.prefill import test_prefill_gdn_scan as scan
from tests.kernels.prefill import test_prefill_gemv_rows as rows
from tests.kernels.prefill import test_prefill_qgemm as qgemm
from tests.kernels.prefill import test_prefill_routing as routing

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
HOST_NAME = 'template [[host_name("{0}")]] [[kernel]] decltype({1}) {1};\n'


def route():
    for small in (False, True):
        logits = routing.random_logits(20 if small else 40, 64)
        routing.check(logits, top_k=2, host="checked", small=small)


def scans():
    for kernel, tokens in (("gdn_scan_norm", 50), ("gdn_scan_block", 34)):
        c = scan.Case("bf16", 1, tokens, 1, 1)
        y, state = scan.scan(c, kernel, "checked")
        want_y, want_state = scan.scan(c)
        np.testing.assert_array_equal(state, want_state)
        np.testing.assert_array_equal(y, scan.norm(c, want_y) if "norm" in kernel else want_y)


def norm():
    h, x = np.ones((1, 512), np.uint16), np.zeros((1, 512), np.uint16)
    buffers = [h, h[0], x, np.array([512], np.int32), np.array([1e-6], np.float32)]
    harness.run("prefill_ops", "rms_norm_rows_bf16", buffers, (1, 1, 1), (256, 1, 1), "checked")


def gemv_rows():
    rows.dense("bf16", 2, 9, 1024, host="checked")
    e = rows.Experts("bf16", 3, 64, 64, 2)
    rows.experts(e, np.array([[0, 1], [1, 0], [0, 1]]), "checked")


# Header, what to instantiate, a scenario that reaches every barrier of it.
CASES = {
    "routing": (
        {"route_topk_e2": "route_topk<2>", "route_small_e2": "route_small<2>"},
        route,
    ),
    "gdn_scan": (
        {
            "gdn_scan_norm_bf16_r2": "gdn_scan_norm<bfloat, 2>",
            "gdn_scan_block_bf16_r2": "gdn_scan_block<bfloat, 2>",
        },
        scans,
    ),
    "gemm_tiles": (
        {"qgemm_multi_bf16_bf16_m32": "qgemm_multi<bfloat, bfloat, GemmBlock32, SimdgroupTile>"},
        lambda: qgemm.gemm("bf16", 33, 64, 128, host="checked"),
    ),
    "gemv_rows": (
        {
            "gemv_rows_multi_bf16_bf16_m4": "gemv_rows_multi<bfloat, bfloat, 2, 4>",
            "moe_gate_up_rows_bf16_m4": "moe_gate_up_rows<bfloat, 2, 4>",
            "moe_down_rows_bf16_m4": "moe_down_rows<bfloat, 2, 4>",
        },
        gemv_rows,
    ),
    "prefill_ops": ({"rms_norm_rows_bf16": "rms_norm_rows<bfloat>"}, norm),
}
INCLUDES = {"gemm_tiles": ("qgemm.h", "tile_mma.h")}


def barriers():
    for name in CASES:
        text = (harness.KERNELS / f"{name}.h").read_text()
        for i, match in enumerate(re.finditer(re.escape(BARRIER), text)):
            yield pytest.param(name, i, id=f"{name}-line{text[: match.start()].count(chr(10)) + 1}")


def with_kernels_from(folder: Path, name: str, monkeypatch) -> None:
    """Makes the harness's checked libraries of `name` come from the headers in `folder`."""
    original = harness._library
    includes = INCLUDES.get(name, (f"{name}.h",))
    source = "".join(f'#include "{i}"\n' for i in includes)
    source += "".join(HOST_NAME.format(*item) for item in CASES[name][0].items())

    def library(file, host, constants):
        if host != "checked":
            return original(file, host, constants)
        return Library(source=source, constants=dict(constants), host=host, include=[folder])

    monkeypatch.setattr(harness, "_library", library)


@pytest.mark.parametrize("name", CASES)
def test_scenario_passes_with_all_barriers(name, monkeypatch):
    with_kernels_from(harness.KERNELS, name, monkeypatch)
    CASES[name][1]()


@pytest.mark.parametrize("name,index", list(barriers()))
def test_without_one_barrier(name, index, tmp_path, monkeypatch):
    for header in harness.KERNELS.glob("*.h"):
        shutil.copy(header, tmp_path)
    parts = (tmp_path / f"{name}.h").read_text().split(BARRIER)
    text = BARRIER.join([*parts[:index], parts[index] + parts[index + 1], *parts[index + 2 :]])
    (tmp_path / f"{name}.h").write_text(text)
    assert text.count(BARRIER) == len(parts) - 2
    with_kernels_from(tmp_path, name, monkeypatch)
    with pytest.raises((KernelFault, AssertionError)):
        CASES[name][1]()
