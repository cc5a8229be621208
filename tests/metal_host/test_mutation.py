"""Each threadgroup_barrier of MLX's kernels removed in turn: the checked host catches it, or it is
named here with the reason why nothing can be caught."""

import re

import pytest

from metal.host import KernelFault, Library

from . import calibration
from .calibration import ALIGNED, KERNELS, NAX, PLAIN_ATTENTION, QUANTIZED, SDPA, SOFTMAX

# header, function -> (source, constants, language, cases)
MUTATED = {
    ("sdpa_vector.h", "sdpa_vector"): (SDPA, PLAIN_ATTENTION, "3.1", ["sdpa_vector"]),
    ("sdpa_vector.h", "sdpa_vector_2pass_2"): (SDPA, PLAIN_ATTENTION, "3.1", ["sdpa_2pass_2"]),
    ("quantized.h", "qmm_t_impl"): (
        QUANTIZED,
        ALIGNED,
        "3.1",
        ["qmm_t", "qmm_t ragged", "qmm_t ragged columns"],
    ),
    ("quantized.h", "qmm_n_impl"): (QUANTIZED, ALIGNED, "3.1", ["qmm_n", "qmm_n ragged depth"]),
    ("quantized_nax.h", "qmm_t_nax_tgp_impl"): (NAX, ALIGNED, "4.0", ["qmm_t_nax"]),
    ("quantized_nax.h", "qmm_n_nax_tgp_impl"): (NAX, ALIGNED, "4.0", ["qmm_n_nax"]),
    ("softmax.h", "softmax_single_row"): (SOFTMAX, {}, "3.1", ["block_softmax"]),
    ("softmax.h", "softmax_looped"): (SOFTMAX, {}, "3.1", ["looped_softmax"]),
}
# (function, which barrier) -> why its absence is no fault
HARMLESS = {
    ("qmm_t_impl", 8): "before a store from registers to device memory",
    ("qmm_n_impl", 12): "before a store from registers to device memory",
    ("qmm_t_nax_tgp_impl", 2): "before a store from registers to device memory",
    ("qmm_n_nax_tgp_impl", 2): "before a store from registers to device memory",
}


def _barriers(header, function):
    """(start, end) of each barrier statement in the function's text."""
    text = (calibration.headers() / KERNELS / header).read_text()
    start = text.index(f"void {function}(")
    body = text[start : text.index("\n}\n", start)]
    return [
        (start + m.start(), start + m.end())
        for m in re.finditer(r"threadgroup_barrier\([^;]*;", body)
    ]


def _only(source, cases):
    """The source with just the instances that the cases run."""
    kernels = {calibration.CASES[c]().kernel for c in cases}
    return re.sub(
        r'instantiate_kernel\("(\w+)".*\n', lambda m: m[0] if m[1] in kernels else "", source
    )


def _caught(header, function, number, folder):
    text = (calibration.headers() / KERNELS / header).read_text()
    start, end = _barriers(header, function)[number]
    place = folder / KERNELS / header
    place.parent.mkdir(parents=True)
    place.write_text(text[:start] + ";" + text[end:])
    source, constants, metal, cases = MUTATED[header, function]
    compiled = Library(
        source=_only(source, cases),
        constants=constants,
        host="checked",
        metal=metal,
        rules="metal",
        include=[str(folder), str(calibration.headers())],
    )
    for case in map(calibration.CASES.__getitem__, cases):
        case = case()
        for seed in (None, 1):
            try:
                outputs, _ = case.run(compiled, seed=seed)
            except KernelFault as fault:
                assert any("race" in f.kind for f in fault.faults)
                return True
            assert case.error(outputs) < case.tolerance, "wrong values and no fault"
    return False


@pytest.mark.parametrize("header,function", MUTATED)
def test_removed_barriers_are_caught(header, function, tmp_path):
    try:
        calibration.headers()
    except calibration.Unavailable as reason:
        pytest.skip(str(reason))
    for number in range(len(_barriers(header, function))):
        caught = _caught(header, function, number, tmp_path / str(number))
        assert caught == ((function, number) not in HARMLESS), (
            f"barrier {number} of {function}: caught is {caught}"
        )
