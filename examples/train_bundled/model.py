"""The bundled model's shapes, and its Hugging Face checkpoint in Qwen3.5-MoE's published layout.

python model.py --work WORK      # writes WORK/checkpoint/config.json, generation_config.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

ROTARY = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def text_config() -> Qwen3_5MoeTextConfig:
    """The shapes: three Gated DeltaNet layers and one attention layer, all with 32 experts."""
    return Qwen3_5MoeTextConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        head_dim=256,
        num_attention_heads=8,
        num_key_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        num_experts=32,
        num_experts_per_tok=8,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=32768,
        rope_parameters=ROTARY,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.001,
        output_router_logits=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def checkpoint_config() -> dict:
    """config.json of a published checkpoint: the text model nested under text_config."""
    text = text_config().to_dict()
    for key in ("architectures", "transformers_version", "_name_or_path"):
        text.pop(key, None)
    for key in ("id2label", "label2id", "problem_type", "chunk_size_feed_forward", "return_dict"):
        text.pop(key, None)
    text["dtype"] = "bfloat16"
    text["full_attention_interval"] = 4
    text["attn_output_gate"] = True
    text["mamba_ssm_dtype"] = "float32"
    text["norm_topk_prob"] = True
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def published_name(name: str) -> str:
    """The parameter's name in a published checkpoint (`model.language_model.` before the text)."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def write_config(folder: Path) -> None:
    """Writes config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoint_config(), indent=2) + "\n")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True}
    generation |= {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_checkpoint(folder: Path) -> Qwen3_5MoeForCausalLM:
    """The text model in float32 on the CPU from a checkpoint in the published layout.

    Raises RuntimeError when a parameter is missing, unknown or of another shape.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    model = Qwen3_5MoeForCausalLM(text_config()).float().eval()
    names = {published_name(name): name for name in model.state_dict()}
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise RuntimeError(f"{folder} holds the unknown parameter {unknown[0]}.")
    model.load_state_dict({names[key]: value.float() for key, value in weights.items()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    write_config(parser.parse_args().work / "checkpoint")


if __name__ == "__main__":
    main()
