"""Every pair of launches that touch the same bytes is kept apart; planted mistakes are found."""

import pytest

from lily_mlx import _ext, spec
from lily_mlx.shapes import qwen3_6_35b_a3b

OFF = ("fuse_norm", "fuse_projections", "fuse_residual", "fuse_delta", "fuse_route", "coalesced")
FORMS = [{}, *({name: False} for name in OFF), {"serial_levels": True}]
LAYER_FORMS = [{}, {"block_rows": 16}, {"scan": "block"}, {"dequantize": True}]


@pytest.fixture(scope="module")
def shapes():
    """Those of the 35B model."""
    return spec.model(qwen3_6_35b_a3b().language_model)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_pair_of_the_decode_step_conflicts(shapes, form):
    program = _ext.step_program("metal", shapes, 256, {"logits": True, **form}).program
    assert program.check_hazards() == []


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_serial_levels_are_one_chain(shapes, target):
    """The fused form is one by itself; products apart share a level."""
    few = {**shapes, "layers": shapes["layers"][2:4]}
    apart = {"fuse_projections": False}
    program = _ext.step_program(target, few, 256, {"serial_levels": True, **apart}).program
    rows = [program.describe(i) for i in range(len(program))]
    assert [r["level"] for r in rows] == list(range(len(program)))
    assert [r["after"] for r in rows] == [[], *([i] for i in range(len(program) - 1))]
    assert _ext.step_program(target, few, 256, apart).program.report()["levels"] < len(program)
    fused = _ext.step_program(target, few, 256).program
    assert fused.report()["levels"] == len(fused)


@pytest.mark.parametrize("capacity", [256, 32768, 131072 + 256])
def test_no_pair_conflicts_at_any_capacity(shapes, capacity):
    program = _ext.step_program("metal", shapes, capacity).program
    assert program.check_hazards() == []
    assert len(program) == 263


@pytest.mark.parametrize("target", ["metal", "metal_nax", "cuda"])
@pytest.mark.parametrize("tokens", [1, 7, 600])
@pytest.mark.parametrize("form", LAYER_FORMS, ids=str)
def test_no_pair_of_a_prefill_chunk_conflicts(shapes, target, tokens, form):
    few = {**shapes, "layers": shapes["layers"][2:4]}  # one layer of each kind
    assert _ext.chunk_program(target, few, tokens, form).program.check_hazards() == []


def test_tensor_operations_have_kernels_for_the_same_chunk(shapes):
    few = {**shapes, "layers": shapes["layers"][2:4]}
    program = _ext.chunk_program("metal_nax", few, 600).program
    assert any(p["file"].endswith("_nax.metal") for p in program.pipelines)


def test_a_level_too_low_is_found(shapes):
    few = {**shapes, "layers": shapes["layers"][2:4]}
    program = _ext.step_program("metal", few, 256).program
    rows = [program.describe(i) for i in range(len(program))]
    levels, after = [r["level"] for r in rows], [r["after"] for r in rows]
    assert program.check_hazards(levels=levels, after=after) == []
    for i in range(1, len(program)):
        lowered = [*levels[:i], levels[i] - 1, *levels[i + 1 :]]
        found = program.check_hazards(levels=lowered, after=after)
        assert any(h["second"] == i or h["first"] == i for h in found), rows[i]["label"]


def test_a_missing_edge_is_found(shapes):
    few = {**shapes, "layers": shapes["layers"][3:4]}
    program = _ext.step_program("metal", few, 256).program
    rows = [program.describe(i) for i in range(len(program))]
    levels, after = [r["level"] for r in rows], [r["after"] for r in rows]
    for i in range(1, len(program)):
        found = program.check_hazards(levels=levels, after=[*after[:i], [], *after[i + 1 :]])
        assert found, rows[i]["label"]
