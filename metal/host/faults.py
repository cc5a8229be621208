"""What the checked host reports."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .toolchain import HostError

KINDS = (
    "threadgroup-race",
    "device-race",
    "grid-race",
    "out-of-bounds",
    "divergent-barrier",
    "divergent-simd",
    "uninitialised-threadgroup",
    "uninitialised-device",
    "write-to-read-only",
    "read-of-write-only",
    "misaligned",
    "division",
    "uninitialised-thread",
)


@dataclass(frozen=True)
class Fault:
    """One kind of fault at one pair of places; threads and byte are those of its first case."""

    kind: str
    message: str
    kernel: str
    file: str
    line: int
    other_line: int  # of the earlier access or barrier, 0 when there is none
    other_file: str
    thread: int
    other_thread: int
    threadgroup: tuple[int, int, int]
    buffer: int  # argument index, -1 for threadgroup memory or none
    byte: int
    count: int

    def __str__(self) -> str:
        return self.message

    @property
    def lines(self) -> set[int]:
        return {self.line, self.other_line} - {0}


class KernelFault(HostError):
    """A dispatch did what a GPU would not forgive; `faults` lists it."""

    def __init__(self, kernel: str, faults: list[Fault], total: int):
        self.faults = faults
        self.total = total
        more = f"\n  and {total - len(faults)} more" if total > len(faults) else ""
        super().__init__(f"{kernel}: {total} fault(s)\n  " + "\n  ".join(map(str, faults)) + more)


def _thread(t) -> str:
    place = f"simdgroup {t.simdgroup}, lane {t.lane}"
    return f"threadgroup {tuple(t.threadgroup)} thread {t.thread} ({place})"


def describe(raw, kernel, names: dict[int, str], threads: int) -> Fault:
    """The runtime's struct -> Fault."""
    kind = KINDS[raw.kind]
    site = raw.site.contents if raw.site else None
    other = raw.other_site.contents if raw.other_site else None
    place = f"{os.path.basename(site.file.decode())}:{site.line}" if site else "?"
    other_place = f"{os.path.basename(other.file.decode())}:{other.line}" if other else "?"
    act = "writes" if raw.store else "reads"
    what = raw.variable.decode() or names.get(raw.buffer, "thread memory")
    me, them = _thread(raw.thread), _thread(raw.other)
    if kind in ("threadgroup-race", "device-race", "grid-race"):
        did = "wrote" if raw.lanes else "read"
        order = "no threadgroup order" if kind == "grid-race" else "no barrier"
        text = (
            f"{me} {act} byte {raw.byte} of {what} that {them} {did} at {other_place}, "
            f"{order} between them"
        )
    elif kind == "out-of-bounds":
        text = f"{me} {act} {raw.lanes} bytes at byte {raw.byte} of {what}, which is outside it"
    elif kind == "divergent-barrier" and other:
        text = (
            f"{me} waits at this threadgroup_barrier while {them} waits at the one at {other_place}"
        )
    elif kind == "divergent-barrier":
        text = (
            f"{me} waits at this threadgroup_barrier with {raw.lanes} of {threads} threads; "
            "the others have returned"
        )
    elif kind == "divergent-simd":
        count = bin(raw.lanes).count("1")
        text = f"{me}: only {count} lanes (mask {raw.lanes:08x}) of the simdgroup take part"
    elif kind == "write-to-read-only":
        text = f"{me} writes byte {raw.byte} of {what}, which the dispatch only reads"
    elif kind == "read-of-write-only":
        text = f"{me} reads byte {raw.byte} of {what}, which the dispatch only writes"
    elif kind == "misaligned":
        text = (
            f"{me} {act} byte {raw.byte} of {what} as a type whose address must be a multiple of "
            f"{raw.lanes}, and this one is not"
        )
    elif kind == "division":
        text = f"{me} divides " + ("the least integer by -1" if raw.lanes else "an integer by zero")
    elif kind == "uninitialised-thread":
        text = f"{me} reads a value of its own that it has not written"
    else:
        text = f"{me} reads byte {raw.byte} of {what}, which nothing has written"
    times = f" ({raw.count} times)" if raw.count > 1 else ""
    return Fault(
        kind,
        f"{place}: {kind} in {kernel}: {text}{times}",
        kernel,
        site.file.decode() if site else "",
        site.line if site else 0,
        other.line if other else 0,
        other.file.decode() if other else "",
        raw.thread.thread,
        raw.other.thread,
        tuple(raw.thread.threadgroup),
        raw.buffer,
        raw.byte,
        raw.count,
    )
