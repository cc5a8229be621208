"""Linear modules of mlx-lm as weights of lily's primitives."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from lily_mlx import ops, selection, spec
from lily_mlx.selection import ANY_ROWS, Choice


def refusal(*modules: nn.Module) -> Choice | None:
    """Why one of the modules is no linear layer that a kernel could read, or None."""
    for module in modules:
        refused = spec.refusal(module)
        if refused is not None:
            return Choice(None, *refused)
    return None


def choose(
    dtype: mx.Dtype, module: nn.Module, rows: int = ANY_ROWS, float32: bool = False
) -> Choice:
    """Whether lily's `project` serves this module."""
    refused = refusal(module)
    if refused is not None:
        return refused
    return selection.linear(dtype, (spec.read_matrix(module),), rows=rows, float32=float32)


def project(x: mx.array, *modules: nn.Module, float32_out: bool = False) -> list[mx.array]:
    """The modules applied to x: those that have a kernel in one primitive, the others by the stock
    op.

    Args:
        x: [..., cols].
        float32_out: the result is float32 (the stock op's is cast).

    Returns:
        For each module [..., rows], in x's dtype or in float32.
    """
    rows = x.size // x.shape[-1]
    served = [m for m in modules if choose(x.dtype, m, rows, float32_out)]
    made = {}
    if served:
        products = ops.project(x, [spec.weight_of(m) for m in served], float32_out)
        made = {id(m): y for m, y in zip(served, products, strict=True)}
    dtype = mx.float32 if float32_out else x.dtype
    return [made[id(m)] if id(m) in made else _stock(m, x).astype(dtype) for m in modules]


def _stock(module: nn.Module, x: mx.array) -> mx.array:
    return module.as_linear(x) if hasattr(module, "as_linear") else module(x)
