"""A float32 run of a quantized checkpoint: the yardstick both engines are judged against."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear


def _dequantized(module: nn.Module) -> mx.array:
    """The module's weight in float32, computed from float32 scales and biases."""
    biases = module.get("biases")
    affine = module.mode == "affine"
    return mx.dequantize(
        module.weight,
        module.scales.astype(mx.float32) if affine else module.scales,
        biases.astype(mx.float32) if biases is not None else None,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )


def _linear(module: nn.Module) -> nn.Linear:
    new = nn.Linear(1, 1, bias=False)
    new.weight = _dequantized(module)
    if "bias" in module:
        new.bias = module.bias.astype(mx.float32)
    return new


def _embedding(module: nn.Module) -> nn.Embedding:
    new = nn.Embedding(1, 1)
    new.weight = _dequantized(module)
    return new


def _switch_linear(module: nn.Module) -> SwitchLinear:
    new = SwitchLinear(1, 1, 1, bias=False)
    new.weight = _dequantized(module)
    if "bias" in module:
        new.bias = module.bias.astype(mx.float32)
    return new


_REPLACEMENTS = {
    nn.QuantizedLinear: _linear,
    nn.QuantizedEmbedding: _embedding,
    QuantizedSwitchLinear: _switch_linear,
}


def to_float32(model: nn.Module) -> nn.Module:
    """Turn a stock model into a float32 one, in place, and return it.

    Quantized linear, embedding and expert modules become float32 modules with dequantized
    weights (scale * code + bias, in float32); every other floating array is cast.

    Args:
        model: a stock mlx-lm model, quantized in any mode of MLX, or not quantized.

    Raises:
        ValueError: a quantized module of a kind this function does not know.
    """

    def convert(module: nn.Module) -> nn.Module:
        replacement = _REPLACEMENTS.get(type(module))
        if replacement is not None:
            return replacement(module)
        if "scales" in module:
            raise ValueError(
                f"No float32 form is known for a module of type {type(module).__name__}."
            )
        return module

    model.update_modules(tree_map(convert, model.leaf_modules(), is_leaf=nn.Module.is_module))
    model.update(
        tree_map(
            lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p,
            model.parameters(),
        )
    )
    model.eval()
    return model


def float32_bytes(model: nn.Module) -> int:
    """Bytes that the weights of ``model`` take once they are float32."""
    total = 0
    for _, module in model.named_modules():
        quantized = "scales" in module
        for name, value in module.items():
            if not isinstance(value, mx.array):
                continue
            if quantized and name in ("scales", "biases", "global_scale"):
                continue
            packed = quantized and name == "weight"
            total += 4 * (value.size * 32 // module.bits if packed else value.size)
    return total


def load_float32(path: str, share: nn.Module | None = None) -> nn.Module:
    """Load the stock model at ``path`` and turn it into float32.

    Args:
        path: a model folder or a Hugging Face repository.
        share: a loaded model of the same checkpoint whose arrays are the source of the
            dequantized weights, so that the file is not read again.
    """
    from lily_mlx.loading import load

    model, _ = load(path, engine="stock", lazy=True)
    if share is not None:
        share_weights(model, share)
    model = to_float32(model)
    mx.eval(model.parameters())
    return model


def share_weights(model: nn.Module, source: nn.Module) -> bool:
    """Point ``model`` at the arrays of ``source``; both must hold the same checkpoint.

    Returns:
        False, with nothing changed, when the two do not have the same parameters.
    """
    theirs = dict(tree_flatten(source.parameters()))
    ours = dict(tree_flatten(model.parameters()))
    same = theirs.keys() == ours.keys() and all(
        theirs[k].shape == ours[k].shape and theirs[k].dtype == ours[k].dtype for k in ours
    )
    if same:
        model.load_weights(list(theirs.items()))
    return same
