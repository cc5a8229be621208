# ruff: noqa: E501 (programs on one line)
"""The call shape, argument binding, caching, coverage and the command line."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from metal.host import HostError, KernelFault, Library, coverage
from metal.host.__main__ import main

from .arrays import bf16, f32

ROOT = Path(__file__).parents[2]
SOURCE = """#include <metal_stdlib>
using namespace metal;
struct P { int rows; float scale; };
constant bool twice [[function_constant(3)]];
constant uint bump [[function_constant(4)]];

[[kernel]] void scale(device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]], constant P& p [[buffer(2)]],
                      constant uint3& shift [[buffer(3)]], constant int* table [[buffer(4)]],
                      uint i [[thread_position_in_grid]]) {
  if (int(i) >= p.rows) return;
  y[i] = x[i] * p.scale + float(shift.y) + float(table[1]);
}
[[kernel]] void narrow(device const bfloat4* x [[buffer(0)]], device bfloat4* y [[buffer(1)]],
                       device bfloat& first [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float4 v = float4(x[i]) * (twice ? 2.0f : 1.0f);
  if (bump == 2u) {
    v += 1.0f;
  }
  y[i] = bfloat4(v);
  if (i == 0) first = bfloat(v.x);
}
[[kernel]] void two_arguments(device float* y [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
                              threadgroup float* b [[threadgroup(1)]], uint3 at [[thread_position_in_threadgroup]],
                              uint3 size [[threads_per_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
                              uint3 grid [[threads_per_grid]], uint3 place [[thread_position_in_grid]],
                              uint t [[thread_index_in_threadgroup]]) {
  a[t] = float(at.x + 10 * at.y + 100 * at.z);
  b[t] = float(group.x);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[place.x + grid.x * (place.y + grid.y * place.z)] = a[t] + 1000.0f * b[t] + 10000.0f * float(size.y);
}
[[kernel]] void in_place(device float* h [[buffer(0)]], device const float* x [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
  h[i] = x[i] + 1.0f;
}
[[kernel]] void counts(device atomic_uint* n [[buffer(0)]], device atomic_float* f [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(n + (i & 3), 1u, memory_order_relaxed);
  atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
}
"""
HOSTS = ["cpu", "checked"]


@pytest.fixture(scope="module", params=HOSTS)
def library(request):
    return Library(source=SOURCE, constants={3: True, "bump": 2}, host=request.param)


def test_structs_tuples_lists_and_scalars(library):
    x, y = np.arange(256, dtype=np.float32).reshape(64, 4), np.zeros((64, 4), np.float32)
    p = np.array([(60, 0.5)], np.dtype([("rows", np.int32), ("scale", np.float32)]))
    library["scale"]([x, y, p, (7, 8, 9), [1, 2, 3]], 2, 32)
    assert np.array_equal(y[:60], x[:60] * 0.5 + 10) and not y[60:].any()
    y[:] = 0
    library["scale"]([x, y, p.tobytes(), (7, 8, 9), [1, 2, 3]], 2, 32)
    assert np.array_equal(y[:60], x[:60] * 0.5 + 10)


def test_bfloat_vectors_and_device_references(library):
    x = bf16(np.linspace(-3, 3, 128)).reshape(32, 4)
    y, first = np.zeros_like(x), np.zeros(1, np.uint16)
    library["narrow"]({0: x, 1: y, 2: first}, 1, 32)
    assert np.array_equal(y, bf16(f32(x) * 2 + 1)) and first[0] == y[0, 0]


def test_mlx_arrays_are_inputs_only(library):
    mx = pytest.importorskip("mlx.core")
    x = mx.arange(128).reshape(32, 4).astype(mx.bfloat16)
    y, first = np.zeros((32, 4), np.uint16), np.zeros(1, np.uint16)
    library["narrow"]([x, y, first], 1, 32)
    assert np.array_equal(f32(y), np.arange(128, dtype=np.float32).reshape(32, 4) * 2 + 1)
    with pytest.raises(HostError, match="argument 1 .*not a writable numpy array"):
        library["narrow"]([x, x, first], 1, 32)


def test_grid_positions_and_threadgroup_arguments(library):
    y = np.zeros((2, 6, 8), np.float32)
    library["two_arguments"]([y], (2, 3, 1), (4, 2, 2), {0: 64, 1: 64})
    z, r, c = np.meshgrid(np.arange(2), np.arange(6), np.arange(8), indexing="ij")
    assert np.array_equal(y, c % 4 + 10 * (r % 2) + 100 * z + 1000 * (c // 4) + 20000)


def test_arrays_that_share_memory_share_it_in_the_kernel(library):
    memory = np.arange(96, dtype=np.float32)
    library["in_place"]([memory[32:64], memory[32:64]], 1, 32)
    assert (
        np.array_equal(memory[32:64], np.arange(33, 65)) and memory[31] == 31 and memory[64] == 64
    )


@pytest.mark.parametrize("host", HOSTS)
def test_tables_at_program_scope(host):
    source = """#include <metal_stdlib>
using namespace metal;
struct Pair { uint a, b; };
constant Pair pairs[3] = {{1u, 2u}, {3u, 4u}, {5u, 6u}};
template <typename T> struct Table { static constexpr constant T values[2] = {T(7), T(8)}; };
[[kernel]] void k(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  Pair p = pairs[(i + n) % 3u];
  y[i] = float(p.a * 10u + p.b) + Table<float>::values[(i + n) & 1u];
}
"""
    y = np.zeros(6, np.float32)
    Library(source=source, host=host)["k"]([y, 1], 1, 6)
    assert y.tolist() == [42, 63, 20, 41, 64, 19]


def test_atomics_count(library):
    n, f = np.zeros(4, np.uint32), np.zeros(1, np.float32)
    result = library["counts"]([n, f], 8, 64)
    assert n.tolist() == [128] * 4 and f[0] == 256
    if library.host == "checked":
        assert result.traffic[0].load_bytes == result.traffic[0].store_bytes == 4 * 512


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda k: k["nothing"], "has no kernel 'nothing'; it has scale"),
        (
            lambda k: k["in_place"]([np.zeros(4, np.float32)], 1, 4),
            "no value for argument 1 \\(x\\)",
        ),
        (lambda k: k["in_place"]([np.zeros(4, np.float32)] * 3, 1, 4), "has no buffer \\[2\\]"),
        (lambda k: k["in_place"]([np.zeros((4, 2), np.float32)[:, 0]] * 2, 1, 4), "not contiguous"),
        (lambda k: k["in_place"]([np.zeros(4, np.float32)] * 2, 0, 4), "grid must be"),
        (
            lambda k: k["in_place"]([np.zeros(4, np.float32)] * 2, 1, (64, 32)),
            "2048 threads a threadgroup",
        ),
        (
            lambda k: k["two_arguments"]([np.zeros(4, np.float32)], 1, 4, 64),
            "gives bytes for \\[0\\], the kernel takes \\[0, 1\\]",
        ),
        (
            lambda k: k["two_arguments"]([np.zeros(4, np.float32)], 1, 4, [32768, 16]),
            "32784 bytes of threadgroup memory",
        ),
        (
            lambda k: k["scale"]([np.zeros(4, np.float32)] * 2 + [b"1234", (1, 2, 3), [1]], 1, 1),
            "has 4 bytes, P has 8",
        ),
    ],
)
def test_wrong_calls_name_value_and_way_out(library, call, message):
    with pytest.raises(HostError, match=message):
        call(library)


def test_a_missing_function_constant_is_named():
    library = Library(source=SOURCE, constants={3: True})
    with pytest.raises(HostError, match=r"function constants without a value: 4 \(bump\)"):
        library["narrow"]
    assert library["in_place"]  # reads none
    with pytest.raises(HostError, match="has no function constant 'stride'"):
        Library(source=SOURCE, constants={"stride": 1})


def test_wrong_options_name_the_choices():
    for options in ({"host": "gpu"}, {"rules": "none"}, {"metal": "2.0"}, {"contract": "on"}):
        with pytest.raises(HostError, match="|".join(options)):
            Library(source=SOURCE, **options)
    with pytest.raises(HostError, match="no Metal source at"):
        Library("/nowhere/x.metal")


def test_contraction_is_a_choice():
    source = """#include <metal_stdlib>
using namespace metal;
[[kernel]] void k(device float* y [[buffer(0)]], device const float* x [[buffer(1)]]) { y[0] = x[0] * x[1] + x[2]; }
"""
    a = np.float32(1 + 2**-12)
    x, exact = np.array([a, a, -1 - 2**-11], np.float32), 2.0**-24
    for contract, expected in (("fast", exact), ("off", 0.0)):
        y = np.zeros(1, np.float32)
        Library(source=source, contract=contract)["k"]([y, x], 1, 1)
        assert y[0] == expected


def test_an_edited_include_is_compiled_again(tmp_path):
    (tmp_path / "value.h").write_text("constant float value = 1.0f;\n")
    (tmp_path / "k.metal").write_text(
        '#include <metal_stdlib>\nusing namespace metal;\n#include "value.h"\n'
        "[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = value; }\n"
    )
    y = np.zeros(1, np.float32)
    for value in (1.0, 2.0, 1.0):
        (tmp_path / "value.h").write_text(f"constant float value = {value}f;\n")
        Library(tmp_path / "k.metal")["k"]([y], 1, 1)
        assert y[0] == value


def test_several_processes_build_at_once(tmp_path):
    script = (
        "import numpy as np; from metal.host import Library\n"
        f"source = '''{SOURCE}// {os.getpid()}\\n'''\n"
        "y = np.zeros(32, np.float32)\n"
        "Library(source=source, host='checked')['in_place']([y, y], 1, 32)\n"
        "assert (y == 1).all()\n"
    )
    with ThreadPoolExecutor(4) as pool:
        done = list(
            pool.map(
                lambda _: subprocess.run(
                    [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
                ),
                range(4),
            )
        )
    assert all(d.returncode == 0 for d in done), done[0].stderr


def test_branches_that_no_dispatch_took_are_listed(tmp_path):
    source = """#include <metal_stdlib>
using namespace metal;
constant bool folded [[function_constant(0)]];
template <int N> [[kernel]] void f(device int* y [[buffer(0)]], constant int& n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  int v = y[i];
  if (folded) v += 1;
  if (N == 3) v += 1;
  if (v > n) {
    y[i] = 0;
  }
  switch (v) {
    case 7: y[i] = n; break;
    case 9: y[i] = n + v; break;
  }
}
template [[host_name("f3")]] [[kernel]] decltype(f<3>) f<3>;
template [[host_name("f4")]] [[kernel]] decltype(f<4>) f<4>;
"""
    library = Library(source=source, constants={0: True}, host="checked")

    def missing():
        return {(b.line, m) for b in library.branches.report() for m in b.missing}

    library["f4"]([np.zeros(4, np.int32), 100], 1, 4)
    assert missing() == {(8, "true"), (11, "case 1"), (11, "case 2")}
    library["f3"]([np.array([5, 500, 1], np.int32), 100], 1, 3)
    assert missing() == {(11, "case 2")}
    library["f4"]([np.array([8], np.int32), 100], 1, 1)
    assert missing() == set()


def test_coverage_is_merged_over_processes(tmp_path):
    script = """import sys, numpy as np
from metal.host import Library
source = '''#include <metal_stdlib>
using namespace metal;
[[kernel]] void f(device int* y [[buffer(0)]]) {
  if (y[0] > 3) { y[0] = 0; }
}
'''
Library(source=source, host="checked")["f"]([np.array([int(sys.argv[1])], np.int32)], 1, 1)
"""
    environment = {**os.environ, "LILY_METAL_COVERAGE": str(tmp_path)}
    for value, missing in ((1, ["true"]), (2, ["true"]), (5, [])):
        subprocess.run(
            [sys.executable, "-c", script, str(value)], cwd=ROOT, env=environment, check=True
        )
        [branch] = coverage.load(tmp_path)
        assert branch.missing == missing and branch.line == 4
        assert main(["coverage", str(tmp_path)]) == (1 if missing else 0)


def test_command_line(tmp_path, capsys):
    good, bad = tmp_path / "good.metal", tmp_path / "bad.metal"
    good.write_text(SOURCE)
    bad.write_text(SOURCE.replace("x[i] + 1.0f", "sqrtf(x[i])"))
    assert main(["check", "-v", str(good)]) == 0 and "5 kernel(s)" in capsys.readouterr().out
    assert main(["check", str(good), str(bad)]) == 1
    assert "bad.metal:34:10: error: " in capsys.readouterr().err
    run = ["run", str(good), "-k", "in_place", "--threadgroup", "32", "-b", "0=float[32]"]
    assert (
        main([*run, "-b", "1=float[32]:count", "--traffic", "--save", str(tmp_path / "out")]) == 0
    )
    assert "load_bytes=128" in capsys.readouterr().out
    assert np.array_equal(np.load(tmp_path / "out0.npy"), np.arange(32) + 1)
    assert main([*run, "-b", "1=float[31]:count"]) == 1
    assert "out-of-bounds in in_place" in capsys.readouterr().err
    assert main(run) == 2 and "--buffer 1=... is missing" in capsys.readouterr().err


def test_ptx_describes_its_entries(tmp_path, capsys):
    from metal.host import cuda_tools

    source, out = tmp_path / "k.metal", tmp_path / "k.ptx"
    source.write_text(SOURCE)
    assert main(["ptx", str(source), "-o", str(out), "-c", "3=true", "-c", "bump=2"]) == 0
    said = capsys.readouterr().out
    entries = json.loads(out.with_suffix(".json").read_text())
    assert set(entries) == {"scale", "narrow", "two_arguments", "in_place", "counts"}
    assert [p["by_value"] for p in entries["scale"]["parameters"]] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert entries["two_arguments"]["threadgroup_arguments"] == [0, 1]
    assert (
        all(f".entry {name}(" in out.read_text() for name in entries)
        and ".target sm_80" in out.read_text()
    )
    if cuda_tools.ptxas() is None:
        assert cuda_tools.NO_PTXAS in said
    else:
        assert "in_place: " in said and "registers" in said


def test_one_clear_sentence_without_clang(tmp_path):
    script = "from metal.host import Library; Library(source='int x;')"
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "LILY_METAL_CLANG": "",
    }
    code = f"import metal.host.toolchain as t; import shutil; shutil.which = lambda n, **k: None\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (
        "HostError: the Metal host needs clang 19 with its development files: install clang-19"
        in done.stderr
    )


@pytest.mark.parametrize(
    "value, said",
    [
        ("x[i + 0x7000000000u]", "touched memory at "),
        ("float(100u / uint(x[i]))", "divided an integer by zero"),
    ],
)
def test_a_crash_on_the_fast_host_ends_with_a_sentence(value, said):
    script = f"""import numpy as np
from metal.host import Library
source = '''{SOURCE.replace("x[i] + 1.0f", value)}'''
y = np.zeros(32, np.float32)
Library(source=source)["in_place"]([y, y], 1, 32)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode < 0 and said in done.stderr
    assert 'host="checked" names the line' in done.stderr


def test_faults_of_a_shuffled_order_are_reproducible():
    source = SOURCE.replace("h[i] = x[i] + 1.0f", "h[i / 2] = x[i] + 1.0f")
    kernel = Library(source=source, host="checked")["in_place"]

    def first(seed):
        with pytest.raises(KernelFault) as raised:
            kernel([np.zeros(64, np.float32), np.zeros(64, np.float32)], 1, 64, seed=seed)
        return raised.value.faults[0].thread, raised.value.faults[0].byte

    assert first(1) == first(1) and len({first(seed) for seed in range(6)}) > 1
