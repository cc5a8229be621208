"""Each barrier is needed, the order of threads is not, and the checked runs enter every branch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from metal.host import KernelFault, Library, coverage
from tests.kernels import harness
from tests.kernels.attention import test_attention_decode as attention
from tests.kernels.gated_delta import test_conv as conv
from tests.kernels.gated_delta import test_scan as scan
from tests.kernels.gated_delta import test_step as gated_delta
from tests.kernels.head import test_head as head
from tests.kernels.linear import test_gemv as gemv
from tests.kernels.linear import test_gemv_rows as rows
from tests.kernels.linear import test_qgemm as qgemm
from tests.kernels.moe import test_moe_decode as moe
from tests.kernels.moe import test_moe_rows as moe_rows
from tests.kernels.moe import test_routing as routing
from tests.kernels.moe.experts import Experts, check_grouped, spread_ids
from tests.kernels.reference import BF16, GatedDeltaShape

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
INSTANCE = 'template [[host_name("{0}")]] [[kernel]] decltype({1}) {1};\n'

# What the scenarios need of each file, so that a changed copy compiles fast: what it includes, and
# kernels by their names. Kernels that are no templates need no instance.
FILES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "linear/gemv.metal": (
        ("linear/gemv.h",),
        {"gemv_bf16_k2048": "lily::gemv<bfloat, bfloat, 2048>"},
    ),
    "linear/gemv_mma.metal": (
        ("linear/gemv_mma.h",),
        {"mma_gemv_bf16_k2048": "lily::gemv<bfloat, bfloat, 2048, lily::MmaProducts>"},
    ),
    "head/head.metal": (
        ("head/head.h", "head/argmax.h"),
        {"head_gemv_bf16_k2048": "lily::head_gemv<bfloat, 2048>"},
    ),
    "gated_delta/gated_delta_step.metal": (
        ("gated_delta/gated_delta_step.h",),
        {
            "gated_delta_step_bf16": "lily::gated_delta_step<bfloat>",
            "gated_delta_conv_step_bf16": "lily::gated_delta_conv_step<bfloat>",
            "gated_delta_delta_step_bf16": "lily::gated_delta_delta_step<bfloat>",
            "gated_delta_gated_norm_bf16": "lily::gated_delta_gated_norm<bfloat>",
        },
    ),
    "attention/attention_decode.metal": (
        ("attention/attention_decode.h",),
        {
            "attention_prepare_bf16": "lily::attention_prepare<bfloat>",
            "attention_decode_bf16": "lily::attention_decode<bfloat>",
            "attention_decode_strided_bf16": "lily::attention_decode_strided<bfloat>",
            "attention_merge_bf16": "lily::attention_merge<bfloat>",
        },
    ),
    "moe/moe_decode.metal": (
        ("moe/moe_decode.h", "moe/moe_route.h"),
        {
            "moe_gate_up_bf16_k2048": "lily::moe_gate_up<bfloat, 2048>",
            "moe_down_bf16": "lily::moe_down<bfloat>",
        },
    ),
    "moe/routing.metal": (
        ("moe/routing.h",),
        {"route_topk_e2": "route_topk<2>", "route_small_e2": "route_small<2>"},
    ),
    "gated_delta/gated_delta_scan.metal": (
        ("gated_delta/gated_delta_scan.h",),
        {
            "gated_delta_scan_bf16_r2": "gated_delta_scan<bfloat, 2>",
            "gated_delta_scan_norm_bf16_r2": "gated_delta_scan_norm<bfloat, 2>",
            "gated_delta_scan_block_bf16_r2": "gated_delta_scan_block<bfloat, 2>",
            "gated_norm_bf16": "gated_norm<bfloat>",
        },
    ),
    "linear/qgemm.metal": (
        ("linear/qgemm.h", "linear/tile_simdgroup.h"),
        {
            "qgemm_multi_bf16_bf16_m32": "qgemm_multi<bfloat, bfloat, GemmBlock32, SimdgroupTile>",
        },
    ),
    "linear/qgemm_mma.metal": (
        ("linear/gemm_mma.h", "linear/qgemm.h"),
        {"mma_qgemm_multi_bf16_bf16_m32": "qgemm_multi<bfloat, bfloat, MmaBlock32, MmaTile>"},
    ),
    "linear/gemv_rows.metal": (
        ("linear/gemv_rows.h",),
        {
            "gemv_rows_multi_bf16_bf16_m4": "gemv_rows_multi<bfloat, bfloat, 2, 4>",
            "moe_gate_up_rows_bf16_m4": "moe_gate_up_rows<bfloat, 2, 4>",
            "moe_down_rows_bf16_m4": "moe_down_rows<bfloat, 2, 4>",
        },
    ),
    "row_ops.metal": (("row_ops.h",), {"rms_norm_rows_bf16": "rms_norm_rows<bfloat>"}),
}


def run_norm() -> None:
    shape = dict(lanes=8, r=2, u=1, simdgroups=2)
    gemv.run("checked", BF16, 512, [9, 5], [4, 8], **shape, norm=True, write_x=True)


def run_split() -> None:
    shape = dict(lanes=8, r=1, u=1, split=2, simdgroups=4)
    gemv.run("checked", BF16, 512, [9], [4], **shape, residual=True)


def run_mma() -> None:
    """Two rounds of gathering."""
    shape = dict(mma=True, **harness.MMA, u=2, split=2, simdgroups=4, blocks=6)
    gemv.run("checked", BF16, 512, [85, 16], [4, 4], **shape, norm=True)


def run_head() -> None:
    head.check_head("checked", BF16, 45, 256, 4, lanes=8, r=2, u=1, simdgroups=2, blocks=2)


def run_gated_delta() -> None:
    layer, row = (
        gated_delta.make_layer(GatedDeltaShape(1, 2), BF16),
        gated_delta.make_row(GatedDeltaShape(1, 2), BF16),
    )
    gated_delta.check(layer, row, *gated_delta.fused("checked", layer, row, 8))


def run_gated_delta_parts() -> None:
    gated_delta.test_unfused_parts("checked", BF16, GatedDeltaShape(1, 2))


def run_prepare() -> None:
    attention.test_prepare("checked", "bf16", 3, 1, 5, 128)


def run_attention() -> None:
    """Eight heads on four simdgroups: the merge takes two rounds."""
    case = attention.Case(BF16, 45, 48)
    case.check(
        case.run(attention.constants(8, simdgroups=4, splits=2, pack=8, merge=2), "checked")[0]
    )


def run_strided() -> None:
    case = attention.Case(BF16, 70, 72, heads=4)
    c = attention.constants(4, simdgroups=2, splits=2, merge=2)
    case.check(case.run(c, "checked", "attention_decode_strided")[0])


def run_moe() -> None:
    moe.check_layer("checked", moe.TINY, BF16)


def run_pick() -> None:
    logits = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    ids, _ = moe.pick("checked", logits, 8, simdgroups=2)
    np.testing.assert_array_equal(ids, moe.route(logits, 8, True)[0])


def run_routing() -> None:
    for small in (False, True):
        logits = routing.random_logits(20 if small else 40, 64)
        routing.check(logits, top_k=2, host="checked", small=small)


def run_scans() -> None:
    for kernel, tokens in (("gated_delta_scan_norm", 50), ("gated_delta_scan_block", 34)):
        c = scan.Case(BF16, 1, tokens, 1, 1)
        y, state = scan.scan(c, kernel, "checked")
        want_y, want_state = scan.scan(c)
        np.testing.assert_array_equal(state, want_state)
        np.testing.assert_array_equal(y, scan.norm(c, want_y) if "norm" in kernel else want_y)


def run_gemm() -> None:
    qgemm.check(BF16, 33, [64], 128, host="checked")


def run_sync_gemm() -> None:
    """Three steps of depth: both halves of the space for x are written again."""
    qgemm.check(BF16, 33, [64], 384, host="checked", **qgemm.MMA)


def run_rows() -> None:
    rows.check(BF16, 2, [9], 1024, host="checked")
    ids = np.array([[0, 1], [1, 0], [0, 1]])
    moe_rows.check(Experts(BF16, 3, 64, 64, 2), ids, "checked")


def run_norm_rows() -> None:
    h, x = np.ones((1, 512), np.uint16), np.zeros((1, 512), np.uint16)
    harness.launch("rms_norm_rows_bf16", [h, h[0], x, 512, 1e-6], 1, 256, "checked")


def run_experts() -> None:
    check_grouped(Experts(BF16, 18, 64, 32, 3, group=32), spread_ids(18, 2, 3), 16, "checked")


SCENARIOS: dict[str, Callable[[], None]] = {
    "norm": run_norm,
    "split": run_split,
    "mma": run_mma,
    "head": run_head,
    "gated_delta": run_gated_delta,
    "gated_delta parts": run_gated_delta_parts,
    "prepare": run_prepare,
    "attention": run_attention,
    "strided": run_strided,
    "moe": run_moe,
    "pick": run_pick,
    "routing": run_routing,
    "scans": run_scans,
    "gemm": run_gemm,
    "mma gemm": run_sync_gemm,
    "rows": run_rows,
    "norm rows": run_norm_rows,
    "experts": run_experts,
    "conv": conv.test_checked,
}

# Header -> for each of its barriers, in order, a scenario that passes it.
BARRIERS = {
    "common.h": ["norm"],
    "linear/gemv_tiles.h": ["norm"],
    "linear/gemv.h": ["split"],
    "linear/gemv_mma.h": ["mma", "mma"],
    "head/head.h": ["head"],
    "gated_delta/gated_delta_step.h": ["gated_delta", "gated_delta", "gated_delta parts"],
    "attention/attention_decode.h": ["prepare", "attention", "attention", "strided", "attention"],
    "moe/moe_decode.h": ["moe", "moe", "moe", "moe"],
    "moe/moe_route.h": ["pick"],
    "moe/routing.h": ["routing"] * 5,
    "gated_delta/gated_delta_scan.h": ["scans"] * 3,
    "linear/gemm_tiles.h": ["gemm"] * 3,
    "linear/gemm_mma.h": ["mma gemm"],
    "linear/gemv_rows.h": ["rows"] * 5,
    "row_ops.h": ["norm rows"],
}


def cases() -> Iterator:
    for name, scenarios in BARRIERS.items():
        for i, scenario in enumerate(scenarios):
            yield pytest.param(name, i, scenario, id=f"{name}-{i}")


def test_every_barrier_has_a_case() -> None:
    counts = {
        path: (harness.METAL / path).read_text().count("threadgroup_barrier(")
        for path in harness.headers()
    }
    wanted = {name: len(scenarios) for name, scenarios in BARRIERS.items()}
    assert {name: count for name, count in counts.items() if count} == wanted


def use_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked libraries come from the headers in `folder`."""
    original = harness.library

    def library(file: str, constants: tuple, host: str) -> Library:
        if host != "checked":
            return original(file, constants, host)
        includes, instances = FILES[file]
        source = "".join(f'#include "{i}"\n' for i in includes)
        source += "".join(INSTANCE.format(*item) for item in instances.items())
        return Library(source=source, constants=dict(constants), host=host, include=[folder])

    for header in harness.headers():
        (folder / header).parent.mkdir(exist_ok=True)
        shutil.copy(harness.METAL / header, folder / header)
    monkeypatch.setattr(harness, "library", library)


