"""Tiny random Qwen3.5 checkpoints in a folder, in every layout that is found in the wild.

The weights come from mlx-lm's own model class, so a test can compare what was loaded with what
was written. Sizes are small but legal for group sizes 32, 64 and 128.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3_5, qwen3_5_moe
from mlx_lm.utils import quantize_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 288  # 256 bytes, 3 special tokens, and ids without a token
PREFIXES = {
    "mlx": "language_model.model.",
    "hf": "model.language_model.",
    "text": "model.",
}
VISION_SPELLINGS = (
    "vision_tower.",
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "language_model.visual.",
)

_NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


def config(kind: str = "moe", **text: Any) -> dict[str, Any]:
    """A config.json for a tiny model; `text` overrides keys of text_config."""
    settings = {
        "model_type": "qwen3_5_moe_text" if kind == "moe" else "qwen3_5_text",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }
    if kind == "moe":
        del settings["intermediate_size"]
        settings |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        }
    settings |= text
    return {
        "model_type": "qwen3_5_moe" if kind == "moe" else "qwen3_5",
        "eos_token_id": 256,
        "text_config": settings,
    }


def stock_model(cfg: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32):
    """mlx-lm's model for `cfg` with random weights; norms near 1, matrices that keep signals up."""
    module = qwen3_5_moe if cfg["model_type"] == "qwen3_5_moe" else qwen3_5
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(cfg)))
    leaves = []
    for name, value in tree_flatten(model.parameters()):
        if value.ndim == 1 and "norm" in name:
            # Multiples of 1/64 survive the trip through the minus-one convention exactly.
            value = 1 + mx.random.randint(-24, 25, value.shape).astype(mx.float32) / 64
        elif name.endswith("dt_bias"):
            value = mx.random.normal(value.shape)
        elif value.ndim > 1:
            value = value * 1.5
        keep = name.endswith("A_log")  # mlx-lm's cast_predicate keeps it in float32
        leaves.append((name, value if keep else value.astype(dtype)))
    model.update(tree_unflatten(leaves))
    mx.eval(model.parameters())
    return model.eval()


def tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a chat template that has the thinking switch."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    specials = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(specials)
    tok.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": specials[0],
        "pad_token": specials[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
            "{% endif %}{% endif %}"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def rename(
    weights: dict[str, mx.array],
    prefix: str = "mlx",
    experts: str = "switch",
    hf_conventions: bool = False,
) -> dict[str, mx.array]:
    """Give a stock model's parameters the names and conventions of another writer.

    Args:
        prefix: "mlx" (language_model.model.*), "hf" (model.language_model.*, lm_head.*) or
            "text" (model.*, lm_head.*).
        experts: "switch", "each" (experts.N.gate_proj.*) or "fused" (experts.gate_up_proj).
        hf_conventions: norm weights without the 1, conv1d as [channels, 1, width].
    """
    out: dict[str, mx.array] = {}
    for name, value in weights.items():
        if hf_conventions and value.ndim == 1 and any(f"{n}.weight" in name for n in _NORMS):
            value = value - 1
        if hf_conventions and name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        if prefix != "mlx":
            name = name.replace(PREFIXES["mlx"], PREFIXES[prefix])
            name = name.replace("language_model.lm_head", "lm_head")
        if experts != "switch" and ".switch_mlp." in name:
            mlp, _, rest = name.partition(".switch_mlp.")
            if experts == "each":
                for number in range(value.shape[0]):
                    out[f"{mlp}.experts.{number}.{rest}"] = value[number]
            elif rest == "down_proj.weight":
                out[f"{mlp}.experts.down_proj"] = value
            elif rest == "gate_proj.weight":
                up = weights[f"{_original(mlp, prefix)}.switch_mlp.up_proj.weight"]
                out[f"{mlp}.experts.gate_up_proj"] = mx.concatenate([value, up], axis=1)
            continue
        out[name] = value
    return out


def _original(mlp: str, prefix: str) -> str:
    return mlp.replace(PREFIXES[prefix], PREFIXES["mlx"], 1)


def extras(
    cfg: dict[str, Any], vision: str | None = None, mtp: bool = False, prefix: str = "mlx"
) -> dict[str, mx.array]:
    """Tensors that a text model must ignore: a vision tower's, a multi-token-prediction head's."""
    out = {}
    if vision is not None:
        out[f"{vision}patch_embed.proj.weight"] = mx.random.normal((8, 3, 2, 4, 4))
        out[f"{vision}blocks.0.norm1.weight"] = mx.ones((8,))
        out[f"{vision}merger.linear_fc1.weight"] = mx.random.normal((8, 8))
    if mtp:
        hidden = cfg["text_config"]["hidden_size"]
        start = "language_model.mtp." if prefix == "mlx" else "mtp."
        out[f"{start}norm.weight"] = mx.zeros((hidden,))
        out[f"{start}layers.0.input_layernorm.weight"] = mx.zeros((hidden,))
        out[f"{start}layers.0.mlp.experts.0.gate_proj.weight"] = mx.zeros((8, hidden))
    return out


def write(folder: Path, cfg: dict[str, Any], weights: dict[str, mx.array], shards: int = 1) -> Path:
    """Write config.json, the weights (with an index when there are several files), a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg, indent=2))
    names = list(weights)
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: weights[name] for name in names[number::shards]}
            mx.save_safetensors(str(folder / file), part, {"format": "mlx"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer(folder)
    return folder


def checkpoint(
    folder: Path,
    kind: str = "moe",
    *,
    quantize: dict[str, Any] | None = None,
    predicate: Any = None,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    prefix: str = "mlx",
    experts: str = "switch",
    hf_conventions: bool = False,
    vision: str | None = None,
    mtp: bool = False,
    stored_head: bool = False,
    shards: int = 1,
    **text: Any,
) -> dict[str, mx.array]:
    """Write a tiny checkpoint and return the parameters that a right loader must end with.

    Args:
        quantize: {"bits", "group_size", "mode"} for `mlx_lm.utils.quantize_model`, or None.
        predicate: a quant_predicate(path, module) in place of the model's (8-bit gates).
        stored_head: with tie_word_embeddings, store a redundant lm_head too.
        text: overrides of text_config.
        The rest: see `rename`, `extras`, `write`.
    """
    cfg = config(kind, **text)
    model = stock_model(cfg, seed, dtype)
    if quantize is not None:
        model, cfg = quantize_model(
            model,
            cfg,
            quantize.get("group_size"),
            quantize.get("bits"),
            quantize.get("mode", "affine"),
            quant_predicate=predicate,
        )
    expected = dict(tree_flatten(model.parameters()))
    stored = rename(expected, prefix, experts, hf_conventions)
    if stored_head:
        embed = f"{PREFIXES[prefix]}embed_tokens."
        head = "language_model.lm_head." if prefix == "mlx" else "lm_head."
        stored |= {k.replace(embed, head): v for k, v in stored.items() if k.startswith(embed)}
    stored |= extras(cfg, vision, mtp, prefix)
    write(folder, cfg, stored, shards)
    return expected


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a checkpoint's config.json after `change` has altered its content in place."""
    path = folder / "config.json"
    cfg = json.loads(path.read_text())
    change(cfg)
    path.write_text(json.dumps(cfg))
