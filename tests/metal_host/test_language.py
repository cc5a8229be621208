# ruff: noqa: E501 (programs on one line)
"""Programs that Metal rejects and programs that it accepts."""

import pytest

from metal.host import CompileError
from metal.host.compiler import Source

from .accepted import ACCEPTED
from .rejected import REJECTED, kernel

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


def check(program, **options):
    text = program[1:] if program.startswith("@") else PRELUDE + program
    return Source(None, source=text, **options).check()


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    program, message = REJECTED[name]
    with pytest.raises(CompileError, match=message) as raised:
        check(program)
    assert "source.metal:" in str(raised.value)  # file and line


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert check(ACCEPTED[name])


@pytest.mark.parametrize("name", [n for n in REJECTED if n.startswith("project: ")])
def test_project_rules_can_be_left_out(name):
    assert check(REJECTED[name][0], rules="metal")


def test_macros_of_the_user_do_not_reach_into_the_standard_headers():
    letters = {chr(c): 1 for c in range(ord("A"), ord("Z") + 1)}
    every = "\n".join(
        ACCEPTED[n].replace("[[kernel]] void k(", f"[[kernel]] void k{i}(")
        for i, n in enumerate(("simd reductions", "simdgroup matrices", "atomics", "vector math"))
    )
    assert check(every, defines={**letters, "MAX": 1, "MIN": 1, "Rows": 1, "Cols": 1})


def test_tables_are_large_enough():
    assert sum(not name.startswith("project: ") for name in REJECTED) >= 30 and len(ACCEPTED) >= 30


def test_tensor_operations_need_metal_4():
    source = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n" + kernel(
        "y[0] = 1.0f;"
    )
    with pytest.raises(CompileError, match="tensor operations need Metal 4"):
        check(source)
    assert check(source, metal="4.0")


def test_coherent_memory_and_fences_come_with_metal_3_2():
    program = kernel(
        "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device); y[0] = 1.0f;",
        "volatile coherent(system) device float* y [[buffer(0)]]",
    )
    assert check(program, metal="3.2")
    with pytest.raises(CompileError, match="coherent"):
        check(program)


def test_a_template_decides_the_limit_on_threads():
    [info] = check(ACCEPTED["limit on threads from a template"])
    assert info.max_threads == 128


def test_lambdas_come_with_metal_3_2():
    assert check(REJECTED["lambda before Metal 3.2"][0], metal="3.2")


def test_an_error_names_file_line_and_rule():
    with pytest.raises(
        CompileError, match=r"source\.metal:4:\d+: error: Metal has no double \[no-double\]"
    ):
        check(kernel("double d = y[0]; y[0] = float(d);").lstrip("\n"))
