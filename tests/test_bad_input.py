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
from mlx.utils import tree_flatten
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
    with pytest.raises(InputError, match="model.safetensors has no config.json"):
        load(str(moe / "model.safetensors"))


def test_no_config(moe):
    (moe / "config.json").unlink()
    refused(moe, "has no config.json", error=FileNotFoundError)


@pytest.mark.parametrize(
    "content,word",
    [
        ('{"model_type": "qwen3_5_moe",\n "text_config": {', "line 2 column 18"),
        ("", "line 1 column 1"),
        ("[1, 2]", "a JSON object is needed, not a list"),
        (b'{"model_type": "\xff\xfe"}', "'utf-8' codec can't decode"),
    ],
)
def test_malformed_config(moe, content, word):
    (moe / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(moe, str(moe / "config.json"), word)


@pytest.mark.parametrize("model_type", [None, "llama"])
def test_another_model_type(moe, model_type):
    edit_config(moe, lambda cfg: cfg.update(model_type=model_type))
    refused(moe, f"{model_type!r} has no", "qwen3_5, qwen3_5_moe", 'engine="stock"')


SIZES = """num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
hidden_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
linear_num_value_heads linear_num_key_heads linear_key_head_dim linear_value_head_dim"""


@pytest.mark.parametrize("key", SIZES.split())
def test_missing_keys(moe, key):
    edit_config(moe, lambda cfg: cfg["text_config"].pop(key))
    refused(moe, f"config.json: text_config.{key} is missing", "qwen3_5_moe model needs")


def test_missing_keys_of_a_flat_dense_config(tmp_path):
    tiny.checkpoint(tmp_path, "dense")

    def flatten(cfg):
        text = cfg.pop("text_config")
        cfg.update({**text, "model_type": "qwen3_5"})
        del cfg["intermediate_size"]

    edit_config(tmp_path, flatten)
    refused(tmp_path, "config.json: intermediate_size is missing,")


@pytest.mark.parametrize(
    "values,word",
    [
        ({"num_experts_per_tok": 0}, "text_config.num_experts_per_tok is 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
        ({"num_experts": "eight"}, "text_config.num_experts is 'eight'"),
        ({"hidden_size": 128.0}, "text_config.hidden_size is 128.0"),
        ({"vocab_size": -1}, "text_config.vocab_size is -1"),
        ({"hidden_act": "gelu"}, "text_config.hidden_act = 'gelu'"),
        # mlx-lm would take another base frequency without a word.
        ({"rope_parameters": None}, "no text_config.rope_parameters.rope_theta"),
        ({"rope_parameters": {"type": "default"}}, "no text_config.rope_parameters.rope_theta"),
        # What MLX and mlx-lm find themselves.
        ({"head_dim": 0}, "ZeroDivisionError"),
        ({"linear_num_key_heads": 3}, "num_v_heads (4) must be divisible by num_k_heads (3)"),
        # What the tensors contradict: layers, then sizes.
        ({"num_hidden_layers": 3}, "layers.3.input_layernorm.weight has no place (and 15 more)"),
        ({"num_hidden_layers": 5}, "layers.4.linear_attn.conv1d.weight is missing (and 18 more)"),
        ({"full_attention_interval": 2}, "linear_attn.A_log has no place"),
        ({"num_key_value_heads": 3}, "k_proj.weight is (64, 128) float32, not (96, 128) floating"),
        ({"vocab_size": 300}, "lm_head.weight is (288, 128) float32, not (300, 128) floating"),
        ({"moe_intermediate_size": 64}, "(8, 128, 128) float32, not (8, 128, 64) floating"),
        ({"head_dim": 16}, "k_norm.weight is (32,) float32, not (16,) floating"),
        ({"linear_num_value_heads": 6}, "A_log is (4,) float32, not (6,) floating"),
    ],
    ids=lambda v: "-".join(map(str, *v.items())) if isinstance(v, dict) else "",
)
def test_impossible_values(moe, values, word):
    edit_config(moe, lambda cfg: cfg["text_config"].update(values))
    refused(moe, str(moe), "config.json", word)


@pytest.mark.parametrize(
    "key,value,word",
    [
        ("vocab_size", 300, "lm_head.biases is (288, 2) float32, not (300, 2) floating"),
        ("hidden_size", 256, "(128,) float32, not (256,) floating"),
        ("hidden_size", 96, "group size 48 is not supported"),
        ("num_experts", 4, "gate.biases is (8, 2) float32, not (4, 2) floating"),
    ],
)
def test_a_config_of_another_size_quantised(quantised, key, value, word):
    edit_config(quantised, lambda cfg: cfg["text_config"].update({key: value}))
    refused(quantised, str(quantised), "config.json", word)


@pytest.mark.parametrize("last", ["full_attention", "linear_attention"])
def test_the_tensors_decide_over_layer_types(moe, last):
    types = ["linear_attention"] * 3 + [last]
    edit_config(moe, lambda cfg: cfg["text_config"].update(layer_types=types))
    load(str(moe))


def test_text_config_that_is_no_object(moe):
    edit_config(moe, lambda cfg: cfg.update(text_config=[1]))
    refused(moe, "config.json cannot be loaded")


def test_overrides_are_checked_too(moe):
    text = {**json.loads((moe / "config.json").read_text())["text_config"], "num_experts": 0}
    refused(moe, "num_experts is 0", model_config={"text_config": text})


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
    refused(moe, f"{path} cannot be loaded (JSONDecodeError")


@pytest.fixture
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text('{"num_layers": 1, "lora_parameters": {}}')
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"x": mx.ones((64,))})
    return folder


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_without_a_file(moe, adapter, name):
    (adapter / name).unlink()
    refused(moe, f"has no {name}", error=FileNotFoundError, adapter_path=str(adapter))


