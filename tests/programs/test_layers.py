"""Each primitive's Program on the Metal host against its reference, over shape classes."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from small import TOLERANCE, error, only

from lily_mlx import _ext, kernels, layers, ops, selection, spec
from lily_mlx.spec import weight_of

HALF = [mx.bfloat16, mx.float16]


def normal(shape, dtype, scale=1.0):
    return (mx.random.normal(shape) * scale).astype(dtype)


def linear(rows, columns, dtype, bits=4, group=64):
    made = nn.Linear(columns, rows, bias=False)
    made.set_dtype(dtype)
    made = nn.QuantizedLinear.from_linear(made, group, bits) if bits else made
    mx.eval(made.parameters())
    return made


def compare(call, dtype, *expected, tolerance=None, **options):
    """`call` gives arrays; the same from the reference and from the Metal host."""
    wanted = call()
    mx.eval(wanted)
    with only(*expected, **options):
        got = call()
        mx.eval(got)
    for a, b in zip(got, wanted, strict=True):
        bound = tolerance or TOLERANCE[dtype if a.dtype != mx.float32 else dtype]
        assert error(a, b) < bound


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 33, 70])
def test_projections(dtype, rows):
    mx.random.seed(rows)
    modules = [linear(n, 256, dtype) for n in (1, 40, 130)]
    x = normal((1, rows, 256), dtype)
    kernel = "gemv" if rows == 1 else "gemv_rows" if rows <= 16 else "qgemm"
    for wide in (False, True):
        compare(lambda w=wide: layers.project(x, *modules, float32_out=w), dtype, kernel)


@pytest.mark.parametrize("bits, group", [(0, 0), (4, 32), (6, 32), (6, 64), (6, 128), (8, 128)])
def test_projections_of_other_formats_and_mixed_ones(bits, group):
    mx.random.seed(1)
    dtype = mx.bfloat16
    modules = [
        linear(n, 256, dtype, b, g) for n, b, g in ((33, bits, group), (7, 8, 64), (9, bits, group))
    ]
    for rows, kernel in ((1, "gemv"), (3, "gemv_rows"), (20, "qgemm")):
        x = normal((rows, 256), dtype)
        compare(lambda x=x: ops.project(x, [weight_of(m) for m in modules]), dtype, kernel)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("target", ["metal", "metal_nax", "cuda"])
@pytest.mark.parametrize("group", [32, 64])
def test_6_bits_for_any_rows(dtype, target, group):
    mx.random.seed(group)
    modules = [linear(n, 192, dtype, 6, group) for n in (1, 37, 70)]
    few = ["gemv" if target != "cuda" else "gemv_rows"] + ["gemv_rows"] * 3
    for rows, kernel in zip((1, 2, 5, 16, 17, 33), [*few, "qgemm", "qgemm"], strict=True):
        x = normal((1, rows, 192), dtype)
        compare(lambda x=x: layers.project(x, *modules), dtype, kernel, target=target)


def test_float32_activations_have_no_kernels():
    x, module = normal((2, 256), mx.float32), linear(40, 256, mx.float32)
    compare(lambda: layers.project(x, module), mx.float32, "reference")
    assert "float32" in kernels.report()[0][2]


@pytest.mark.parametrize("target, rows, kernel", [
    ("metal", 1, "gemv_rows"), ("metal", 1, "gemv"), ("metal", 20, "qgemm"),
    ("metal_nax", 40, "qgemm"), ("cuda", 1, "gemv_rows"),
])  # fmt: skip
def test_a_wide_dense_model_has_kernels_for_its_rows(target, rows, kernel):
    """5,120 columns with float32 results do not fit the one-row kernel's threadgroup memory: the
    kernel for a few rows serves them, and the answer before the first token says the same."""
    wide = kernel != "gemv"
    module = linear(40, 5120, mx.bfloat16)
    x = normal((1, rows, 5120), mx.bfloat16)
    answer = selection.linear(
        mx.bfloat16, [spec.matrix(module)], rows=rows, float32=wide, on=target
    )
    assert answer.kernel == kernel
    compare(lambda: layers.project(x, module, float32_out=wide), mx.bfloat16, kernel, target=target)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rms_norm(dtype):
    for rows, dim in ((1, 256), (7, 128), (2, 2052)):
        x, w = normal((rows, dim), dtype, 3.0), normal((dim,), dtype)
        compare(lambda x=x, w=w: [ops.rms_norm(x, w, 1e-6)], dtype, "rms_norm_rows")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("bits, group", [(0, 0), (4, 64), (6, 64), (8, 32)])
def test_embedding_is_exact(dtype, bits, group):
    table = nn.Embedding(19, 160)
    table.set_dtype(dtype)
    if bits:
        table = nn.QuantizedEmbedding.from_embedding(table, 32 if group == 64 else group, bits)
    ids = mx.array([[0, 18, 3], [3, 3, 7]])
    compare(lambda: [ops.embed(ids, weight_of(table), dtype)], dtype, "embed_rows", tolerance=1e-12)


def delta_inputs(B, T, Hk, Hv, dtype, state=True, seed=0):
    mx.random.seed(seed)
    C = (2 * Hk + Hv) * 128
    given = dict(
        conv_state=normal((B, 3, C), dtype) if state else None,
        state=mx.random.normal((B, Hv, 128, 128)) * 0.1 if state else None,
    )
    arrays = (
        normal((B, T, C), dtype), normal((B, T, Hv * 128), dtype), normal((B, T, Hv), dtype),
        normal((B, T, Hv), dtype), normal((C, 4, 1), dtype, 0.5), mx.random.uniform(-2, 1, (Hv,)),
        normal((Hv,), dtype), normal((128,), dtype),
    )  # fmt: skip
    mx.eval(arrays, [v for v in given.values() if v is not None])
    return arrays, given


def delta(arrays, given, Hk, Hv, **more):
    return ops.gated_delta(
        *arrays, 1e-6, key_heads=Hk, value_heads=Hv, key_dim=128, value_dim=128, **given, **more
    )


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("T", [1, 2, 31, 33, 70])
@pytest.mark.parametrize("state", [True, False])
def test_gated_delta(dtype, T, state):
    arrays, given = delta_inputs(1, T, 1, 2, dtype, state, T)
    kernel = "gated_delta_step" if T == 1 else "gated_delta_scan"
    compare(lambda: delta(arrays, given, 1, 2), dtype, kernel)


def test_gated_delta_with_padding_and_lengths():
    arrays, given = delta_inputs(3, 21, 1, 2, mx.bfloat16)
    t = mx.arange(21)
    left = t[None] >= mx.array([0, 4, 21])[:, None]
    # A padded position's output means nothing: its row is not compared.
    for more in (
        dict(mask=left),
        dict(mask=t[None] < mx.array([21, 9, 1])[:, None], lengths=mx.array([21, 9, 1])),
    ):
        keep = more["mask"][..., None]

        def call(more=more, keep=keep):
            out, conv, state = delta(arrays, given, 1, 2, **more)
            return [mx.where(keep, out, mx.zeros_like(out)), conv, state]

        compare(call, mx.bfloat16, "gated_delta_scan")


@pytest.mark.parametrize("scan", ["norm", "apart", "block"])
@pytest.mark.parametrize("T", [1, 33])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_form_of_the_scan(scan, T, dtype):
    """The norm in the scan's kernel, apart, and operands staged in blocks."""
    arrays, given = delta_inputs(2, T, 1, 2, dtype)
    compare(lambda: delta(arrays, given, 1, 2), dtype, "gated_delta_scan", layers={"scan": scan})


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("offset", [[0], [1000], [7, 0, 3]])
def test_attention_prepare(dtype, T, offset):
    mx.random.seed(3)
    B = 3
    q, k = normal((B, T, 4 * 2 * 256), dtype), normal((B, T, 256), dtype)
    norms = normal((256,), dtype), normal((256,), dtype)
    mx.eval(q, k, norms)
    compare(
        lambda: ops.attention_prepare(
            q, k, *norms, mx.array(offset), heads=4, kv_heads=1, rotary=64, base=1e7, eps=1e-6
        ),
        dtype, "attention_prepare",
    )  # fmt: skip


