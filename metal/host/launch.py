"""Runs compiled kernels on the CPU."""

from __future__ import annotations

import ctypes as C
import functools

import numpy as np

from . import toolchain
from .compiler import THREADGROUP_LIMIT
from .manifest import KernelInfo, Parameter
from .toolchain import HostError

SCALARS = {
    "bool": np.bool_,
    "char": np.int8,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned int": np.uint32,
    "long": np.int64,
    "unsigned long": np.uint64,
    "float": np.float32,
    "__fp16": np.float16,
    "half": np.float16,
}
MAX_FAULTS = 64


class _Thread(C.Structure):
    _fields_ = [
        ("threadgroup", C.c_uint32 * 3),
        ("thread", C.c_uint32),
        ("simdgroup", C.c_uint32),
        ("lane", C.c_uint32),
    ]


class _Site(C.Structure):
    _fields_ = [
        ("file", C.c_char_p),
        ("line", C.c_uint32),
        ("column", C.c_uint32),
        ("order", C.c_uint32),
        ("function", C.c_char_p),
    ]


class _Fault(C.Structure):
    _fields_ = [
        ("kind", C.c_uint32),
        ("store", C.c_uint32),
        ("site", C.POINTER(_Site)),
        ("other_site", C.POINTER(_Site)),
        ("thread", _Thread),
        ("other", _Thread),
        ("buffer", C.c_int32),
        ("lanes", C.c_uint32),
        ("byte", C.c_int64),
        ("count", C.c_uint64),
        ("variable", C.c_char * 64),
    ]


class _Buffer(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("bytes", C.c_uint64),
        ("initialised", C.c_void_p),
        ("index", C.c_int32),
        ("may_read", C.c_uint32),
        ("may_write", C.c_uint32),
        ("shared_writable", C.c_uint32),
    ]


class Traffic(C.Structure):
    """Accesses of one dispatch to one buffer. Lines are distinct 128-byte lines, summed over the
    simdgroups' accesses; they and the accesses are counted when the launch asked for traffic."""

    _fields_ = [
        (n, C.c_uint64)
        for n in (
            "loads",
            "stores",
            "load_bytes",
            "store_bytes",
            "load_lines",
            "store_lines",
            "load_accesses",
            "store_accesses",
        )
    ]

    def __repr__(self) -> str:
        return "Traffic(" + ", ".join(f"{n}={getattr(self, n)}" for n, _ in self._fields_) + ")"


class _Launch(C.Structure):
    _fields_ = [
        ("stub", C.c_void_p),
        ("arguments", C.POINTER(C.c_void_p)),
        ("grid", C.c_uint32 * 3),
        ("threadgroup", C.c_uint32 * 3),
        ("threadgroup_bytes", C.c_uint32 * 8),
        ("workers", C.c_uint32),
        ("checked", C.c_uint32),
        ("lines", C.c_uint32),
        ("shuffled", C.c_uint32),
        ("seed", C.c_uint64),
        ("buffers", C.POINTER(_Buffer)),
        ("variables", C.c_void_p),
        ("constants", C.c_void_p),
        ("buffer_count", C.c_uint64),
        ("variable_count", C.c_uint64),
        ("constant_count", C.c_uint64),
        ("faults", C.POINTER(_Fault)),
        ("fault_capacity", C.c_uint64),
        ("fault_count", C.c_uint64),
        ("traffic", C.POINTER(Traffic)),
        ("barriers", C.c_uint64),
        ("exchanges", C.c_uint64),
        ("partial_exchanges", C.c_uint64),
    ]


@functools.cache
def _runtime() -> C.CDLL:
    library = C.CDLL(str(toolchain.runtime()), mode=C.RTLD_GLOBAL)
    library.msl_launch.argtypes = [C.POINTER(_Launch)]
    library.msl_launch.restype = None
    return library


def open_library(path) -> C.CDLL:
    """Loads a library of launch stubs."""
    _runtime()
    return C.CDLL(str(path))


