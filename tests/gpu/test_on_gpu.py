"""On an NVIDIA GPU: kernels at the 35B shapes, and whole models against stock and the CPU."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest

import lily_mlx
from benchmarks import gpu, gpu_checks, ledger
from lily_mlx import _ext

from . import executors, kernels


@pytest.fixture(autouse=True)
def card():
    if mx.default_device().type != mx.DeviceType.gpu or mx.metal.is_available():
        pytest.skip("MLX has no NVIDIA GPU here")
    if not _ext.built_with_cuda:
        pytest.skip("lily_mlx was built without NVIDIA support")


@pytest.fixture(scope="module")
def pair():
    """Four layers at the 35B shapes: the kernels of all forty."""
    with pytest.MonkeyPatch.context() as patch:
        shapes = copy.deepcopy(ledger.SHAPES)
        shapes["text_config"]["num_hidden_layers"] = 4
        patch.setattr(ledger, "SHAPES", shapes)
        yield gpu.both_models()


def test_every_kernel_of_a_step_at_the_35b_shapes():
    assert kernels.run(executors.Gpu()) == []


def test_the_decode_step_serves_the_35b_shapes(pair):
    choice = pair[0].language_model.decode_plan().choice
    assert choice, choice.reason


@pytest.mark.parametrize("context", [1, 255, 256, 1025, 5000])
def test_decode_from_filled_caches_is_stocks(pair, context):
    found = gpu.forced_from_caches(*pair, context)
    assert found["largest_difference"] < 0.02 and found["same_top_1"] > 0.9, found


def test_a_prompt_and_tokens_one_by_one_are_stocks(pair):
    for found in (gpu_checks.prompt(*pair), gpu_checks.teacher_forced(*pair)):
        assert found["largest_difference"] < 0.02 and found["same_top_1"] > 0.9, found


def test_a_repeated_prompt_gives_the_same_bits(pair):
    assert gpu_checks.repeated(pair[0])["equal"]


def test_the_bundled_model():
    assert gpu_checks.bundled_greedy()["equal"]
    found = gpu_checks.bundled_forced()
    assert found["largest_difference"] < 0.05 and found["same_top_1"] > 0.9, found
    model, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))
    assert gpu_checks.repeated(model)["equal"]