def test_attention_itself_is_the_reference_here_and_says_so():
    q, kv = normal((1, 2, 3, 256), mx.bfloat16), normal((1, 1, 5, 256), mx.bfloat16)
    gate = normal((1, 3, 2 * 256 * 2), mx.bfloat16)
    with only("reference"):
        mx.eval(ops.attend(q, kv, kv, gate, causal=True))
    [(kind, _, reason, count)] = kernels.report()
    assert kind == "attend" and "scaled_dot_product_attention" in reason and count == 1


def moe_layer(
    dtype, hidden=128, width=64, experts=32, top_k=4, bits=4, group=32, normalize=True, seed=0
):
    mx.random.seed(seed)

    def weight(*shape, b=bits):
        w = normal(shape, dtype, shape[-1] ** -0.5)
        if not b:
            return _ext.Weight(w)
        q, s, z = mx.quantize(w, group, b)
        mx.eval(q, s, z)
        return _ext.Weight(q, s, z, b, group)

    return _ext.MoeLayer(
        weight(experts, hidden, b=8 if bits else 0),
        weight(experts, width, hidden), weight(experts, width, hidden),
        weight(experts, hidden, width),
        weight(width, hidden), weight(width, hidden), weight(hidden, width),
        weight(1, hidden, b=8 if bits else 0), top_k, normalize,
    )  # fmt: skip


