"""Full attention with an output gate."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from lily_mlx import ops, selection, spec
from lily_mlx.layers.linear import choose, project
from lily_mlx.selection import TRAINING, Choice, device_name


class Attention(Qwen3NextAttention):
    """Stock's layer with q/k norm and rotary in one primitive, attention and gate in another."""

    def refusal(self) -> Choice | None:
        """Why lily's primitives cannot stand in for this module as it is now, or None."""
        rope = self.rope
        if type(rope) is not nn.RoPE or rope.traditional or rope.scale != 1.0:
            return Choice(None, "rope", f"{type(rope).__name__} with scaling has no kernel.")
        return None

    def choice(self, dtype: mx.Dtype, mask: Any = "causal") -> Choice:
        """The kernel that serves this layer for activations of `dtype`, or why none does."""
        if self.training:
            return TRAINING
        refused = self.refusal()
        if refused is not None:
            return refused
        numbers = {k: v for k, v in spec.attention(self).items() if not isinstance(v, nn.Module)}
        return selection.attention(dtype, spec.shape_of(numbers), mask=_mask_kind(mask))

    def report(self, dtype: mx.Dtype) -> list[tuple[str, str, Choice]]:
        """(name, kind, choice) of each part of this layer."""
        projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return [("", "attention", self.choice(dtype))] + [
            (name, "project", choose(dtype, self[name])) for name in projections
        ]

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None
    ) -> mx.array:
        """x [B, T, hidden] -> [B, T, hidden]; cache: any of mlx-lm's KV caches."""
        if not self.choice(x.dtype, mask):
            return super().__call__(x, mask, cache)
        B, T, _ = x.shape
        q_gate, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, keys = ops.attention_prepare(
            q_gate, k, self.q_norm.weight, self.k_norm.weight,
            cache.offset if cache is not None else 0,
            heads=self.num_attention_heads, kv_heads=self.num_key_value_heads,
            rotary=self.rope.dims, base=self.rope.base, eps=self.q_norm.eps,
        )  # fmt: skip
        values = v.reshape(B, T, self.num_key_value_heads, -1).transpose(0, 2, 1, 3)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        if isinstance(keys, mx.array) and device_name() == "cpu":
            out = ops.attend(
                q, keys, values, q_gate,
                mask=mask if isinstance(mask, mx.array) else None,
                causal=isinstance(mask, str),
            )  # fmt: skip
        else:  # a GPU, where MLX's own kernel is the best there is; or a quantized KV cache
            out = scaled_dot_product_attention(
                q, keys, values, cache=cache, scale=self.scale, mask=mask
            )
            gate = q_gate.reshape(B, T, self.num_attention_heads, 2, -1)[..., 1, :]
            out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)
            out = out * mx.sigmoid(gate.reshape(B, T, -1))
        return project(out, self.o_proj)[0]


def _mask_kind(mask: Any) -> str:
    if mask is None:
        return "none"
    if isinstance(mask, str):
        return mask
    return "bool" if mask.dtype == mx.bool_ else "additive"
