"""Nothing in metal/ that no supported model runs: each kernel of the manifest is launched by a
production Program of some model and target, or is an arm of `python -m benchmarks ablate`."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest

import lily_mlx
from benchmarks import ablate
from lily_mlx import _ext, kernels, spec
from lily_mlx.loading import load
from lily_mlx.model import Model, ModelArgs
from lily_mlx.shapes import qwen3_6_35b_a3b_config

TARGETS = ("metal", "metal_nax", "cuda")
CAPACITIES = (1024, 1280, 8192, 32768, 131072)
ROWS = (1, 4, 8, 16, 17, 32, 33, 100, 600, 2048, 4096)

# The Metal backend builds this one's Program where caches grow (csrc/backend/metal_decode.cpp).
BACKEND = {"copy_rows"}


def shapes_of(dtype=mx.bfloat16, bits=4, **sizes):
    """Qwen3.6-35B-A3B's shapes, four layers, with other sizes or another format."""
    config = qwen3_6_35b_a3b_config(4)
    config["text_config"] |= sizes
    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, 64, bits)
    return spec.model(model.language_model)


def models():
    """Shapes of models that the kernels serve."""
    yield spec.model(load(str(lily_mlx.BUNDLED_MODEL), lazy=True)[0].language_model)
    for dtype in (mx.bfloat16, mx.float16):
        for bits in (0, 4, 8):
            yield shapes_of(dtype, bits)
        # As wide as the kernels of one row go.
        yield shapes_of(dtype, hidden_size=4096, num_attention_heads=32)
    for experts in (32, 64, 128, 512):
        yield shapes_of(num_experts=experts)


def production(target, shapes):
    """Every Program of a model's decode steps and layers, at any length."""
    for capacity in CAPACITIES:
        yield _ext.step_program(target, shapes, capacity)
    few = {**shapes, "layers": shapes["layers"][2:4]}  # one of each kind
    dtype = shapes["dtype"]
    for rows in ROWS:
        yield _ext.chunk_program(target, few, rows)
        yield _ext.linear_program(target, dtype, rows, [shapes["head"]], True)
        yield _ext.rms_norm_program(target, dtype, rows, shapes["norm"][0])


def arms(target, shapes):
    for arm in ablate.ARMS:
        if not arm.why_not(target):
            for at in arm.at:
                yield from ablate.programs(arm, target, shapes, at)


def names(programs):
    return {p["kernel"] for program in programs for p in program.pipelines}


@pytest.fixture(scope="module")
def reached():
    """(By production, by the arms alone.)"""
    kernels.load()
    found, ablated = set(), set()
    for shapes in models():
        for target in TARGETS:
            found |= names(built.program for built in production(target, shapes))
            ablated |= names(arms(target, shapes))
    return found, ablated - found


def test_every_kernel_is_launched_by_a_model_or_is_an_arm(reached):
    listed = {e["kernel"] for e in json.loads((kernels.folder() / "manifest.json").read_text())}
    nothing = listed - set.union(*reached) - BACKEND
    assert not nothing


def test_what_only_arms_launch(reached):
    """A kernel that stays for an ablation is named here, so that none hides among them."""
    _, ablated = reached
    alone = {name.rsplit("_bf16")[0].rsplit("_fp16")[0] for name in ablated}
    assert alone == {
        "norm_row", "add_rows", "attention_decode_strided", "gated_delta_scan_block",
        "gated_delta_conv_step", "gated_delta_delta_step", "gated_delta_gated_norm",
    }  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_each_arm_changes_what_is_launched(target):
    """Else its row would say that a choice does not pay."""
    shapes = shapes_of()
    for arm in ablate.ARMS:
        # Without early starts NVIDIA's graph has other edges (cuda.cpp), not other launches.
        if arm.why_not(target) or arm.way or arm.name == "serial levels":
            continue
        changed = [differs(arm, target, shapes, at) for at in arm.at]
        assert all(changed), arm.name


def differs(arm, target, shapes, at):
    with_arm = ablate.programs(arm, target, shapes, at)[-1]
    without = replace(arm, step={}, layers={})
    return launches(with_arm) != launches(ablate.programs(without, target, shapes, at)[-1])


def launches(program):
    """What tells Programs apart, without the order of launches where edges leave it open."""
    rows = [program.describe(i) for i in range(len(program))]
    keys = [program.pipelines[r["pipeline"]]["key"] for r in rows]
    return [(k, r["grid"], r["after"], [a.get("value") for a in r["arguments"]])
            for k, r in zip(keys, rows, strict=True)]  # fmt: skip
