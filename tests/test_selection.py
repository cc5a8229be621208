"""Which kernel, or why not: every op has an answer, every refusal its own reason."""

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

import lily_mlx
from lily_mlx import selection, spec
from lily_mlx.cli import info
from lily_mlx.loading import load
from lily_mlx.model import Model, ModelArgs

BF16 = mx.bfloat16
GPUS = ("metal", "metal_nax", "cuda")


def matrix(rows=64, columns=2048, bits=4, group=64, experts=1, mode="affine", dtype="bfloat16"):
    return rows, columns, bits, group, experts, mode, dtype


def moe(experts=256, top_k=8, **change):
    routed, shared = matrix(experts=experts, **change), matrix(**change)
    names = ("shared_gate", "shared_up", "shared_down")
    return {
        "router": matrix(rows=experts), **dict.fromkeys(("gate", "up", "down"), routed),
        **dict.fromkeys(names, shared), "shared_router": matrix(rows=1),
        "top_k": top_k, "normalize": True,
    }  # fmt: skip


def delta(key_dim=128, value_dim=128, dtype="bfloat16", A_log="float32"):
    return {
        "key_heads": 1, "value_heads": 2, "key_dim": key_dim, "value_dim": value_dim,
        "conv_width": 4, "eps": 1e-6, "conv": (1024, dtype), "A_log": (2, A_log),
        "dt_bias": (2, dtype), "norm": (128, dtype),
    }  # fmt: skip


