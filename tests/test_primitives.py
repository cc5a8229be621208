"""Each layer primitive against mlx-lm's own module, run in float32 on dequantized weights."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchLinear

from lily_mlx import layers, ops
from lily_mlx.float32 import to_float32
from lily_mlx.spec import weight_of

# Largest error over the largest value: half an ulp of the dtype, a few roundings deep.
TOLERANCE = {mx.float32: 3e-6, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}
DTYPES = list(TOLERANCE)
ROWS = [1, 2, 3, 4, 5, 7, 16, 17, 65, 70]
FORMATS = [(0, 0), *((bits, group) for bits in (4, 6, 8) for group in (32, 64, 128))]

BUNDLED = dict(
    hidden_size=256, num_attention_heads=8, num_key_value_heads=1, head_dim=256,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=128,
    linear_value_head_dim=128, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=64,
    shared_expert_intermediate_size=64, rms_norm_eps=1e-6,
)  # fmt: skip
ODD = dict(  # nothing is a power of two that need not be
    BUNDLED, hidden_size=96, num_attention_heads=2, num_key_value_heads=2, head_dim=48,
    linear_num_value_heads=8, linear_num_key_heads=2, linear_key_head_dim=48,
    linear_value_head_dim=20, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=32,
    shared_expert_intermediate_size=96,
)  # fmt: skip
# One layer of Qwen3.6-35B-A3B, with a smaller expert width so that the float32 twin stays small.
LARGE = dict(
    BUNDLED, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
    linear_num_value_heads=32, linear_num_key_heads=16, num_experts=256,
    moe_intermediate_size=64, shared_expert_intermediate_size=512,
)  # fmt: skip


def error(got: mx.array, expected: mx.array) -> float:
    assert got.shape == expected.shape
    top = mx.maximum(mx.abs(expected).max(), 1e-30)
    value = (mx.abs(got.astype(mx.float32) - expected).max() / top).item()
    assert np.isfinite(value)
    return value


def twins(lily, stock, dims, dtype, bits=4, group=32, seed=0):
    """A lily module in `dtype`, quantized, and the stock module in float32 on the same weights."""
    mx.random.seed(seed)
    args = qwen3_5.TextModelArgs.from_dict(dims)
    ours, exact = lily(args), stock(args)
    ours.set_dtype(dtype)
    if isinstance(ours, qwen3_5.GatedDeltaNet):
        ours.A_log = ours.A_log.astype(mx.float32)
        ours.dt_bias = mx.random.normal(ours.dt_bias.shape).astype(dtype)
        ours.norm.weight = mx.random.uniform(0.5, 1.5, ours.norm.weight.shape).astype(dtype)
        exact.conv1d.weight = exact.conv1d.weight * 2
    if isinstance(ours, Qwen3NextAttention):
        for norm in (ours.q_norm, ours.k_norm):
            norm.weight = mx.random.uniform(0.5, 1.5, norm.weight.shape).astype(dtype)
    if bits:
        quantizable = nn.Linear, SwitchLinear
        nn.quantize(exact, group, bits, class_predicate=lambda _, m: isinstance(m, quantizable))
        nn.quantize(ours, group, bits, class_predicate=lambda _, m: isinstance(m, quantizable))
    exact.update(ours.parameters())
    ours.eval()
    return ours, to_float32(exact).eval()


def rows(batch, length, hidden, dtype, scale=1.0):
    return (mx.random.normal((batch, length, hidden)) * scale).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits, group", FORMATS)
def test_projections_of_every_format_and_row_count(dtype, bits, group):
    mx.random.seed(1)
    linears = [nn.Linear(384, n, bias=False) for n in (1, 31, 64, 130)]
    for linear in linears:
        linear.set_dtype(dtype)
    if bits:
        linears = [nn.QuantizedLinear.from_linear(l, group, bits) for l in linears]
    exact = [to_float32(nn.Sequential(l)) for l in linears]
    for count in ROWS:
        x = rows(1, count, 384, dtype)
        for got, reference in zip(layers.project(x, *linears), exact, strict=True):
            assert got.dtype == dtype
            assert error(got, reference(x.astype(mx.float32))) < TOLERANCE[dtype]
        wide = layers.project(x, *linears, float32_out=True)
        for got, reference in zip(wide, exact, strict=True):
            assert got.dtype == mx.float32
            assert error(got, reference(x.astype(mx.float32))) < 3e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_rows_do_not_depend_on_their_neighbours(dtype, bits):
    mx.random.seed(2)
    linear = nn.Linear(256, 77, bias=False)
    if bits:
        linear = nn.QuantizedLinear.from_linear(linear, 64, bits)
    linear.set_dtype(dtype)
    x = rows(1, 70, 256, dtype)
    together = layers.project(x, linear)[0]
    for count in ROWS:
        assert mx.array_equal(layers.project(x[:, :count], linear)[0], together[:, :count])


@pytest.mark.parametrize("scale", [0.0, 1e4], ids=["zero scales", "large scales"])
def test_projection_with_extreme_scales(scale):
    linear = nn.QuantizedLinear.from_linear(nn.Linear(64, 8, bias=False), 64, 4)
    linear.scales, linear.biases = linear.scales * scale, linear.biases * scale
    x = rows(1, 3, 64, mx.float32)
    assert error(layers.project(x, linear)[0], to_float32(nn.Sequential(linear))(x)) < 3e-6


def test_a_strided_expert_view_is_read_in_place():
    mx.random.seed(3)
    fused = mx.random.normal((4, 128, 64))
    for view in (fused[:, :64], fused[:, 64:]):
        linear = SwitchLinear(64, 64, 4, bias=False)
        linear.weight = view
        shared = weight_of(linear)
        assert shared.rows == 64 and shared.cols == 64
    args = qwen3_5.TextModelArgs.from_dict(dict(ODD, hidden_size=64, moe_intermediate_size=64,
                                                num_experts=4, num_experts_per_tok=2))  # fmt: skip
    block = layers.SparseMoeBlock(args).eval()
    x = rows(1, 5, 64, mx.float32)
    block.switch_mlp.gate_proj.weight = fused[:, :64]
    block.switch_mlp.up_proj.weight = fused[:, 64:]
    strided = block(x)
    block.switch_mlp.gate_proj.weight = mx.contiguous(fused[:, :64])
    block.switch_mlp.up_proj.weight = mx.contiguous(fused[:, 64:])
    assert mx.array_equal(strided, block(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_rounds_once(dtype):
    mx.random.seed(4)
    x, w = rows(2, 9, 200, dtype, 3.0), mx.random.normal((200,)).astype(dtype)
    x32, w32 = x.astype(mx.float32), w.astype(mx.float32)
    exact = x32 * mx.rsqrt(mx.mean(x32 * x32, -1, keepdims=True) + 1e-6) * w32
    got = ops.rms_norm(x, w, 1e-6)
    ulp = {mx.float32: 2e-6, mx.float16: 2**-11 * 1.01, mx.bfloat16: 2**-8 * 1.01}[dtype]
    assert (mx.abs(got.astype(mx.float32) - exact) / mx.abs(exact)).max().item() <= ulp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits, group", FORMATS)
def test_embedding(dtype, bits, group):
    embedding = nn.Embedding(50, 128)
    embedding.set_dtype(dtype)
    if bits:
        embedding = nn.QuantizedEmbedding.from_embedding(embedding, group, bits)
    ids = mx.array([[0, 49, 7], [7, 1, 0]])
    got = ops.embed(ids, weight_of(embedding), dtype)
    exact = to_float32(nn.Sequential(embedding))(ids)
    if dtype == mx.float32:
        assert error(got, exact) < 1e-6
    else:
        assert mx.array_equal(got, exact.astype(dtype))


def test_embedding_names_an_id_outside_the_vocabulary():
    weight = ops.Weight(mx.ones((50, 32)))
    with pytest.raises(Exception, match="token id 50 is outside the vocabulary of 50"):
        mx.eval(ops.embed(mx.array([1, 50]), weight, mx.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [BUNDLED, ODD], ids=["bundled", "odd"])
def test_gated_delta_net(dtype, dims):
    ours, exact = twins(layers.GatedDeltaNet, qwen3_5.GatedDeltaNet, dims, dtype)
    for batch, lengths in ((1, [1]), (1, [2, 1]), (2, [5, 1, 3]), (3, [17])):
        mine, theirs = ArraysCache(2), ArraysCache(2)
        for length in lengths:
            x = rows(batch, length, dims["hidden_size"], dtype)
            got, expected = ours(x, cache=mine), exact(x.astype(mx.float32), cache=theirs)
            assert error(got, expected) < 2 * TOLERANCE[dtype]
        assert error(mine[1], theirs[1]) < 2 * TOLERANCE[dtype]
        assert mine[1].dtype == mx.float32 and mine[0].dtype == dtype
        assert error(mine[0], theirs[0]) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [BUNDLED, ODD], ids=["bundled", "odd"])
def test_attention(dtype, dims):
    ours, exact = twins(layers.Attention, Qwen3NextAttention, dims, dtype)
    for batch, lengths in ((1, [1, 1, 1]), (2, [5, 1, 3]), (1, [66, 1]), (1, [63, 2])):
        mine, theirs = KVCache(), KVCache()
        for length in lengths:
            x = rows(batch, length, dims["hidden_size"], dtype)
            mask = "causal" if length > 1 else None
            got, expected = ours(x, mask, mine), exact(x.astype(mx.float32), mask, theirs)
            assert error(got, expected) < 2 * TOLERANCE[dtype]


def test_attention_over_many_chunks_of_keys_is_the_same_for_any_row_count():
    mx.random.seed(5)
    q = mx.random.normal((1, 4, 9, 64))
    k, v = mx.random.normal((2, 1, 2, 2100, 64))
    gate = mx.random.normal((1, 9, 4 * 64 * 2))
    together = ops.attend(q, k, v, gate, causal=True)
    exact = mx.fast.scaled_dot_product_attention(q, k, v, scale=64**-0.5, mask="causal")
    exact = exact.transpose(0, 2, 1, 3).reshape(1, 9, -1)
    exact = exact * mx.sigmoid(gate.reshape(1, 9, 4, 2, 64)[..., 1, :].reshape(1, 9, -1))
    assert error(together, exact) < 1e-5
    for row in range(9):
        seen = 2100 - 9 + row + 1
        alone = ops.attend(
            q[:, :, row : row + 1], k[:, :, :seen], v[:, :, :seen], gate[:, row : row + 1]
        )
        assert mx.array_equal(alone, together[:, row : row + 1])


def test_attention_mask_and_rows_that_see_nothing():
    mx.random.seed(6)
    q, k, v = mx.random.normal((3, 2, 4, 6, 32))
    gate = mx.random.normal((2, 6, 4 * 32 * 2))
    mask = mx.random.uniform(shape=(2, 1, 6, 6)) > 0.5
    mask[1, 0, 2] = False
    mask[0, 0, :, 0] = True
    got = ops.attend(q, k, v, gate, mask=mask)
    exact = mx.fast.scaled_dot_product_attention(q, k, v, scale=32**-0.5, mask=mask)
    exact = exact.transpose(0, 2, 1, 3).reshape(2, 6, -1)
    exact = exact * mx.sigmoid(gate.reshape(2, 6, 4, 2, 32)[..., 1, :].reshape(2, 6, -1))
    some = mask.any(-1)[:, 0]
    assert error(got * some[..., None], mx.where(some[..., None], exact, 0)) < 1e-5
    assert mx.all(got[1, 2] == 0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [BUNDLED, ODD], ids=["bundled", "odd"])
def test_moe(dtype, dims, normalize):
    dims = dict(dims, norm_topk_prob=normalize)
    ours, exact = twins(layers.SparseMoeBlock, Qwen3NextSparseMoeBlock, dims, dtype)
    for batch, length in ((1, 1), (1, 2), (2, 8), (1, 17), (3, 33)):
        x = rows(batch, length, dims["hidden_size"], dtype)
        assert error(ours(x), exact(x.astype(mx.float32))) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("bits, group", FORMATS)
def test_moe_formats(bits, group):
    dims = dict(BUNDLED, num_experts=8, moe_intermediate_size=128,
                shared_expert_intermediate_size=128)  # fmt: skip
    ours, exact = twins(
        layers.SparseMoeBlock, Qwen3NextSparseMoeBlock, dims, mx.float32, bits, group
    )
    for count in (1, 2, 3, 9):
        x = rows(1, count, 256, mx.float32)
        assert error(ours(x), exact(x)) < 6e-6


@pytest.mark.parametrize("kind", ["moe", "gated_delta", "attention"])
def test_one_layer_of_35b(kind):
    lily, stock = {
        "moe": (layers.SparseMoeBlock, Qwen3NextSparseMoeBlock),
        "gated_delta": (layers.GatedDeltaNet, qwen3_5.GatedDeltaNet),
        "attention": (layers.Attention, Qwen3NextAttention),
    }[kind]
    ours, exact = twins(lily, stock, LARGE, mx.bfloat16, 4, 64)
    for length in (1, 5):
        x = rows(1, length, 2048, mx.bfloat16)
        assert error(ours(x), exact(x.astype(mx.float32))) < 2 * TOLERANCE[mx.bfloat16]


def test_equal_experts_go_to_the_lowest_ids():
    dims = dict(ODD, num_experts=6, num_experts_per_tok=2)
    block = layers.SparseMoeBlock(qwen3_5.TextModelArgs.from_dict(dims)).eval()
    x = rows(1, 3, 96, mx.float32)
    row = mx.random.normal((96,)) * 0.01
    # Experts 1, 2, 4 and 5 tie for first place on every row with a positive product.
    block.gate.weight = mx.stack([-row, row, row, -row, row, row])
    x = x * mx.sign((x @ row)[..., None])
    got = block(x)
    expected = layers.SparseMoeBlock(qwen3_5.TextModelArgs.from_dict(dims)).eval()
    expected.update(block.parameters())
    for expert in (4, 5):  # what they hold must not matter
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = mx.array(expected.switch_mlp[name].weight)
            weight[expert] = float("nan")
            expected.switch_mlp[name].weight = weight
    assert mx.array_equal(got, expected(x))


def test_a_nan_reaches_the_result():
    ours, _ = twins(layers.SparseMoeBlock, Qwen3NextSparseMoeBlock, ODD, mx.float32)
    x = rows(1, 2, 96, mx.float32)
    x[0, 1, 5] = float("nan")
    y = ours(x)
    assert mx.isfinite(y[0, 0]).all() and mx.isnan(y[0, 1]).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.rms_norm(mx.ones((2, 8)), mx.ones(7), 1e-6), r"\[7\] does not fit x \[2, 8\]"),
        (lambda: ops.rms_norm(mx.ones((2, 8), mx.int32), mx.ones(8), 1e-6), "use float32, float16"),
        (lambda: ops.project(mx.ones((2, 64)), [ops.Weight(mx.ones((3, 32)))]), "32 columns"),
        (lambda: ops.Weight(mx.ones((3, 33))), "multiple of 32"),
        (lambda: ops.Weight(mx.ones((3, 4), mx.uint32), mx.ones((3, 1)), mx.ones((3, 1)), 3, 32),
         "bits 3 has no kernel; 0, 4, 6, 8 have"),
        (lambda: ops.Weight(mx.ones((3, 8), mx.uint32), mx.ones((3, 2)), mx.ones((3, 2)), 4, 48),
         "group 48 has no kernel; 32, 64, 128 have"),
        (lambda: ops.Weight(mx.ones((3, 8), mx.uint32), mx.ones((3, 2)), mx.ones((3, 2)), 4, 64),
         "do not fit codes"),
        (lambda: ops.attend(mx.ones((1, 4, 2, 32)), mx.ones((1, 3, 2, 32)), mx.ones((1, 3, 2, 32)),
                            mx.ones((1, 2, 256))), "multiple of 3 KV heads"),
        (lambda: ops.attend(mx.ones((1, 4, 2, 32)), mx.ones((1, 4, 2, 32)), mx.ones((1, 4, 2, 32)),
                            mx.ones((1, 2, 256)), mask=mx.ones((2, 2))), "must be boolean"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lazy_compiled_asynchronous_and_on_another_stream():
    ours, exact = twins(layers.SparseMoeBlock, Qwen3NextSparseMoeBlock, ODD, mx.float32)
    x = rows(1, 4, 96, mx.float32)
    expected = ours(x)
    compiled = mx.compile(ours)
    assert mx.array_equal(compiled(x), expected) and mx.array_equal(compiled(x + 0), expected)
    again = ours(x)
    mx.async_eval(again)
    assert mx.array_equal(again, expected)
    with mx.stream(mx.new_stream(mx.cpu)):
        assert mx.array_equal(ours(x), expected)


def test_shapeless_compile_knows_the_output_shapes():
    values = mx.random.normal((8, 32))
    mx.eval(values)
    weight = ops.Weight(values)
    compiled = mx.compile(lambda x: ops.project(x, [weight])[0], shapeless=True)
    for count in (1, 3, 2):
        x = mx.random.normal((count, 32))
        assert mx.array_equal(compiled(x), ops.project(x, [weight])[0])


def test_gradients_are_refused_in_a_sentence_and_work_after_train():
    ours, _ = twins(layers.SparseMoeBlock, Qwen3NextSparseMoeBlock, ODD, mx.float32, bits=0)
    x = rows(1, 2, 96, mx.float32)
    with pytest.raises(ValueError, match="has no gradient; call model.train()"):
        mx.eval(mx.grad(lambda x: ours(x).sum())(x))
    ours.train()
    assert mx.isfinite(mx.grad(lambda x: ours(x).sum())(x)).all()
