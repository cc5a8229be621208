"""Who owns a cache: what anybody else holds is never written, and nothing is copied in vain."""

import copy
import pickle

import mlx.core as mx
import models
import pytest
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import (
    BatchKVCache,
    LRUPromptCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

import lily_mlx
from lily_mlx import decode
from lily_mlx.cache import ArraysCache, KVCache, adopt


@pytest.fixture(scope="module")
def model():
    ours, _ = models.pair("plain", mx.bfloat16)
    return ours


def snapshot(caches):
    """Values of every cache, copied out to numpy-like lists of exact bits."""
    out = []
    for c in caches:
        state = c.cache if hasattr(c, "cache") else c.keys_and_values()
        out.append([mx.array(a.astype(mx.float32)) + 0 for a in state])
    mx.eval(out)
    return out


def same(a, b):
    return all(
        mx.array_equal(x, y) for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )  # fmt: skip


def started(model, length=6, steps=3):
    """Caches that have seen a prompt and some decode steps."""
    caches = model.make_cache()
    ids = models.prompt(model, length + steps)
    model(ids[:, :length], cache=caches)
    for i in range(length, length + steps):
        mx.eval(model(ids[:, i : i + 1], cache=caches))
    return caches, ids


def go_on(model, caches, count=5, seed=9):
    ids = models.prompt(model, count, seed)
    out = [model(ids[:, i : i + 1], cache=caches) for i in range(count)]
    return mx.concatenate(out, axis=1)


COPIES = {
    "copy.deepcopy": copy.deepcopy,
    "pickle-like state": lambda caches: [
        type(c).from_state(copy.deepcopy(c.state)) for c in caches
    ],
    "from_state, shared": lambda caches: [type(c).from_state(c.state) for c in caches],
    "copy.copy of each": lambda caches: [copy.copy(c) for c in caches],
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("when", ["between steps", "with a step pending"])
def test_a_copied_cache_is_untouched_by_the_original_and_the_reverse(model, how, when):
    caches, ids = started(model)
    if when == "with a step pending":
        model(mx.array([[11]]), cache=caches)
        ids = mx.concatenate([ids, mx.array([[11]])], axis=1)
    stored = COPIES[how](caches)
    before = snapshot(copy.deepcopy(stored))
    expected = go_on(model, caches)
    mx.eval(expected)
    assert same(before, snapshot(copy.deepcopy(stored)))
    assert stored[3].offset == ids.shape[1]
    assert mx.array_equal(go_on(model, stored), expected)
    fresh = model.make_cache()
    model(ids, cache=fresh)
    assert mx.array_equal(go_on(model, fresh), expected)


def test_slices_and_arrays_read_from_a_cache_keep_their_values(model):
    caches, _ = started(model)
    held = [
        caches[0][1], caches[0][0], caches[3].keys, caches[3].keys[..., :4, :],
        mx.contiguous(caches[3].values), caches[2].state[0][1],
    ]  # fmt: skip
    mx.eval(held)
    before = [a.astype(mx.float32) + 0 for a in held]
    mx.eval(before)
    mx.eval(go_on(model, caches))
    seen = caches[3].offset - 5
    for i, (array, value) in enumerate(zip(held, before, strict=True)):
        now = array.astype(mx.float32)
        if i == 2:  # what is beyond the tokens seen so far is nobody's
            now, value = now[..., :seen, :], value[..., :seen, :]
        assert mx.array_equal(now, value), i


def test_lazy_readers_of_a_cache_see_the_values_of_their_time(model):
    caches, _ = started(model)
    late = caches[0][1] * 2.0  # not evaluated before the steps
    twin = caches[0][1] + 0.0
    mx.eval(twin)
    mx.eval(go_on(model, caches))
    assert mx.array_equal(late, twin * 2.0)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_nothing_is_copied_while_a_sequence_has_its_caches_alone(model, in_flight):
    caches, _ = started(model)
    pending, token = [], mx.array([[3]])
    for _ in range(40):
        token, logits = decode.step(model.language_model, token, caches)
        mx.async_eval(token)
        pending.append(token)
        if len(pending) == in_flight:
            pending.pop(0).item()
    session = caches[0]._loan[0]
    mx.eval(token)
    assert session.copied_bytes == 0
    assert session.grown_bytes == 0


def test_generation_copies_nothing_from_prefill_to_the_last_token(model):
    caches = model.make_cache()
    ids = models.prompt(model, 20)[0]
    sessions = set()
    for _ in lily_mlx.generate_step(ids, model, max_tokens=30, prompt_cache=caches):
        sessions.add(caches[0]._loan[0])
    assert len(sessions) == 1
    session = sessions.pop()
    assert session.copied_bytes == 0 and session.grown_bytes == 0


def test_a_shared_buffer_is_copied_once(model):
    caches, _ = started(model)
    keep = copy.deepcopy(caches)
    mx.eval(go_on(model, caches, 1))
    session = caches[0]._loan[0]
    once = session.copied_bytes
    state = 3 * 4 * 32 * 32 * 4  # three DeltaNet layers
    keys = 2 * 2 * 256 * 32 * 2
    assert once == state + keys
    mx.eval(go_on(model, caches, 6))
    assert session.copied_bytes == once
    del keep


def test_keys_grow_by_blocks_over_their_edge(model):
    caches = model.make_cache()
    ids = models.prompt(model, 262)
    whole = model(ids)
    model(ids[:, :250], cache=caches)
    got = mx.concatenate([model(ids[:, i : i + 1], cache=caches) for i in range(250, 262)], axis=1)
    assert mx.array_equal(got, whole[:, 250:])
    session = caches[0]._loan[0]
    assert session.grown_bytes == 2 * 2 * 256 * 32 * 2
    assert caches[3].keys.shape[2] == 512
    assert mx.array_equal(caches[3].keys[..., 262:, :], mx.zeros((1, 2, 250, 32)))


def test_a_step_longer_than_a_key_chunk_has_the_same_bits(model):
    """Contexts around the 1,024 keys of one partial softmax."""
    ids = models.prompt(model, 1030) % 280
    for length in (1022, 1023, 1024, 1025):
        caches = model.make_cache()
        model.model(ids[:, :length], cache=caches)
        one = model(ids[:, length : length + 1], cache=caches)
        assert mx.array_equal(one, model(ids[:, : length + 1])[:, -1:])


def test_a_conversation_alternates_prefill_and_decode(model):
    caches = model.make_cache()
    ids = models.prompt(model, 40)
    whole = model(ids)
    at = 0
    for piece in (7, 1, 1, 5, 1, 1, 1, 2, 1, 20):
        got = model(ids[:, at : at + piece], cache=caches)
        assert mx.array_equal(got, whole[:, at : at + piece])
        at += piece


def test_saved_and_restored_caches_go_on_bit_for_bit(model, tmp_path):
    caches, _ = started(model)
    path = str(tmp_path / "cache.safetensors")
    model(mx.array([[7]]), cache=caches)  # pending while it is saved
    save_prompt_cache(path, caches, {"note": "x"})
    expected = go_on(model, caches)
    restored, metadata = load_prompt_cache(path, return_metadata=True)
    assert metadata == {"note": "x"}
    assert [type(c).__name__ for c in restored] == [type(c).__name__ for c in caches]
    assert mx.array_equal(go_on(model, restored), expected)
    assert decode.step(model.language_model, mx.array([[1]]), restored) is not None


def merged(lists):
    """mlx-lm's batch caches from lists of caches, as its server makes them."""
    return [type(rows[0]).merge(list(rows)) for rows in zip(*lists, strict=True)]


def test_a_batch_of_one_is_decoded_by_the_step(model):
    caches, ids = started(model)
    expected = go_on(model, copy.deepcopy(caches), 9)
    batch = merged([caches])
    assert mx.array_equal(go_on(model, batch, 9), expected)
    session = batch[0]._loan[0]
    assert all(c._loan == (session, i) for i, c in enumerate(batch))
    before = session.copied_bytes
    mx.eval(go_on(model, batch, 5))
    assert session.copied_bytes == before
    assert batch[3]._idx == batch[3].offset.item() == ids.shape[1] + 14
    # What comes out again is a cache of one sequence.
    alone = [c.extract(0) for c in batch]
    assert mx.array_equal(go_on(model, alone, 4, seed=2), go_on(model, batch, 4, seed=2))


def test_a_new_batch_of_one_is_decoded_by_the_step(model):
    """From empty caches, whose DeltaNet part counts its padding of nothing down."""
    batch = merged([model.make_cache()])
    assert batch[0].left_padding.tolist() == [0]
    ids = models.prompt(model, 6)
    model(ids[:, :3], cache=batch)
    got = [model(ids[:, i : i + 1], cache=batch) for i in range(3, 6)]
    assert batch[0]._loan is not None
    assert mx.array_equal(mx.concatenate(got, axis=1), model(ids)[:, 3:])
    assert batch[0].left_padding.tolist() == [-6]


def test_a_batch_that_grows_and_shrinks_between_steps(model):
    a, _ = started(model, 6, 3)
    b, _ = started(model, 2, 2)
    expected = [go_on(model, copy.deepcopy(c), 12) for c in (a, b)]
    ids = models.prompt(model, 12, 9)
    batch = merged([a])
    got = [model(ids[:, i : i + 1], cache=batch) for i in range(4)]
    assert batch[3]._loan is not None
    for mine, other in zip(batch, merged([b]), strict=True):
        mine.extend(other)
    for i in range(4):  # the second row is four tokens behind the first
        pair = mx.concatenate([ids[:, i + 4 : i + 5], ids[:, i : i + 1]])
        got.append(model(pair, cache=batch))
    assert mx.array_equal(mx.concatenate([g[:1] for g in got], axis=1), expected[0][:, :8])
    for c in batch:
        c.filter([1])
    late = [g[1:] for g in got[4:]]
    late += [model(ids[:, i : i + 1], cache=batch) for i in range(4, 12)]
    assert batch[3]._loan is not None
    assert mx.array_equal(mx.concatenate(late, axis=1), expected[1])


def test_a_padded_row_runs_by_the_layers(model):
    padded = [
        ArraysCache(2, left_padding=[2]) if hasattr(c, "cache") else BatchKVCache([2])
        for c in model.make_cache()
    ]
    ids = models.prompt(model, 6)
    model(mx.concatenate([mx.array([[7, 7]]), ids[:, :5]], axis=1), cache=padded)
    got = model(ids[:, 5:], cache=padded)
    assert padded[3].__dict__.get("_loan") is None
    assert mx.array_equal(got, model(ids)[:, 5:])


def test_saved_padding_and_lengths_come_back(model, tmp_path):
    """Two left-padded rows, saved between two steps: both forms of mlx-lm's batch caches."""
    path = str(tmp_path / "batch.safetensors")
    padding = [3, 0]
    caches = [
        ArraysCache(2, left_padding=padding) if hasattr(c, "cache") else BatchKVCache(padding)
        for c in model.make_cache()
    ]
    ids = models.prompt(model, 12, batch=2)
    model(ids[:, :6], cache=caches)
    save_prompt_cache(path, caches)
    restored = load_prompt_cache(path)
    assert mx.array_equal(restored[0].left_padding, caches[0].left_padding)
    for at in range(6, 12):
        one = ids[:, at : at + 1]
        assert mx.array_equal(model(one, cache=restored), model(one, cache=caches))


def test_files_of_the_same_run_are_the_same_bytes(model, tmp_path):
    for name in ("a", "b"):
        caches, _ = started(model)
        save_prompt_cache(str(tmp_path / f"{name}.safetensors"), caches)
    a, b = (tmp_path / f"{name}.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_stocks_prompt_cache_reuses_a_prefix_that_generation_did_not_touch(model):
    store = LRUPromptCache(max_size=4)
    ids = models.prompt(model, 12)[0].tolist()
    caches = model.make_cache()
    model(mx.array([ids[:8]]), cache=caches)
    store.insert_cache("m", ids[:8], caches)
    answers = []
    for _ in range(2):
        found, rest = store.fetch_nearest_cache("m", ids)
        assert found is not None and rest == ids[8:]
        answers.append([
            t for t, _ in lily_mlx.generate_step(mx.array(rest), model, max_tokens=10,
                                                 prompt_cache=found)
        ])  # fmt: skip
    fresh = [t for t, _ in lily_mlx.generate_step(mx.array(ids), model, max_tokens=10)]
    assert answers == [fresh, fresh]


def test_a_diverging_prefix_is_recomputed_never_trimmed(model):
    caches, ids = started(model)
    assert not stock_cache.can_trim_prompt_cache(caches)
    assert stock_cache.trim_prompt_cache(caches, 2) == 0
    assert caches[3].offset == ids.shape[1]


def test_mlx_lms_own_cache_objects_are_taken_as_they_are(model):
    caches = [
        stock_cache.ArraysCache(2) if l.is_linear else stock_cache.KVCache() for l in model.layers
    ]
    ids = models.prompt(model, 9)
    whole = model(ids)
    first = caches[0]
    for i in range(9):
        assert mx.array_equal(model(ids[:, i : i + 1], cache=caches), whole[:, i : i + 1])
    assert caches[0] is first and isinstance(first, stock_cache.ArraysCache)
    assert adopt(stock_cache.KVCache()) and not adopt(stock_cache.RotatingKVCache(8))


def test_cache_methods_work_while_the_arrays_are_lent(model):
    caches, ids = started(model)
    kv, arrays = caches[3], caches[0]
    assert kv._loan is not None
    assert not kv.empty() and not arrays.empty()
    assert kv.size() == ids.shape[1] and kv.nbytes == 2 * 2 * 256 * 32 * 2
    assert arrays.nbytes > 0 and arrays.batch_size == 1
    again, _ = started(model)
    merged = type(kv).merge([caches[3], again[3]])
    assert merged.keys.shape[0] == 2
    assert type(arrays).merge([arrays, again[0]])[1].shape[0] == 2
    assert pickle.dumps(arrays.lengths) is not None
    mx.eval(go_on(model, caches), go_on(model, again))


def test_setting_a_state_replaces_what_was_lent(model):
    caches, ids = started(model)
    saved = copy.deepcopy([c.state for c in caches])
    expected = go_on(model, caches)
    for c, state in zip(caches, saved, strict=True):
        c.state = state
    assert mx.array_equal(go_on(model, caches), expected)


def test_half_a_list_of_caches_taken_elsewhere(model):
    """Some of the caches read or replaced between steps: the step takes all over again."""
    caches, ids = started(model)
    expected = go_on(model, copy.deepcopy(caches))
    _ = caches[1][0], caches[3].values
    caches[2] = copy.deepcopy(caches[2])
    assert mx.array_equal(go_on(model, caches), expected)


def test_caches_survive_a_step_that_refuses_one_of_them(model):
    caches, ids = started(model)
    keys = caches[3].keys
    expected = go_on(model, copy.deepcopy(caches))
    caches[3].keys = keys[:, :1]
    with pytest.raises(ValueError, match="layer 3"):
        model(mx.array([[1]]), cache=caches)
    caches[3].keys = keys
    assert mx.array_equal(go_on(model, caches), expected)


def test_a_pending_step_that_fails_does_not_empty_the_caches(model):
    caches, ids = started(model)
    before = snapshot(copy.deepcopy(caches))
    mx.eval(model(ids[:, :1], cache=caches))
    model(mx.array([[288]]), cache=caches)  # outside the vocabulary: fails when it is run
    with pytest.raises(Exception, match="token id 288"):
        _ = caches[3].keys
    # The caches still hold what was there before the failed step.
    assert caches[3].offset == ids.shape[1] + 2
    now = copy.deepcopy(caches)
    seen = ids.shape[1]
    keys = now[3].keys[..., :seen, :].astype(mx.float32)
    assert mx.array_equal(keys, before[3][0][..., :seen, :])
    assert all(a is not None for c in now[:3] for a in c.cache)


def test_wrong_caches_are_refused_or_run_by_the_layers(model):
    with pytest.raises(ValueError, match="layer 3"):
        caches = model.make_cache()
        caches[3].keys = mx.zeros((1, 5, 16, 32), mx.bfloat16)
        caches[3].values = caches[3].keys
        mx.eval(model(mx.array([[1]]), cache=caches))
    # The refused arrays are still there, and so are those of the layers before.
    assert caches[3].keys.shape == caches[3].values.shape == (1, 5, 16, 32)
    caches = model.make_cache()
    caches[3].keys = caches[3].values = mx.zeros((1, 2, 16, 32), mx.float32)
    assert decode.step(model.language_model, mx.array([[1]]), caches) is None


def test_offsets_that_differ_run_by_the_layers(model):
    import tiny

    from lily_mlx.model import Model, ModelArgs

    config = tiny.config("moe", num_hidden_layers=4, full_attention_interval=2)
    two = Model(ModelArgs.from_dict(config)).eval()
    caches = two.make_cache()
    two(mx.array([[1, 2, 3]]), cache=caches)
    caches[1].trim(1)
    assert decode.step(two.language_model, mx.array([[1]]), caches) is None


def test_make_prompt_cache_gives_lenders(model):
    kinds = {type(c) for c in make_prompt_cache(model)}
    assert kinds == {ArraysCache, KVCache}