def test_a_truncated_adapter(moe, adapter):
    path = adapter / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(moe, f"{path} cannot be loaded", "exceeding the size", adapter_path=str(adapter))


def test_an_adapter_of_peft(moe, adapter):
    """mlx-lm's AttributeError names neither the file nor what is wrong with it."""
    path = adapter / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    refused(moe, f"{path} has no num_layers", "PEFT", adapter_path=str(adapter))


# --- quantization settings ------------------------------------------------------------------

GATE = "language_model.model.layers.1.mlp.gate"


@pytest.mark.parametrize(
    "entry,word",
    [
        ({"bits": 4, "group_size": 64}, "gate.weight is (8, 32) uint32, not (8, 16) uint32"),
        ({"bits": 8, "group_size": 32}, "gate.biases is (8, 2) float32, not (8, 4) floating"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, "(8, 2) float32, not (8, 4) uint8"),
        (True, "gate.weight is (8, 32) uint32, not (8, 16) uint32"),
        (False, "gate.weight is (8, 32) uint32, not (8, 128) floating"),
        (8, "must return a bool or a dict"),
        ({"bits": 8, "group_size": 64, "mode": "q8"}, "quantization mode 'q8'"),
        ({"bits": 8, "group_size": 64, "zero": 1}, "argument 'zero'"),
    ],
    ids=["bits", "group", "mode", "true", "false", "type", "unknown-mode", "unknown-key"],
)
def test_an_entry_that_contradicts_the_tensor(quantised, entry, word):
    """An 8-bit router gate must never be decoded as 4-bit: it would pick other experts."""
    edit_config(quantised, lambda cfg: cfg["quantization"].update({GATE: entry}))
    refused(quantised, str(quantised), "config.json", word)


@pytest.mark.parametrize(
    "change",
    [{"mode": "int4"}, {"bits": 7}, {"group_size": 48}, {"mode": "mxfp4"}, {GATE: {"bits": 8}}],
    ids=str,
)
def test_the_tensors_decide_over_the_setting_of_the_whole_model(quantised, change):
    expected, _ = load(str(quantised))
    edit_config(quantised, lambda cfg: cfg["quantization"].update(change))
    model, _ = load(str(quantised))
    expected, found = (dict(tree_flatten(m.parameters())) for m in (expected, model))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
    qkv = model.layers[0].linear_attn.in_proj_qkv
    assert (qkv.bits, qkv.group_size, qkv.mode) == (4, 64, "affine")


