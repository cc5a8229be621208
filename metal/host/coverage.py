"""Branches of kernel source that checked dispatches took."""

from __future__ import annotations

import atexit
import ctypes as C
import json
import os
from dataclasses import dataclass
from pathlib import Path

from .launch import _Site


class _Counter(C.Structure):
    _fields_ = [("site", C.POINTER(_Site)), ("taken", C.c_uint64), ("not_taken", C.c_uint64)]


@dataclass(frozen=True, order=True)
class Branch:
    """A branch that the compiler could not decide. choice: 0, or n for a switch's n-th case."""

    file: str
    line: int
    column: int
    choice: int
    function: str
    taken: int
    not_taken: int

    @property
    def missing(self) -> list[str]:
        """The outcomes that no dispatch had."""
        if self.choice:
            return [] if self.taken else [f"case {self.choice}"]
        return [n for n, count in (("true", self.taken), ("false", self.not_taken)) if not count]

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}"
        return f"{place}: never {' or '.join(self.missing)} in {self.function}"


def merge(branches) -> list[Branch]:
    """Adds up the counts of one place (template instances, libraries, processes)."""
    total: dict[tuple, list] = {}
    for b in branches:
        entry = total.setdefault((b.file, b.line, b.column, b.choice), [b.function, 0, 0])
        entry[1] += b.taken
        entry[2] += b.not_taken
    return sorted(Branch(*key, *entry) for key, entry in total.items())


class Branches:
    """The branch counters of one loaded library."""

    def __init__(self, library: C.CDLL):
        try:
            count = C.c_uint64.in_dll(library, "__msl_branch_count").value
            self._table = (
                (C.POINTER(_Counter) * count).in_dll(library, "__msl_branches") if count else ()
            )
        except ValueError:  # no branch at all
            self._table = ()
        self._library = library
        _loaded.setdefault(library._handle, self)

    def report(self) -> list[Branch]:
        """All branches with their counts so far, merged over template instances."""
        result = []
        for pointer in self._table:
            counter = pointer.contents
            site = counter.site.contents
            result.append(
                Branch(
                    os.path.realpath(site.file.decode()),
                    site.line,
                    site.column,
                    site.order,
                    site.function.decode(),
                    counter.taken,
                    counter.not_taken,
                )
            )
        return merge(result)


_loaded: dict[int, Branches] = {}


def report() -> list[Branch]:
    """Branches of every checked library that this process has loaded."""
    return merge(b for branches in _loaded.values() for b in branches.report())


def _save(folder: str) -> None:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    fresh = place / f".{os.getpid()}"
    fresh.write_text(json.dumps([list(vars(b).values()) for b in report()]))
    os.replace(fresh, place / f"{os.getpid()}.json")


def load(folder: str) -> list[Branch]:
    """Merges what processes with LILY_METAL_COVERAGE=folder left there."""
    files = sorted(Path(folder).glob("*.json"))
    return merge(Branch(*entry) for f in files for entry in json.loads(f.read_text()))


if os.environ.get("LILY_METAL_COVERAGE"):
    atexit.register(_save, os.environ["LILY_METAL_COVERAGE"])