@pytest.mark.parametrize("scenario", sorted({s for names in BARRIERS.values() for s in names}))
def test_with_all_barriers(scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_copy(tmp_path, monkeypatch)
    SCENARIOS[scenario]()


@pytest.mark.parametrize("name,index,scenario", list(cases()))
def test_without_one_barrier(
    name: str, index: int, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_copy(tmp_path, monkeypatch)
    text = (tmp_path / name).read_text()
    start = [m.start() for m in re.finditer(re.escape(BARRIER), text)][index]
    (tmp_path / name).write_text(text[:start] + text[start + len(BARRIER) :])
    with pytest.raises((KernelFault, AssertionError)):
        SCENARIOS[scenario]()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_do_not_depend_on_the_order_of_threads(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for options in ({}, {"seed": 1}, {"seed": 2}):
        monkeypatch.setattr(harness, "run_options", options)
        monkeypatch.setattr(harness, "record", [])
        SCENARIOS[scenario]()
        results.append(harness.record)
    assert results[0]
    for other in results[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_checked_runs_enter_every_branch(tmp_path: Path) -> None:
    """Both outcomes of each branch of the decode kernels that the compiler could not decide."""
    chosen = "(checked or broken or extreme or nan or embedding)"
    files = (m.__file__ for m in (gemv, head, gated_delta, attention, moe))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen],
        env={**os.environ, "LILY_METAL_COVERAGE": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    branches = [b for b in coverage.load(str(tmp_path)) if str(harness.METAL) in b.file]
    assert len(branches) > 100
    assert not [str(b) for b in branches if b.missing]
