"""lily_mlx.trace and the ledger: from shapes alone, and what they count."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import small

import lily_mlx
from benchmarks import ledger
from lily_mlx import spec
from lily_mlx.shapes import qwen3_6_35b_a3b

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model():
    return qwen3_6_35b_a3b()


def test_the_35b_model_is_traced_without_its_weights(model):
    mx.reset_peak_memory()
    trace = lily_mlx.trace(model, context=4096)
    assert mx.get_peak_memory() < 2**20
    assert trace.report["dispatches"] < 300 and trace.report["levels"] < 270
    assert "attention merge" in str(trace) and json.loads(trace.to_json())["dispatches"]


def test_bytes_of_a_token_are_near_the_floor_of_the_design(model):
    shapes = spec.model(model.language_model)
    parts = ledger.floor(shapes, 0)
    assert 1.65e9 < parts["weights"] < 1.68e9 and 1.25e8 < parts["state"] < 1.30e8
    assert parts["cache"] == 20480
    row = ledger.decode_entry(model, shapes, 0)
    assert 1.0 < row["over_floor"] < 1.05


def test_keys_and_values_are_counted_by_the_context(model):
    read = [lily_mlx.trace(model, context=c).report["read"] for c in (1000, 2000)]
    assert read[1] - read[0] == pytest.approx(1000 * 20480, rel=0.1)


def test_prefill_and_its_forms(model):
    for on in ("metal", "metal_nax", "cuda"):
        trace = lily_mlx.trace(model, "prefill", tokens=512, on=on)
        assert trace.report["weights"] > 18e9
    assert lily_mlx.trace(model, "prefill", tokens=4).report["dispatches"] > 0


@pytest.mark.parametrize("arguments, words", [
    (dict(kind="encode"), "decode or prefill"),
    (dict(context=-1), "capacity"),
    (dict(context=300, capacity=256), "capacity"),
    (dict(kind="prefill", tokens=0), "0 tokens"),
    (dict(fuse_everything=True), "fuse_everything"),
    (dict(kind="prefill", scan="block"), "scan"),
    (dict(on="vulkan"), "vulkan"),
])  # fmt: skip
def test_what_cannot_be_traced_is_named(model, arguments, words):
    with pytest.raises(ValueError, match=words):
        lily_mlx.trace(model, **arguments)


def test_a_model_without_kernels_is_refused_with_the_reason():
    ours, _ = small.model(head_dim=128)
    with pytest.raises(ValueError, match="heads of 256"):
        lily_mlx.trace(ours)


def test_the_module_and_the_function_are_one():
    from lily_mlx.trace import Trace

    ours, _ = small.model()
    assert isinstance(lily_mlx.trace(ours), Trace)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_ledger_command():
    done = run("-m", "benchmarks", "ledger", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [r["kind"] for r in rows] == ["decode"] * 5 + ["prefill"] * 3
    for r in rows:
        assert sum(k["read"] + k["written"] for k in r["kernels"]) >= r["bytes"]
    assert "reached" in run("-m", "benchmarks", "ledger").stdout


def test_the_switch_writes_the_same_text():
    """The command line, on the bundled model; its report says that the step's Program ran."""
    code = (
        "import mlx.core as mx, lily_mlx; mx.set_default_device(mx.cpu);"
        "m, t = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL));"
        "ids = mx.array(t.encode('There was once a poor man who lived'));"
        "print(t.decode([x for x, _ in lily_mlx.generate_step(ids, m, max_tokens=8)]));"
        "print({(k, n) for k, n, _, _ in lily_mlx.kernels.report()})"
    )
    reference, host = (run("-c", code, LILY_MLX_BACKEND=b).stdout for b in ("", "metal-host"))
    assert host.splitlines()[0] == reference.splitlines()[0] != ""
    assert "('decode_step', 'decode_step')" in host and reference.splitlines()[1] == "set()"


def test_the_environment_switch():
    code = "import lily_mlx; print(lily_mlx.backend_info()['backend'])"
    assert run("-c", code, LILY_MLX_BACKEND="").stdout.startswith("reference")
    assert run("-c", code, LILY_MLX_BACKEND="metal-host").stdout.startswith("metal-host (")
    checked = run("-c", code, LILY_MLX_BACKEND="metal-host", LILY_MLX_METAL_HOST="checked")
    assert checked.stdout.startswith("metal-host, checked")
    assert "metal-host" in run("-c", code, LILY_MLX_BACKEND="vulkan").stderr
    bad = run("-c", code, LILY_MLX_BACKEND="metal-host", LILY_MLX_METAL_HOST="fast")
    assert "cpu or checked" in bad.stderr
