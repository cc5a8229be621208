"""What goes wrong under the Metal host is raised where the result is evaluated."""

import contextlib
import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
import small

from lily_mlx import decode, kernels, ops
from lily_mlx.spec import weight_of


def embedding():
    table = nn.QuantizedEmbedding(9, 128, 64, 4)
    table.set_dtype(mx.bfloat16)
    mx.eval(table.parameters())
    return lambda: ops.embed(mx.array([[1, 8]]), weight_of(table), mx.bfloat16)


def test_a_kernel_that_does_not_compile(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("no compiler today")

    call = embedding()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "compile_pipeline", broken)
        with kernels.metal_host(), pytest.raises(ZeroDivisionError, match="no compiler today"):
            mx.eval(call())
    with small.only("embed_rows"):
        mx.eval(call())


def test_a_fault_in_a_kernel_is_raised(monkeypatch):
    """Codes of 8 bits where the Program bound codes of 4: the kernel reads past their end."""
    compile_pipeline = kernels.compile_pipeline

    def wrong(file, kernel, constants, checked):
        return compile_pipeline(file, kernel, {**constants, "kBits": 8}, checked)

    call = embedding()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "compile_pipeline", wrong)
        with kernels.metal_host(checked=True), pytest.raises(RuntimeError, match="out of bounds"):
            mx.eval(call())
    with small.only("embed_rows", checked=True):
        mx.eval(call())


CACHES = {
    "empty": lambda m: m.make_cache(),
    "ours alone": lambda m: small.prefilled(m, mx.array([4, 5])),
    "shared": lambda m: small.prefilled(m, mx.array([4, 5])),
    "full": lambda m: small.prefilled(m, mx.arange(256) % 301),
}


@pytest.mark.parametrize("again", ["reference", "decode_step"])
@pytest.mark.parametrize("name", CACHES)
def test_a_step_that_cannot_be_compiled_changes_nothing(monkeypatch, name, again):
    """Evaluated again, by kernels that compile or by the reference, and gone on with."""
    ours, _ = small.model()
    caches, twins = CACHES[name](ours), CACHES[name](ours)
    held = copy.deepcopy(caches) if name == "shared" else None
    step = decode.step(ours.language_model, mx.array([[1]]), caches)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "compile_pipeline", lambda *a, **k: 1 / 0)
        with kernels.metal_host():
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    mx.eval(step)
    session = caches[0]._loan[0]
    assert (session.copied_bytes, session.grown_bytes) == (0, 0)
    with small.only("decode_step") if again == "decode_step" else contextlib.nullcontext():
        expected, _ = small.steps(ours, [1, 2], twins)
        mx.eval(step)
        assert caches[0]._loan[0] is session
        assert mx.array_equal(step[1][0], expected[:1])
        assert mx.array_equal(small.steps(ours, [2], caches)[0], expected[1:])
    assert (session.copied_bytes > 0) == (held is not None)
    assert (session.grown_bytes > 0) == (name == "full")


def test_options_that_are_not_known():
    with pytest.raises(ValueError, match="fuse_everything"):
        kernels.start_metal_host(step={"fuse_everything": True})


def test_tied_embeddings_share_their_bytes_in_a_program():
    ours, _ = small.model(tie_word_embeddings=True)
    ids = mx.array([4, 5])
    expected, _ = small.steps(ours, [1, 2], small.prefilled(ours, ids))
    caches = small.prefilled(ours, ids)
    with small.only("decode_step"):
        got, _ = small.steps(ours, [1, 2], caches)
        mx.eval(got)
    assert small.error(got, expected) < 2e-2
