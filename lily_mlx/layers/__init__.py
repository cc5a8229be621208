"""mlx-lm's Qwen3.5 layers with lily's primitives inside; parameters and paths are stock's."""

from .attention import Attention
from .gated_delta_net import GatedDeltaNet
from .linear import project
from .moe import SparseMoeBlock
from .norm import RMSNorm

__all__ = ["Attention", "GatedDeltaNet", "RMSNorm", "SparseMoeBlock", "project"]
