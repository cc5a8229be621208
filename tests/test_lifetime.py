"""What a model leaves behind when it is let go: nothing. And its copies, which live apart."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import mlx.core as mx
import models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generation_stream

import lily_mlx

IDS = mx.array([5, 1, 8])


@pytest.fixture(autouse=True)
def no_collector():
    """Whatever is freed is freed at once, as stock's models are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def model(seed=0):
    return models.pair("plain", mx.bfloat16, seed=seed)[0]


def weight_bytes(ours):
    return sum(array.nbytes for _, array in tree_flatten(ours.parameters()))


def step(ours, token=7, caches=None):
    return ours(mx.array([[token]]), cache=ours.make_cache() if caches is None else caches)


def batch(ours):
    """As mlx-lm's server answers."""
    generator = BatchGenerator(ours)
    generator.insert([IDS.tolist()], max_tokens=[4])
    while generator.next() != ([], []):
        pass
    generator.close()


USES = {
    "a plan": lambda m: m.language_model.decode_plan(),
    "a report": lambda m: m.lily_report(),
    "a generation": lambda m: list(lily_mlx.generate_step(IDS, m, max_tokens=4)),
    "a generation left early": lambda m: next(lily_mlx.generate_step(IDS, m, max_tokens=4)),
    "mlx-lm's batches": batch,
    "a step that nobody evaluates": step,
    "a plan made again": lambda m: (step(m), m.freeze(), m.update(m.parameters()), step(m)),
}


@pytest.mark.parametrize("name", USES)
def test_a_model_is_freed_when_it_is_let_go(name):
    ours = model()
    parts = [weakref.ref(p) for p in (ours, ours.language_model, ours.layers[0].mlp)]
    weights = weight_bytes(ours)
    USES[name](ours)
    for stream in (generation_stream, mx.default_stream(mx.default_device())):
        mx.synchronize(stream)  # a step that runs still needs the weights
    before = mx.get_active_memory()
    del ours
    assert [part() for part in parts] == [None] * 3
    assert before - mx.get_active_memory() >= weights


def test_a_module_that_refers_to_its_model_leaves_it_to_the_collector():
    ours = model()
    part = weakref.ref(ours.language_model)
    ours.layers[0].mlp.owner = SimpleNamespace(model=ours)
    mx.eval(step(ours))
    del ours
    assert part() is not None
    gc.collect()
    assert part() is None


@pytest.mark.parametrize("pending", [False, True])
def test_caches_that_outlive_their_model_keep_no_weights(pending):
    """But for steps that nobody has evaluated yet, which still run."""
    ours, twin = model(), model()
    weights = weight_bytes(ours)
    caches, expected = ours.make_cache(), twin.make_cache()
    mx.eval(step(ours, 3, caches), step(twin, 3, expected))
    if pending:
        step(ours, 4, caches)
        step(twin, 4, expected)
    mx.synchronize()
    before = mx.get_active_memory()
    del ours
    if pending:
        assert mx.get_active_memory() == before
        _ = caches[0].cache  # runs the step
        mx.synchronize()
    assert before - mx.get_active_memory() >= weights
    assert mx.array_equal(step(twin, 5, caches), step(twin, 5, expected))


# --- copies -----------------------------------------------------------------------------------

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
CHANGES = {
    "an array assigned to": lambda m: m.model.norm.weight.__setitem__(slice(0, 64), 3.0),
    "an array replaced": lambda m: setattr(m.model.norm, "weight", m.model.norm.weight * 2),
    "a module replaced": lambda m: setattr(m.model, "norm", m.layers[0].input_layernorm),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", COPIES)
def test_a_copied_model_decodes_as_the_original_and_apart_from_it(how, change):
    ours = model()
    caches = ours.make_cache()
    mx.eval(step(ours, 2, caches))  # a session is under way
    expected = step(ours)
    twin = COPIES[how](ours)
    assert type(twin) is type(ours)
    assert mx.array_equal(step(twin), expected)
    CHANGES[change](twin)
    changed = step(twin)
    assert not mx.array_equal(changed, expected)
    assert mx.array_equal(step(ours), expected)
    CHANGES[change](ours)
    assert mx.array_equal(step(ours), changed)
    assert twin.language_model.decode_plan() is not ours.language_model.decode_plan()


def test_a_shallow_copy_notices_what_it_alone_replaces():
    ours = model()
    text = ours.language_model
    expected = step(text)
    twin = copy.copy(text)
    assert mx.array_equal(step(twin), expected)
    twin.lm_head = copy.deepcopy(text.lm_head)
    twin.lm_head.scales = twin.lm_head.scales * 2
    assert not mx.array_equal(step(twin), expected)
    assert mx.array_equal(step(text), expected)
