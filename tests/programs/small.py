"""The smallest model that every decode kernel serves, and comparisons with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5_moe
from mlx_lm.utils import quantize_model

from lily_mlx import kernels
from lily_mlx.float32 import to_float32
from lily_mlx.model import Model, ModelArgs

# Largest error over the largest value: an ulp or two of the dtype, a few roundings deep.
TOLERANCE = {mx.float32: 3e-6, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}

DIMS = dict(
    hidden_size=256, num_hidden_layers=2, full_attention_interval=2, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=128, linear_value_head_dim=128, num_experts=32, num_experts_per_tok=4,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, vocab_size=301,
    max_position_embeddings=4096,
)  # fmt: skip


MIXED = {
    "embed_tokens": 6, "lm_head": 8, "in_proj_qkv": 6, "in_proj_z": 4, "out_proj": 6, "q_proj": 4,
    "k_proj": 6, "v_proj": 8, "o_proj": 6, "switch_mlp": 6, "shared_expert": 4,
}  # fmt: skip
"""Bits by a part of the path; the rest has 4."""


def format_of(bits: int | dict[str, int], group: int) -> Callable[..., bool | dict[str, int]]:
    """How a module is quantized, by its path: the gates with 8 bits, as checkpoints have them."""

    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        if path.endswith(("mlp.gate", "shared_expert_gate")):
            return {"group_size": group, "bits": 8}
        named = bits if isinstance(bits, dict) else {"": bits}
        return {"group_size": group, "bits": next((b for n, b in named.items() if n in path), 4)}

    return choose


def model(
    dtype: mx.Dtype = mx.bfloat16,
    bits: int | dict[str, int] = 4,
    seed: int = 0,
    group: int = 64,
    **dims: Any,
) -> tuple[Model, nn.Module]:
    """A random model of ours, and mlx-lm's own in float32 on the same dequantized weights."""
    config = tiny.config("moe", **{**DIMS, **dims})
    stock = tiny.stock_model(config, seed, dtype)
    if bits:
        stock, _ = quantize_model(stock, config, group, 4, quant_predicate=format_of(bits, group))
    ours = Model(ModelArgs.from_dict(config))
    twin = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    if bits:
        for m in (ours, twin):
            nn.quantize(m, group, 4, class_predicate=format_of(bits, group))
    ours.update(stock.parameters())
    twin.update(stock.parameters())
    ours.eval()
    mx.eval(ours.parameters())
    return ours, to_float32(twin)


def error(got: mx.array, expected: mx.array) -> float:
    """Largest difference over the largest value."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (got, expected))
    assert np.isfinite(a).all()
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) if a.size else 0.0


@contextlib.contextmanager
def only(*expected: str, **options: Any):
    """The Metal host; afterwards, that exactly these kernels ran and no reference."""
    kernels.reset_report()
    with kernels.metal_host(**options):
        yield
    ran = {(kind, kernel, reason) for kind, kernel, reason, _ in kernels.report()}
    assert {kernel for _, kernel, _ in ran} == set(expected), ran


def steps(ours: Model, tokens: list[int], caches: list[Any]) -> tuple[mx.array, mx.array]:
    """(logits [n, vocabulary], next tokens [n]) of decode steps fed with `tokens`."""
    from lily_mlx import decode

    out = []
    for token in tokens:
        step = decode.step(ours.language_model, mx.array([[token]]), caches)
        mx.eval(step)
        out.append(step)
    return mx.concatenate([s[1][0] for s in out]), mx.concatenate([s[0][0] for s in out])


def prefilled(ours: Model, ids: mx.array) -> list[Any]:
    """Caches after the prompt, by the reference."""
    caches = ours.make_cache()
    ours(ids[None], cache=caches)
    mx.eval([c.state for c in caches])
    return caches


def arrays(caches: list[Any], length: int) -> list[mx.array]:
    """Every cached array; keys and values cut to what is used."""
    out = []
    for c in caches:
        for _, a in tree_flatten(c.state):
            if isinstance(a, mx.array) and a.size > 1:
                out.append(a[..., :length, :] if a.ndim == 4 and hasattr(c, "offset") else a)
    mx.eval(out)
    return out
