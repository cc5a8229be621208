"""Which kernel serves what, or why none does. The answers are those of the ops in csrc/ops."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lily_mlx import _ext, ptx
from lily_mlx.spec import Matrix, dtype_name

ANY_ROWS = 0
"""Rows that are not known yet: the answer names every kernel that may be needed."""

TARGETS = ("cpu", "metal", "metal_nax", "cuda")
"""What kernels are chosen for; "metal_nax" is a Mac whose GPU has Metal 4's tensor operations."""


@dataclass(frozen=True)
class Choice:
    """An answer: true when there is a kernel.

    `code` is "ok", or the kind of reason: unsupported_bits, unsupported_group, unsupported_mode,
    unsupported_dtype, head_dim, not_divisible, out_of_range, masked, training, module, no_ptx or
    device_has_no_backend. `reason` is one sentence, empty when there is a kernel.
    """

    kernel: str | None
    code: str
    reason: str

    def __bool__(self) -> bool:
        return self.kernel is not None


TRAINING = Choice(None, "training", "kernels have no gradient; training runs the stock ops.")


def device_name() -> str:
    """The backend of MLX's default device: "cpu", "metal" or "cuda"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def target() -> str | None:
    """Whose kernels primitives run on MLX's default device; None: this build has none for it."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    found = _ext.gpu_target()
    return None if found == "cpu" else found


def linear(
    dtype: mx.Dtype,
    matrices: Sequence[Matrix],
    *,
    rows: int = ANY_ROWS,
    float32: bool = False,
    on: str | None = None,
) -> Choice:
    """Whether one primitive makes the products of `rows` rows with these matrices.

    Args:
        dtype: of the activations.
        matrices: as `spec.matrix` gives them, all with the same columns.
        float32: the results are not rounded.
        on: one of TARGETS; by default that of MLX's default device.
    """
    return _ask("linear", on, dtype, tuple(matrices), rows, float32)


def embed(dtype: mx.Dtype, table: Matrix, *, on: str | None = None) -> Choice:
    """Whether a primitive looks rows of an embedding up."""
    return _ask("embed", on, dtype, table)


def moe(
    dtype: mx.Dtype, shape: dict[str, Any], *, rows: int = ANY_ROWS, on: str | None = None
) -> Choice:
    """Whether a primitive serves an MoE block; shape: `spec.shape_of(spec.moe(block))`."""
    return _ask("moe", on, dtype, tuple(shape.items()), rows)


def gated_delta(
    dtype: mx.Dtype,
    shape: dict[str, Any],
    *,
    rows: int = ANY_ROWS,
    masked: bool = False,
    on: str | None = None,
) -> Choice:
    """Whether a primitive serves a DeltaNet mixer; shape: `spec.shape_of(spec.gated_delta(m))`."""
    dtypes = tuple(shape[name][1] for name in ("conv", "A_log", "dt_bias", "norm"))
    return _ask("gated_delta", on, dtype, _numbers(shape), dtypes, rows, masked)


def attention(
    dtype: mx.Dtype, shape: dict[str, Any], *, mask: str = "causal", on: str | None = None
) -> Choice:
    """Whether a primitive serves attention between its projections.

    Args:
        shape: `spec.shape_of(spec.attention(module))`.
        mask: "none", "causal", "bool" or "additive".
    """
    norms = {shape["q_norm"][1], shape["k_norm"][1]}
    if len(norms) > 1:
        return Choice(None, "unsupported_dtype", "q_norm and k_norm differ in dtype.")
    return _ask("attention", on, dtype, _numbers(shape), norms.pop(), mask)


def step(model: dict[str, Any], *, on: str | None = None) -> Choice:
    """Whether one primitive serves a whole model for one row; model: `spec.model(text_model)`."""
    on = on or target()
    if on is None:
        return _no_backend("the decode step")
    choice = _choice(_ext.step_kernel(on, model))
    if choice and on == "cuda" and _ext.built_with_cuda:
        needed = [p["key"] for p in _ext.step_pipelines(on, model, ptx.CAPACITIES)]
        return _compiled(choice, "the decode step", needed)
    return choice


def _numbers(shape: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple((k, v) for k, v in shape.items() if not isinstance(v, tuple))


def _ask(kind: str, on: str | None, dtype: mx.Dtype, *question: Any) -> Choice:
    on = on or target()
    return _no_backend(kind) if on is None else _answer(kind, on, dtype_name(dtype), *question)


# Layers ask at every call.
@functools.lru_cache(maxsize=4096)
def _answer(kind: str, on: str, dtype: str, what: Any, *rest: Any) -> Choice:
    if dtype not in ("bfloat16", "float16", "float32"):
        return Choice(None, "unsupported_dtype", f"dtype '{dtype}' has no kernel.")
    what = dict(what) if kind in ("moe", "gated_delta", "attention") else what
    choice = _choice(getattr(_ext, f"{kind}_kernel")(on, dtype, what, *rest))
    if choice and on == "cuda" and _ext.built_with_cuda:
        needed = {
            "linear": lambda: _ext.linear_pipelines(on, dtype, what, rest[1]),
            "embed": lambda: _ext.embed_pipelines(dtype, what),
            "moe": lambda: _ext.moe_pipelines(on, dtype, what),
            "gated_delta": lambda: _ext.gated_delta_pipelines(on, dtype),
            "attention": lambda: _ext.attention_pipelines(dtype),
        }[kind]()
        return _compiled(choice, kind, [p["key"] for p in needed])
    return choice


def _choice(answer: tuple[str, str, str]) -> Choice:
    kernel, code, reason = answer
    return Choice(kernel if code == "ok" else None, code, reason)


def _no_backend(kind: str) -> Choice:
    text = f"this build runs nothing of {kind} on device '{device_name()}'."
    return Choice(None, "device_has_no_backend", text)


def _compiled(choice: Choice, kind: str, needed: list[str]) -> Choice:
    """The choice, unless an NVIDIA GPU misses kernels, which are compiled ahead of time."""
    missing = ptx.missing(needed)
    if not missing:
        return choice
    text = f"{len(missing)} of {len(needed)} kernels of {kind} are not compiled: "
    return Choice(None, "no_ptx", ptx.refusal() or f"{text}python -m lily_mlx.ptx.")