@pytest.mark.parametrize(
    "change,word",
    [
        (lambda cfg: cfg["quantization"].pop("bits"), "KeyError: 'bits'"),
        (lambda cfg: cfg["quantization"].pop("group_size"), "KeyError: 'group_size'"),
        (lambda cfg: cfg.update(quantization="4bit"), "TypeError"),
        (lambda cfg: cfg.pop("quantization"), "KeyError: 'quant_method'"),
        (
            lambda cfg: [cfg.pop("quantization"), cfg.pop("quantization_config")],
            "lm_head.weight is (288, 16) uint32, not (288, 128) floating",
        ),
    ],
    ids=["bits", "group_size", "no object", "no method", "none"],
)
def test_quantised_weights_without_a_setting(quantised, change, word):
    edit_config(quantised, change)
    refused(quantised, str(quantised), "config.json", word)


def gptq(weights):
    """GPTQ packs eight 4-bit codes of a column into a word; AutoAWQ, which mlx-lm reads, of a row.

    Both keep [groups, rows] scales.
    """
    weights[f"{QKV}.qweight"] = mx.zeros((128 // 8, 256), mx.int32)
    weights[f"{QKV}.qzeros"] = mx.zeros((1, 256 // 8), mx.int32)
    weights[f"{QKV}.scales"] = mx.ones((1, 256), mx.float16)


def bitsandbytes(weights):
    weights[f"{QKV}.weight"] = mx.zeros((256 * 128 // 2, 1), mx.uint8)
    weights[f"{QKV}.weight.absmax"] = mx.ones((512,))


def fp8(weights):
    weights[f"{QKV}.weight"] = mx.to_fp8(weights[f"{QKV}.weight"])
    weights[f"{QKV}.weight_scale_inv"] = mx.ones((2, 1))


@pytest.mark.parametrize("pack", [gptq, bitsandbytes, fp8])
def test_a_format_that_mlx_lm_does_not_decode(moe, pack):
    edit_weights(moe, pack)
    method = pack.__name__
    setting = {"quant_method": method, "bits": 4, "group_size": 128}
    edit_config(moe, lambda cfg: cfg.update(quantization_config=setting))
    refused(moe, f"not by '{method}'", "mlx_lm.convert")


def test_an_entry_for_a_tensor_that_is_not_quantised(tmp_path):
    tiny.checkpoint(
        tmp_path,
        quantize=AFFINE,
        predicate=lambda path, module: not path.endswith("mlp.gate"),
    )
    edit_config(tmp_path, lambda cfg: cfg["quantization"].update({GATE: AFFINE}))
    refused(tmp_path, f"{GATE}.scales is missing", f"{GATE}.weight is (8, 128) float32, not")


# --- weight files ---------------------------------------------------------------------------


def test_no_weights(moe):
    (moe / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"No safetensors found in {moe}"):
        load(str(moe))


@pytest.mark.parametrize("experts", ["switch", "each", "fused"])
def test_a_shard_is_missing(tmp_path, experts):
    tiny.checkpoint(tmp_path, shards=3, experts=experts)
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


@pytest.mark.parametrize("content", ["{", "{}"])
def test_an_index_is_read_only_to_name_an_absent_file(tmp_path, content):
    tiny.checkpoint(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    load(str(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, f"{index} cannot be loaded" if content == "{" else "is missing (and")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_weights(moe, keep):
    """Cut in the length, in the header, in the data, at the last byte."""
    path = moe / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)] if isinstance(keep, float) else data[:keep])
    refused(moe, f"{path} cannot be loaded", "download it again")


HEADER = b'{"t": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}'


@pytest.mark.parametrize(
    "content,word",
    [
        (b"<!DOCTYPE html><html><body>404 not found</body></html>" * 9, "Invalid json header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "cannot use at() with number"),
        (struct.pack("<Q", 8) + b"not json", "syntax error"),
        (struct.pack("<Q", len(HEADER)) + HEADER + b"\0", "unsupported dtype F4"),
    ],
    ids=["html", "lfs", "entry", "json", "dtype"],
)
def test_other_content_in_place_of_weights(moe, content, word):
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


@pytest.mark.parametrize(
    "name,value,word",
    [
        (NORM, None, "is missing;"),
        ("language_model.lm_head.weight", None, "is missing;"),
        ("language_model.model.extra.weight", mx.ones((2,)), "has no place;"),
        (NORM, mx.ones((64,)), "is (64,) float32, not (128,) floating;"),
        # float8 tensors are read as uint8: the bytes would pass for values.
        (f"{QKV}.weight", mx.ones((256, 128), mx.uint8), "is (256, 128) uint8, not (256, 128) fl"),
        (f"{QKV}.weight", mx.ones((256, 128), mx.int32), "is (256, 128) int32, not (256, 128) fl"),
    ],
    ids=["missing", "no head although untied", "surplus", "shape", "uint8", "int32"],
)
def test_another_tensor_than_the_model_has(moe, name, value, word):
    edit_weights(moe, lambda w: w.pop(name) if value is None else w.update({name: value}))
    refused(moe, str(moe), f"{name} {word}", "config.json")


@pytest.mark.parametrize(
    "leaf,word", [("scales", "weight is (256, 16) uint32, not"), ("biases", "biases is missing")]
)
def test_scales_or_biases_missing(quantised, leaf, word):
    edit_weights(quantised, lambda w: w.pop(f"{QKV}.{leaf}"))
    refused(quantised, f"{QKV}.{word}")


@pytest.mark.parametrize(
    "leaf,change,word",
    [
        ("scales", lambda a: a[:64], "scales is (64, 2) float32, not (256, 2) floating"),
        ("scales", lambda a: a.astype(mx.int32), "scales is (256, 2) int32, not (256, 2) floating"),
        ("scales", lambda a: a.astype(mx.uint8), "4 bits with group size 64"),
        ("biases", lambda a: a[:, :1], "biases is (256, 1) float32, not (256, 2) floating"),
        ("biases", lambda a: a.astype(mx.int32), "biases is (256, 2) int32, not"),
        ("weight", lambda a: a[:, :10], "weight is (256, 10) uint32, not (256, 8) uint32"),
        ("weight", lambda a: a[:64], "weight is (64, 16) uint32, not (256, 16) uint32"),
        ("weight", lambda a: a.astype(mx.int32), "weight is (256, 16) int32, not (256, 16) uint32"),
    ],
    ids=["rows", "int", "mode", "bias", "bias-int", "codes", "codes-rows", "codes-int"],
)
def test_packed_tensors_that_do_not_fit(quantised, leaf, change, word):
    name = f"{QKV}.{leaf}"
    edit_weights(quantised, lambda w: w.update({name: change(w[name])}))
    refused(quantised, QKV, word)


def test_a_packing_that_is_legal_but_not_the_one_that_an_entry_states(quantised):
    def edit(weights):
        for leaf in ("scales", "biases"):
            weights[f"{QKV}.{leaf}"] = weights[f"{QKV}.{leaf}"][:, :1]

    edit_weights(quantised, edit)
    edit_config(quantised, lambda cfg: cfg["quantization"].update({QKV: AFFINE}))
    refused(quantised, f"{QKV}.biases is (256, 1) float32, not (256, 2) floating (and 1 more)")


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
    refused(experts, "experts.3.up_proj", "experts 0 to 7, each (128, ", "convert the model again")


def test_awq_experts(experts):
    def edit(weights):
        for number in range(8):
            weights[EXPERT.format(number, "qweight")] = weights.pop(EXPERT.format(number, "weight"))

    edit_weights(experts, edit)
    setting = {"quant_method": "awq", "bits": 4, "group_size": 64}
    edit_config(experts, lambda cfg: cfg.update(quantization=None, quantization_config=setting))
    refused(experts, "not by 'awq'", "mlx_lm.convert")


def test_half_of_a_fused_pair(tmp_path):
    tiny.checkpoint(tmp_path, experts="fused", prefix="hf")
    edit_weights(tmp_path, lambda w: w.pop("model.language_model.layers.1.mlp.experts.down_proj"))
    refused(tmp_path, str(tmp_path), "layers.1.mlp.experts.down_proj")


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
    assert "load_weights" not in vars(model)
