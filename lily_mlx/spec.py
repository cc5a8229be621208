"""The one walk over a text model's modules: what it is made of, as kernels see it.

A description is a dict of the fields that csrc/spec.h names: embedding, norm, head, dtype, eps and
layers; a layer has input_norm, post_norm, moe and either delta or attention. Its matrices are
modules in `parts`, tuples in `model`, and `Weight`s in `weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from lily_mlx import _ext

_QUANTIZED = {nn.QuantizedLinear, QuantizedSwitchLinear, nn.QuantizedEmbedding}
_LINEAR = _QUANTIZED | {nn.Linear, SwitchLinear, nn.Embedding}

Matrix = tuple[Any, ...]
"""(rows, columns, bits, group size, experts, mode, dtype of scales or plain elements); bits 0 means
plain elements. A mode whose scales are no floats leaves the dtype out."""


_NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}


# Layers ask what follows at every call, so parameters are read as the dict entries that they are.
def dtype_name(dtype: mx.Dtype) -> str:
    """The dtype as kernels' choices spell it, e.g. "bfloat16"."""
    return _NAMES.get(dtype) or str(dtype).rpartition(".")[2]


def refusal(module: nn.Module) -> tuple[str, str] | None:
    """Why a module is no linear layer that a kernel could read: (code, reason), or None."""
    kind = type(module)
    if kind not in _LINEAR:
        return "module", f"{kind.__name__} has no kernel; plain linear modules have."
    if "bias" in module:
        return "bias", f"{kind.__name__} has a bias, which has no kernel."
    if module.get("global_scale") is not None:
        return "unsupported_mode", f"{kind.__name__} has a global scale."
    biases = module.get("biases")
    if biases is not None and biases.dtype != module["scales"].dtype:
        found = dtype_name(module["scales"].dtype), dtype_name(biases.dtype)
        text = f"{kind.__name__} has scales of {found[0]}, biases of {found[1]}"
        return "unsupported_dtype", f"{text}; kernels read one dtype."
    return None


def matrix(module: nn.Module) -> Matrix:
    """A linear module's shape and format.

    Raises:
        ValueError: a module that no kernel can read.
    """
    refused = refusal(module)
    if refused is not None:
        raise ValueError(refused[1])
    return read_matrix(module)


def read_matrix(module: nn.Module) -> Matrix:
    """`matrix` of a module that `refusal` has nothing against."""
    weight = module["weight"]
    *experts, rows, columns = weight.shape
    count = experts[0] if experts else 1
    if type(module) not in _QUANTIZED:
        return rows, columns, 0, 0, count, "affine", dtype_name(weight.dtype)
    bits = module.bits
    found = rows, columns * 32 // bits, bits, module.group_size, count, module.mode
    return (*found, dtype_name(module["scales"].dtype)) if module.mode == "affine" else found


def weight_of(module: nn.Module) -> _ext.Weight:
    """A linear module's arrays, shared."""
    weight = module["weight"]
    if type(module) in _QUANTIZED:
        scales, biases = module["scales"], module["biases"]
        return _ext.Weight(weight, scales, biases, module.bits, module.group_size)
    return _ext.Weight(weight)


def gated_delta(m: nn.Module) -> dict[str, Any]:
    """A GatedDeltaNet's parts; A_log is float32, as the gates are."""
    return {
        "qkv": m.in_proj_qkv, "z": m.in_proj_z, "b": m.in_proj_b, "a": m.in_proj_a,
        "out": m.out_proj, "conv": m.conv1d.weight, "A_log": m.A_log.astype(mx.float32),
        "dt_bias": m.dt_bias, "norm": m.norm.weight,
        "key_heads": m.num_k_heads, "value_heads": m.num_v_heads,
        "key_dim": m.head_k_dim, "value_dim": m.head_v_dim,
        "conv_width": m.conv1d.weight.shape[1], "eps": m.norm.eps,
    }  # fmt: skip


def attention(m: nn.Module) -> dict[str, Any]:
    """An Attention's parts."""
    return {
        "q": m.q_proj, "k": m.k_proj, "v": m.v_proj, "out": m.o_proj,
        "q_norm": m.q_norm.weight, "k_norm": m.k_norm.weight,
        "heads": m.num_attention_heads, "kv_heads": m.num_key_value_heads,
        "head_dim": m.head_dim, "rotary": m.rope.dims, "base": m.rope.base, "eps": m.q_norm.eps,
    }  # fmt: skip


def moe(m: nn.Module) -> dict[str, Any]:
    """A SparseMoeBlock's parts."""
    routed, shared = m.switch_mlp, m.shared_expert
    return {
        "router": m.gate,
        "gate": routed.gate_proj, "up": routed.up_proj, "down": routed.down_proj,
        "shared_gate": shared.gate_proj, "shared_up": shared.up_proj,
        "shared_down": shared.down_proj, "shared_router": m.shared_expert_gate,
        "top_k": m.top_k, "normalize": bool(m.norm_topk_prob),
    }  # fmt: skip


def activation_dtype(text_model: nn.Module) -> mx.Dtype:
    """The dtype of the residual stream: the norms', since scales may be packed in some modes."""
    return text_model.model.norm.weight.dtype


def parts(text_model: nn.Module) -> dict[str, Any]:
    """A text model's modules, arrays and numbers by the fields of its description.

    Raises:
        ValueError: a dense MLP, which a description has no place for.
    """
    model = text_model.model
    layers = []
    for i, layer in enumerate(model.layers):
        if not hasattr(layer.mlp, "switch_mlp"):
            raise ValueError(f"layer {i} has a dense MLP; the decode step is made for experts.")
        mixer = (
            {"delta": gated_delta(layer.linear_attn)}
            if layer.is_linear
            else {"attention": attention(layer.self_attn)}
        )
        layers.append(
            {
                "input_norm": layer.input_layernorm.weight,
                "post_norm": layer.post_attention_layernorm.weight,
                **mixer,
                "moe": moe(layer.mlp),
            }
        )
    return {
        "dtype": dtype_name(activation_dtype(text_model)),
        "embedding": model.embed_tokens,
        "norm": model.norm.weight,
        "head": text_model.head(),
        "eps": text_model.args.rms_norm_eps,
        "layers": layers,
    }


def linears(part: dict[str, Any]) -> list[nn.Module]:
    """The linear modules of a layer's part."""
    return [m for m in part.values() if isinstance(m, nn.Module)]


def shape_of(part: Any) -> Any:
    """A part with modules and arrays replaced by their shapes; evaluates nothing."""
    return _replaced(part, matrix, lambda a: (a.size, dtype_name(a.dtype)))


def model(text_model: nn.Module) -> dict[str, Any]:
    """The shapes and formats that a text model's Programs depend on; evaluates nothing.

    Raises:
        ValueError: a module that no kernel can read, or a model without experts.
    """
    return shape_of(parts(text_model))


def weights(text_model: nn.Module) -> dict[str, Any]:
    """The weights that a decode step runs with."""
    return _replaced(parts(text_model), weight_of, lambda a: a)


def _replaced(
    value: Any, module: Callable[[nn.Module], Any], array: Callable[[mx.array], Any]
) -> Any:
    if isinstance(value, nn.Module):
        return module(value)
    if isinstance(value, mx.array):
        return array(value)
    if isinstance(value, dict):
        return {k: _replaced(v, module, array) for k, v in value.items()}
    if isinstance(value, list):
        return [_replaced(v, module, array) for v in value]
    return value
