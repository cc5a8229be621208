"""The bundled model on float32 weights, for comparing any engine with the goldens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import _get_classes

HERE = Path(__file__).parent
BUNDLE = HERE.parents[1] / "lily_mlx" / "bundled"
GOLDENS = HERE / "goldens.npz"

# Called with config=(config.json's content), as mlx-lm calls it; gives Model and ModelArgs.
ClassLoader = Callable[..., tuple[type[nn.Module], type]]


def float32_weights(folder: Path = BUNDLE) -> dict[str, mx.array]:
    """The checkpoint's parameters under their module paths, dequantized: scale * code + bias.

    Scales and biases go to float32 before the product, so no rounding but float32's own occurs.
    """
    config = json.loads((folder / "config.json").read_text())
    stored = mx.load(str(folder / "model.safetensors"))
    weights = {}
    for name, value in stored.items():
        path, _, kind = name.rpartition(".")
        if kind in ("scales", "biases") and f"{path}.weight" in stored:
            continue
        if f"{path}.scales" in stored:
            how = config["quantization"].get(path, config["quantization"])
            scales = stored[f"{path}.scales"].astype(mx.float32)
            biases = stored[f"{path}.biases"].astype(mx.float32)
            value = mx.dequantize(value, scales, biases, how["group_size"], how["bits"])
        weights[name] = value.astype(mx.float32)
    return weights


def load_float32(classes: ClassLoader = _get_classes, folder: Path = BUNDLE) -> nn.Module:
    """The unquantized model in float32 on the dequantized weights.

    Args:
        classes: gives Model and ModelArgs for a configuration; stock mlx-lm's by default.
        folder: a checkpoint that mlx_lm.convert wrote.
    """
    config = json.loads((folder / "config.json").read_text())
    model_class, args_class = classes(config=config)
    model = model_class(args_class.from_dict(config))
    model.load_weights(list(float32_weights(folder).items()), strict=True)
    mx.eval(model.parameters())
    return model.eval()


def load_quantized_float32(classes: ClassLoader = _get_classes, folder: Path = BUNDLE) -> nn.Module:
    """The quantized model with float32 scales, biases and activations: the same weights' values."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, lazy=True, get_model_classes=classes)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model.eval()


@dataclass(frozen=True)
class Golden:
    """One prompt's logits in transformers, float32.

    ids [rows] int32; top_ids and top_logits [rows, 8], by falling logit; log_sums [rows], the
    log of the sum of the exponentials; last [kept, vocabulary], the whole logits of the last rows.
    """

    name: str
    ids: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    log_sums: np.ndarray
    last: np.ndarray


FIELDS = ["ids", "top_ids", "top_logits", "log_sums", "last"]


def load_goldens(path: Path = GOLDENS) -> list[Golden]:
    """The committed goldens in the order in which make.py wrote them."""
    with np.load(path) as data:
        names = [str(name) for name in data["names"]]
        return [Golden(name, *(data[f"{name}.{field}"] for field in FIELDS)) for name in names]


def largest_error(golden: Golden, logits: np.ndarray) -> float:
    """The largest absolute difference between an engine's float32 logits and the golden's.

    `logits` [n, vocabulary] are the rows of the last n of the golden's ids. Compares the whole
    last rows, and of the others the top logits and the log sums.
    """
    count = len(logits)
    top_ids, top = golden.top_ids[-count:], golden.top_logits[-count:]
    errors = [np.abs(np.take_along_axis(logits, top_ids, 1) - top).max()]
    peak = logits.max(1, keepdims=True)
    sums = np.log(np.exp(logits - peak).sum(1)) + peak[:, 0]
    errors.append(np.abs(sums - golden.log_sums[-count:]).max())
    whole = min(count, len(golden.last))
    errors.append(np.abs(logits[-whole:] - golden.last[-whole:]).max())
    return float(max(errors))
