"""RMS norm, rounded once."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from lily_mlx import ops
from lily_mlx.selection import device_name


class RMSNorm(nn.RMSNorm):
    """mlx.nn.RMSNorm; on the CPU lily's primitive, which rounds once where stock rounds twice."""

    def __call__(self, x: mx.array) -> mx.array:
        """x, weight: [..., dim], [dim] -> [..., dim]."""
        if self.training or device_name() != "cpu":
            return super().__call__(x)
        return ops.rms_norm(x, self.weight, self.eps)
