"""The whole model: against float32, in chunks and steps, in batches, under mlx-lm's own tools."""

import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

import lily_mlx
from lily_mlx.loading import load

LENGTHS = [1, 2, 3, 5, 16, 17, 63, 64, 65]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def run(model, ids, step):
    """Logits of ids in chunks of `step`, through a cache."""
    caches = make_prompt_cache(model)
    out = []
    for start in range(0, ids.shape[1], step):
        out.append(model(ids[:, start : start + step], cache=caches))
        mx.eval(out[-1])
    return mx.concatenate(out, axis=1)


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("shape", list(models.SHAPES))
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_float32_logits_equal_stocks(kind, shape, bits):
    ours, exact = models.pair(shape, mx.float32, bits, kind=kind)
    for length in LENGTHS:
        ids = models.prompt(ours, length, batch=2)
        assert mx.abs(ours(ids) - exact(ids)).max().item() < 1e-3
        assert mx.abs(run(ours, ids[:1], 1) - exact(ids[:1])).max().item() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", list(models.SHAPES))
def test_one_pass_chunks_and_single_steps_are_the_same_bits(shape, dtype):
    ours, _ = models.pair(shape, dtype)
    ids = models.prompt(ours, 67)
    whole = ours(ids)
    for step in (1, 2, 3, 16, 64, 66):
        assert mx.array_equal(run(ours, ids, step), whole), step


def test_a_dense_model_in_chunks_and_single_steps():
    # Its MLP is mlx-lm's own, whose products depend on the row count by a rounding.
    ours, _ = models.pair("plain", mx.float32, 0, kind="dense")
    ids = models.prompt(ours, 67)
    whole = ours(ids)
    for step in (1, 2, 16, 66):
        assert mx.abs(run(ours, ids, step) - whole).max().item() < 1e-4


@pytest.mark.parametrize("bits, dtype", [(4, mx.bfloat16), (8, mx.float16), (0, mx.float32)])
def test_logits_are_float32_and_the_state_stays_float32(bits, dtype):
    ours, _ = models.pair("plain", dtype, bits)
    caches = ours.make_cache()
    assert ours(models.prompt(ours, 5), cache=caches).dtype == mx.float32
    assert ours(models.prompt(ours, 1), cache=caches).dtype == mx.float32
    assert caches[0][0].dtype == dtype and caches[0][1].dtype == mx.float32
    assert caches[3].keys.dtype == dtype


def batched(caches, padding):
    """Fresh caches for left-padded rows."""
    return [
        ArraysCache(2, left_padding=padding) if hasattr(c, "cache") else BatchKVCache(padding)
        for c in caches
    ]


@pytest.mark.parametrize("shape", list(models.SHAPES))
def test_left_padded_rows_equal_rows_alone(shape):
    ours, _ = models.pair(shape, mx.bfloat16)
    lengths = [9, 3, 1]
    alone = [models.prompt(ours, n, seed=n) for n in lengths]
    padding = [max(lengths) - n for n in lengths]
    pairs = list(zip(padding, alone, strict=True))
    ids = mx.concatenate([mx.concatenate([mx.full((1, p), 7), a], axis=1) for p, a in pairs])
    for step in (9, 4, 1):
        caches = batched(ours.make_cache(), padding)
        rows = []
        for start in range(0, 9, step):
            rows.append(ours(ids[:, start : start + step], cache=caches))
        got = mx.concatenate(rows, axis=1)
        for row, (p, a) in enumerate(pairs):
            assert mx.array_equal(got[row, p:], ours(a)[0])


def test_right_padded_rows_with_lengths_leave_the_states_of_the_rows_alone():
    ours, _ = models.pair("odd", mx.float32)
    lengths = [7, 2, 3]
    rows = [models.prompt(ours, n, seed=n) for n in lengths]
    ids = mx.concatenate([mx.pad(r, ((0, 0), (0, 7 - r.shape[1]))) for r in rows])
    caches = batched(ours.make_cache(), [0, 0, 0])
    for c in caches:
        if isinstance(c, ArraysCache):
            c.prepare(lengths=lengths)
    ours(ids, cache=caches)
    for i, row in enumerate(rows):
        own = ours.make_cache()
        ours(row, cache=own)
        for mine, theirs in zip(caches, own, strict=True):
            if isinstance(mine, ArraysCache):
                for a, b in zip(mine.cache, theirs.cache, strict=True):
                    assert mx.array_equal(a[i], b[0])


