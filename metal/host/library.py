"""Library(path, constants, host)[kernel](buffers, grid, threadgroup): one call on every host."""

from __future__ import annotations

import ctypes as C
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from . import launch, memory
from .compiler import Source
from .coverage import Branches
from .faults import Fault, KernelFault, describe
from .launch import Traffic
from .manifest import KernelInfo
from .toolchain import HostError

HOSTS = ("cpu", "checked", "cuda")
_GAP = 1 << 20  # between buffers in a checked run, so that an overrun does not meet the next one


@dataclass
class Result:
    """What a dispatch did. traffic: by argument index (checked host). seconds: of the run alone."""

    seconds: float
    faults: list[Fault] = field(default_factory=list)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    barriers: int = 0
    simd_operations: int = 0


class Library:
    """The kernels of one Metal file, compiled for a host.

    path: the .metal file (or None with source=, its text). constants: {id or name: value} of the
    function constants. host: "cpu" (fast), "checked" (finds faults, counts traffic and branches) or
    "cuda". defines: {name: value} for the preprocessor. include: further folders. metal: language
    version, "3.1", "3.2" or "4.0" (tensor operations). rules: "strict" (Metal's and the project's)
    or "metal" (Metal's alone). contract: "fast" or "off", may a*b+c round once. arch: of the GPU.
    Raises CompileError with file, line and rule, HostError with what is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        constants: Mapping[int | str, bool | int | float] | None = None,
        host: str = "cpu",
        *,
        defines: Mapping[str, object] | None = None,
        include: Iterable[str] = (),
        source: str | None = None,
        metal: str = "3.1",
        rules: str = "strict",
        contract: str = "fast",
        arch: str | None = None,
    ):
        if host not in HOSTS:
            raise HostError(f"host={host!r}: one of {', '.join(HOSTS)}")
        if (path is None) == (source is None):
            raise HostError("a Library takes a path or source=, one of them")
        if contract not in ("fast", "off"):
            raise HostError(f'contract={contract!r}: "fast" or "off"')
        self.host = host
        self.source = Source(
            path, source=source, defines=defines, include=include, metal=metal, rules=rules
        )
        self.kernels: dict[str, KernelInfo] = {k.name: k for k in self.source.check()}
        self.constants = self.source.constant_values(constants)
        self.branches: Branches | None = None
        order = list(self.kernels)
        if host == "cuda":
            from . import cuda

            self._module = cuda.Module(self.source, self.constants, contract=contract, arch=arch)
        else:
            checked = host == "checked"
            built = self.source.library(self.constants, checked=checked, contract=contract)
            self._library = launch.open_library(built)
            self._stubs = {
                name: C.cast(getattr(self._library, f"stub_{i}"), C.c_void_p).value
                for i, name in enumerate(order)
            }
            if checked:
                self.branches = Branches(self._library)

    def __getitem__(self, name: str) -> Kernel:
        if name not in self.kernels:
            raise HostError(
                f"{self.source.path.name} has no kernel {name!r}; it has {', '.join(self.kernels)}"
            )
        return Kernel(self, self.kernels[name])

    def __contains__(self, name: str) -> bool:
        return name in self.kernels

    def present(self, condition: str) -> bool:
        """Whether a function constant of the source is given and true."""
        identifier = self.source.constants.get(condition, (None,))[0]
        return self.constants.get(identifier, "0") not in ("0", "0.0")


class Kernel:
    """One kernel of a Library; call it to dispatch it."""

    def __init__(self, library: Library, info: KernelInfo):
        self.library = library
        self.info = info
        names = {i: n for n, (i, _) in library.source.constants.items()}
        missing = [f"{i} ({names[i]})" for i in info.constants if i not in library.constants]
        if missing:
            raise HostError(
                f"{info.name} reads function constants without a value: {', '.join(missing)}"
            )

    def __call__(
        self,
        buffers,
        grid,
        threadgroup,
        threadgroup_memory=None,
        *,
        writes: Iterable[int] | None = None,
        reads: Iterable[int] | None = None,
        outputs: Iterable[int] = (),
        seed: int | None = None,
        traffic: bool = False,
        workers: int | None = None,
        on_fault: str = "raise",
    ) -> Result:
        """Dispatches the kernel and waits for it.

        buffers: list, or dict by buffer index, of numpy arrays (written in place), mlx arrays (read
        only), scalars and tuples for `constant` arguments, bytes for structs. grid: threadgroups.
        threadgroup: threads of each. threadgroup_memory: bytes of the [[threadgroup(i)]] arguments,
        an int, list or dict by index.

        Checked host only: writes: the indices that the kernel may write, the others are read-only.
        reads: the indices that it may read. outputs: indices whose contents are undefined at the
        start. seed: shuffles the order of threads and threadgroups. traffic: also count 128-byte
        lines. on_fault: "raise" KernelFault or "return" the faults in the Result.
        """
        info = self.info
        grid = launch.dimensions(grid, "grid")
        threadgroup = launch.dimensions(threadgroup, "threadgroup")
        memory_bytes = launch.check_dispatch(info, threadgroup, threadgroup_memory)
        bound = launch.bind(info, buffers, self.library.present)
        writes = None if writes is None else set(writes)
        for i, (p, _, writable) in bound.items():
            if not p.const and not writable and (writes is None or i in writes):
                raise HostError(
                    f"{info.name}: argument {i} ({p.name}) may be written but what is bound is "
                    "not a writable numpy array; bind one, or leave the index out of writes="
                )
        if self.library.host == "cuda":
            return self.library._module.launch(info, bound, grid, threadgroup, memory_bytes)
        checked = self.library.host == "checked"
        run = launch._Launch(
            stub=self.library._stubs[info.name],
            grid=grid,
            threadgroup=threadgroup,
            workers=workers or min(os.cpu_count() or 1, 8),
            checked=checked,
            lines=traffic,
            shuffled=seed is not None,
            seed=seed or 0,
        )
        for i, count in memory_bytes.items():
            run.threadgroup_bytes[i] = count
        arguments = (C.c_void_p * 64)()
        run.arguments = arguments
        if not checked:
            for i, (_, array, _) in bound.items():
                arguments[i] = array.ctypes.data
            start = time.perf_counter()
            launch._runtime().msl_launch(C.byref(run))
            return Result(
                time.perf_counter() - start, barriers=run.barriers, simd_operations=run.exchanges
            )
        return self._checked(
            run,
            arguments,
            bound,
            writes,
            None if reads is None else set(reads),
            set(outputs),
            on_fault,
        )

    def _checked(self, run, arguments, bound, writes, reads, outputs, on_fault) -> Result:
        arena = _Arena(bound)
        table = (launch._Buffer * max(1, len(bound)))()
        counts = (Traffic * max(1, len(bound)))()
        known, kept = memory.Initialised(), []
        for entry, (i, (p, array, _)) in zip(table, bound.items(), strict=False):
            entry.data, entry.bytes, entry.index = arena.address[i], array.nbytes, i
            entry.may_read = reads is None or i in reads
            entry.may_write = not p.const and (writes is None or i in writes or i in outputs)
            arguments[i] = arena.address[i]
            flags = known.of(array)
            if i in outputs:
                flags = np.zeros(array.nbytes, np.uint8)
            if flags is not None:
                kept.append(flags)
                entry.initialised = flags.ctypes.data
        for region in arena.regions:
            writable = any(e.may_write for e in table if e.index in region)
            for e in table:
                if e.index in region:
                    e.shared_writable = writable
        faults = (launch._Fault * launch.MAX_FAULTS)()
        run.buffers, run.buffer_count, run.traffic = table, len(bound), counts
        run.faults, run.fault_capacity = faults, launch.MAX_FAULTS
        library = self.library._library
        run.variables, run.variable_count = launch.variables(library, "__msl_threadgroup_variable")
        run.constants, run.constant_count = launch.variables(library, "__msl_constant")
        start = time.perf_counter()
        launch._runtime().msl_launch(C.byref(run))
        seconds = time.perf_counter() - start
        arena.copy_back({e.index for e in table if e.may_write})
        names = {i: f"argument {i} ({p.name})" for i, (p, _, _) in bound.items()}
        threads = run.threadgroup[0] * run.threadgroup[1] * run.threadgroup[2]
        found = [
            describe(f, self.info.name, names, threads)
            for f in faults[: min(run.fault_count, launch.MAX_FAULTS)]
        ]
        if found and on_fault == "raise":
            raise KernelFault(self.info.name, found, run.fault_count)
        return Result(
            seconds, found, dict(zip(bound, counts, strict=False)), run.barriers, run.exchanges
        )


class _Arena:
    """Copies of the bound arrays, far apart; arrays that share memory share it here too."""

    def __init__(self, bound):
        spans = sorted(
            (a.ctypes.data, a.ctypes.data + a.nbytes, i) for i, (_, a, _) in bound.items()
        )
        self.bound = bound
        self.regions: list[set[int]] = []
        bounds: list[list[int]] = []
        for start, end, i in spans:
            if bounds and start < bounds[-1][1]:
                bounds[-1][1] = max(bounds[-1][1], end)
                self.regions[-1].add(i)
            else:
                bounds.append([start, end])
                self.regions.append({i})
        offsets, size = [], _GAP
        for start, end in bounds:
            offsets.append(size + start % 16)
            size += (end - start + 511) // 256 * 256 + _GAP
        self.map = mmap.mmap(-1, size)
        base = C.addressof(C.c_char.from_buffer(self.map))
        self.address = {}
        for (start, _), offset, region in zip(bounds, offsets, self.regions, strict=True):
            for i in region:
                self.address[i] = base + offset + bound[i][1].ctypes.data - start
        for i, (_, array, _) in bound.items():
            C.memmove(self.address[i], array.ctypes.data, array.nbytes)

    def copy_back(self, indices) -> None:
        for i in indices:
            array = self.bound[i][1]
            C.memmove(array.ctypes.data, self.address[i], array.nbytes)
