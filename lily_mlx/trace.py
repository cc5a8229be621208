"""A readable view of a Program: what would be launched, in which order, moving how many bytes."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import _ext, kernels

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
        options: decode: the switches of its Program, all True unless said otherwise: logits
            (False), fuse_norm, fuse_projections, fuse_residual, fuse_delta, fuse_route,
            fuse_shared, fuse_head, coalesced; pack (4): query heads a threadgroup;
            fixed_block_from (32768): capacity above which the cache is cut into splits of fixed
            length, -1 for never.
            prefill: scan ("norm", "apart", "block" or "chunk"), unit
            ("simdgroup", "tensor" or "nvidia").

    Raises:
        ValueError: an unknown kind or option, or a model whose shapes have no kernel, naming which.
    """
    kernels.load()
    shapes = dims(getattr(model, "language_model", model))
    if kind == "decode":
        rows = capacity if capacity is not None else (context + 256) // 256 * 256
        if context < 0 or rows < context + 1:
            raise ValueError(
                f"a context of {context} tokens needs a capacity above it, not {rows}."
            )
        built = _ext.decode_program(shapes, rows, {"context": context + 1, **options})
    elif kind == "prefill":
        if tokens < 1:
            raise ValueError(f"a chunk of {tokens} tokens has nothing to run.")
        built = _ext.prefill_program(shapes, tokens, **options)
    else:
        raise ValueError(f"there is no kind {kind!r}; use decode or prefill.")
    return Trace(built.program)


def dims(text_model: nn.Module) -> dict[str, Any]:
    """The shapes and formats that a text model's Programs depend on; evaluates nothing.

    Matrices are (rows, columns, bits, group size, experts); bits 0 means plain elements.

    Raises:
        ValueError: a module that has no kernel, or a model without experts.
    """
    from lily_mlx.decode import activation_dtype

    args, model = text_model.args, text_model.model
    layers = []
    for i, layer in enumerate(model.layers):
        if not hasattr(layer.mlp, "switch_mlp"):
            raise ValueError(f"layer {i} has a dense MLP; the decode step is made for experts.")
        entry: dict[str, Any] = {"moe": _moe(layer.mlp)}
        if layer.is_linear:
            m = layer.linear_attn
            entry["delta"] = {
                "qkv": _matrix(m.in_proj_qkv), "z": _matrix(m.in_proj_z),
                "b": _matrix(m.in_proj_b), "a": _matrix(m.in_proj_a), "out": _matrix(m.out_proj),
                "key_heads": m.num_k_heads, "value_heads": m.num_v_heads,
                "key_dim": m.head_k_dim, "value_dim": m.head_v_dim,
                "conv_width": m.conv1d.weight.shape[1], "eps": m.norm.eps,
            }  # fmt: skip
        else:
            m = layer.self_attn
            entry["attention"] = {
                "q": _matrix(m.q_proj), "k": _matrix(m.k_proj), "v": _matrix(m.v_proj),
                "out": _matrix(m.o_proj), "heads": m.num_attention_heads,
                "kv_heads": m.num_key_value_heads, "head_dim": m.head_dim,
                "rotary": m.rope.dims, "base": m.rope.base, "eps": m.q_norm.eps,
            }  # fmt: skip
        layers.append(entry)
    return {
        "dtype": str(activation_dtype(text_model)).rpartition(".")[2],
        "embedding": _matrix(model.embed_tokens),
        "head": _matrix(text_model.head()),
        "eps": args.rms_norm_eps,
        "layers": layers,
    }


def _moe(block: nn.Module) -> dict[str, Any]:
    names = (
        "router", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "shared_router",
    )  # fmt: skip
    matrices = dict(zip(names, map(_matrix, block.linears()), strict=True))
    return {**matrices, "top_k": block.top_k, "normalize": bool(block.norm_topk_prob)}


def _matrix(module: nn.Module) -> tuple[int, int, int, int, int]:
    from lily_mlx.layers.linear import refusal

    refused = refusal(module)
    if refused is not None:
        raise ValueError(refused.reason)
    *experts, rows, columns = module.weight.shape
    bits, group = getattr(module, "bits", 0), getattr(module, "group_size", 0)
    if module.weight.dtype != mx.uint32:
        bits = group = 0
    if bits:
        columns = columns * 32 // bits
    return rows, columns, bits, group, experts[0] if experts else 1


class _Callable(ModuleType):
    """Lets `lily_mlx.trace(model)` work although `lily_mlx.trace` is a module too."""

    def __call__(self, *args: Any, **options: Any) -> Trace:
        return trace(*args, **options)


sys.modules[__name__].__class__ = _Callable