def variables(library: C.CDLL, symbol: str) -> tuple[int | None, int]:
    """Address and length of a table that frontend/trace.cpp wrote; None, 0 when it wrote none."""
    try:
        count = C.c_uint64.in_dll(library, f"{symbol}_count").value
        return C.addressof(C.c_char.in_dll(library, f"{symbol}s")), count
    except ValueError:
        return None, 0


def dimensions(value, what: str) -> tuple[int, int, int]:
    """An int or up to three of them -> three; raises HostError when one is not positive."""
    value = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(value) <= 3 or any(int(v) < 1 for v in value):
        raise HostError(f"{what} must be one to three positive numbers, not {value}")
    x, y, z = (*(int(v) for v in value), 1, 1)[:3]
    return x, y, z


def as_array(value, parameter: Parameter) -> tuple[np.ndarray, bool]:
    """What a caller binds -> (contiguous numpy array, whether writes reach the caller)."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise HostError(
                f"argument {parameter.index} ({parameter.name}) is not contiguous: "
                "pass a contiguous array"
            )
        return value, value.flags.writeable
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8), isinstance(value, bytearray)
    if type(value).__module__.startswith("mlx"):
        import mlx.core as mx

        if value.dtype == mx.bfloat16:
            value = value.view(mx.uint16)
        return np.ascontiguousarray(np.array(value)), False
    if isinstance(value, (bool, int, float, np.generic, list, tuple)):
        scalar = parameter.type.split(" __attribute__")[0]
        if scalar not in SCALARS:
            raise HostError(
                f"argument {parameter.index} ({parameter.name}) has type {parameter.type}: "
                "pass an array or bytes of it"
            )
        array = np.atleast_1d(np.array(value, SCALARS[scalar]))
        if parameter.reference and array.nbytes < parameter.size <= 4 * array.itemsize:
            array = np.concatenate(
                [array, np.zeros(parameter.size // array.itemsize - array.size, array.dtype)]
            )
        return array, False
    return np.ascontiguousarray(np.asarray(value)), False


def check_dispatch(kernel: KernelInfo, threadgroup, threadgroup_memory) -> dict[int, int]:
    """Threadgroup shape and memory of a dispatch against Metal's limits; -> bytes by index."""
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > kernel.max_threads:
        raise HostError(
            f"{kernel.name}: {threads} threads a threadgroup, the limit is {kernel.max_threads}"
        )
    memory = threadgroup_memory or {}
    if not isinstance(memory, dict):
        memory = dict(enumerate([memory] if isinstance(memory, int) else memory))
    wanted = {p.index for p in kernel.threadgroup}
    if set(memory) != wanted:
        raise HostError(
            f"{kernel.name}: threadgroup_memory gives bytes for {sorted(memory)}, "
            f"the kernel takes {sorted(wanted)}"
        )
    total = kernel.threadgroup_bytes + sum(memory.values())
    if total > THREADGROUP_LIMIT:
        raise HostError(
            f"{kernel.name}: {total} bytes of threadgroup memory, the limit is {THREADGROUP_LIMIT}"
        )
    return memory


def bind(kernel: KernelInfo, buffers, present) -> dict[int, tuple[Parameter, np.ndarray, bool]]:
    """Caller's buffers by index -> (parameter, array, writable by the caller's leave)."""
    given = dict(buffers) if isinstance(buffers, dict) else dict(enumerate(buffers))
    result = {}
    for p in kernel.buffers:
        if p.index not in given:
            if p.condition and not present(p.condition):
                continue
            raise HostError(f"{kernel.name}: no value for argument {p.index} ({p.name})")
        value = given.pop(p.index)
        if value is None:
            continue
        array, writable = as_array(value, p)
        if p.reference and array.nbytes < p.size:
            raise HostError(
                f"{kernel.name}: argument {p.index} ({p.name}) has {array.nbytes} bytes, "
                f"{p.type} has {p.size}"
            )
        result[p.index] = (p, array, writable)
    if any(v is not None for v in given.values()):
        raise HostError(
            f"{kernel.name} has no buffer {sorted(given)}; "
            f"it has {[p.index for p in kernel.buffers]}"
        )
    return result