# The GEMMs round weights to the dtype; a router near a tie may then choose another expert, so the
# seeds are such that none is near.
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 33, 65])
def test_moe(dtype, rows):
    layer = moe_layer(dtype)
    x = normal((rows, 128), dtype)
    mx.eval(x)
    compare(lambda: [ops.moe(x, layer)], dtype, "moe_rows" if rows <= 16 else "moe_gemm",
            tolerance=None if rows <= 16 else 4 * TOLERANCE[dtype])  # fmt: skip


@pytest.mark.parametrize("options",
                         [dict(bits=6), dict(bits=8), dict(bits=0),
                          dict(experts=7, top_k=3, normalize=False)],
                         ids=["6 bits", "8 bits", "plain", "odd"])  # fmt: skip
def test_moe_of_other_formats_and_shapes(options):
    layer = moe_layer(mx.bfloat16, **options)
    for rows, kernel in ((3, "moe_rows"), (40, "moe_gemm")):
        x = normal((rows, 128), mx.bfloat16)
        compare(lambda x=x: [ops.moe(x, layer)], mx.bfloat16, kernel, tolerance=6e-2)


def same(call, kernel, target="metal", **layers):
    """The production form's bytes, from a form with other dispatches."""
    results = []
    for form in ({}, layers):
        with only(kernel, layers=form, target=target):
            results.append([np.array(x if x.dtype == mx.float32 else x.view(mx.uint16))
                            for x in call()])  # fmt: skip
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bits, group", [(4, 32), (8, 64)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("target", ["metal", "metal_nax", "cuda"])
def test_weights_dequantized_apart_give_the_same_bytes(dtype, bits, group, target):
    """The GEMMs round weights to the dtype as they read them."""
    mx.random.seed(7)
    modules = [linear(n, 256, dtype, bits, group) for n in (33, 70)]
    x = normal((1, 20, 256), dtype)
    for wide in (False, True):
        same(
            lambda w=wide: layers.project(x, *modules, float32_out=w),
            "qgemm",
            target,
            dequantize=True,
        )
    layer, x = moe_layer(dtype, bits=bits, group=group), normal((40, 128), dtype)
    same(lambda: [ops.moe(x, layer)], "moe_gemm", target, dequantize=True)


