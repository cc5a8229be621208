"""Checkpoints of every layout load, and end with the very parameters that were written."""

from __future__ import annotations

import inspect
import json

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_5_moe

from lily_mlx import checkpoint
from lily_mlx.attach import attach
from lily_mlx.loading import InputError, load, load_model

PROMPT = mx.array([[3, 141, 59, 26, 253, 58]])


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert mx.array_equal(actual[name], value), name


AFFINE = {"bits": 4, "group_size": 64}
LAYOUTS = [
    ("mlx", "switch", False),
    ("mlx", "each", False),
    ("hf", "switch", False),
    ("hf", "each", True),
    ("hf", "fused", True),
    ("text", "each", True),
    ("text", "fused", True),
    ("text", "switch", False),
]


@pytest.mark.parametrize("prefix,experts,hf", LAYOUTS)
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_layouts_in_float32(tmp_path, kind, prefix, experts, hf):
    expected = tiny.checkpoint(
        tmp_path, kind, prefix=prefix, experts=experts, hf_conventions=hf, vision="visual."
    )
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)


@pytest.mark.parametrize("prefix", ["mlx", "hf", "text"])
@pytest.mark.parametrize("experts", ["switch", "each"])
def test_layouts_quantised(tmp_path, prefix, experts):
    expected = tiny.checkpoint(
        tmp_path, quantize=AFFINE, dtype=mx.bfloat16, prefix=prefix, experts=experts
    )
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)


QUANTIZATIONS = [
    *({"bits": b, "group_size": g} for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)),
    {"mode": "mxfp4"},
    {"mode": "mxfp8"},
    {"mode": "nvfp4"},
]


@pytest.mark.parametrize("setting", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("experts", ["switch", "each"])
def test_every_quantization(tmp_path, setting, experts):
    """Experts in each mode, gates 8-bit affine beside them, as mlx-lm writes them."""
    expected = tiny.checkpoint(tmp_path, quantize=setting, experts=experts)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)
    mlp = model.layers[0].mlp
    assert (mlp.gate.bits, mlp.gate.group_size, mlp.gate.mode) == (8, 64, "affine")
    assert mlp.switch_mlp.up_proj.mode == setting.get("mode", "affine")
    assert mx.all(mx.isfinite(model(PROMPT)))


def mixed(path, module):
    """A setting of its own for nearly every kind of tensor, and some left alone."""
    if path.endswith("mlp.gate"):
        return {"bits": 8, "group_size": 64}
    if path.endswith("shared_expert_gate"):
        return False
    if "shared_expert" in path:
        return {"bits": 6, "group_size": 32}
    if "switch_mlp.down_proj" in path:
        return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    if "self_attn" in path:
        return {"bits": 8, "group_size": 128}
    return "in_proj_b" not in path


@pytest.mark.parametrize("experts", ["switch", "each"])
@pytest.mark.parametrize("entries", ["kept", "removed"])
def test_mixed_quantization(tmp_path, experts, entries):
    """Per-tensor settings are honoured; without entries, mlx-lm reads them off the shapes."""
    expected = tiny.checkpoint(tmp_path, quantize=AFFINE, predicate=mixed, experts=experts)
    if entries == "removed":

        def edit(cfg):
            cfg["quantization"] = {k: v for k, v in cfg["quantization"].items() if "." not in k}

        tiny.edit_config(tmp_path, edit)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)
    mlp = model.layers[3].mlp
    assert (mlp.gate.bits, mlp.shared_expert.up_proj.bits) == (8, 6)
    assert mlp.switch_mlp.down_proj.mode == "mxfp4"
    assert not hasattr(mlp.shared_expert_gate, "bits")
    assert model.layers[3].self_attn.q_proj.group_size == 128


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_quantization_named_in_hugging_face_style(tmp_path, mode):
    expected = tiny.checkpoint(tmp_path, quantize={"mode": mode})

    def edit(cfg):
        del cfg["quantization"]
        cfg["quantization_config"] = {"quant_method": mode}

    tiny.edit_config(tmp_path, edit)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)
    assert model.layers[0].mlp.switch_mlp.up_proj.mode == mode


@pytest.mark.parametrize("spelling", tiny.VISION_SPELLINGS)
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_vision_tensors_are_dropped(tmp_path, kind, spelling):
    expected = tiny.checkpoint(tmp_path, kind, vision=spelling)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)


