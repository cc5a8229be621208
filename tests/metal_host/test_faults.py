# ruff: noqa: E501 (programs on one line)
"""Every kind of fault that the checked host looks for, planted; and the same kernels without it."""

import re
from pathlib import Path

import numpy as np
import pytest

from metal.host import KernelFault, Library, empty

SOURCE = Path(__file__).parent / "kernels" / "faults.metal"

# kernel -> (kinds that may be reported, keywords of the dispatch)
FAULTS = {
    "race_missing_barrier": ("threadgroup-race", {}),
    "race_same_byte": ("threadgroup-race", {}),
    "race_write_after_read": ("threadgroup-race", {}),
    "race_inside_simdgroup": ("threadgroup-race", {}),
    "race_across_simdgroups": ("threadgroup-race", {}),
    "race_barrier_flags": ("threadgroup-race", {}),
    "race_argument": ("threadgroup-race", {"threadgroup_memory": 512}),
    "race_atomic_and_plain": ("threadgroup-race", {}),
    "device_race_scratch": ("device-race", {}),
    "device_race_same_byte": ("device-race", {}),
    "grid_race_overlap": ("grid-race", {"grid": 4, "threadgroup": 32}),
    "grid_race_sum": ("grid-race", {"grid": 4, "threadgroup": 32}),
    "grid_race_neighbour": ("grid-race", {"grid": 4, "threadgroup": 32}),
    "bounds_read_past": ("out-of-bounds", {}),
    "bounds_read_before": ("out-of-bounds", {}),
    "bounds_write_past": ("out-of-bounds", {}),
    "bounds_write_before": ("out-of-bounds", {}),
    "bounds_far": ("out-of-bounds", {}),
    "bounds_vector": ("out-of-bounds", {}),
    "bounds_constant": ("out-of-bounds", {}),
    "bounds_threadgroup_past": ("out-of-bounds", {}),
    "bounds_threadgroup_before": ("out-of-bounds", {}),
    "bounds_threadgroup_argument": ("out-of-bounds", {"threadgroup_memory": 512}),
    "barrier_two_places": ("divergent-barrier", {}),
    "barrier_after_return": ("divergent-barrier", {}),
    "barrier_loop_counts": ("divergent-barrier", {}),
    "simd_some_lanes": ("divergent-simd", {}),
    "simd_two_places": ("divergent-simd", {}),
    "simd_after_return": ("divergent-simd", {}),
    "simd_matrix_some_lanes": ("divergent-simd", {}),
    "uninitialised_slot": ("uninitialised-threadgroup", {}),
    "uninitialised_never": ("uninitialised-threadgroup", {}),
    "uninitialised_atomic": ("uninitialised-threadgroup", {}),
    "output_accumulates": ("uninitialised-device", {"outputs": {1}}),
    "output_reads_ahead": ("uninitialised-device", {"outputs": {1}, "threadgroup": 64}),
    "writes_input": ("write-to-read-only", {"writes": {1}}),
    "writes_input_atomically": ("write-to-read-only", {"writes": {1}}),
    "reads_output": ("read-of-write-only", {"reads": {0}}),
    "reads_output_late": ("read-of-write-only", {"reads": {0}}),
    "race_plain_behind_atomic": ("threadgroup-race", {}),
    "grid_race_plain_behind_atomic": ("grid-race", {"grid": 4, "threadgroup": 32}),
    "bounds_table_past": ("out-of-bounds", {}),
    "bounds_table_before": ("out-of-bounds", {}),
    "bounds_thread_past": ("out-of-bounds", {}),
    "bounds_thread_before": ("out-of-bounds", {}),
    "misaligned_device": ("misaligned", {}),
    "misaligned_threadgroup": ("misaligned", {}),
    "misaligned_constant": ("misaligned", {}),
    "division_by_zero": ("division", {}),
    "division_remainder": ("division", {}),
    "division_overflow": ("division", {}),
    "unwritten_tail": ("uninitialised-thread", {}),
    "unwritten_slot": ("uninitialised-thread", {}),
    "unwritten_accumulator": ("uninitialised-thread", {}),
}


@pytest.fixture(scope="module", params=[True, False], ids=["planted", "clean"])
def library(request):
    return request.param, Library(
        SOURCE, host="checked", defines={"FAULT": 1} if request.param else None
    )


