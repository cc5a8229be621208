"""The layers of a prefill chunk on a GPU, and their parts, each by itself."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lily_mlx import ops
from lily_mlx.layers import project


def served(model: nn.Module) -> list[str]:
    """What serves each kind of layer: a line a module, a kernel's name or the reason for none."""
    out = []
    for part, name in ((model.layers[0], "linear_attn"), (model.layers[3], "self_attn"),
                       (model.layers[0], "mlp")):  # fmt: skip
        for at, kind, choice in part[name].report(mx.bfloat16):
            out.append(f"{name}.{at} {kind}: {choice.kernel or choice.reason}")
    return out


def layer_times(model: nn.Module, rows: int, repeat: int = 8) -> dict[str, float]:
    """Milliseconds of each kind of layer, and of its parts, for a chunk of `rows` from no cache."""
    delta, attention = model.layers[0], model.layers[3]
    hidden = model.language_model.args.hidden_size
    x = mx.random.normal((1, rows, hidden)).astype(mx.bfloat16)
    mixer, parts = delta.linear_attn, {}
    in_proj = [mixer[f"in_proj_{name}"] for name in ("qkv", "z", "b", "a")]
    qkv, z, b, a = project(x, *in_proj)
    mixed = mx.random.normal(z.shape).astype(mx.bfloat16)
    mx.eval(x, qkv, z, b, a, mixed)

    def scan() -> mx.array:
        return ops.gated_delta(
            qkv, z, b, a, mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight, 1e-6,
            key_heads=mixer.num_k_heads, value_heads=mixer.num_v_heads,
            key_dim=mixer.head_k_dim, value_dim=mixer.head_v_dim)[0]  # fmt: skip

    calls: dict[str, Any] = {
        "linear_attn": lambda: mixer(x),
        "  in projections": lambda: project(x, *in_proj)[0],
        "  scan": scan,
        "  out projection": lambda: project(mixed, mixer.out_proj)[0],
        "self_attn": lambda: attention.self_attn(x, mask="causal"),
        "mlp": lambda: delta.mlp(x),
        "norm": lambda: delta.input_layernorm(x),
    }
    for name, call in calls.items():
        for _ in range(2):  # the first warms up
            mx.synchronize()
            start = time.perf_counter()
            mx.eval([call() for _ in range(repeat)])
            mx.synchronize()
            parts[name] = (time.perf_counter() - start) / repeat * 1e3
    return parts
