"""Models for tests: tiny random ones of several kinds, and prompts."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import tiny
from mlx_lm.models import qwen3_5, qwen3_5_moe
from mlx_lm.utils import quantize_model

from lily_mlx.float32 import to_float32
from lily_mlx.model import Model, ModelArgs

SHAPES = {
    # One KV head for all query heads; no dim is a power of two that need not be.
    "odd": dict(
        hidden_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=48,
        linear_num_value_heads=8, linear_num_key_heads=2, linear_key_head_dim=48,
        linear_value_head_dim=20, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=32,
        shared_expert_intermediate_size=96, vocab_size=301, num_hidden_layers=6,
        full_attention_interval=3,
    ),
    "plain": {},
}  # fmt: skip


def pair(
    shape: str = "plain", dtype: mx.Dtype = mx.bfloat16, bits: int = 4, group: int = 32,
    kind: str = "moe", seed: int = 0,
) -> tuple[Model, nn.Module]:  # fmt: skip
    """A lily model, and mlx-lm's own in float32 on the same (dequantized) weights."""
    config = tiny.config(kind, **SHAPES[shape])
    stock = tiny.stock_model(config, seed, dtype)
    if bits:
        stock, _ = quantize_model(stock, config, group, bits, quant_predicate=lambda *_: True)
    ours = Model(ModelArgs.from_dict(config))
    if bits:
        nn.quantize(ours, group, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    ours.update(stock.parameters())
    ours.eval()
    mx.eval(ours.parameters())
    twin_class = qwen3_5_moe if kind == "moe" else qwen3_5
    twin = twin_class.Model(twin_class.ModelArgs.from_dict(config))
    if bits:
        nn.quantize(twin, group, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    twin.update(stock.parameters())
    return ours, to_float32(twin)


def prompt(model: nn.Module, length: int, seed: int = 0, batch: int = 1) -> mx.array:
    """Token ids [batch, length]."""
    mx.random.seed(seed)
    vocabulary = model.language_model.args.vocab_size
    ids = mx.random.randint(0, vocabulary, (batch, length))
    mx.eval(ids)
    return ids
