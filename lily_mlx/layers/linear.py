"""Linear modules of mlx-lm as weights of lily's primitives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from lily_mlx import _ext, ops
from lily_mlx.selection import Choice, query

_QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear, nn.QuantizedEmbedding)
_PLAIN = (nn.Linear, SwitchLinear, nn.Embedding)
LINEAR = _QUANTIZED + _PLAIN


def refusal(*modules: nn.Module) -> Choice | None:
    """Why a module is no plain linear layer, or None."""
    for module in modules:
        name = type(module).__name__
        if type(module) not in LINEAR:
            return Choice(None, "module", f"{name} has no kernel; plain linear modules have.")
        if "bias" in module:
            return Choice(None, "bias", f"{name} has a bias, which has no kernel.")
        if module.get("global_scale") is not None:
            return Choice(None, "unsupported_mode", f"{name} has a global scale.")
    return None


def describe(*modules: nn.Module) -> dict[str, list[Any]]:
    """The fields of a `selection.query` that describe these modules' weights."""
    fields: dict[str, set[Any]] = {"bits": set(), "group": set(), "mode": set(), "columns": set()}
    for module in modules:
        columns = module.weight.shape[-1]
        if type(module) in _QUANTIZED:
            fields["bits"].add(module.bits)
            fields["group"].add(module.group_size)
            fields["mode"].add(module.mode)
            fields["columns"].add(columns * 32 // module.bits)
        else:
            fields["bits"].add(0)
            fields["columns"].add(columns)
    return {name: sorted(values) for name, values in fields.items() if values}


def ask(kind: str, *modules: nn.Module, **fields: Any) -> Choice:
    """`selection.query` for a kind that takes these modules' weights."""
    refused = refusal(*modules)
    return query(kind, **fields, **describe(*modules)) if refused is None else refused


def weight_of(module: nn.Module) -> ops.Weight:
    """The module's arrays, shared, as a `Weight`."""
    if type(module) in _QUANTIZED:
        return _ext.Weight(
            module.weight, module.scales, module.biases, module.bits, module.group_size
        )
    return _ext.Weight(module.weight)


def choose(dtype: mx.Dtype, *modules: nn.Module) -> Choice:
    """Whether lily's `project` serves these modules."""
    return ask("project", *modules, dtype=dtype)


def project(x: mx.array, *modules: nn.Module, float32_out: bool = False) -> list[mx.array]:
    """The modules applied to x: in one primitive, or one by one with the stock op.

    Args:
        x: [..., cols].
        float32_out: the result is float32 (the stock op's is cast).
    """
    if choose(x.dtype, *modules):
        return ops.project(x, [weight_of(m) for m in modules], float32_out)
    out = [m.as_linear(x) if hasattr(m, "as_linear") else m(x) for m in modules]
    return [y.astype(mx.float32) for y in out] if float32_out else out