@pytest.mark.parametrize("prefix", ["mlx", "hf", "text"])
@pytest.mark.parametrize("quantize", [None, AFFINE], ids=["float32", "4bit"])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_tied_embeddings_with_a_stored_head(tmp_path, kind, quantize, prefix):
    expected = tiny.checkpoint(
        tmp_path,
        kind,
        quantize=quantize,
        prefix=prefix,
        stored_head=True,
        tie_word_embeddings=True,
    )
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)
    assert not any("lm_head" in name for name in expected)


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("hf", [False, True])
def test_norm_convention_follows_the_conv_layout_alone(tmp_path, kind, hf):
    """Stored mtp.* tensors must not make a converted checkpoint's norms gain 1 again."""
    prefix = "hf" if hf else "mlx"
    expected = tiny.checkpoint(tmp_path, kind, mtp=True, prefix=prefix, hf_conventions=hf)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)


@pytest.mark.parametrize("prefix,experts,hf", LAYOUTS)
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_sanitize_twice_is_sanitize_once(kind, prefix, experts, hf):
    cfg = tiny.config(kind, tie_word_embeddings=True)
    module = qwen3_5_moe if kind == "moe" else qwen3_5
    model = tiny.stock_model(cfg)
    stored = tiny.rename(parameters(model), prefix, experts, hf)
    stored |= tiny.extras(cfg, "visual.", True, prefix)
    stored["lm_head.weight"] = model.language_model.model.embed_tokens.weight
    before = dict(stored)

    def clean(weights):
        return checkpoint.sanitize(weights, model.args, lambda w: module.Model.sanitize(model, w))

    once = clean(stored)
    assert stored.keys() == before.keys()
    assert all(stored[name] is before[name] for name in before)
    assert_same(once, parameters(model))
    assert_same(clean(once), once)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("quantize", [None, AFFINE], ids=["float32", "4bit"])
def test_a_stored_head_that_differs_from_tied_embeddings_is_used(tmp_path, quantize, outer):
    """transformers does so, with a warning; dropping it would change every logit."""
    expected = tiny.checkpoint(tmp_path, quantize=quantize)

    def edit(cfg):
        cfg["tie_word_embeddings"] = outer
        cfg["text_config"]["tie_word_embeddings"] = True

    tiny.edit_config(tmp_path, edit)
    with pytest.warns(UserWarning, match="ties lm_head"):
        model, cfg = load_model(tmp_path)
    assert_same(parameters(model), expected)
    assert not cfg["text_config"]["tie_word_embeddings"]
    attach(tmp_path)
    with pytest.raises(InputError, match="lm_head differs.*tie_word_embeddings"):
        mlx_lm.load(str(tmp_path), trust_remote_code=True)


def test_embeddings_tied_by_the_outer_config_alone(tmp_path):
    expected = tiny.checkpoint(tmp_path, tie_word_embeddings=True)

    def edit(cfg):
        cfg["tie_word_embeddings"] = cfg["text_config"].pop("tie_word_embeddings")

    tiny.edit_config(tmp_path, edit)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)


@pytest.mark.parametrize("method", ["bitsandbytes", "auto-round", "fp8", "awq", "gptq", None])
@pytest.mark.parametrize("nested", [False, True])
def test_the_label_of_a_quantization_that_was_undone(tmp_path, method, nested):
    """Merged or dequantised weights often keep the config.json of what they were made from."""
    expected = tiny.checkpoint(tmp_path, prefix="hf", hf_conventions=True, vision="model.visual.")
    label = {"quant_method": method, "bits": 4} if method else {"bits": 4, "group_size": 64}

    def edit(cfg):
        (cfg["text_config"] if nested else cfg)["quantization_config"] = label

    tiny.edit_config(tmp_path, edit)
    model, cfg = load_model(tmp_path)
    assert_same(parameters(model), expected)
    assert "quantization_config" not in cfg


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_text_model_saved_alone(tmp_path, kind):
    """Its config is the inner one, whose model_type mlx-lm does not know."""
    expected = tiny.checkpoint(tmp_path, kind, prefix="text", experts="each")
    tiny.edit_config(tmp_path, lambda cfg: cfg.update(cfg.pop("text_config")))
    model, _, cfg = load(str(tmp_path), return_config=True)
    assert cfg["model_type"] == ("qwen3_5_moe_text" if kind == "moe" else "qwen3_5_text")
    assert_same(parameters(model), expected)
    attach(tmp_path)
    model, _ = mlx_lm.load(str(tmp_path), trust_remote_code=True)
    assert_same(parameters(model), expected)


