"""A readable view of a Program: what would be launched, in which order, moving how many bytes."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import mlx.nn as nn

from . import _ext, kernels, spec

_COLUMNS = ("index", "level", "layer", "label", "kernel", "grid", "threads", "read", "written")


def _dims(values: Any) -> str:
    sizes = list(values)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(str(v) for v in sizes)


def _constants(values: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )


def format_bytes(count: int) -> str:
    """`count` bytes with a decimal unit, e.g. "1.66 GB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


class Trace:
    """The dispatches of a finished Program.

    With `bindings`, grids and bytes are those of that step (its scalars and its aliasing);
    without, those of the Program's initial scalars. `print(Trace(program))` shows a table and,
    below it, the pipelines (kernels with function constants) that the table names by number.
    """

    def __init__(self, program: _ext.Program, bindings: _ext.Bindings | None = None):
        self.name: str = program.name
        self.slots: list[dict[str, Any]] = program.slots
        self.pipelines: list[dict[str, Any]] = program.pipelines
        self.report: dict[str, Any] = program.report(bindings)
        self.dispatches: list[dict[str, Any]] = [
            program.describe(i, bindings) for i in range(len(program))
        ]

    def __len__(self) -> int:
        return len(self.dispatches)

    def kind_of(self, slot: str) -> str:
        """weight, cache, input, output or scratch."""
        return next(s["kind"] for s in self.slots if s["name"] == slot)

    def _row(self, d: dict[str, Any]) -> tuple[str, ...]:
        layer = "" if d["layer"] is None else str(d["layer"])
        return (
            str(d["index"]),
            str(d["level"]),
            " ".join(x for x in (layer, d["phase"]) if x),
            d["label"],
            f"{d['kernel']} #{d['pipeline']}",
            _dims(d["grid"]),
            _dims(d["threadgroup"]),
            format_bytes(d["read"]),
            format_bytes(d["written"]),
        )

    def summary(self, floor: int | None = None) -> str:
        """One line of counts; `floor` is the bytes that the step cannot do without."""
        r = self.report
        moved = r["read"] + r["written"]
        text = (
            f"{self.name}: {r['dispatches']} dispatches, {r['levels']} levels, "
            f"{r['barriers']} barriers, {format_bytes(r['read'])} read "
            f"({format_bytes(r['weights'])} distinct weights), "
            f"{format_bytes(r['written'])} written, arena {format_bytes(r['arena'])}"
        )
        return text if floor is None else f"{text}, {moved / floor:.3f} of the floor"

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(self._row, self.dispatches)]
        widths = [max(len(row[c]) for row in rows) for c in range(len(_COLUMNS))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        pipelines = [
            f"#{i} {p['file']} {p['kernel']} {_constants(p['constants'])}".rstrip()
            for i, p in enumerate(self.pipelines)
        ]
        return "\n".join([self.summary(), *lines, *pipelines])

    def to_json(self, indent: int | None = None) -> str:
        """Counts, slots, pipelines and dispatches as JSON."""
        data = {
            "name": self.name,
            "report": self.report,
            "slots": self.slots,
            "pipelines": self.pipelines,
            "dispatches": self.dispatches,
        }
        return json.dumps(data, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form.")


# ---- The Programs of a model, from its shapes alone


def trace(
    model: nn.Module,
    kind: str = "decode",
    *,
    context: int = 0,
    tokens: int = 512,
    capacity: int | None = None,
    on: str | None = None,
    **options: Any,
) -> Trace:
    """What a GPU would launch for one decode step or one prefill chunk of `model`.

    Nothing is evaluated: weights may be lazy, and no GPU is needed.

    Args:
        model: a model of lily's class, as `lily_mlx.load` returns it.
        kind: "decode" (one token) or "prefill" (a chunk of `tokens` tokens).
        context: decode: tokens in the caches before this one.
        tokens: prefill: rows of the chunk.
        capacity: decode: rows that the caches have; by default the context, in blocks of 256.
        on: whose kernels: "metal", "metal_nax" (Metal 4's tensor operations) or "cuda"; by default
            this machine's GPU, "metal" where there is none.
        options: decode: the switches of its Program, all True unless said otherwise: logits
            (False), fuse_norm, fuse_projections, fuse_residual, fuse_delta, fuse_route, coalesced,
            serial_levels (False); pack (4): query heads a threadgroup; fixed_block_from (32768):
            capacity above which the cache is cut into splits of fixed length, -1 for never.

    A prefill chunk shows what lily's primitives launch. MLX's own ops run between them: norms,
    residuals, attention over the prompt and its gate. Levels count from what those ops made.

    Raises:
        ValueError: an unknown kind or option, or a model whose shapes have no kernel, naming which.
    """
    kernels.load()
    on = on or _ext.gpu_target()
    on = "metal" if on == "cpu" else on
    shapes = spec.model(getattr(model, "language_model", model))
    if kind == "decode":
        rows = capacity if capacity is not None else (context + 256) // 256 * 256
        if context < 0 or rows < context + 1:
            raise ValueError(
                f"a context of {context} tokens needs a capacity above it, not {rows}."
            )
        built = _ext.step_program(on, shapes, rows, {"context": context + 1, **options})
    elif kind == "prefill":
        if tokens < 1:
            raise ValueError(f"a chunk of {tokens} tokens has nothing to run.")
        if options:
            raise ValueError(f"a prefill chunk has no option {sorted(options)[0]!r}.")
        built = _ext.chunk_program(on, shapes, tokens)
    else:
        raise ValueError(f"there is no kind {kind!r}; use decode or prefill.")
    return Trace(built.program)


class _Callable(ModuleType):
    """Lets `lily_mlx.trace(model)` work although `lily_mlx.trace` is a module too."""

    def __call__(self, *args: Any, **options: Any) -> Trace:
        return trace(*args, **options)


sys.modules[__name__].__class__ = _Callable
