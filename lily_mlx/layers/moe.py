"""The sparse mixture-of-experts block."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU

from lily_mlx import _ext, ops, selection, spec
from lily_mlx.layers.linear import refusal
from lily_mlx.selection import ANY_ROWS, TRAINING, Choice


class SparseMoeBlock(Qwen3NextSparseMoeBlock):
    """Stock's block in one primitive: router, top-k, experts, shared expert, combination."""

    def refusal(self) -> Choice | None:
        """Why lily's primitive cannot stand in for this block as it is now, or None."""
        if self.sharding_group is not None:
            return Choice(None, "sharded", "a sharded block runs the stock ops.")
        if type(self.switch_mlp) is not SwitchGLU:
            name = type(self.switch_mlp).__name__
            return Choice(None, "module", f"{name} has no kernel; SwitchGLU has.")
        return None

    def choice(self, dtype: mx.Dtype, rows: int = ANY_ROWS) -> Choice:
        """The kernel that serves this block for activations of `dtype`, or why none does."""
        if self.training:
            return TRAINING
        refused = self.refusal()
        if refused is not None:
            return refused
        parts = spec.moe(self)
        refused = refusal(*spec.linears(parts))
        if refused is not None:
            return refused
        return selection.moe(dtype, spec.shape_of(parts), rows=rows)

    def report(self, dtype: mx.Dtype) -> list[tuple[str, str, Choice]]:
        """(name, kind, choice) of each part of this block."""
        return [("", "moe", self.choice(dtype))]

    def layer(self) -> ops.MoeLayer:
        """The weights as the primitive takes them."""
        weights = [spec.weight_of(m) for m in spec.linears(spec.moe(self))]
        return _ext.MoeLayer(*weights, self.top_k, self.norm_topk_prob)

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., hidden] -> [..., hidden]."""
        if not self.choice(x.dtype, x.size // x.shape[-1]):
            return super().__call__(x)
        return ops.moe(x, self.layer())