def attention(head_dim=256, rotary=64, dtype="bfloat16"):
    return {
        "heads": 4, "kv_heads": 1, "head_dim": head_dim, "rotary": rotary, "base": 1e7,
        "eps": 1e-6, "q_norm": (head_dim, dtype), "k_norm": (head_dim, dtype),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_reference_serves_every_op(dtype):
    for choice in (
        selection.linear(dtype, [matrix(dtype="float16"), matrix(bits=8)], on="cpu"),
        selection.embed(dtype, matrix(bits=0, group=0), on="cpu"),
        selection.moe(dtype, moe(experts=1024, top_k=32), on="cpu"),
        selection.gated_delta(dtype, delta(16, 4, A_log="bfloat16"), on="cpu"),
        selection.attention(dtype, attention(80), mask="bool", on="cpu"),
    ):
        assert (choice.kernel, choice.code, choice.reason) == ("reference", "ok", "")


@pytest.mark.parametrize("on", GPUS)
def test_rows_choose_the_kernel(on):
    def kernels(ask, rows):
        return [ask(rows=n).kernel for n in rows]

    one = "gemv_rows" if on == "cuda" else "gemv"
    rows = (1, 2, 16, 17, 4096, selection.ANY_ROWS)
    ask = lambda rows: selection.linear(BF16, [matrix()], rows=rows, on=on)  # noqa: E731
    every = "gemv_rows, qgemm" if on == "cuda" else "gemv, gemv_rows, qgemm"
    assert kernels(ask, rows) == [one, "gemv_rows", "gemv_rows", "qgemm", "qgemm", every]
    ask = lambda rows: selection.moe(BF16, moe(), rows=rows, on=on)  # noqa: E731
    assert kernels(ask, (1, 16, 17)) == ["moe_rows", "moe_rows", "moe_gemm"]
    masked = selection.gated_delta(BF16, delta(), rows=1, masked=True, on=on)
    assert masked.kernel == "gated_delta_scan"
    step = selection.gated_delta(BF16, delta(), rows=1, on=on)
    assert step.kernel == ("gated_delta_scan" if on == "cuda" else "gated_delta_step")


CPU, METAL, CUDA = "cpu", "metal", "cuda"


@pytest.mark.parametrize(
    ("ask", "code", "text"),
    [
        (lambda: selection.linear(BF16, [matrix(bits=3)], on=CPU), "unsupported_bits", "bits 3"),
        (lambda: selection.linear(BF16, [matrix(), matrix(bits=5)], on=CPU),
         "unsupported_bits", "bits 5"),
        (lambda: selection.linear(BF16, [matrix(group=16)], on=CPU), "unsupported_group", "16"),
        (lambda: selection.linear(BF16, [matrix(mode="mxfp4")], on=CPU),
         "unsupported_mode", "mode 'mxfp4'"),
        (lambda: selection.linear(BF16, [matrix(columns=2056)], on=CPU),
         "not_divisible", "columns 2056 is no multiple of 32"),
        (lambda: selection.linear(mx.int32, [matrix()], on=CPU), "unsupported_dtype", "'int32'"),
        (lambda: selection.linear(mx.float32, [matrix(dtype="float32")], on=METAL),
         "unsupported_dtype", "'float32'"),
        (lambda: selection.linear(BF16, [matrix(dtype="float16")], on=CUDA),
         "unsupported_dtype", "a weight of dtype float16"),
        (lambda: selection.embed(BF16, matrix(bits=0, group=0, dtype="float32"), on=METAL),
         "unsupported_dtype", "a weight of dtype float32"),
        (lambda: selection.moe(BF16, moe(top_k=33), on=CPU), "out_of_range", "top_k 33"),
        (lambda: selection.moe(BF16, moe(experts=4), on=CPU),
         "out_of_range", "top_k 8 is more than experts 4"),
        (lambda: selection.moe(BF16, moe(experts=1025), on=CPU), "out_of_range", "experts 1025"),
        (lambda: selection.moe(BF16, moe(experts=1024), on=METAL), "out_of_range", "experts 1024"),
        (lambda: selection.gated_delta(BF16, delta(24), on=CPU), "not_divisible", "key_dim 24"),
        (lambda: selection.gated_delta(BF16, delta(272), on=CPU), "out_of_range", "key_dim 272"),
        (lambda: selection.gated_delta(BF16, delta(128, 6), on=CPU), "not_divisible", "6"),
        (lambda: selection.gated_delta(BF16, delta(64), on=CUDA), "out_of_range", "key_dim 64"),
        (lambda: selection.gated_delta(BF16, delta(dtype="float32"), on=METAL),
         "unsupported_dtype", "conv1d.weight is float32"),
        (lambda: selection.gated_delta(BF16, delta(A_log="bfloat16"), on=METAL),
         "unsupported_dtype", "A_log is bfloat16"),
        (lambda: selection.attention(BF16, attention(72), on=CPU), "head_dim", "head_dim 72"),
        (lambda: selection.attention(BF16, attention(528), on=CPU), "head_dim", "head_dim 528"),
        (lambda: selection.attention(BF16, attention(), mask="additive", on=CPU),
         "masked", "mask 'additive'"),
        (lambda: selection.attention(BF16, attention(rotary=128), on=METAL),
         "out_of_range", "rotary dims 128"),
        (lambda: selection.attention(BF16, attention(dtype="float32"), on=METAL),
         "unsupported_dtype", "q_norm.weight is float32"),
    ],
)  # fmt: skip
def test_refusals_name_the_value(ask, code, text):
    choice = ask()
    assert not choice and choice.kernel is None
    assert choice.code == code
    assert text in choice.reason


def test_questions_that_cannot_be_answered():
    with pytest.raises(ValueError, match="no target 'tpu'"):
        selection.linear(BF16, [matrix()], on="tpu")
    with pytest.raises(ValueError, match="no 'head_dim'"):
        shape = {k: v for k, v in attention().items() if k != "head_dim"}
        selection.attention(BF16, shape, on=METAL)
    with pytest.raises(ValueError, match="a matrix is not"):
        selection.linear(BF16, [(1, 2)], on=CPU)


def test_default_target_is_that_of_mlxs_device():
    previous = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        assert selection.device_name() == selection.target() == "cpu"
    finally:
        mx.set_default_device(previous)


# ---- Whole models


@pytest.fixture(scope="module")
def described():
    return spec.model(load(str(lily_mlx.BUNDLED_MODEL), lazy=True)[0].language_model)


@pytest.mark.parametrize("on", selection.TARGETS)
def test_the_bundled_model_has_a_step_everywhere(described, on):
    assert selection.step(described, on=on)


@pytest.mark.parametrize("on", GPUS)
@pytest.mark.parametrize("part, field, named", [
    (None, "input_norm", "input_layernorm.weight is float32"),
    ("delta", "dt_bias", "dt_bias is float32"),
    ("delta", "conv", "conv1d.weight is float32"),
    ("attention", "q_norm", "q_norm.weight is float32"),
])  # fmt: skip
def test_a_gpu_does_not_read_float32_parameters_as_bf16(described, on, part, field, named):
    """They were read as bf16 without a word; logits were off by 0.6 of 11."""
    layers = [dict(layer) for layer in described["layers"]]
    at = next(i for i, layer in enumerate(layers) if part is None or part in layer)
    if part is not None:
        layers[at][part] = dict(layers[at][part])
    holder = layers[at] if part is None else layers[at][part]
    holder[field] = (holder[field][0], "float32")
    choice = selection.step({**described, "layers": layers}, on=on)
    assert choice.code == "unsupported_dtype"
    assert choice.reason.startswith(f"layer {at}: ") and named in choice.reason
    assert selection.step({**described, "layers": layers}, on="cpu")


@pytest.mark.parametrize("on", GPUS)
def test_two_group_sizes_in_one_launch_are_refused_before_the_first_token(described, on):
    layers = [dict(layer) for layer in described["layers"]]
    moe = layers[0]["moe"]
    rows, columns, bits, group, *rest = moe["router"]
    layers[0]["moe"] = moe | {"router": (rows, columns, bits, 2 * group, *rest)}
    choice = selection.step({**described, "layers": layers}, on=on)
    assert not choice and "differ in group size" in choice.reason


def served(model):
    return {row["path"]: row["kernel"] for row in model.lily_report()}


def test_a_tensor_without_a_kernel_is_the_only_one_of_its_projection_that_stock_serves():
    """Joined projections fell back as a whole, while the report called the others served."""
    model, _ = load(str(lily_mlx.BUNDLED_MODEL))
    text = model.language_model
    changed = {}
    for i, name in ((0, "linear_attn.in_proj_z"), (3, "self_attn.v_proj")):
        parent, leaf = name.split(".")
        linear = text.layers[i][parent][leaf]
        w = mx.dequantize(linear.weight, linear.scales, linear.biases, 64, linear.bits)
        plain = nn.Linear(w.shape[1], w.shape[0], bias=False)
        plain.weight = w
        text.layers[i][parent][leaf] = nn.QuantizedLinear.from_linear(plain, 64, 5)
        changed[f"language_model.model.layers.{i}.{name}"] = plain
    report = served(model)
    assert {path for path, kernel in report.items() if kernel is None} == {
        "language_model", *changed
    }  # fmt: skip
    ids = mx.array([[5, 9, 250, 7]])
    wanted = load(str(lily_mlx.BUNDLED_MODEL))[0](ids)
    ran = []
    original = nn.QuantizedLinear.__call__
    nn.QuantizedLinear.__call__ = lambda self, x: ran.append(self.bits) or original(self, x)
    try:
        got = model(ids)
        mx.eval(got)
    finally:
        nn.QuantizedLinear.__call__ = original
    assert ran == [5, 5]
    # The mean: a row whose router is near a tie may choose another expert.
    assert mx.abs(got - wanted).mean() < 0.02 * mx.abs(wanted).max()


def test_a_dense_mlp_is_reported_as_stocks():
    model = Model(ModelArgs.from_dict(tiny.config("dense")))
    report = [row for row in model.lily_report() if row["path"].endswith(".mlp")]
    assert report and all(row["kernel"] is None for row in report)
    assert "mlx-lm's own code" in info.group(report)[0]["reason"]
