"""The sparse mixture-of-experts block."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU

from lily_mlx import _ext, ops
from lily_mlx.layers.linear import ask, weight_of
from lily_mlx.selection import Choice


class SparseMoeBlock(Qwen3NextSparseMoeBlock):
    """Stock's block in one primitive: router, top-k, experts, shared expert, combination."""

    def linears(self) -> list[nn.Module]:
        """The linear modules in the order of `MoeLayer`'s weights."""
        routed, shared = self.switch_mlp, self.shared_expert
        return [
            self.gate,
            routed.gate_proj, routed.up_proj, routed.down_proj,
            shared.gate_proj, shared.up_proj, shared.down_proj,
            self.shared_expert_gate,
        ]  # fmt: skip

    def refusal(self) -> Choice | None:
        """Why lily's primitive cannot stand in for this block as it is now, or None."""
        if self.sharding_group is not None:
            return Choice(None, "sharded", "a sharded block runs the stock ops.")
        if type(self.switch_mlp) is not SwitchGLU:
            name = type(self.switch_mlp).__name__
            return Choice(None, "module", f"{name} has no kernel; SwitchGLU has.")
        return None

    def choice(self, dtype: mx.Dtype) -> Choice:
        """The kernel that serves this block for activations of `dtype`, or why none does."""
        refused = self.refusal()
        if refused is not None:
            return refused
        return ask(
            "moe",
            *self.linears(),
            dtype=dtype,
            experts=self.num_experts,
            top_k=self.top_k,
            training=self.training,
        )

    def report(self, dtype: mx.Dtype) -> list[tuple[str, str, Choice]]:
        """(name, kind, choice) of each part of this block."""
        return [("", "moe", self.choice(dtype))]

    def layer(self) -> ops.MoeLayer:
        """The weights as the primitive takes them."""
        weights = [weight_of(m) for m in self.linears()]
        return _ext.MoeLayer(*weights, self.top_k, self.norm_topk_prob)

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., hidden] -> [..., hidden]."""
        if not self.choice(x.dtype):
            return super().__call__(x)
        return ops.moe(x, self.layer())
