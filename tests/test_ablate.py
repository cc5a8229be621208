"""`python -m benchmarks ablate`: its arms on a CPU and the Metal host, its table, its command."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

import lily_mlx
from benchmarks import ablate, common, gpu, readme
from lily_mlx import _ext, decode, kernels, layers, ptx
from lily_mlx.model import Model, ModelArgs


@pytest.fixture(autouse=True)
def on_the_cpu():
    with mx.stream(mx.cpu):
        before = mx.default_device()
        mx.set_default_device(mx.cpu)
        yield
        mx.set_default_device(before)


@pytest.fixture
def model():
    config = tiny.config("moe", linear_key_head_dim=64, linear_value_head_dim=64)
    config["text_config"]["max_position_embeddings"] = 4096
    ours = Model(ModelArgs.from_dict(config))
    ours.set_dtype(mx.bfloat16)
    nn.quantize(ours, 64, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    gpu.random_weights(ours)
    return ours


def arm(name):
    return next(a for a in ablate.ARMS if a.name == name)


# ---- The arms that are no option of a Program


def test_tokens_through_the_cpu_are_the_same_words(model):
    def words(step):
        mx.random.seed(0)
        caches = gpu.caches_at(model, 4)
        return [t for t, _ in step(mx.array([7]), model, max_tokens=6, prompt_cache=caches)]

    assert words(ablate.through_cpu) == words(decode.generate_step)


def test_logits_that_were_not_picked_weigh_nothing():
    logits = mx.array([[1.0, 5.0, 3.0, 4.0], [9.0, 8.0, 7.0, 6.0]])
    got = ablate.picked(logits, 2)
    assert got.dtype == mx.float32
    assert mx.softmax(got, axis=-1)[:, 2].tolist() == [0.0, 0.0]
    assert (got > -1).tolist() == [[False, True, False, True], [True, True, False, False]]
    assert got[0, 1].item() == 5.0 and got[1, 0].item() == 9.0


@pytest.mark.parametrize("rows", [5, 40])
def test_experts_that_the_cpu_picks_are_the_same_experts(model, rows):
    block = model.layers[0].mlp
    mx.random.seed(rows)
    x = mx.random.normal((1, rows, model.language_model.args.hidden_size)).astype(mx.bfloat16)
    with kernels.metal_host():
        expected = block(x)
        with ablate.form(arm("routing read by the CPU"), True):
            got = block(x)
        mx.eval(expected, got)
    # The weights of a softmax over fewer values differ in their last bits.
    assert mx.allclose(got, expected, rtol=0.02, atol=0.02 * mx.abs(expected).max().item()).item()


def test_probabilities_of_all_experts_cannot_be_made_from_some(model):
    block = model.layers[0].mlp
    block.norm_topk_prob = False
    with pytest.raises(ValueError, match="probabilities over all experts"):
        ablate.routed_by_cpu(block, mx.zeros((1, 2, 64)))


def test_a_form_ends_with_its_block(monkeypatch):
    """A form that stays would be measured in place of the production form."""
    set_to = {"step": [], "layers": []}
    monkeypatch.setattr(_ext, "set_step_options", set_to["step"].append)
    monkeypatch.setattr(_ext, "set_layer_options", set_to["layers"].append)
    call = layers.SparseMoeBlock.__call__
    with pytest.raises(KeyError), ablate.form(arm("unpacked KV reads"), True):
        raise KeyError
    with ablate.form(arm("unpacked KV reads"), False):
        pass
    assert set_to["step"] == [{"mma": False, "pack": 1}, {}, {"mma": False}, {}]
    with ablate.form(arm("block-based scan"), True):
        assert set_to["layers"][-1] == {"scan": "block"}
    assert set_to["layers"][-1] == {}
    with ablate.form(arm("routing read by the CPU"), True):
        assert layers.SparseMoeBlock.__call__ is ablate.routed_by_cpu
    assert layers.SparseMoeBlock.__call__ is call


# ---- The measurement and its table


def measured(model, monkeypatch, tmp_path, target, *words):
    monkeypatch.setattr(ablate, "ARMS", (
        ablate.Arm("item", "reads", "decode", (4, 9), way="item"),
        ablate.Arm("whole", "one chunk", "prefill", (40,), way="whole"),
        ablate.Arm("pack", "packs", "decode", (4,), step={"pack": 1},
                   missing={"cuda": "it has none"}),
    ))  # fmt: skip
    words = ["--rounds", "2", "--tokens", "2", "--output", str(tmp_path / "a.json"), *words]
    arguments = ablate.make_parser().parse_args(words)
    report = {}
    ablate.run(model, target, report, arguments)
    assert json.loads((tmp_path / "a.json").read_text()) == report
    return report


def test_arms_are_run_in_turn_and_those_that_there_are_none_of_are_named(
    model, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(ablate, "CELL_SECONDS", 0)
    order, rate = [], ablate.rate

    def counted(a, undone, *rest):
        order.append((a.name, undone))
        return rate(a, undone, *rest)

    monkeypatch.setattr(ablate, "rate", counted)
    report = measured(model, monkeypatch, tmp_path, "cpu")
    rows = report["rows"]
    assert [(r["arm"], r["at"]) for r in rows] == [("item", 4), ("item", 9), ("whole", 40)]
    assert [u for name, u in order if name == "whole"] == [False, True, False, True, True, False]
    row = rows[0]
    assert row["ratio"] == row["production"] / row["without"] > 0
    assert {k: len(v) for k, v in row["samples"].items()} == {"production": 2, "without": 2}
    assert [(x["arm"], x["why"]) for x in report["left_out"]] == [
        ("pack", "the reference on the CPU has no such form")
    ]
    assert "pack" in capsys.readouterr().out


def test_what_begins_too_late_is_named(model, monkeypatch, tmp_path):
    report = measured(model, monkeypatch, tmp_path, "cuda", "--seconds", "0")
    assert report["rows"] == []
    assert [(x["arm"], x["at"]) for x in report["left_out"]] == [
        ("item", 4), ("item", 9), ("whole", 40), ("pack", None)
    ]  # fmt: skip


def test_an_arm_that_was_not_compiled_is_named(model, monkeypatch, tmp_path):
    def refuse(a, undone, *rest):
        raise RuntimeError("kernel 'x' was not compiled")

    monkeypatch.setattr(ablate, "rate", refuse)
    report = measured(model, monkeypatch, tmp_path, "metal")
    assert {x["why"] for x in report["left_out"]} == {"kernel 'x' was not compiled"}


def row(ratio, **more):
    return {
        "arm": "norm apart", "what": "a norm", "kind": "decode", "at": 32768, "against": {},
        "production": 600.0, "without": 600.0 / ratio, "ratio": ratio,
        "pays": ratio >= ablate.PAYS, "samples": {}, **more,
    }  # fmt: skip


def test_the_table_says_what_pays():
    report = {
        "rows": [row(1.2), row(1.001, against={"mma": False})],
        "left_out": [
            {"arm": "a", "what": "", "at": None, "why": "none"},
            {"arm": "b", "what": "", "at": 9, "why": "none"},
        ],
    }
    lines = ablate.text(report).splitlines()
    assert lines[0].split() == ["arm", "at", "production", "without", "ratio", "verdict"]
    assert "32,768" in lines[1] and "1.200x  pays" in lines[1]
    assert "1.001x  does not pay here (both with mma=False)" in lines[2]
    assert "norm apart: a norm." in lines and "left out: a; b at 9: none." in lines


def test_readme_shows_the_table(tmp_path):
    machine = {"device": "gpu", "device_name": "H", "system": "Linux", "cpu": "c", "cores": 1,
               "memory_bytes": 1 << 30}  # fmt: skip
    result = {
        "routine": "ablate", "command": "python -m benchmarks ablate", "date": "2026-12-01",
        "load_before": None, "machine": common.machine() | machine, "rows": [row(1.2)],
        "left_out": [], "versions": {"mlx": "1", "mlx-lm": "2"},
        "model": {"name": "35b", "bytes": 1e9},
    }  # fmt: skip
    (tmp_path / "ablate.json").write_text(json.dumps(result))
    block = readme.figures(tmp_path)
    assert "| norm apart (a norm) | decode at 32,768 | 600 | 500 | **1.20x** | pays |" in block


# ---- The command


@pytest.mark.parametrize(
    "words,message",
    [
        (["--rounds", "0"], "are 1 or more"),
        (["--only", "nothing"], "invalid choice"),
        (["--ptx", "x"], "--ptx is for an NVIDIA GPU"),
    ],
)
def test_flags_that_do_not_fit(words, message, capsys):
    with pytest.raises(SystemExit):
        ablate.main(words)
    assert message in capsys.readouterr().err


def test_the_command_writes_its_table(model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lily_mlx, "load", lambda _: (model, None))
    monkeypatch.setattr(ablate, "CELL_SECONDS", 0)
    words = ["--only", "token through the CPU", "--rounds", "1", "--tokens", "2"]
    ablate.main([*words, "--output", str(tmp_path / "a.json")])
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["routine"] == "ablate" and report["model"]["name"] == "bundled"
    assert "--output" not in report["command"]
    assert "token through the CPU" in capsys.readouterr().out


def test_ptx_of_the_arms_is_none_that_the_package_carries(monkeypatch, tmp_path):
    built = {}

    def build(pipelines, path):
        built.update({p["key"]: p for p in pipelines})
        path.write_text("")
        return len(built)

    monkeypatch.setattr(ptx, "build", build)
    monkeypatch.setattr(ptx, "not_packaged", lambda found: found)
    ablate.main(["--make", str(tmp_path / "x")])
    names = {p["kernel"] for p in built.values()}
    assert {
        "norm_row_bf16",
        "gated_delta_scan_block_bf16_r2",
        "attention_decode_strided_bf16",
    } <= names
    plain = [k for k in built if k.startswith("mma_moe_gate_up") and "_0:16_" in k]
    assert plain, "the experts' GEMM on weights that were dequantized"
