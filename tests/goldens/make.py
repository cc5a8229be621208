"""Makes goldens.npz: the bundled model's logits in transformers (torch, CPU, float32).

    python tests/goldens/make.py

Needs torch and transformers beside mlx-lm. The 4-bit weights are dequantized to float32, exported
to a Hugging Face checkpoint in Qwen3.5-MoE's published layout, and loaded by transformers' own
from_pretrained; so every engine can be compared on the same float32 weights. The run ends by
comparing stock mlx-lm with what it wrote, and record.json names the versions.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM
from util import BUNDLE, GOLDENS, HERE, float32_weights, largest_error, load_float32, load_goldens

TOP = 8
LAST_ROWS = 3
CONTINUED = 24  # greedy tokens appended to the chat prompt: the rows of decode steps

PASSAGE = (
    "It was now the middle of June, and the weather fine; and Mrs. Elton was growing impatient to "
    "name the day, and settle with Mr. Weston as to pigeon-pies and cold lamb, when a lame "
    "carriage-horse threw every thing into sad uncertainty. It might be weeks, it might be only a "
    "few days, before the horse were useable; but no preparations could be ventured on, and it was "
    "all melancholy stagnation. Mrs. Elton's resources were inadequate to such an attack. \n\n"
    "12 And the LORD said unto Moses, Write this for a memorial in a book, and rehearse it in the "
    "ears of Joshua: for I will utterly put out the remembrance of Amalek from under heaven."
)


def published_weights() -> dict[str, np.ndarray]:
    """The float32 weights under the names and in the layout of a published checkpoint.

    The inverse of mlx-lm's sanitize: norms around 0, [channels, 1, taps] convolutions, gate and
    up projections of all experts in one tensor.
    """
    norms = ("layernorm.weight", "language_model.model.norm.weight", "q_norm.weight")
    norms += ("k_norm.weight",)
    weights = {name: np.array(value) for name, value in float32_weights().items()}
    published = {}
    for name, value in weights.items():
        if "switch_mlp.up_proj" in name:
            continue
        target = name.replace("language_model.model.", "model.language_model.")
        target = target.replace("language_model.lm_head.", "lm_head.")
        if name.endswith(norms):
            value = value - 1.0
        elif "conv1d" in name:
            value = value.transpose(0, 2, 1)
        elif "switch_mlp.gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            value = np.concatenate([value, up], axis=1)
            target = target.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
        target = target.replace("switch_mlp.down_proj.weight", "experts.down_proj")
        published[target] = np.ascontiguousarray(value)
    return published


def oracle(folder: Path) -> Qwen3_5MoeForCausalLM:
    """transformers' model on the exported checkpoint, its plain implementations chosen."""
    config = json.loads((BUNDLE / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key)
    config["dtype"] = config["text_config"]["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(published_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    model, report = Qwen3_5MoeForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {key: value for key, value in report.items() if value}
    if wrong:
        raise RuntimeError(f"transformers did not load the exported checkpoint whole: {wrong}.")
    return model.eval()


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLE)
    chat = [{"role": "user", "content": "Tell me a story."}]
    prompts = {
        "one": tokenizer.encode("The", add_special_tokens=False)[:1],
        "short": tokenizer.encode("In the beginning God created", add_special_tokens=False),
        "passage": tokenizer.encode(PASSAGE, add_special_tokens=False),
        "chat": tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, enable_thinking=False, return_dict=False
        ),
    }
    arrays: dict[str, np.ndarray] = {"names": np.array(list(prompts))}
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        model = oracle(Path(temporary))
        for _ in range(CONTINUED):
            logits = model(torch.tensor([prompts["chat"]]), use_cache=False).logits
            prompts["chat"] = [*prompts["chat"], int(logits[0, -1].argmax())]
        for name, ids in prompts.items():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            top = logits.topk(TOP)
            arrays[f"{name}.ids"] = np.array(ids, dtype=np.int32)
            arrays[f"{name}.top_ids"] = top.indices.numpy().astype(np.int32)
            arrays[f"{name}.top_logits"] = top.values.numpy()
            arrays[f"{name}.log_sums"] = logits.logsumexp(-1).numpy()
            arrays[f"{name}.last"] = logits[-LAST_ROWS:].numpy()
    np.savez_compressed(GOLDENS, **arrays)
    stock = load_float32()
    errors = {}
    for golden in load_goldens():
        logits = np.array(stock(mx.array(golden.ids)[None])[0])
        errors[golden.name] = largest_error(golden, logits)
        rows = len(golden.ids)
        print(f"{golden.name:8s} {rows:4d} tokens, mlx-lm differs by {errors[golden.name]:.2e}")
    print(tokenizer.decode(prompts["chat"]))
    record = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "model_sha256": hashlib.sha256((BUNDLE / "model.safetensors").read_bytes()).hexdigest(),
        "tokens": {name: len(ids) for name, ids in prompts.items()},
        "mlx_lm_largest_error": errors,
        "mlx": mx.__version__,
    }
    (HERE / "record.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
