"""Programs executed by the HostEncoder: values, and the faults of wrong declarations."""

import numpy as np
import pytest
from host_program import bind, host_encoder, overstated

from lily_mlx import _ext

SOURCE = """
#include <metal_stdlib>
using namespace metal;

constant int factor [[function_constant(0)]];

[[kernel]] void scale(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant int& n [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  if (int(i) < n) {
    y[i] = x[i] * float(factor);
  }
}

// y[group] = sum of x over a threadgroup.
[[kernel]] void sum(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint i [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  shared[i] = x[group * threads + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) {
    float total = 0.0f;
    for (uint k = 0; k < threads; ++k) {
      total += shared[k];
    }
    y[group] = total;
  }
}

[[kernel]] void negate(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = -x[i];
}
"""


def argument(index, name, space, access, type):
    return {"index": index, "name": name, "space": space, "access": access, "type": type}


X = argument(0, "x", "device", "read", "float*")
Y = argument(1, "y", "device", "read_write", "float*")
MANIFEST = [
    {
        "kernel": "scale",
        "constants": [{"id": 0, "name": "factor", "type": "int"}],
        "arguments": [X, Y, argument(2, "n", "constant", "read", "int&")],
    },
    {
        "kernel": "sum",
        "constants": [],
        "arguments": [X, Y, argument(0, "shared", "threadgroup", "read_write", "float*")],
    },
    {"kernel": "negate", "constants": [], "arguments": [{**X, "access": "read_write"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "small.metal").write_text(SOURCE)
    return folder


@pytest.fixture
def registry(folder):
    r = _ext.KernelRegistry(str(folder))
    for entry in MANIFEST:
        r.add({**entry, "file": "small.metal"})
    return r


def scale(registry, factor, n, x, y):
    """`scale` with 64 threads; n: a number or a ScalarId; x, y: (slot, offset, bytes)."""
    d = _ext.Dispatch(registry.at("scale")).constant("factor", factor).read("x", *x).write("y", *y)
    d = d.scalar("n", n) if isinstance(n, _ext.ScalarId) else d.value("n", n)
    return d.grid(2).threads(32)


@pytest.fixture
def program(registry):
    """out = sums of each 32 of 3 * 2 * x; other = -other, last in order and at level 0."""
    p = _ext.Program("p")
    n = p.scalar("n", 64)
    x, out = p.slot("x", "input", 256), p.slot("out", "output", 8)
    other = p.slot("other", "cache", 256)
    a, b = p.scratch("a", 256), p.scratch("b", 256)
    p.add(scale(registry, 2, n, (x,), (a,)))
    p.add(scale(registry, 3, n, (a,), (b,)))
    d = _ext.Dispatch(registry.at("sum")).read("x", b).write("y", out)
    p.add(d.threadgroup_memory("shared", 128).grid(2).threads(32))
    p.add(_ext.Dispatch(registry.at("negate")).read_write("x", other).grid(2).threads(32))
    p.finish()
    return p


@pytest.mark.parametrize(
    "options", [{"checked": False, "workers": 2}, {"checked": True}, {"checked": True, "seed": 7}]
)
def test_program_runs_and_is_rebound(program, folder, options):
    encoder = host_encoder(program, folder, **options)
    for start in (0, 100):
        x = np.arange(start, start + 64, dtype=np.float32)
        out, other = np.zeros(2, np.float32), np.ones(64, np.float32)
        b, _alive = bind(program, {"x": x, "out": out, "other": other})
        encoder.encode(program, b)
        assert out.tolist() == (6 * x).reshape(2, 32).sum(1).tolist()
        assert (other == -1).all()
    if options["checked"]:
        moved = {(d, a): (loaded, stored) for d, a, loaded, stored in encoder.moved}
        assert moved[0, 0] == (256, 0)
        assert moved[0, 1] == (0, 256)
        assert moved[2, 1] == (0, 8)
        assert moved[3, 0] == (256, 256)
        assert overstated(program, b, encoder) == []


def run(p, folder, **arrays):
    scalars = arrays.pop("scalars", {})
    b, _alive = bind(p, {k: np.zeros(v, np.uint8) for k, v in arrays.items()}, scalars)
    host_encoder(p, folder).encode(p, b)


def test_scratch_that_a_kernel_leaves_unwritten(program, folder):
    # 63 values through both launches of `scale`; `sum` reads 64.
    with pytest.raises(RuntimeError, match=r"dispatch 2 'sum'.*\n.*nothing has written.*252 of x"):
        run(program, folder, x=256, out=8, other=256, scalars={"n": 63})


def test_touch_outside_the_declared_range(registry, folder):
    p = _ext.Program("p")
    x, y = p.slot("x", "input", 256), p.slot("y", "output", 256)
    p.add(scale(registry, 2, 33, (x, 0, 128), (y,)).label("short"))
    p.finish()
    with pytest.raises(
        RuntimeError, match=r"dispatch 0 'short'.*\n  access out of bounds at .*:13"
    ):
        run(p, folder, x=256, y=256)


def test_write_that_is_not_declared(registry, folder):
    p = _ext.Program("p")
    x = p.slot("x", "cache", 256)
    p.add(_ext.Dispatch(registry.at("negate")).read("x", x).grid(2).threads(32))
    p.finish()
    with pytest.raises(RuntimeError, match=r"write to an argument that the dispatch declares read"):
        run(p, folder, x=256)


def test_read_that_is_not_declared(registry, folder):
    p = _ext.Program("p")
    x = p.slot("x", "cache", 256)
    p.add(_ext.Dispatch(registry.at("negate")).write("x", x).grid(2).threads(32))
    p.finish()
    with pytest.raises(RuntimeError, match=r"read of an argument that the dispatch declares writ"):
        run(p, folder, x=256)


def test_declared_bytes_that_do_not_move(registry, folder):
    p = _ext.Program("p")
    x, y = p.slot("x", "input", 256), p.slot("y", "cache", 256)
    d = _ext.Dispatch(registry.at("scale")).constant("factor", 2).value("n", 32)
    p.add(d.read("x", x).traffic(128).read_write("y", y).grid(2).threads(32).label("half"))
    p.finish()
    b, _alive = bind(p, {"x": np.zeros(64, np.float32), "y": np.zeros(64, np.float32)})
    encoder = host_encoder(p, folder)
    encoder.encode(p, b)
    assert overstated(p, b, encoder) == [
        "dispatch 0 'half' reads 0 bytes of y, 256 are declared",
        "dispatch 0 'half' writes 128 bytes of y, 256 are declared",
    ]


def test_encoder_needs_a_fitting_library_for_each_pipeline(program, folder):
    from metal.host import toolchain

    encoder = _ext.HostEncoder(str(toolchain.runtime()), checked=False)
    x, out, other = (np.zeros(n, np.float32) for n in (64, 2, 64))
    b, _alive = bind(program, {"x": x, "out": out, "other": other})
    with pytest.raises(ValueError, match="no library for pipeline 'scale_0:2'"):
        encoder.encode(program, b)
    with pytest.raises(ValueError, match="cannot load gone.so"):
        encoder.add("scale_0:2", "gone.so", "stub_0")
    with pytest.raises(ValueError, match="no symbol msl_launch"):
        _ext.HostEncoder("libm.so.6")