@pytest.mark.parametrize(
    "inside,beside",
    [
        ({"rope_theta": 5e5}, {"partial_rotary_factor": 0.5}),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}),
        (None, {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
        (None, {"rope_theta": 5e5, "rope_scaling": {"partial_rotary_factor": 0.5}}),
    ],
    ids=["factor", "inside wins", "beside", "scaling"],
)
@pytest.mark.parametrize("nested", [True, False])
def test_rope_settings_beside_rope_parameters(tmp_path, inside, beside, nested):
    """As transformers merges them; mlx-lm reads rope_parameters alone, with its own defaults."""
    tiny.checkpoint(tmp_path)

    def edit(cfg):
        cfg["text_config"].update(beside, rope_parameters=inside)
        if not nested:
            cfg |= {**cfg.pop("text_config"), "model_type": cfg["model_type"]}

    tiny.edit_config(tmp_path, edit)
    model, _ = load_model(tmp_path)
    args = model.language_model.args
    assert (args.rope_theta, args.partial_rotary_factor) == (5e5, 0.5)
    rope = model.layers[3].self_attn.rope
    assert (rope.base, rope.dims) == (5e5, 16)


def test_several_files(tmp_path):
    expected = tiny.checkpoint(tmp_path, quantize=AFFINE, experts="each", shards=3)
    model, _ = load_model(tmp_path)
    assert_same(parameters(model), expected)


def test_mlx_lm_still_fails_on_the_three_layouts(tmp_path):
    """The repairs are needed for as long as this holds for the pinned mlx-lm."""
    tiny.checkpoint(tmp_path / "each", experts="each")
    tiny.checkpoint(tmp_path / "visual", vision="visual.")
    tiny.checkpoint(tmp_path / "tied", stored_head=True, tie_word_embeddings=True)
    for name in ("each", "visual", "tied"):
        with pytest.raises(ValueError, match="not in model"):
            mlx_lm.utils.load_model(tmp_path / name)


# --- load: the drop-in ----------------------------------------------------------------------


def test_load_has_the_signature_of_mlx_lm():
    ours = list(inspect.signature(load).parameters.values())
    stock = list(inspect.signature(mlx_lm.load).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(stock)]] == [
        (p.name, p.kind, p.default) for p in stock
    ]
    extra = ours[len(stock) :]
    assert [(p.name, p.kind, p.default) for p in extra] == [
        ("engine", inspect.Parameter.KEYWORD_ONLY, "lily"),
        ("strict", inspect.Parameter.KEYWORD_ONLY, False),
    ]


def test_load_model_has_the_signature_of_mlx_lm():
    ours = inspect.signature(load_model).parameters
    stock = inspect.signature(mlx_lm.utils.load_model).parameters
    assert list(ours) == list(stock)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_load_returns_what_mlx_lm_returns(tmp_path, kind):
    tiny.checkpoint(tmp_path, kind, quantize=AFFINE)
    theirs = mlx_lm.load(str(tmp_path), return_config=True)
    ours = load(str(tmp_path), return_config=True)
    assert len(ours) == len(theirs) == 3
    assert ours[2] == theirs[2]
    assert type(ours[1]) is type(theirs[1])
    assert ours[1].eos_token_ids == theirs[1].eos_token_ids
    assert isinstance(ours[0], qwen3_5.Model)
    assert_same(parameters(ours[0]), parameters(theirs[0]))
    assert [name for name, _ in ours[0].named_modules()] == [
        name for name, _ in theirs[0].named_modules()
    ]
    assert not ours[0].training
    assert "load_weights" not in vars(ours[0])
    assert len(load(str(tmp_path))) == 2


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_stock_engine_is_mlx_lm_itself(tmp_path, kind):
    tiny.checkpoint(tmp_path, kind)
    theirs, _ = mlx_lm.load(str(tmp_path))
    ours, _ = load(str(tmp_path), engine="stock")
    assert type(ours) is type(theirs)
    assert mx.array_equal(ours(PROMPT), theirs(PROMPT))


def test_stock_engine_takes_other_model_types(tmp_path):
    from mlx_lm.models import llama

    cfg = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": tiny.VOCAB_SIZE,
    }
    model = llama.Model(llama.ModelArgs.from_dict(cfg))
    tiny.write(tmp_path, cfg, parameters(model))
    loaded, _ = load(str(tmp_path), engine="stock")
    assert type(loaded) is llama.Model
    with pytest.raises(InputError, match="'llama' has no lily engine"):
        load(str(tmp_path))


