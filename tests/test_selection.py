"""Which kernel, or why not: every kind has an answer, every refusal its own reason."""

import mlx.core as mx
import pytest

from lily_mlx import selection

WEIGHTS = {"mode": "affine", "bits": 4, "group": 64, "columns": 2048}
DELTA = {"key_dim": 128, "value_dim": 128}
EXPERTS = {"experts": 256, "top_k": 8}
GOOD = {
    "project": WEIGHTS,
    "moe": {**WEIGHTS, **EXPERTS},
    "gated_delta": DELTA,
    "attention": {"head_dim": 256, "mask": "causal"},
    "decode_step": {**WEIGHTS, **DELTA, **EXPERTS, "head_dim": 256, "rows": 1},
}


def ask(kind, **change):
    shape = {"device": "cpu", "dtype": mx.bfloat16, **GOOD[kind], **change}
    return selection.query(kind, **shape)


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, "bfloat16"])
def test_reference_serves_every_kind(kind, dtype):
    choice = ask(kind, dtype=dtype)
    assert choice
    assert (choice.kernel, choice.code, choice.reason) == ("reference", "ok", "")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("project", {"bits": 8, "group": 128}),
        ("project", {"bits": 0, "mode": "none", "group": 0}),
        ("project", {"bits": (4, 8)}),
        ("project", {"rows": 2048}),
        ("moe", {"top_k": 32, "experts": 32}),
        ("moe", {"bits": {4, 8}, "experts": 1024}),
        ("gated_delta", {"key_dim": 16, "value_dim": 4}),
        ("gated_delta", {"key_dim": 256, "value_dim": 252}),
        ("attention", {"head_dim": 512, "mask": "none"}),
        ("attention", {"head_dim": 80, "mask": "bool"}),
    ],
)
def test_edges_that_are_served(kind, change):
    assert ask(kind, **change).code == "ok"


@pytest.mark.parametrize(
    ("kind", "change", "code", "text"),
    [
        ("project", {"bits": 3}, "unsupported_bits", "bits 3 has no kernel"),
        ("project", {"bits": [4, 6]}, "unsupported_bits", "bits 6"),
        ("project", {"group": 16}, "unsupported_group", "group 16"),
        ("project", {"mode": "mxfp4"}, "unsupported_mode", "mode 'mxfp4'"),
        ("project", {"mode": ["affine", "nvfp4"]}, "unsupported_mode", "'nvfp4'"),
        ("project", {"columns": 2056}, "not_divisible", "columns 2056 is no multiple of 32"),
        ("project", {"dtype": mx.int32}, "unsupported_dtype", "dtype 'int32'"),
        ("moe", {"top_k": 33}, "out_of_range", "top_k 33 is outside 1 to 32"),
        ("moe", {"top_k": 8, "experts": 4}, "out_of_range", "top_k 8 is more than experts 4"),
        ("moe", {"experts": 1025}, "out_of_range", "experts 1025"),
        ("gated_delta", {"key_dim": 24}, "not_divisible", "key_dim 24"),
        ("gated_delta", {"key_dim": 272}, "out_of_range", "key_dim 272"),
        ("gated_delta", {"value_dim": 6}, "not_divisible", "value_dim 6"),
        ("attention", {"head_dim": 72}, "head_dim", "head_dim 72"),
        ("attention", {"head_dim": 528}, "head_dim", "head_dim 528"),
        ("attention", {"head_dim": 0}, "head_dim", "head_dim 0"),
        ("attention", {"mask": "additive"}, "masked", "mask 'additive'"),
        ("decode_step", {"rows": 2}, "out_of_range", "rows 2 is outside 1 to 1"),
        ("decode_step", {"training": True}, "training", "no gradient"),
        ("moe", {"device": "tpu"}, "device_has_no_backend", "device 'tpu' has no kernel for moe"),
    ],
)
def test_refusals_name_the_value(kind, change, code, text):
    choice = ask(kind, **change)
    assert not choice
    assert choice.kernel is None
    assert choice.code == code
    assert text in choice.reason


def test_questions_that_cannot_be_answered():
    with pytest.raises(ValueError, match="'attention' needs head_dim"):
        selection.query("attention", device="cpu", dtype="bfloat16", mask="none")
    with pytest.raises(ValueError, match="no field 'headdim'"):
        ask("attention", headdim=3)
    with pytest.raises(ValueError, match="no kind 'conv'"):
        selection.query("conv", device="cpu")
    with pytest.raises(ValueError, match="'bits' has no value"):
        ask("project", bits=[])


def test_default_device_is_that_of_mlx():
    previous = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        assert selection.device_name() == "cpu"
        assert selection.query("attention", dtype="float32", head_dim=64, mask="none")
    finally:
        mx.set_default_device(previous)


def test_table_in_words():
    rows = selection.table()
    assert {row[0] for row in rows} == set(GOOD)
    assert all(kernel and rules for _, _, kernel, rules in rows)
