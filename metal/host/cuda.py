"""Runs the kernels' PTX on an NVIDIA GPU, through the driver alone (libcuda)."""

from __future__ import annotations

import ctypes as C
import functools
import time

import numpy as np

from .cuda_tools import entry_name
from .toolchain import HostError


class NoDevice(HostError):
    """There is no NVIDIA GPU, or no driver for it."""


@functools.cache
def driver() -> tuple[C.CDLL, str]:
    """(libcuda with a context on device 0, its architecture as "sm_90"). Raises NoDevice."""
    try:
        cuda = C.CDLL("libcuda.so.1")
    except OSError:
        raise NoDevice("no NVIDIA driver here: libcuda.so.1 cannot be loaded") from None
    if cuda.cuInit(0):
        raise NoDevice("the NVIDIA driver finds no GPU")
    device, context, major, minor = C.c_int(), C.c_void_p(), C.c_int(), C.c_int()
    _check(cuda, cuda.cuDeviceGet(C.byref(device), 0), "cuDeviceGet")
    _check(cuda, cuda.cuDeviceGetAttribute(C.byref(major), 75, device), "cuDeviceGetAttribute")
    _check(cuda, cuda.cuDeviceGetAttribute(C.byref(minor), 76, device), "cuDeviceGetAttribute")
    _check(
        cuda, cuda.cuDevicePrimaryCtxRetain(C.byref(context), device), "cuDevicePrimaryCtxRetain"
    )
    _check(cuda, cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return cuda, f"sm_{major.value}{minor.value}"


def _check(cuda: C.CDLL, status: int, what: str) -> None:
    if status:
        text = C.c_char_p()
        cuda.cuGetErrorString(status, C.byref(text))
        raise HostError(f"{what}: {(text.value or b'unknown error').decode()}")


class Program:
    """A loaded PTX or cubin image."""

    def __init__(self, image: bytes):
        self.cuda, _ = driver()
        self.module = C.c_void_p()
        _check(
            self.cuda,
            self.cuda.cuModuleLoadData(C.byref(self.module), image + b"\0"),
            "loading the kernels",
        )

    def launch(
        self, entry: str, arguments, grid, threadgroup, shared: int = 0, repeat: int = 1
    ) -> float:
        """Runs an entry; -> seconds a run.

        arguments: numpy arrays (device memory, copied both ways) and bytes (passed by value), in
        the entry's order. grid: threadgroups. shared: bytes of dynamic shared memory. repeat: runs.
        """
        cuda, function, keep, memory = self.cuda, C.c_void_p(), [], []
        _check(
            cuda,
            cuda.cuModuleGetFunction(C.byref(function), self.module, entry.encode()),
            f"finding {entry}",
        )
        spans: dict[tuple[int, int], C.c_uint64] = {}
        try:
            for start, end in _spans(arguments):
                pointer = C.c_uint64()
                _check(
                    cuda,
                    cuda.cuMemAlloc_v2(C.byref(pointer), C.c_size_t(max(16, end - start + 16))),
                    "cuMemAlloc",
                )
                memory.append(pointer)
                spans[start, end] = pointer
                _check(
                    cuda,
                    cuda.cuMemcpyHtoD_v2(
                        _at(pointer, start % 16), C.c_void_p(start), C.c_size_t(end - start)
                    ),
                    "cuMemcpyHtoD",
                )
            for a in arguments:
                if isinstance(a, np.ndarray):
                    address = a.ctypes.data
                    start, pointer = next(
                        (s, p) for (s, e), p in spans.items() if s <= address <= e
                    )
                    keep.append(_at(pointer, start % 16 + address - start))
                else:
                    keep.append(C.c_uint64(0) if a is None else C.create_string_buffer(a, len(a)))
            table = (C.c_void_p * max(1, len(keep)))(
                *[C.cast(C.byref(k), C.c_void_p) for k in keep]
            )
            _check(cuda, cuda.cuCtxSynchronize(), "cuCtxSynchronize")
            begin = time.perf_counter()
            for _ in range(repeat):
                _check(
                    cuda,
                    cuda.cuLaunchKernel(function, *grid, *threadgroup, shared, None, table, None),
                    f"launching {entry}",
                )
            _check(cuda, cuda.cuCtxSynchronize(), f"running {entry}")
            seconds = (time.perf_counter() - begin) / repeat
            for (start, end), pointer in spans.items():
                if any(
                    isinstance(a, np.ndarray) and a.flags.writeable and start <= a.ctypes.data < end
                    for a in arguments
                ):
                    _check(
                        cuda,
                        cuda.cuMemcpyDtoH_v2(
                            C.c_void_p(start), _at(pointer, start % 16), C.c_size_t(end - start)
                        ),
                        "cuMemcpyDtoH",
                    )
        finally:
            for pointer in memory:
                cuda.cuMemFree_v2(pointer)
        return seconds


def _at(pointer: C.c_uint64, offset: int) -> C.c_uint64:
    return C.c_uint64(pointer.value + offset)


def _spans(arguments) -> list[tuple[int, int]]:
    """The distinct stretches of memory behind the arrays; those that overlap are one."""
    result: list[list[int]] = []
    for start, end in sorted(
        (a.ctypes.data, a.ctypes.data + a.nbytes) for a in arguments if isinstance(a, np.ndarray)
    ):
        if result and start < result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return [(s, e) for s, e in result]


def entry_arguments(kernel, bound, memory: dict[int, int]) -> tuple[list, int]:
    """Arguments of a kernel's entry, in its order, and the dynamic shared memory that it needs."""
    arguments: list = []
    for p in kernel.buffers:
        array = bound[p.index][1] if p.index in bound else None
        if p.by_value:
            arguments.append(bytes(p.size) if array is None else array.tobytes()[: p.size])
        else:
            arguments.append(array)
    total = 0
    for n, index in enumerate(sorted(memory)):
        if n:
            arguments.append(np.uint32(total).tobytes())
        total += (memory[index] + 15) // 16 * 16
    return arguments, total


class Module:
    """A Library's kernels on the GPU."""

    def __init__(self, source, values, *, contract: str, arch: str | None):
        _, found = driver()
        text = source.ptx(
            values, contract=contract, arch=arch or min(found, "sm_90", key=lambda a: int(a[3:]))
        ).read_bytes()
        self.program = Program(text)

    def launch(self, kernel, bound, grid, threadgroup, memory):
        from .library import Result

        arguments, shared = entry_arguments(kernel, bound, memory)
        return Result(
            self.program.launch(entry_name(kernel.name), arguments, grid, threadgroup, shared)
        )
