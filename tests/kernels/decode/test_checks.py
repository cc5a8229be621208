"""Each barrier is needed, the order of threads is not, and the checked runs enter every branch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import numpy as np
import pytest
import test_attention_decode as attention
import test_gdn_step as gdn
import test_gemv as gemv
import test_head as head
import test_moe_decode as moe
from reference import BF16, GdnShape

from metal.host import KernelFault, Library, coverage

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
INSTANCE = 'template [[host_name("{0}")]] [[kernel]] decltype(lily::{1}) lily::{1};\n'

# What each scenario needs of its file, so that a changed copy compiles fast.
INSTANCES = {
    "gemv.metal": {"gemv_bf16_k2048": "gemv<bfloat, bfloat, 2048>"},
    "gemv_sync.metal": {"sync_gemv_bf16_k2048": "gemv<bfloat, bfloat, 2048, lily::SyncProducts>"},
    "head.metal": {"head_gemv_bf16_k2048": "head_gemv<bfloat, 2048>"},
    "gdn_step.metal": {
        "gdn_step_bf16": "gdn_step<bfloat>",
        "gdn_conv_step_bf16": "gdn_conv_step<bfloat>",
        "gdn_delta_step_bf16": "gdn_delta_step<bfloat>",
        "gdn_gated_norm_bf16": "gdn_gated_norm<bfloat>",
    },
    "attention_decode.metal": {
        "attention_prepare_bf16": "attention_prepare<bfloat>",
        "attention_decode_bf16": "attention_decode<bfloat>",
        "attention_decode_strided_bf16": "attention_decode_strided<bfloat>",
        "attention_merge_bf16": "attention_merge<bfloat>",
    },
    "moe_decode.metal": {
        "moe_gate_up_bf16_k2048": "moe_gate_up<bfloat, 2048>",
        "moe_down_bf16": "moe_down<bfloat>",
    },
}


def run_norm() -> None:
    gemv.run(
        "checked",
        BF16,
        512,
        [9, 5],
        [4, 8],
        lanes=8,
        r=2,
        u=1,
        simdgroups=2,
        norm=True,
        write_x=True,
    )


def run_split() -> None:
    gemv.run(
        "checked", BF16, 512, [9], [4], lanes=8, r=1, u=1, split=2, simdgroups=4, residual=True
    )


def run_sync() -> None:
    """Two rounds of gathering."""
    gemv.run(
        "checked",
        BF16,
        512,
        [85, 16],
        [4, 4],
        sync=True,
        **harness.SYNC,
        u=2,
        split=2,
        simdgroups=4,
        blocks=6,
        norm=True,
    )


def run_head() -> None:
    head.check_head("checked", BF16, 45, 256, 4, lanes=8, r=2, u=1, simdgroups=2, blocks=2)


def run_gdn() -> None:
    layer, row = gdn.make_layer(GdnShape(1, 2), BF16), gdn.make_row(GdnShape(1, 2), BF16)
    gdn.check(layer, row, *gdn.fused("checked", layer, row, 8))


def run_gdn_parts() -> None:
    gdn.test_unfused_parts("checked", BF16, GdnShape(1, 2))


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


SCENARIOS: dict[str, Callable[[], None]] = {
    "norm": run_norm,
    "split": run_split,
    "sync": run_sync,
    "head": run_head,
    "gdn": run_gdn,
    "gdn parts": run_gdn_parts,
    "prepare": run_prepare,
    "attention": run_attention,
    "strided": run_strided,
    "moe": run_moe,
}

# Header -> for each of its barriers, in order, a scenario that passes it.
BARRIERS = {
    "common.h": ["norm", "norm"],
    "gemv.h": ["split"],
    "gemv_sync.h": ["sync", "sync"],
    "head.h": ["head"],
    "gdn_step.h": ["gdn", "gdn", "gdn parts"],
    "attention_decode.h": ["prepare", "attention", "attention", "strided", "attention"],
    "moe_decode.h": ["moe", "moe", "moe", "moe"],
}


def cases() -> Iterator:
    for name, scenarios in BARRIERS.items():
        for i, scenario in enumerate(scenarios):
            yield pytest.param(name, i, scenario, id=f"{name}-{i}")


def test_every_barrier_has_a_case() -> None:
    for name, scenarios in BARRIERS.items():
        assert (harness.METAL / name).read_text().count("threadgroup_barrier(") == len(scenarios), (
            name
        )


@pytest.mark.parametrize("name,index,scenario", list(cases()))
def test_without_one_barrier(
    name: str, index: int, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for header in harness.METAL.glob("*.h"):
        shutil.copy(header, tmp_path)
    text = (tmp_path / name).read_text()
    start = [m.start() for m in re.finditer(re.escape(BARRIER), text)][index]
    (tmp_path / name).write_text(text[:start] + text[start + len(BARRIER) :])

    def library(file: str, constants: tuple, host: str) -> Library:
        source = f'#include "{file.replace(".metal", ".h")}"\n'
        source += "".join(INSTANCE.format(*item) for item in INSTANCES[file].items())
        return Library(source=source, constants=dict(constants), host=host, include=[tmp_path])

    monkeypatch.setattr(harness, "_library", library)
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
    chosen = "(checked or broken or extreme or nan or embedding) "
    chosen += "and not barrier and not order and not branch"
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder, "-k", chosen],
        env={**os.environ, "LILY_METAL_COVERAGE": str(tmp_path)},
        cwd=folder.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    branches = [b for b in coverage.load(str(tmp_path)) if str(harness.METAL) in b.file]
    assert len(branches) > 100
    assert not [str(b) for b in branches if b.missing]