def test_an_attached_folder_loads_with_both_engines(tmp_path):
    """The folder's model file is ours, so neither engine needs trust_remote_code."""
    expected = tiny.checkpoint(tmp_path)
    plain, _ = load(str(tmp_path))
    attach(tmp_path)
    for engine in ("lily", "stock"):
        model, _, cfg = load(str(tmp_path), engine=engine, return_config=True)
        assert_same(parameters(model), expected)
        assert cfg["model_file"] == "lily_mlx_model.py"
    assert type(model) is qwen3_5_moe.Model
    assert type(load(str(tmp_path))[0]) is type(plain)


def test_model_config_and_tokenizer_config_pass_through(tmp_path):
    tiny.checkpoint(tmp_path)
    _, tokenizer, cfg = load(
        str(tmp_path),
        tokenizer_config={"eos_token": "<|endoftext|>"},
        model_config={"eos_token_id": 258, "note": "kept"},
        return_config=True,
    )
    assert cfg["note"] == "kept"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_ids == {258}


def test_lazy_leaves_values_alone(tmp_path):
    expected = tiny.checkpoint(tmp_path, quantize=AFFINE)
    model, _ = load(str(tmp_path), lazy=True)
    assert_same(parameters(model), expected)


@pytest.mark.parametrize("experts", ["switch", "each"])
def test_adapters_load_on_top(tmp_path, experts):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    tiny.checkpoint(tmp_path / "model", quantize=AFFINE, experts=experts)
    tiny.checkpoint(tmp_path / "plain", quantize=AFFINE)
    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    model, _ = mlx_lm.load(str(tmp_path / "plain"))
    model.freeze()
    linear_to_lora_layers(model, 2, settings)
    trained = {
        name: mx.random.normal(value.shape) * 0.1
        for name, value in tree_flatten(model.trainable_parameters())
    }
    assert any("switch_mlp" in name for name in trained)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), trained)
    (adapter / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings})
    )
    theirs, _ = mlx_lm.load(str(tmp_path / "plain"), adapter_path=str(adapter))
    ours, _ = load(str(tmp_path / "model"), adapter_path=str(adapter))
    assert_same(parameters(ours), parameters(theirs))
    assert not ours.training


def test_loading_patches_nothing_in_mlx_lm(tmp_path):
    tiny.checkpoint(tmp_path)
    watched = [mlx_lm, mlx_lm.utils, qwen3_5, qwen3_5_moe, qwen3_5.Model, qwen3_5_moe.Model]
    mlx_lm.load(str(tmp_path))
    before = [dict(vars(item)) for item in watched]
    load(str(tmp_path))
    for item, names in zip(watched, before, strict=True):
        assert {k: id(v) for k, v in vars(item).items()} == {k: id(v) for k, v in names.items()}


def test_loading_draws_the_same_random_numbers(tmp_path):
    """A seed set before loading gives the same samples with both engines."""
    tiny.checkpoint(tmp_path, quantize=AFFINE)
    drawn = []
    for engine in ("lily", "stock"):
        mx.random.seed(7)
        load(str(tmp_path), engine=engine)
        drawn.append(mx.random.uniform(shape=(4,)))
    assert mx.array_equal(*drawn)


def test_a_relative_path_and_a_path_object(tmp_path, monkeypatch):
    tiny.checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    load("m")
    load(tmp_path / "m")


def test_strict_accepts_a_model_with_a_kernel_for_every_module(tmp_path):
    tiny.checkpoint(tmp_path, quantize=AFFINE)
    model, _ = load(str(tmp_path), strict=True)
    assert all(entry["kernel"] for entry in model.lily_report())


@pytest.mark.parametrize("setting", [{"bits": 3, "group_size": 64}, {"mode": "mxfp4"}], ids=str)
def test_strict_names_the_module_and_the_reason(tmp_path, setting):
    tiny.checkpoint(tmp_path, quantize=setting)
    model, _ = load(str(tmp_path))
    first = next(entry for entry in model.lily_report() if not entry["kernel"])
    with pytest.raises(InputError) as caught:
        load(str(tmp_path), strict=True)
    assert f"no {first['kind']} kernel for {first['path']} " in str(caught.value)
    assert first["reason"].rstrip(".") in str(caught.value)


def test_unknown_engine_and_strict_stock(tmp_path):
    with pytest.raises(InputError, match="engine='fast' is unknown"):
        load(str(tmp_path), engine="fast")
    with pytest.raises(InputError, match="strict=True"):
        load(str(tmp_path), engine="stock", strict=True)