def test_batch_generation_of_mlx_lm_writes_the_same_with_both_engines(tmp_path):
    import tiny

    tiny.checkpoint(tmp_path, quantize={"group_size": 32, "bits": 4})
    texts = []
    for engine in ("lily", "stock"):
        model, tokenizer = load(str(tmp_path), engine=engine)
        prompts = [tokenizer.encode(t) for t in ("hello there", "a", "one two three four five")]
        texts.append(batch_generate(model, tokenizer, prompts, max_tokens=8).texts)
    assert texts[0] == texts[1]


def test_a_batch_outlives_rows_that_come_and_go():
    """mlx-lm's server: rows join late, leave in mid-prompt or in mid-answer, or are cut short."""
    ours, _ = models.pair("plain", mx.float32, 0)
    prompts = [models.prompt(ours, n, seed=n)[0].tolist() for n in (5, 40, 3, 11)]

    def alone(prompt, count):
        return [t for t, _ in generate_step(mx.array(prompt), ours, max_tokens=count)]

    batch = BatchGenerator(ours, prefill_step_size=16)
    first, leaves_early = batch.insert(prompts[:2], max_tokens=[12, 12])
    got = {}

    def run(steps):
        for _ in range(steps):
            _, answers = batch.next()
            for answer in answers:
                got.setdefault(answer.uid, []).append(answer.token)

    run(1)
    batch.remove([leaves_early])  # its prompt is longer than a chunk: it has not answered yet
    leaves_late, last = batch.insert(prompts[2:], max_tokens=[12, 6])
    run(5)
    batch.remove([leaves_late])
    run(14)
    batch.close()
    assert leaves_early not in got
    assert got[first] == alone(prompts[0], 12)
    assert got[last] == alone(prompts[3], 6)
    assert 0 < len(got[leaves_late]) < 12
    assert got[leaves_late] == alone(prompts[2], len(got[leaves_late]))


def test_quantized_and_rotating_caches_run():
    ours, exact = models.pair("plain", mx.float32, 0)
    ids = models.prompt(ours, 12)
    for make in (lambda: QuantizedKVCache(32, 8), lambda: RotatingKVCache(max_size=64)):
        results = []
        for model in (ours, exact):
            caches = [c if hasattr(c, "cache") else make() for c in make_prompt_cache(model)]
            model(ids[:, :8], cache=caches)
            results.append(model(ids[:, 8:9], cache=caches))
        assert mx.abs(results[0] - results[1]).max().item() < 5e-3


def test_a_sampler_and_logits_processors_go_through_mlx_lms_own_loop():
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    ours, exact = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 6)[0]
    words = []
    for model, step in ((ours, lily_mlx.generate_step), (exact, generate_step)):
        mx.random.seed(3)
        words.append([
            t for t, _ in step(ids, model, max_tokens=12, sampler=make_sampler(0.7, top_p=0.9),
                               logits_processors=make_logits_processors(repetition_penalty=1.2))
        ])  # fmt: skip
    assert words[0] == words[1]


def test_input_embeddings():
    ours, exact = models.pair("plain", mx.float32, 0)
    embeddings = exact.model.embed_tokens(models.prompt(ours, 4))
    got = ours(mx.zeros((1, 4), mx.int32), input_embeddings=embeddings)
    assert mx.abs(got - exact(mx.zeros((1, 4), mx.int32), input_embeddings=embeddings)).max() < 1e-3


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_training_runs_the_stock_ops_and_has_gradients(kind):
    ours, exact = models.pair("plain", mx.float32, 0, kind=kind)
    ids = models.prompt(ours, 5)

    def loss(model):
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    with pytest.raises(ValueError, match="has no gradient; call model.train()"):
        mx.eval(nn.value_and_grad(ours, loss)(ours))
    ours.train()
    exact.train()
    value, gradient = nn.value_and_grad(ours, loss)(ours)
    expected, expected_gradient = nn.value_and_grad(exact, loss)(exact)
    assert abs(value.item() - expected.item()) < 1e-4
    got = _flat(gradient)
    for name, array in _flat(expected_gradient).items():
        assert mx.abs(got[name] - array).max().item() < 1e-3, name


def _flat(tree):
    from mlx.utils import tree_flatten

    return dict(tree_flatten(tree))


def test_sharding_one_rank_runs_the_stock_ops_with_the_same_result():
    ours, exact = models.pair("plain", mx.float32, 0)
    ids = models.prompt(ours, 5)
    ours.shard(mx.distributed.init())
    assert mx.abs(ours(ids) - exact(ids)).max().item() < 1e-3
    reasons = {row["reason"] for row in ours.lily_report() if row["kernel"] is None}
    assert any("shard" in reason for reason in reasons)


