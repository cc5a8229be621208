"""The model that the kernels are made for, as shapes alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lily_mlx.model import Model, ModelArgs


def qwen3_6_35b_a3b_config(layers: int = 40) -> dict[str, Any]:
    """The fields of Qwen3.6-35B-A3B's config.json that decide shapes, with so many layers."""
    return {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048, "num_hidden_layers": layers, "full_attention_interval": 4,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "vocab_size": 248320,
            "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
            "rope_parameters": {
                "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            },
        },
    }  # fmt: skip


def qwen3_6_35b_a3b(layers: int = 40) -> Model:
    """Qwen3.6-35B-A3B with lazy weights: 4 bits, group 64, router gates 8 bits. Allocates nothing.

    Args:
        layers: how many; every fourth is full attention.
    """
    made = Model(ModelArgs.from_dict(qwen3_6_35b_a3b_config(layers)))
    made.set_dtype(mx.bfloat16)

    def quantization(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        gate = path.endswith(("mlp.gate", "shared_expert_gate"))
        return {"group_size": 64, "bits": 8 if gate else 4}

    nn.quantize(made, 64, 4, class_predicate=quantization)
    return made
