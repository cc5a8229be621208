"""The Gated DeltaNet layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from lily_mlx import ops, selection, spec
from lily_mlx.layers.linear import choose, project
from lily_mlx.selection import ANY_ROWS, TRAINING, Choice


class GatedDeltaNet(qwen3_5.GatedDeltaNet):
    """Stock's layer with its convolution, gates, delta rule and gated norm in one primitive."""

    def refusal(self) -> Choice | None:
        """Why lily's primitives cannot stand in for this module as it is now, or None."""
        if self.sharding_group is not None:
            return Choice(None, "sharded", "a sharded layer runs the stock ops.")
        if type(self.conv1d) is not nn.Conv1d or "bias" in self.conv1d:
            return Choice(None, "module", "conv1d is no plain convolution without bias.")
        return None

    def choice(self, dtype: mx.Dtype, rows: int = ANY_ROWS, masked: bool = False) -> Choice:
        """The kernel that serves this layer for activations of `dtype`, or why none does."""
        if self.training:
            return TRAINING
        refused = self.refusal()
        if refused is not None:
            return refused
        numbers = {k: v for k, v in spec.gated_delta(self).items() if not isinstance(v, nn.Module)}
        shape = spec.shape_of(numbers)
        return selection.gated_delta(dtype, shape, rows=rows, masked=masked)

    def report(self, dtype: mx.Dtype) -> list[tuple[str, str, Choice]]:
        """(name, kind, choice) of each part of this layer."""
        projections = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
        return [("", "gated_delta", self.choice(dtype))] + [
            (name, "project", choose(dtype, self[name])) for name in projections
        ]

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        """inputs [B, T, hidden] -> the same; cache: mlx-lm's ArraysCache, mask [B, T] bool."""
        rows = inputs.shape[0] * inputs.shape[1]
        if not self.choice(inputs.dtype, rows, mask is not None):
            return super().__call__(inputs, mask, cache)
        qkv, z, b, a = project(
            inputs, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        )
        out, conv_state, state = ops.gated_delta(
            qkv, z, b, a,
            self.conv1d.weight, self.A_log.astype(mx.float32), self.dt_bias,
            self.norm.weight, self.norm.eps,
            key_heads=self.num_k_heads, value_heads=self.num_v_heads,
            key_dim=self.head_k_dim, value_dim=self.head_v_dim,
            conv_state=cache[0] if cache is not None else None,
            state=cache[1] if cache is not None else None,
            mask=mask,
            lengths=cache.lengths if cache is not None else None,
        )  # fmt: skip
        if cache is not None:
            cache[0], cache[1] = conv_state, state
            cache.advance(inputs.shape[1])
        return project(out, self.out_proj)[0]