def test_pipeline_of_one_keeps_the_stages():
    ours, exact = models.pair("plain", mx.float32, 0)
    ids = models.prompt(ours, 5)
    ours.model.pipeline(mx.distributed.init())
    assert mx.abs(ours(ids) - exact(ids)).max().item() < 1e-3
    assert len(ours.layers) == 4


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_bits_without_a_kernel_run_the_stock_op_and_are_reported(bits):
    ours, exact = models.pair("plain", mx.float32, bits, group=64)
    ids = models.prompt(ours, 6)
    assert mx.abs(ours(ids) - exact(ids)).max().item() < 1e-3
    assert mx.abs(run(ours, ids, 1) - exact(ids)).max().item() < 1e-3
    rows = [r for r in ours.lily_report() if r["kernel"] is None]
    assert any(r["kind"] == "moe" and f"bits {bits}" in r["reason"] for r in rows)
    assert all(r["kernel"] for r in ours.lily_report() if r["kind"] in ("gated_delta", "attention"))


@pytest.mark.parametrize(
    "mode, group, bits", [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
)
def test_other_modes_run_the_stock_op_and_are_reported(mode, group, bits):
    ours, _ = models.pair("plain", mx.bfloat16, 0)
    nn.quantize(ours, group, bits, mode=mode)
    stock_twin = [r for r in ours.lily_report() if r["kind"] == "moe"]
    assert all(r["kernel"] is None and mode in r["reason"] for r in stock_twin)
    caches = ours.make_cache()
    assert mx.isfinite(ours(models.prompt(ours, 4), cache=caches)).all()
    assert mx.isfinite(ours(models.prompt(ours, 1), cache=caches)).all()


def test_router_gates_of_other_bits_are_read_by_their_own(tmp_path):
    """An 8-bit router beside 4-bit experts: decoded as 4-bit it would choose other experts."""
    import tiny

    tiny.checkpoint(
        tmp_path,
        quantize={"group_size": 32, "bits": 4},
        predicate=lambda path, _: {"group_size": 64, "bits": 8} if path.endswith("gate") else True,
    )
    ours, _ = load(str(tmp_path))
    gate = ours.layers[0].mlp.gate
    assert (gate.bits, gate.group_size) == (8, 64)
    from lily_mlx.float32 import load_float32

    ids = models.prompt(ours, 9)
    exact = load_float32(str(tmp_path))
    scale = mx.abs(exact(ids)).max().item()
    assert mx.abs(ours(ids) - exact(ids)).max().item() < 0.02 * scale


def test_prefill_scratch_does_not_grow_with_the_prompt():
    ours, _ = models.pair("plain", mx.bfloat16)
    peaks = []
    for length in (256, 1024):
        ids = models.prompt(ours, length)
        caches = ours.make_cache()
        mx.eval(ours(ids[:, :64], cache=caches))
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        for start in range(64, length, 64):
            ours(ids[:, start : start + 64], cache=caches)
            mx.eval([c.state for c in caches])
        peaks.append(mx.get_peak_memory() - base)
    keys = 2 * (1024 - 256) * 2 * 32 * 2 * 4  # the KV cache itself, twice while it grows
    assert peaks[1] - peaks[0] < keys + (1 << 20)


def test_the_tokenizer_is_mlx_lms(tmp_path):
    import tiny

    tiny.checkpoint(tmp_path)
    _, tokenizer = load(str(tmp_path))
    assert isinstance(tokenizer, TokenizerWrapper)


def test_module_paths_and_parameters_are_stocks():
    from mlx.utils import tree_flatten

    for kind in ("moe", "dense"):
        ours, exact = models.pair("plain", mx.float32, 0, kind=kind)
        mine = {k: v.shape for k, v in tree_flatten(ours.parameters())}
        assert mine == {k: v.shape for k, v in tree_flatten(exact.parameters())}
        assert [n for n, _ in ours.named_modules()] == [n for n, _ in exact.named_modules()]
        for attribute in ("sanitize", "quant_predicate", "cast_predicate", "make_cache", "layers",
                          "shard"):  # fmt: skip
            assert hasattr(ours, attribute)
        assert isinstance(ours, qwen3_5.Model)
        assert ours.cast_predicate("layers.0.linear_attn.A_log") is False
    assert isinstance(ours.make_cache()[3], KVCache)
    assert np.isfinite(ours.language_model.args.rope_theta)