def test_few_rows_are_not_dequantized_apart():
    """Ablated is the GEMM: row products read each weight once anyway."""
    x, layer = normal((3, 128), mx.bfloat16), moe_layer(mx.bfloat16)
    same(lambda: [ops.moe(x, layer)], "moe_rows", dequantize=True)


@pytest.mark.parametrize("rows, experts", [(40, 32), (300, 4)])
@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_blocks_of_16_rows_give_the_same_bytes(rows, experts, target):
    """Of experts with a row or two each, and with more than a block of 64."""
    layer = moe_layer(mx.bfloat16, experts=experts)
    x = normal((rows, 128), mx.bfloat16)
    same(lambda: [ops.moe(x, layer)], "moe_gemm", target, block_rows=16)


@pytest.mark.parametrize("options", [{"scan": "whole"}, {"block_rows": 8}, {"fuse": True}])
def test_forms_of_layers_that_there_are_none_of(options):
    with pytest.raises(ValueError, match="whole|block_rows 8|'fuse'"):
        kernels.start_metal_host(layers=options)


@pytest.mark.parametrize("rows", [5, 40])
def test_logits_that_come_from_elsewhere(rows):
    """The router's own, so that the result is the same; and others, so that it is not."""
    dtype = mx.bfloat16
    layer, x = moe_layer(dtype), normal((rows, 128), dtype)
    logits, shared = mx.random.normal((rows, 32)), mx.random.normal((rows, 1))
    with kernels.metal_host():
        own = ops.moe(x, layer)
        given = _ext.moe(x, layer, logits, shared)
        again = _ext.moe(x, layer, logits, shared)
        other = _ext.moe(x, layer, -logits, shared)
        mx.eval(own, given, again, other)
    assert mx.array_equal(given, again)
    assert not mx.array_equal(given, other) and not mx.array_equal(given, own)
    for wrong in ((logits[:, :8], shared), (logits, None), (logits.astype(dtype), shared)):
        with pytest.raises(ValueError, match="logits"):
            _ext.moe(x, layer, *wrong)
    with pytest.raises(ValueError, match="makes its own logits"):
        mx.eval(_ext.moe(x, layer, logits, shared))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_checked_host_finds_no_fault_and_the_same_values(seed):
    """Races, touches outside the declared ranges, unwritten bytes; in shuffled orders."""
    mx.random.seed(5)
    dtype = mx.bfloat16
    host = dict(checked=True, seed=seed)
    modules = [linear(n, 64, dtype, 4, 32) for n in (3, 40)]
    for rows, kernel in ((1, "gemv"), (3, "gemv_rows"), (18, "qgemm")):
        x = normal((rows, 64), dtype)
        compare(lambda x=x: layers.project(x, *modules), dtype, kernel, **host)
    layer = moe_layer(dtype, hidden=64, width=32, experts=6, top_k=2)
    for rows, kernel in ((3, "moe_rows"), (18, "moe_gemm")):
        x = normal((rows, 64), dtype)
        compare(lambda x=x: [ops.moe(x, layer)], dtype, kernel, tolerance=6e-2, **host)
    for T, kernel in ((1, "gated_delta_step"), (5, "gated_delta_scan")):
        arrays, given = delta_inputs(1, T, 1, 1, dtype)
        compare(lambda a=arrays, g=given: delta(a, g, 1, 1), dtype, kernel, **host)


def test_the_order_of_launches_and_threads_does_not_change_a_bit():
    mx.random.seed(6)
    layer = moe_layer(mx.bfloat16)
    x = normal((40, 128), mx.bfloat16)
    results = []
    for seed in range(3):
        with kernels.metal_host(seed=seed):
            results.append(np.array(ops.moe(x, layer).view(mx.uint16)))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