def dispatch(library, name, keywords, **more):
    keywords = {"grid": 1, "threadgroup": 128, **keywords, **more}
    x = np.arange(128, dtype=np.float32)
    if name == "writes_input_atomically":
        x = np.zeros(128, np.int32)
    buffers = {0: x, 1: np.zeros(128, np.float32), 2: np.zeros(128, np.float32)}
    kernel = library[name]
    wanted = {p.index for p in kernel.info.buffers}
    buffers = {i: b for i, b in buffers.items() if i in wanted}
    return kernel(
        buffers, keywords.pop("grid"), keywords.pop("threadgroup"), on_fault="return", **keywords
    )


def marked_lines(name):
    text = SOURCE.read_text().split("\n")
    return {n for n, line in enumerate(text, 1) if re.search(rf"FAULT: {name}$", line)}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_on_its_line_and_its_twin_is_silent(library, name):
    planted, compiled = library
    kind, keywords = FAULTS[name]
    faults = dispatch(compiled, name, keywords).faults
    if not planted:
        assert not faults, [str(f) for f in faults]
        return
    found = [f for f in faults if f.kind == kind]
    assert found, f"{kind} not found, only {[str(f) for f in faults]}"
    assert any(f.lines & marked_lines(name) for f in found), [str(f) for f in found]
    assert all(f.kernel == name and Path(f.file) == SOURCE and name in str(f) for f in found)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "name", [n for n, (kind, _) in FAULTS.items() if "race" in kind or "divergent" in kind]
)
def test_order_of_threads_changes_nothing(library, name, seed):
    planted, compiled = library
    kind, keywords = FAULTS[name]
    kinds = {f.kind for f in dispatch(compiled, name, keywords, seed=seed).faults}
    assert (kind in kinds) if planted else not kinds


def test_at_least_two_of_each_kind():
    from metal.host.faults import KINDS

    assert all(sum(kind == k for kind, _ in FAULTS.values()) >= 2 for k in KINDS)


def test_a_fault_raises_and_names_kernel_threads_byte_and_place(library):
    planted, compiled = library
    if not planted:
        pytest.skip("needs the planted fault")
    with pytest.raises(KernelFault) as raised:
        compiled["bounds_read_past"]([np.zeros(128, np.float32), np.zeros(128, np.float32)], 1, 128)
    [fault] = raised.value.faults
    assert (fault.thread, fault.byte, fault.buffer, fault.count) == (127, 512, 0, 1)
    [line] = marked_lines("bounds_read_past")
    assert f"faults.metal:{line}" in str(raised.value)
    assert "argument 0 (x)" in str(raised.value)


TENSOR = """#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
constexpr constant auto sizes = mpp::tensor_ops::matmul2d_descriptor(
    16, 16, 16, false, false, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
[[kernel]] void k(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& first [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) {
  mpp::tensor_ops::matmul2d<sizes, execution_simdgroup> product;
  auto a = product.get_left_input_cooperative_tensor<float, float, float>();
  auto b = product.get_right_input_cooperative_tensor<float, float, float>();
  auto c = product.get_destination_cooperative_tensor<float, float, float>();
  for (int j = 0; j < 8; j++) {
    a[j] = x[i];
    b[j] = x[i];
    if (j != first - 8) c[j] = 0.0f;
  }
  product.run(a, b, c);
  y[i] = c[first];
}
"""


def test_cooperative_tensors_have_a_capacity_and_need_their_accumulator():
    kernel = Library(source=TENSOR, metal="4.0", host="checked")["k"]

    def kinds(first):
        x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
        return {f.kind for f in kernel([x, y, first], 1, 32, on_fault="return").faults}

    assert kinds(3) == set()
    assert kinds(-1) == {"out-of-bounds"}
    assert kinds(8) == {"out-of-bounds", "uninitialised-thread"}


def test_bits_that_only_move_are_no_value_of_a_thread(library):
    _, compiled = library
    x, y = np.full(128, -1, np.int32).view(np.float32), np.zeros(128, np.float32)
    assert not compiled["device_race_same_byte"]([x, y], 1, 64, on_fault="return").faults


def test_memory_never_written_is_known_across_dispatches(library):
    _, compiled = library
    scratch, y = empty(128, np.float32), np.zeros(128, np.float32)
    x = np.ones(128, np.float32)
    copy = compiled["reads_output_late"]
    with pytest.raises(KernelFault, match="uninitialised-device"):
        compiled["device_race_same_byte"]([scratch, y], 1, 128)
    copy([x, scratch], 1, 64, on_fault="return")  # 64 threads write the first half
    result = compiled["device_race_same_byte"]([scratch, y], 1, 64, on_fault="return")
    assert not [f for f in result.faults if f.kind == "uninitialised-device"]
    with pytest.raises(KernelFault, match="uninitialised-device"):
        compiled["device_race_same_byte"]([scratch[64:], y], 1, 64)
