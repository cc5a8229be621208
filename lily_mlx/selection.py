"""Which kernel serves a module, or why none does. The table itself is in csrc/selection.cpp."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import _ext, ptx


@dataclass(frozen=True)
class Choice:
    """The answer of `query`: true when there is a kernel.

    `code` is "ok", or the kind of reason: unsupported_bits, unsupported_group, unsupported_mode,
    unsupported_dtype, head_dim, not_divisible, out_of_range, masked, training,
    no_ptx or device_has_no_backend. `reason` is one sentence, empty when there is a kernel.
    """

    kernel: str | None
    code: str
    reason: str

    def __bool__(self) -> bool:
        return self.kernel is not None


def device_name() -> str:
    """The backend of MLX's default device: "cpu", "metal" or "cuda"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def query(kind: str, *, device: str | None = None, **shape: Any) -> Choice:
    """Which kernel serves `kind` for this shape, or why none does.

    kind: "project", "moe", "gated_delta", "attention" or "decode_step".
    device: "cpu", "metal" or "cuda"; by default that of MLX's default device.
    shape: dtype (mx.Dtype or its name), bits (0 = plain weights), group, mode ("affine", "mxfp4",
    ...), columns (of the weights), rows, head_dim, key_dim, value_dim, experts, top_k, mask
    ("none", "causal", "bool", "additive"), training, heads, kv_heads, context. Where the weights of
    one module differ, give a list: every value must have a kernel.
    Raises ValueError when a field that decides is missing, or one is not known.
    """
    fields = tuple(
        (name, tuple(value) if isinstance(value, (list, set, frozenset)) else value)
        for name, value in shape.items()
    )
    if device is None:
        device = device_name()
        if not _ext.has_backend(device):
            text = f"this build runs nothing of {kind} on device '{device}'."
            return Choice(None, "device_has_no_backend", text)
    return _answer(kind, device, fields)


# Layer primitives, whose kernels an NVIDIA GPU needs as PTX; the decode step's plan checks its own.
_COMPILED_AHEAD = ("project", "moe", "gated_delta", "attention")


# Layers ask at every call.
@functools.lru_cache(maxsize=1024)
def _answer(kind: str, device: str, fields: tuple[tuple[str, Any], ...]) -> Choice:
    shape = {name: _plain(value) for name, value in fields}
    kernel, code, reason = _ext.query(kind, device, shape)
    if kernel and device == "cuda" and _ext.built_with_cuda and kind in _COMPILED_AHEAD:
        missing = ptx.missing(kind, shape)
        if missing:
            text = f"{len(missing)} kernels of {kind} are not compiled: python -m lily_mlx.ptx."
            return Choice(None, "no_ptx", ptx.refusal() or text)
    return Choice(kernel or None, code, reason)


def table() -> list[tuple[str, str, str, list[str]]]:
    """The whole table: (kind, device, kernel, rules) a row, the rules in words."""
    return _ext.selection_table()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, mx.Dtype):
        return str(value).rpartition(".")[2]
    return value
