"""The check of single dispatches finds what is wrong and passes what is right."""

from __future__ import annotations

import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from programs import small

from lily_mlx import _ext, ptx, spec
from lily_mlx.model import Model, ModelArgs
from metal.host import cuda, toolchain
from metal.host.toolchain import HostError

from . import dispatches, executors, kernels


@pytest.fixture(scope="module")
def place():
    """(Shapes, executor): small ones on the CPU host; without clang the package's PTX on a GPU."""
    try:
        toolchain.plugin()
    except HostError as no_clang:
        try:
            return kernels.shapes(), executors.Gpu()
        except cuda.NoDevice as no_gpu:
            pytest.skip(f"{no_clang}; {no_gpu}")
    config = tiny.config("moe", **{**small.DIMS, "num_key_value_heads": 2})
    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4, class_predicate=small.format_of(4, 64))
    return spec.model(model.language_model), executors.Host()


@pytest.fixture(scope="module")
def shapes(place):
    return place[0]


@pytest.fixture(scope="module")
def host(place):
    return place[1]


@pytest.mark.parametrize("context,capacity", [(1, 256), (300, 512), (9, 1280)])
def test_every_dispatch_of_a_step(shapes, host, context, capacity):
    found = list(dispatches.run_program(shapes, host, context, capacity))
    assert [str(o) for o in found if not o.passed] == []
    assert {o.label for o in found} >= {
        "embedding", "delta in", "delta step", "delta out", "router", "experts up", "experts down",
        "attention in", "attention prepare", "attention", "attention merge", "attention out",
        "head", "argmax",
    }  # fmt: skip


# Label -> an argument to spoil: an output, or a constant's value.
FAULTS = {
    "embedding": "h", "delta in": "y1", "delta step": "state_out", "delta out": "y0",
    "router": "y1", "experts up": "act", "experts down": "out", "attention prepare": "k_cache",
    "attention merge": "out", "head": "logits", "argmax": "token",
}  # fmt: skip


@pytest.mark.parametrize("label", list(FAULTS))
def test_one_wrong_value_is_found(shapes, host, label):
    def spoiled(d, arrays, key):
        host(d, arrays, key)
        if d["label"] == label:
            index = next(a["index"] for a in d["arguments"] if a["name"] == FAULTS[label])
            flat = arrays[index].reshape(-1).view("uint8")
            flat[len(flat) // 2 | 3] ^= 0x10  # a high byte

    only = {label, "attention", "head"} if label in ("attention merge", "argmax") else {label}
    found = list(dispatches.run_program(shapes, spoiled, 17, only=lambda name: name in only))
    assert [o.label for o in found if not o.passed] == [label]


def test_a_capacity_that_does_not_arrive_is_found(shapes, host):
    """Two KV heads at the same rows: a value that the backend loses on the way."""

    def spoiled(d, arrays, key):
        lost = [{**a, "value": 0} if a["name"] == "capacity" else a for a in d["arguments"]]
        host({**d, "arguments": lost}, arrays, key)

    def only(label):
        return label.startswith("attention") and label not in ("attention in", "attention out")

    found = list(dispatches.run_program(shapes, spoiled, 40, only=only))
    assert not all(o.passed for o in found if o.label == "attention prepare")
    assert not all(o.passed for o in found if o.label == "attention merge")


def test_a_run_that_changes_is_found(shapes, host):
    runs = []

    def drifting(d, arrays, key):
        host(d, arrays, key)
        runs.append(1)
        if len(runs) == 2:
            arrays[7].view("uint8")[0] ^= 1

    only = {"delta in"}
    found = list(dispatches.run_program(shapes, drifting, 1, only=lambda name: name in only))
    assert not found[0].repeatable and not found[0].passed and "TWO RUNS DIFFER" in str(found[0])


def test_a_kernel_without_a_reference_is_named():
    with pytest.raises(KeyError, match="'qgemm_bf16' has no reference"):
        dispatches.check_of("qgemm_bf16")
    assert dispatches.check_of("gemv_bf16_fp32_k2048") is dispatches.CHECKS["gemv"]


def test_the_longest_name_decides():
    assert dispatches.check_of("head_gemv_bf16_k2048") is dispatches.CHECKS["head_gemv"]


def test_without_a_gpu_the_command_says_why():
    try:
        cuda.driver()
    except cuda.NoDevice as reason:
        with pytest.raises(SystemExit, match=str(reason).split(":")[0]):
            kernels.main(["run"])
    else:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="python -m tests.gpu.kernels make FILE"):
        kernels.main([])


def test_values_by_size():
    assert executors._bytes(7, 4) == b"\x07\0\0\0" and executors._bytes(b"ab", 2) == b"ab"
    with pytest.raises(HostError, match="4 bytes, the kernel takes 8"):
        executors._bytes(7, 8)


def test_the_package_carries_the_kernels_of_the_35b_model(tmp_path, capsys):
    kernels.make(tmp_path / "ptx.tar.xz")
    assert ": 0 of " in capsys.readouterr().out


def test_each_parameter_of_each_kernel_gets_an_argument(monkeypatch):
    """What the GPU's executor hands to the driver for a step of the 35B shapes, by the PTX."""
    launched = []

    class Program:
        def __init__(self, text: bytes):
            self.text = text.decode()

        def launch(self, entry, arguments, grid, threadgroup):
            sizes = re.findall(rf"\.param \.[ubsf](\d+)[^\n]* {entry}_param_\d+", self.text)
            assert len(sizes) == len(arguments) > 0
            for bits, argument in zip(sizes, arguments, strict=True):
                if isinstance(argument, bytes):
                    assert len(argument) == int(bits) // 8
                else:
                    assert bits == "64"
            launched.append(entry)

    monkeypatch.setattr(cuda, "driver", lambda: None)
    monkeypatch.setattr(cuda, "Program", Program)
    gpu = executors.Gpu()
    few = dispatches.distinct_layers(kernels.shapes())
    for capacity in ptx.CAPACITIES:
        program = _ext.step_program("cuda", few, capacity).program
        for i in range(len(program)):
            d = program.describe(i)
            arrays = {a["index"]: np.zeros(1) for a in d["arguments"] if "slot" in a}
            gpu(d, arrays, program.pipelines[d["pipeline"]]["key"])
    assert {e.split("_bf16")[0] for e in launched} >= {
        "moe_route",
        "gemv",
        "mma_gemv",
        "gated_delta_step",
    }
