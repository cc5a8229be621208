"""What the front end says of a file's kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; index: of the buffer or threadgroup argument, -1 for a builtin."""

    name: str
    space: str  # "device", "constant", "threadgroup" or "" (builtin)
    builtin: str
    type: str  # of the value or of what is pointed to
    size: int  # bytes of that type
    const: bool
    reference: bool
    index: int
    condition: str  # function constant that decides whether the argument exists

    @property
    def by_value(self) -> bool:
        """Whether a GPU entry takes the value itself: `constant T&`."""
        return self.reference and self.space == "constant"


@dataclass(frozen=True)
class KernelInfo:
    """A kernel as the front end sees it."""

    name: str
    function: str
    file: str
    line: int
    threadgroup_bytes: int
    max_threads: int
    constants: tuple[int, ...]  # ids of the function constants that it may read
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> list[Parameter]:
        """By buffer index."""
        found = [p for p in self.parameters if p.space in ("device", "constant")]
        return sorted(found, key=lambda p: p.index)

    @property
    def threadgroup(self) -> list[Parameter]:
        """By threadgroup index."""
        found = [p for p in self.parameters if p.space == "threadgroup"]
        return sorted(found, key=lambda p: p.index)


def parse(entry: dict) -> KernelInfo:
    """One kernel of the JSON manifest; gives arguments without an index the next free one."""
    taken: dict[bool, set[int]] = {True: set(), False: set()}
    for p in entry["parameters"]:
        taken[p["space"] == "threadgroup"].add(p.get("index", -1))
    parameters = []
    for p in entry["parameters"]:
        index = p.get("index", -1)
        if index < 0 and p["space"]:
            used = taken[p["space"] == "threadgroup"]
            index = next(i for i in range(64) if i not in used)
            used.add(index)
        parameters.append(
            Parameter(
                name=p["name"] or f"argument {len(parameters)}",
                space=p["space"],
                builtin=p["builtin"],
                type=p["type"],
                size=p["size"],
                const=p["const"] or p["space"] == "constant",
                reference=p["reference"],
                index=index,
                condition=p.get("condition", ""),
            )
        )
    return KernelInfo(
        name=entry["name"] or entry["function"],
        function=entry["function"],
        file=entry["file"],
        line=entry["line"],
        threadgroup_bytes=entry["threadgroup_bytes"],
        max_threads=entry.get("max_threads", 1024),
        constants=tuple(entry["constants"]),
        parameters=tuple(parameters),
    )
