"""Bad input gets one sentence that names the value and the way out, and changes no file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
from tiny import edit_config

from lily_mlx.checkpoint import InputError
from lily_mlx.loading import load, load_model

AFFINE = {"bits": 4, "group_size": 64}


def contents(folder):
    return {
        str(path.relative_to(folder)): (
            os.readlink(path)
            if path.is_symlink()
            else hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def refused(folder, *words, error=InputError, **arguments):
    """Loading `folder` fails with one sentence that has all the words; no file changes."""
    before = contents(folder)
    with pytest.raises(error) as caught:
        load(str(folder), **arguments)
    assert contents(folder) == before
    text = str(caught.value)
    assert "\n" not in text and text.endswith((".", "?")), text
    for word in words:
        assert word in text, text


def edit_weights(folder, change, file="model.safetensors"):
    weights = dict(mx.load(str(folder / file)))
    mx.eval(weights)
    change(weights)
    (folder / file).unlink()
    mx.save_safetensors(str(folder / file), weights)


@pytest.fixture
def moe(tmp_path):
    tiny.checkpoint(tmp_path)
    return tmp_path


@pytest.fixture
def quantised(tmp_path):
    tiny.checkpoint(tmp_path, quantize=AFFINE)
    return tmp_path


# --- folders and config.json ----------------------------------------------------------------


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist; give a model folder"):
        load(str(tmp_path / "absent"))


def test_a_repository_that_cannot_be_fetched():
    """Offline, in a process of its own: huggingface_hub reads the switch when imported."""
    code = (
        "from lily_mlx.loading import MissingFileError, find_model\n"
        "try:\n    find_model('no-one/no-such-model')\n"
        "except MissingFileError as error:\n    print(error)\n"
    )
    root = Path(__file__).resolve().parent.parent
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "no-one/no-such-model is no folder here and could not be fetched" in out
    assert out.count("\n") == 1


def test_a_file_in_place_of_a_folder(moe):
    with pytest.raises(InputError, match="is a file; give the folder"):
        load(str(moe / "model.safetensors"))


def test_no_config(moe):
    (moe / "config.json").unlink()
    refused(moe, "has no config.json", error=FileNotFoundError)


@pytest.mark.parametrize(
    "content,word",
    [
        ('{"model_type": "qwen3_5_moe",\n "text_config": {', "line 2, column 18"),
        ("", "line 1, column 1"),
        ("[1, 2]", "must hold a JSON object"),
        (b'{"model_type": "\xff\xfe"}', "not UTF-8"),
    ],
)
def test_malformed_config(moe, content, word):
    (moe / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(moe, str(moe / "config.json"), word)


def test_no_model_type(moe):
    edit_config(moe, lambda cfg: cfg.pop("model_type"))
    refused(moe, "config.json has no model_type", "qwen3_5_moe")


def test_another_model_type(moe):
    edit_config(moe, lambda cfg: cfg.update(model_type="llama"))
    refused(moe, "'llama'", "qwen3_5, qwen3_5_moe", 'engine="stock"')


MOE_KEYS = [
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
]


@pytest.mark.parametrize("key", MOE_KEYS)
def test_missing_keys(moe, key):
    edit_config(moe, lambda cfg: cfg["text_config"].pop(key))
    refused(moe, f"config.json has no text_config.{key}", "qwen3_5_moe model needs")


def test_missing_keys_of_a_flat_dense_config(tmp_path):
    tiny.checkpoint(tmp_path, "dense")

    def flatten(cfg):
        text = cfg.pop("text_config")
        cfg.update({**text, "model_type": "qwen3_5"})
        del cfg["intermediate_size"]

    edit_config(tmp_path, flatten)
    refused(tmp_path, "config.json has no intermediate_size,")


@pytest.mark.parametrize("change", ["drop", "old style", "no theta"])
def test_missing_rope_theta(moe, change):
    """mlx-lm would run such a model with another base frequency, without a word."""

    def edit(cfg):
        rope = cfg["text_config"].pop("rope_parameters")
        if change == "old style":
            cfg["text_config"]["rope_theta"] = rope["rope_theta"]
        if change == "no theta":
            del rope["rope_theta"]
            cfg["text_config"]["rope_parameters"] = rope

    edit_config(moe, edit)
    refused(moe, "text_config.rope_parameters.rope_theta")


@pytest.mark.parametrize(
    "values,words",
    [
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok = 0", "positive"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "num_experts = 8"]),
        ({"num_experts": "eight"}, ["num_experts = 'eight'", "positive"]),
        ({"hidden_size": 128.0}, ["hidden_size = 128.0"]),
        ({"vocab_size": -1}, ["vocab_size = -1"]),
        ({"head_dim": 0}, ["head_dim = 0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4", "num_key_value_heads = 3"]),
        ({"linear_num_key_heads": 3}, ["linear_num_value_heads = 4", "linear_num_key_heads = 3"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ({"layer_types": ["full_attention"] * 4}, ["layer_types", "full_attention_interval"]),
    ],
    ids=lambda v: str(next(iter(v))),
)
def test_impossible_values(moe, values, words):
    edit_config(moe, lambda cfg: cfg["text_config"].update(values))
    refused(moe, "config.json: text_config.", *words)


def test_layer_types_of_transformers_are_accepted(moe):
    types = ["linear_attention"] * 3 + ["full_attention"]
    edit_config(moe, lambda cfg: cfg["text_config"].update(layer_types=types))
    load(str(moe))


def test_text_config_that_is_no_object(moe):
    edit_config(moe, lambda cfg: cfg.update(text_config=[1]))
    refused(moe, "text_config must be an object", "[1]")


def test_overrides_are_checked_too(moe):
    text = {**json.loads((moe / "config.json").read_text())["text_config"], "num_experts": 0}
    refused(moe, "num_experts = 0", model_config={"text_config": text})


def test_foreign_model_code(moe):
    edit_config(moe, lambda cfg: cfg.update(model_file="theirs.py"))
    (moe / "theirs.py").write_text("raise SystemExit('was run')")
    refused(moe, "'theirs.py'", 'engine="stock"', trust_remote_code=True)


def test_no_tokenizer(moe):
    """With its settings alone, transformers would make a tokenizer without a vocabulary."""
    (moe / "tokenizer.json").unlink()
    refused(moe, "has no tokenizer", error=FileNotFoundError)


def test_malformed_tokenizer_config(moe):
    path = moe / "tokenizer_config.json"
    path.write_text(path.read_text()[:40])
    refused(moe, f"{path} is not valid JSON")


@pytest.fixture
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text("{}")
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"x": mx.ones((64,))})
    return folder


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_without_a_file(moe, adapter, name):
    (adapter / name).unlink()
    refused(moe, f"has no {name}", error=FileNotFoundError, adapter_path=str(adapter))


def test_a_truncated_adapter(moe, adapter):
    path = adapter / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(moe, f"{path} is cut off", adapter_path=str(adapter))


# --- quantization settings ------------------------------------------------------------------

GATE = "language_model.model.layers.1.mlp.gate"


@pytest.mark.parametrize(
    "change,words",
    [
        ({"mode": "int4"}, ["quantization.mode = 'int4'", "affine, mxfp4, mxfp8, nvfp4"]),
        ({"bits": 7}, ["quantization.bits = 7", "allowed"]),
        ({"group_size": 48}, ["quantization.group_size = 48", "32, 64, 128"]),
        ({"mode": "mxfp4"}, ["quantization.group_size = 64", "'mxfp4'", "32"]),
        ({GATE: {"bits": 8}}, [GATE, "has no group_size"]),
        ({GATE: {"bits": 8, "group_size": 64, "mode": "q8"}}, [GATE, "mode = 'q8'"]),
        ({GATE: {"bits": 8, "group_size": 64, "zero": 1}}, [GATE, "unknown key 'zero'"]),
        ({GATE: 8}, [GATE, "= 8 must be true, false or an object"]),
    ],
    ids=["mode", "bits", "group", "mode-group", "entry", "entry-mode", "entry-key", "entry-type"],
)
def test_unknown_quantization(quantised, change, words):
    edit_config(quantised, lambda cfg: cfg["quantization"].update(change))
    refused(quantised, "config.json", *words)


@pytest.mark.parametrize("key", ["bits", "group_size"])
def test_quantization_without_a_key(quantised, key):
    edit_config(quantised, lambda cfg: cfg["quantization"].pop(key))
    refused(quantised, f"quantization has no {key}")


def test_quantization_that_is_no_object(quantised):
    edit_config(quantised, lambda cfg: cfg.update(quantization="4bit"))
    refused(quantised, "quantization must be an object", "'4bit'")


def test_unknown_quant_method(moe):
    setting = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_config(moe, lambda cfg: cfg.update(quantization_config=setting))
    refused(moe, "quant_method = 'bitsandbytes'", "mlx_lm.convert")


def test_quantization_config_without_a_method(quantised):
    edit_config(quantised, lambda cfg: cfg.pop("quantization"))
    refused(quantised, "without quant_method")


def test_quantised_weights_without_a_setting(quantised):
    def edit(cfg):
        del cfg["quantization"], cfg["quantization_config"]

    edit_config(quantised, edit)
    refused(quantised, "scales", "config.json has no 'quantization'")


@pytest.mark.parametrize(
    "entry,words",
    [
        ({"bits": 4, "group_size": 64}, ["4 bits, group size 64", "8 bits, group size 64"]),
        ({"bits": 8, "group_size": 32}, ["8 bits, group size 32", "8 bits, group size 64"]),
        ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, ["mode mxfp8", "mode affine"]),
        (True, ["4 bits, group size 64", "8 bits, group size 64"]),
        (False, ["= false", "packed with 8 bits"]),
    ],
    ids=["bits", "group", "mode", "true", "false"],
)
def test_an_entry_that_contradicts_the_tensor(quantised, entry, words):
    """An 8-bit router gate must never be decoded as 4-bit: it would pick other experts."""
    edit_config(quantised, lambda cfg: cfg["quantization"].update({GATE: entry}))
    refused(quantised, GATE, "model.safetensors", *words)


def test_an_entry_for_a_tensor_that_is_not_quantised(tmp_path):
    tiny.checkpoint(
        tmp_path,
        quantize=AFFINE,
        predicate=lambda path, module: not path.endswith("mlp.gate"),
    )
    edit_config(tmp_path, lambda cfg: cfg["quantization"].update({GATE: AFFINE}))
    refused(tmp_path, GATE, "without scales")


# --- weight files ---------------------------------------------------------------------------


def test_no_weights(moe):
    (moe / "model.safetensors").unlink()
    refused(moe, str(moe), "holds no weights", error=FileNotFoundError)


def test_a_shard_is_missing(tmp_path):
    tiny.checkpoint(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors", "is missing", error=FileNotFoundError)


def test_an_absent_file_that_nobody_needs(tmp_path):
    """A file of mtp and vision tensors, and an index from before a conversion."""
    tiny.checkpoint(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["mtp.norm.weight"] = "mtp.safetensors"
    index["weight_map"]["model.visual.pos_embed.weight"] = "visual.safetensors"
    gate_up = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    index["weight_map"][gate_up] = "model.safetensors-00001-of-00026.safetensors"
    path.write_text(json.dumps(index))
    load(str(tmp_path))


def test_a_damaged_index(tmp_path):
    tiny.checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused(tmp_path, "model.safetensors.index.json is not valid JSON")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "has no 'weight_map'")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_weights(moe, keep):
    """Cut in the length, in the header, in the data, at the last byte."""
    path = moe / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)] if isinstance(keep, float) else data[:keep])
    word = "not a safetensors file" if keep in (0, 4, 8) else "is cut off"
    refused(moe, str(path), word, "download it again")


def test_weights_longer_than_the_header_says(moe):
    path = moe / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"tail")
    refused(moe, str(path), "does not match its header")


@pytest.mark.parametrize(
    "content,word",
    [
        (b"<!DOCTYPE html><html><body>404 not found</body></html>" * 9, "not a safetensors file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "Git LFS pointer",
        ),
        (struct.pack("<Q", 8) + b'{"a": 1}', "damaged header at tensor 'a'"),
        (struct.pack("<Q", 8) + b"not json", "not a safetensors file"),
    ],
    ids=["html", "lfs", "entry", "json"],
)
def test_other_content_in_place_of_weights(moe, content, word):
    (moe / "model.safetensors").write_bytes(content)
    refused(moe, str(moe / "model.safetensors"), word)


@pytest.mark.parametrize(
    "change,word",
    [
        ({"data_offsets": [0, 3]}, "needs 4 bytes, but 3 are given"),
        ({"shape": [-1]}, "damaged header at tensor 't'"),
        ({"data_offsets": [4, 0]}, "damaged header at tensor 't'"),
        ({"data_offsets": [8, 12]}, "is cut off"),
        ({"dtype": "F4"}, "stores tensor 't' as F4"),
    ],
    ids=["length", "shape", "order", "beyond", "dtype"],
)
def test_a_header_that_contradicts_itself(moe, change, word):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **change}
    header = json.dumps({"t": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (moe / "model.safetensors").write_bytes(content)
    refused(moe, str(moe / "model.safetensors"), word)


def test_a_tensor_in_two_files(moe):
    """mlx-lm takes whichever file the directory lists last."""
    extra = moe / "model-old.safetensors"
    mx.save_safetensors(str(extra), {"language_model.model.norm.weight": mx.ones((128,))})
    refused(moe, "twice", "model.safetensors", "model-old.safetensors", "norm.weight")


# --- tensors --------------------------------------------------------------------------------

NORM = "language_model.model.layers.0.input_layernorm.weight"
QKV = "language_model.model.layers.0.linear_attn.in_proj_qkv"


def test_a_missing_tensor(moe):
    edit_weights(moe, lambda w: w.pop(NORM))
    refused(moe, NORM, "is not in model.safetensors", "num_hidden_layers = 4")


def test_fewer_layers_in_the_config_than_in_the_file(moe):
    edit_config(moe, lambda cfg: cfg["text_config"].update(num_hidden_layers=3))
    refused(moe, "layers.3.", "in model.safetensors", "has no place", "num_hidden_layers = 3")


def test_more_layers_in_the_config_than_in_the_file(moe):
    edit_config(moe, lambda cfg: cfg["text_config"].update(num_hidden_layers=5))
    refused(moe, "layers.4.", "is not in model.safetensors", "num_hidden_layers = 5")


def test_an_unexpected_tensor(moe):
    edit_weights(moe, lambda w: w.update({"language_model.model.extra.weight": mx.ones((2,))}))
    refused(moe, "language_model.model.extra.weight", "in model.safetensors", "has no place")


def test_no_head_although_untied(moe):
    edit_weights(moe, lambda w: w.pop("language_model.lm_head.weight"))
    refused(moe, "language_model.lm_head.weight", "tie_word_embeddings")


@pytest.mark.parametrize(
    "key,value,words",
    [
        ("vocab_size", 300, ["vocab_size = 300", "(288, 128)", "(300, 128)"]),
        ("moe_intermediate_size", 64, ["switch_mlp", "moe_intermediate_size = 64"]),
        ("head_dim", 16, ["self_attn", "head_dim = 16"]),
        ("linear_num_value_heads", 6, ["linear_attn", "linear_num_value_heads = 6"]),
    ],
)
def test_a_config_of_another_size(moe, key, value, words):
    edit_config(moe, lambda cfg: cfg["text_config"].update({key: value}))
    refused(moe, "in model.safetensors has shape", *words)


@pytest.mark.parametrize(
    "key,value",
    [("vocab_size", 300), ("hidden_size", 256), ("hidden_size", 96), ("num_experts", 4)],
)
def test_a_config_of_another_size_quantised(quantised, key, value):
    edit_config(quantised, lambda cfg: cfg["text_config"].update({key: value}))
    refused(quantised, "in model.safetensors", f"{key} = {value}")


def test_a_wrong_shape(moe):
    edit_weights(moe, lambda w: w.update({NORM: mx.ones((64,))}))
    refused(moe, NORM, "in model.safetensors", "(64,)", "hidden_size = 128")


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int32, mx.uint32])
def test_a_matrix_of_whole_numbers(moe, dtype):
    """float8 tensors are read as uint8: the bytes would pass for values."""
    name = f"{QKV}.weight"
    edit_weights(moe, lambda w: w.update({name: mx.ones(w[name].shape, dtype)}))
    refused(moe, name, str(dtype).removeprefix("mlx.core."), "floating-point")


@pytest.mark.parametrize("leaf", ["scales", "biases"])
def test_scales_or_biases_missing(quantised, leaf):
    edit_weights(quantised, lambda w: w.pop(f"{QKV}.{leaf}"))
    refused(quantised, QKV)


@pytest.mark.parametrize(
    "leaf,change,word",
    [
        ("scales", lambda a: a[:, :1], "quantis"),
        ("scales", lambda a: a[:64], "before the packed axis"),
        ("scales", lambda a: a.astype(mx.int32), "floating-point"),
        ("scales", lambda a: a.astype(mx.uint8), "have no biases"),
        ("biases", lambda a: a[:, :1], "but the scales have"),
        ("biases", lambda a: a.astype(mx.int32), "floating-point"),
        ("weight", lambda a: a[:, :10], "no packing of 128 columns"),
        ("weight", lambda a: a[:64], "before the packed axis"),
        ("weight", lambda a: a.astype(mx.int32), "must be uint32"),
    ],
    ids=["group", "rows", "int", "mode", "bias", "bias-int", "codes", "codes-rows", "codes-int"],
)
def test_packed_tensors_that_do_not_fit(quantised, leaf, change, word):
    name = f"{QKV}.{leaf}"

    def edit(weights):
        weights[name] = change(weights[name])
        if word == "quantis":  # a legal packing, but not the one that an entry states
            weights[f"{QKV}.biases"] = change(weights[f"{QKV}.biases"])

    edit_weights(quantised, edit)
    if word == "quantis":
        edit_config(quantised, lambda cfg: cfg["quantization"].update({QKV: AFFINE}))
        word = "packed with 4 bits, group size 128"
    refused(quantised, QKV, word)


# --- experts in single tensors --------------------------------------------------------------

EXPERT = "model.language_model.layers.2.mlp.experts.{}.up_proj.{}"


@pytest.fixture
def experts(tmp_path):
    tiny.checkpoint(tmp_path, quantize=AFFINE, experts="each", prefix="hf")
    return tmp_path


def test_a_missing_expert(experts):
    edit_weights(experts, lambda w: w.pop(EXPERT.format(5, "weight")))
    refused(experts, "layers.2.mlp.experts.5.up_proj.weight is missing", "num_experts = 8")


def test_more_experts_than_the_config_says(experts):
    edit_config(experts, lambda cfg: cfg["text_config"].update(num_experts=6))
    refused(experts, "experts.6.", "num_experts = 6")


@pytest.mark.parametrize("leaf", ["weight", "scales"])
def test_experts_packed_differently(experts, leaf):
    name = EXPERT.format(3, leaf)

    def edit(weights):
        weights[name] = mx.concatenate([weights[name]] * 2, axis=1)

    edit_weights(experts, edit)
    refused(experts, "experts.3.up_proj", "while expert 0 has", "convert the model again")


def test_awq_experts(experts):
    def edit(weights):
        for number in range(8):
            weights[EXPERT.format(number, "qweight")] = weights.pop(EXPERT.format(number, "weight"))

    edit_weights(experts, edit)
    refused(experts, "AWQ/GPTQ", "mlx_lm.convert")


def test_half_of_a_fused_pair(tmp_path):
    tiny.checkpoint(tmp_path, experts="fused", prefix="hf")
    edit_weights(tmp_path, lambda w: w.pop("model.language_model.layers.1.mlp.experts.down_proj"))
    refused(tmp_path, "layers.1.mlp.experts.gate_up_proj has no", "down_proj")


# --- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        f"{QKV}.scales",
        "language_model.model.layers.3.mlp.switch_mlp.down_proj.biases",
        "language_model.model.norm.weight",
        "language_model.model.layers.0.linear_attn.A_log",
    ],
)
def test_nan_and_infinity(quantised, name, value):
    def edit(weights):
        flat = np.array(weights[name].astype(mx.float32))
        flat.reshape(-1)[-1] = value
        weights[name] = mx.array(flat).astype(weights[name].dtype)

    edit_weights(quantised, edit)
    refused(quantised, name, "NaN or infinity")
    load(str(quantised), lazy=True)


@pytest.mark.parametrize("mode,code", [("mxfp4", 0xFF), ("mxfp8", 0xFF), ("nvfp4", 0x7F)])
def test_nan_in_float8_scales(tmp_path, mode, code):
    tiny.checkpoint(tmp_path, quantize={"mode": mode})
    load(str(tmp_path))
    name = f"{QKV}.scales"

    def edit(weights):
        scales = np.array(weights[name])
        scales[0, 0] = code
        weights[name] = mx.array(scales)

    edit_weights(tmp_path, edit)
    refused(tmp_path, name, "NaN or infinity")


def test_scales_of_zero_and_large_scales_are_no_error(quantised):
    def edit(weights):
        weights[f"{QKV}.scales"] *= 0
        weights[f"{QKV}.biases"] = mx.full(weights[f"{QKV}.biases"].shape, 1e4)

    edit_weights(quantised, edit)
    load(str(quantised))


def test_a_failed_load_leaves_the_next_one_alone(quantised):
    edit_config(quantised, lambda cfg: cfg["quantization"].update({GATE: AFFINE}))
    refused(quantised, GATE)
    edit_config(quantised, lambda cfg: cfg["quantization"].pop(GATE))
    model, _ = load_model(quantised)
    assert "sanitize" not in vars(model)
