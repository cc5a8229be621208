"""The decode step: its words, its laziness, and the weights it runs with."""

import threading
import weakref

import mlx.core as mx
import mlx.nn as nn
import models
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers

import lily_mlx
from lily_mlx import decode


def words(step, model, ids, count=64, **options):
    return [token for token, _ in step(ids, model, max_tokens=count, **options)]


@pytest.mark.parametrize("shape", list(models.SHAPES))
@pytest.mark.parametrize("bits", [0, 4, 6, 8])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_64_greedy_tokens_equal_stocks_in_float32(shape, bits, length):
    ours, exact = models.pair(shape, mx.float32, bits)
    ids = models.prompt(ours, length)[0]
    expected = words(stock_generate_step, exact, ids)
    assert words(lily_mlx.generate_step, ours, ids) == expected
    # The same through mlx-lm's own loop and sampler.
    assert words(stock_generate_step, ours, ids) == expected


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_both_loops_write_the_same_words_in_half_precision(dtype):
    ours, _ = models.pair("plain", dtype)
    ids = models.prompt(ours, 7)[0]
    assert words(lily_mlx.generate_step, ours, ids) == words(stock_generate_step, ours, ids)


def test_log_probabilities_are_those_of_the_layers():
    ours, _ = models.pair("plain", mx.bfloat16)
    ids = models.prompt(ours, 7)[0]
    fast = list(lily_mlx.generate_step(ids, ours, max_tokens=5))
    slow = list(stock_generate_step(ids, ours, max_tokens=5))
    for (_, a), (_, b) in zip(fast, slow, strict=True):
        assert mx.array_equal(a, b) and a.shape == (288,)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_generations(count):
    ours, exact = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 3)[0]
    assert words(lily_mlx.generate_step, ours, ids, count) == words(
        stock_generate_step, exact, ids, count
    )


def test_progress_is_reported_as_mlx_lm_does():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 10)[0]
    seen = {}
    for step in (lily_mlx.generate_step, stock_generate_step):
        seen[step] = []
        words(step, ours, ids, 2, prefill_step_size=4,
              prompt_progress_callback=lambda *a, to=seen[step]: to.append(a))  # fmt: skip
    assert seen[lily_mlx.generate_step] == seen[stock_generate_step]


def test_equal_logits_go_to_the_lowest_id():
    ours, _ = models.pair("plain", mx.float32, 0)
    head = ours.language_model.lm_head
    rows = mx.array(head.weight)
    rows[200] = rows[40]
    rows[91] = rows[40]
    head.weight = rows * mx.where(mx.arange(288) == 40, 1, 1)[:, None]
    caches = ours.make_cache()
    token, logits = decode.step(ours.language_model, mx.array([[3]]), caches)
    best = mx.argmax(logits[0, 0]).item()
    assert token.item() == best
    # Make the tied rows the best by construction.
    hidden = ours.model(mx.array([[3]]))[0, 0]
    rows[40] = rows[91] = rows[200] = hidden * 100
    head.weight = rows
    token, logits = decode.step(ours.language_model, mx.array([[3]]), ours.make_cache())
    assert logits[0, 0, 40] == logits[0, 0, 91] == logits[0, 0, 200] == logits.max()
    assert token.item() == 40


def test_an_id_outside_the_vocabulary_is_named():
    ours, _ = models.pair("plain", mx.float32)
    with pytest.raises(Exception, match="token id 288 is outside the vocabulary of 288"):
        mx.eval(ours(mx.array([[288]]), cache=ours.make_cache()))
    with pytest.raises(ValueError, match="token id 300 at position 1"):
        next(lily_mlx.generate_step(mx.array([1, 300]), ours))


@pytest.mark.parametrize(
    "ids, message", [([], "no tokens"), ([1] * 600, "max_position_embeddings")]
)
def test_prompts_that_cannot_be_are_refused(ids, message):
    ours, _ = models.pair("plain", mx.float32)
    with pytest.raises(ValueError, match=message):
        next(lily_mlx.generate_step(mx.array(ids, mx.int32), ours))


# --- the plan is never stale ------------------------------------------------------------------


def first_logits(model):
    caches = model.make_cache()
    model(mx.array([[6]]), cache=caches)
    return model(mx.array([[5]]), cache=caches)


def layer_logits(model):
    """The same tokens through the layers: two rows are no decode step."""
    return model(mx.array([[6, 5]]), cache=model.make_cache())[:, 1:]


CHANGES = {
    "update": lambda m: m.update(
        tree_map(lambda p: p * 1.25 if p.ndim == 1 else p, m.parameters())
    ),
    "a norm replaced": lambda m: setattr(m.model, "norm", m.layers[0].input_layernorm),
    "an array replaced": lambda m: setattr(m.layers[3].self_attn.q_norm, "weight", mx.ones(32) * 2),
    "an array assigned to": lambda m: m.layers[1].input_layernorm.weight.__setitem__(3, 5.0),
    "quantized": lambda m: nn.quantize(m, 32, 4),
    "a layer replaced": lambda m: m.model.layers.__setitem__(0, m.model.layers[1]),
    "two layers exchanged": lambda m: m.model.layers.insert(0, m.model.layers.pop(1)),
    "lora": lambda m: (
        linear_to_lora_layers(m, 4, {"rank": 4, "scale": 20.0, "dropout": 0.0}),
        m.update(tree_map(lambda p: p + 0.05, m.trainable_parameters())),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_used_at_once(name):
    ours, _ = models.pair("plain", mx.float32, 0)
    ours.freeze()
    before = first_logits(ours)
    mx.eval(before)
    CHANGES[name](ours)
    ours.eval()
    after = first_logits(ours)
    assert not mx.array_equal(before, after)
    assert mx.abs(after - layer_logits(ours)).max().item() < 1e-4


def test_a_change_between_two_steps_of_one_generation():
    ours, _ = models.pair("plain", mx.float32, 0)
    caches, twins = ours.make_cache(), ours.make_cache()
    ids = models.prompt(ours, 4)
    for i in range(4):
        if i == 2:
            ours.language_model.lm_head.weight = ours.language_model.lm_head.weight * 2
        got = ours(ids[:, i : i + 1], cache=caches)
        pair = mx.concatenate([ids[:, i : i + 1]] * 2)
        assert mx.array_equal(got, ours(pair, cache=twins)[:1])


def test_adapters_decode_layer_by_layer_and_say_so():
    ours, _ = models.pair("plain", mx.float32)
    linear_to_lora_layers(ours, 4, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    ours.eval()
    report = ours.lily_report()
    assert report[0]["kind"] == "decode_step" and report[0]["kernel"] is None
    assert "LoRA" in report[0]["reason"]
    ids = models.prompt(ours, 4)[0]
    assert len(words(lily_mlx.generate_step, ours, ids, 6)) == 6


# --- lazy, compiled, on other threads and streams ------------------------------------------------


def test_a_step_computes_nothing_until_it_is_evaluated():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 6)
    whole = ours(ids)
    caches = ours.make_cache()
    pending = [ours(ids[:, i : i + 1], cache=caches) for i in range(6)]
    # Only the last is asked for; it runs the others, in their order.
    assert mx.array_equal(pending[-1], whole[:, -1:])
    assert mx.array_equal(mx.concatenate(pending, axis=1), whole)


def test_steps_that_were_dropped_still_count():
    """As in mlx-lm: a built step has advanced its cache, whether or not its logits are read."""
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 6)
    caches = ours.make_cache()
    for i in range(5):
        ours(ids[:, i : i + 1], cache=caches)
    assert mx.array_equal(ours(ids[:, 5:], cache=caches), ours(ids)[:, 5:])
    assert caches[3].offset == 6


def test_dropped_caches_are_freed():
    ours, _ = models.pair("plain", mx.float32)
    caches = ours.make_cache()
    ours(mx.array([[1]]), cache=caches)  # built, never evaluated
    session = weakref.ref(caches[0]._loan[0])
    del caches
    assert session() is None


def test_inside_compile_the_layers_run():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 1)

    @mx.compile
    def forward(x):
        return ours(x, cache=ours.make_cache())

    expected = ours(ids, cache=ours.make_cache())
    assert mx.array_equal(forward(ids), expected)
    assert mx.array_equal(forward(ids), expected)


def test_async_eval():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 3)
    caches = ours.make_cache()
    out = [ours(ids[:, i : i + 1], cache=caches) for i in range(3)]
    mx.async_eval(out)
    assert mx.array_equal(mx.concatenate(out, axis=1), ours(ids))


def test_generation_on_a_thread_that_did_not_make_the_model():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 5)[0]
    expected = words(lily_mlx.generate_step, ours, ids, 12)
    got = {}

    def work(name):
        got[name] = words(lily_mlx.generate_step, ours, ids, 12)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert list(got.values()) == [expected] * 3


def test_steps_on_changing_streams_stay_in_order():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 8)
    caches = ours.make_cache()
    streams = [mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)]
    out = []
    for i in range(8):
        with mx.stream(streams[i % 2]):
            out.append(ours(ids[:, i : i + 1], cache=caches))
            mx.async_eval(out[-1])
    assert mx.array_equal(mx.concatenate(out, axis=1), ours(ids))


def test_a_generator_closed_early_leaves_usable_caches():
    ours, _ = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 5)
    caches = ours.make_cache()
    generator = lily_mlx.generate_step(ids[0], ours, max_tokens=20, prompt_cache=caches)
    tokens = [next(generator)[0] for _ in range(3)]
    generator.close()
    # mlx-lm's loop too has one step more in the caches than it has yielded tokens.
    seen = mx.concatenate([ids, mx.array([tokens])], axis=1)
    assert caches[3].offset == seen.shape[1]
    follow = ours(mx.array([[9]]), cache=caches)
    assert mx.array_equal(follow, ours(mx.concatenate([seen, mx.array([[9]])], axis=1))[:, -1:])


def test_unknown_caches_decode_layer_by_layer():
    from mlx_lm.models.cache import QuantizedKVCache

    ours, exact = models.pair("plain", mx.float32, 0)
    ids = models.prompt(ours, 4)[0]
    caches = [c if hasattr(c, "cache") else QuantizedKVCache(32, 8) for c in ours.make_cache()]
    assert decode.step(ours.language_model, mx.array([[1]]), caches) is None
    assert len(words(lily_mlx.generate_step, ours, ids, 5, prompt_cache=caches)) == 5


def test_mlx_lms_batch_generator_with_one_request_runs_the_step():
    """Its server's path: a single client must not lose the decode step."""
    ours, exact = models.pair("plain", mx.float32)
    ids = models.prompt(ours, 20)[0]
    batch = BatchGenerator(ours, prefill_step_size=8)
    batch.insert([ids.tolist()], max_tokens=[10])
    got, lent = [], []
    while len(got) < 10:
        _, answers = batch.next()
        got += [answer.token for answer in answers]
        lent += [c.__dict__.get("_loan") for c in batch._generation_batch.prompt_cache]
    batch.close()
    assert got == words(stock_generate_step, exact, ids, 10)
    # Once the prompt is through, one session holds every cache until the answer ends.
    sessions = {loan[0] for loan in lent if loan is not None}
    assert len(sessions) == 1 and all(loan is not None for loan in lent)
    assert sessions.pop().copied_bytes == 0
