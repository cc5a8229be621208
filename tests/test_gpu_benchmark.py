"""`python -m benchmarks gpu` away from a GPU: its settings, its result, and its parts on a CPU."""

from __future__ import annotations

import json
import os

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx_lm.models import qwen3_5_moe

from benchmarks import gpu, gpu_checks, gpu_plot, gpu_report, readme
from lily_mlx.model import Model, ModelArgs


def row(part="decode", context=256, lily=600.0, stock=40.0, **more):
    rates = {"lily": lily, "stock": stock}
    given = {k: v for k, v in rates.items() if v is not None}
    return {gpu_report.ROWS[part]: context, "repeatable": True, **given, **more}


def report(**parts):
    out = {"device": "H", "mlx": "1", "command": "c", "left_out": []}
    for part, rows in parts.items():
        for r in rows:
            gpu_report.put_row(out, part, r)
    return out


def test_the_ratio_is_the_lesser_of_two_processes():
    out = report(decode=[row()])
    assert out["decode"][0]["ratio"] == 15
    gpu_report.add_raised(out, {"decode": [{"context": 256, "lily": 550.0, "stock": 50.0}]})
    assert out["decode"][0]["ratio"] == 11
    assert out["decode"][0]["lily"] == 600 and out["decode"][0]["lily_raised"] == 550
    gpu_report.add_raised(out, {"decode": [{"context": 256, "lily": 590.0, "stock": 30.0}]})
    assert out["decode"][0]["ratio"] == 15


def test_rates_of_different_processes_make_no_ratio():
    out = report(decode=[row(stock=None)])
    gpu_report.add_raised(out, {"decode": [{"context": 256, "stock": 30.0}]})
    assert out["decode"][0]["ratio"] is None and out["decode"][0]["stock_raised"] == 30
    assert out["raised"]["environment"] == gpu_report.RAISED


def test_what_the_raised_run_left_out_is_named():
    out = report(decode=[row()])
    cell = {"part": "decode", "engine": "stock", "context": 512, "why": "no time"}
    gpu_report.add_raised(out, {"left_out": [cell]})
    assert out["left_out"] == [cell | {"engine": "stock_raised"}]


def test_a_row_measured_again_keeps_nothing_of_the_old_run_but_the_raised_rates():
    raised = {"lily_raised": 450.0, "stock_raised": 45.0}
    out = report(decode=[row(), {"context": 256, **raised}])
    gpu_report.put_row(out, "decode", row(lily=500.0, stock=None))
    assert "stock" not in out["decode"][0]
    assert out["decode"][0]["ratio"] == 10


def test_rows_stay_in_order_and_apart():
    out = report(prefill=[row("prefill", n) for n in (4096, 256, 512)])
    assert [r["tokens"] for r in out["prefill"]] == [256, 512, 4096]


def test_parts_measured_apart_are_joined():
    cell = {"part": "decode", "engine": "lily", "context": 512, "why": "no time"}
    first = report(decode=[row()]) | {"left_out": [cell], "kernels_256": []}
    second = report(decode=[row(context=512)], prefill=[row("prefill")])
    third = report(decode=[{"context": 256, "lily_raised": 600.0, "stock_raised": 60.0}])
    out = gpu_report.merged([first, second, third])
    assert [r["context"] for r in out["decode"]] == [256, 512]
    assert out["decode"][0]["ratio"] == 10 and out["prefill"][0]["tokens"] == 256
    assert out["left_out"] == [] and out["commands"] == ["c"] * 3 and "kernels_256" in out
    assert gpu_report.merged([out]) == out


def test_results_of_two_devices_are_not_joined():
    with pytest.raises(ValueError, match="'H' and 'other' are not one run"):
        gpu_report.merged([report(), report() | {"device": "other"}])
    with pytest.raises(ValueError, match="no result"):
        gpu_report.merged([])


def test_a_kernel_against_its_floor():
    r = gpu_report.kernel_row("head", 2, 200e-6, 300_000_000, 4e12)
    assert r["us"] == 100 and r["total_us"] == 200
    assert r["floor_us"] == pytest.approx(75) and r["over_floor"] == pytest.approx(200 / 75)
    assert r["tb_s"] == pytest.approx(1.5) and r["share_of_copy"] == pytest.approx(0.375)
    assert gpu_report.kernel_row("argmax", 1, 1e-6, 0, 4e12)["over_floor"] is None


def kernel_rows(head_us=100.0):
    return [
        gpu_report.kernel_row(label, 1, us * 1e-6, moved, 4e12)
        for label, us, moved in (
            ("head", head_us, 280_000_000), ("router", 85.0, 20_000_000),
            ("experts up", 400.0, 400_000_000), ("argmax", 5.0, 100),
        )
    ]  # fmt: skip


def test_the_worst_kernels_are_those_that_cost_a_step_most():
    labels = [r["label"] for r in gpu_report.worst(kernel_rows())]
    assert labels == ["experts up", "router", "head"]


def test_targets_name_what_was_missed():
    out = report(
        decode=[row(), row(context=4096, lily=450.0), row(context=131072, lily=360.0)],
        prefill=[row("prefill", 512, 5000.0, 200.0), row("prefill", 4096, 9000.0, 300.0)],
    )
    out["kernels_256"] = kernel_rows()
    found = {t["what"]: t["met"] for t in gpu_report.targets(out)}
    assert found == {
        "decode: no length slower than stock (least at 131,072)": True,
        "decode: times stock at every context (least at 131,072)": False,
        "decode: repeated runs are bit-equal": True,
        "prefill: no length slower than stock (least at 512)": True,
        "prefill: repeated runs are bit-equal": True,
        "decode: tokens a second at 4,096": False,
        "decode: tokens a second at 131,072": True,
        "prefill: tokens a second at 4,096": True,
        "prefill: times stock at 512": True,
        "head: share of the copy rate": True,
    }
    assert gpu_report.targets(report()) == []
    text = gpu_report.text(out)
    assert "MISSED  decode: tokens a second at 4,096: 450, wanted 500" in text


def test_a_row_that_differs_between_runs_is_named():
    out = report(decode=[row() | {"repeatable": False}])
    assert "NOT EQUAL" in gpu_report.text(out)
    assert not all(t["met"] for t in gpu_report.targets(out))


# ---- README's tables and picture


def whole_result():
    out = report(
        decode=[row(context=n, lily=600 - n / 1e3, stock=40.0) for n in gpu.CONTEXTS],
        prefill=[
            row("prefill", n, 9000.0 - n / 100, 300.0 if n <= 4096 else None) for n in gpu.CONTEXTS
        ],
    )
    gpu_report.add_raised(out, {"decode": [{"context": 256, "lily": 598.5, "stock": 45.0}]})
    why = "above --stock-up-to 4,096"
    out["left_out"] = [
        {"part": "prefill", "engine": "stock", "context": n, "why": why} for n in (8192, 16384)
    ]
    forced = {"largest_difference": 0.004, "same_top_1": 1.0}
    return out | {
        "routine": "gpu", "date": "2026-12-01", "weights_gb": 19.5, "copy_tb_s": 4.0,
        "versions": {"mlx": "1", "mlx-lm": "2"}, "kernels_256": kernel_rows(),
        "kernels_131072": kernel_rows(), "step_256": {"us": 1700.0}, "teacher_forced": forced,
        "bundled_greedy": {"equal": True},
    }  # fmt: skip


def test_readme_shows_the_result_of_a_gpu(tmp_path):
    result = whole_result()
    (tmp_path / "gpu-35b-h.json").write_text(json.dumps(result))
    block = readme.figures(tmp_path)
    head = "| tokens | decode lily | decode stock | decode lily, raised | decode stock, raised |"
    assert head in block
    assert "| 256 | 600 | 40.0 | 598 | 45.0 | **13.3x** | 8,997 | 300 | **30.0x** |" in block
    assert "Left out: prefill of stock at 8,192, 16,384 (above --stock-up-to 4,096)." in block
    assert "Repeated runs are equal to the bit." in block and "4.0e-03 token by token" in block
    assert "Farthest above their floors in a step: experts up" in block
    assert "| the step, measured |" in block and readme.GPU_PICTURE in block
    assert block.count("kernel (a step at") == 2 and block.endswith("    c")
    assert "Missed of what this project wants: decode: times stock at every context" in block
    result["decode"][0]["repeatable"] = False
    (tmp_path / "gpu-35b-h.json").write_text(json.dumps(result))
    block = readme.figures(tmp_path)
    assert "1 of 20 repeated runs differ" in block and "repeated runs are bit-equal" in block


def test_stocks_decode_is_shown_with_its_spread(tmp_path):
    """It moves with the host, and the ratio with it."""
    result = whole_result()
    result["decode"][0]["samples"] = {"lily": [599.0, 601.0], "stock": [44.0, 40.0, 33.4]}
    result["raised"]["decode"][0]["samples"] = {"lily": [598.5], "stock": [45.0]}
    (tmp_path / "gpu-35b-h.json").write_text(json.dumps(result))
    assert "| 256 | 600 | 40.0 (33 to 44) | 598 | 45.0 |" in readme.figures(tmp_path)
    assert gpu_report.samples(result, "decode", 256, "stock_raised") == [45.0]
    assert gpu_report.samples(result, "prefill", 9, "stock") == []


def test_the_picture_of_a_gpu(tmp_path):
    pytest.importorskip("matplotlib")
    gpu_plot.plot(whole_result(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="neither decode nor prefill"):
        gpu_plot.plot(report(), tmp_path / "y.png")
    assert [gpu_plot.length_name(n) for n in (256, 4096, 131072)] == ["256", "4K", "128K"]


# ---- The command


@pytest.mark.parametrize(
    "words,message",
    [
        (["--rounds", "0"], "are 1 or more"),
        (["--merge", "x.json"], "--merge needs --output"),
        (["--build"], "--build needs --ptx"),
        (["--only", "kernels", "--engine", "stock"], "needs lily"),
        (["--only", "nothing"], "invalid choice"),
    ],
)
def test_flags_that_do_not_fit(words, message, capsys):
    with pytest.raises(SystemExit):
        gpu.main(words)
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so():
    with mx.stream(mx.cpu), pytest.raises(SystemExit, match="needs an MLX build with a GPU"):
        gpu.main(["--only", "decode"])


def test_merge_writes_the_joined_result(tmp_path, capsys):
    for name, part in (("a", "decode"), ("b", "prefill")):
        made = report(**{part: [row(part)]})
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    files = [str(tmp_path / f"{n}.json") for n in "ab"]
    gpu.main(["--merge", *files, "--output", str(tmp_path / "c.json")])
    out = json.loads((tmp_path / "c.json").read_text())
    assert out["decode"] and out["prefill"]
    assert "decode" in capsys.readouterr().out


# ---- Its parts, on a tiny model and the CPU


@pytest.fixture
def models(monkeypatch):
    config = tiny.config("moe", linear_key_head_dim=64, linear_value_head_dim=64)
    config["text_config"]["max_position_embeddings"] = 4096
    ours = Model(ModelArgs.from_dict(config))
    ours.set_dtype(mx.bfloat16)
    nn.quantize(ours, 64, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    gpu.random_weights(ours)
    stock = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    nn.quantize(stock, 64, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    stock.update(ours.parameters())
    stock.eval()
    monkeypatch.setattr(gpu, "both_models", lambda: (ours, stock))
    return ours, stock


def arguments(tmp_path, *words):
    small = ["--contexts", "4", "9", "--lengths", "5", "40", "--tokens", "3", "--stock-tokens", "2"]
    return gpu.make_parser().parse_args([*small, "--output", str(tmp_path / "result.json"), *words])


def measured(tmp_path, *words):
    gpu.measure(arguments(tmp_path, *words), {"device": "cpu", "mlx": mx.__version__})
    return json.loads((tmp_path / "result.json").read_text())


def test_decode_and_prefill(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "STOCK_WARM", 5)
    monkeypatch.setattr(gpu, "MOST_ROUNDS", 2)
    out = measured(tmp_path, "--only", "decode", "prefill", "--stock-up-to", "5")
    for part, contexts in (("decode", [4, 9]), ("prefill", [5, 40])):
        assert [r[gpu_report.ROWS[part]] for r in out[part]] == contexts
        assert all(r["repeatable"] is True and len(r["samples"]["lily"]) == 2 for r in out[part])
    assert out["decode"][0]["ratio"] > 0 and out["prefill"][0]["ratio"] > 0
    assert out["prefill"][1]["ratio"] is None and out["prefill"][1]["samples"]["stock"] == []
    assert [(x["engine"], x["context"]) for x in out["left_out"]] == [("stock", 40)]
    assert "above --stock-up-to 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rounds,seconds_each,left,count",
    [
        (2, 0.1, 500, 5),
        (2, 3, 500, 2),
        (1, 3, 500, 2),
        (2, 9, 500, 2),
        (7, 9, 500, 7),
        (1, 2, 1, 1),
    ],
)
def test_short_cells_get_more_rounds(monkeypatch, rounds, seconds_each, left, count):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    words = ["--rounds", str(rounds), "--seconds", str(left)]
    run = gpu.Run(gpu.make_parser().parse_args(words), {})
    done = 0
    for _ in run.turns():
        now[0] += seconds_each
        done += 1
    assert done == count


def test_what_does_not_fit_the_time_is_left_out_and_named(models, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.Clock, "left", lambda _: 0.0)
    out = measured(tmp_path, "--only", "decode", "prefill", "raised", "--rounds", "1")
    # The first cell of a part has no estimate yet.
    assert [r["context"] for r in out["decode"]] == [4]
    assert [r["tokens"] for r in out["prefill"]] == [5]
    assert out["prefill"][0]["repeatable"] is None
    cells = {(x["part"], x["engine"], x["context"]) for x in out["left_out"]}
    assert {("decode", "lily", 9), ("decode", "stock", 9), ("prefill", "lily", 40)} <= cells
    assert {("decode", f"{engine}_raised", 32768) for engine in ("lily", "stock")} <= cells


def test_both_engines_with_mlx_s_limits_raised(models, tmp_path, monkeypatch):
    seen = {}

    def again(words, environment):
        given = gpu.make_parser().parse_args(words)
        seen.update(environment=environment, given=given)
        gpu.measure(given, {"device": "cpu", "mlx": mx.__version__})
        return 0

    monkeypatch.setattr(gpu, "run_again", again)
    words = ["--only", "decode", "raised", "--raised", "4", "9", "--stock-up-to", "4"]
    out = measured(tmp_path, *words)
    assert seen["environment"] == gpu_report.RAISED and seen["given"].engine == "both"
    assert seen["given"].contexts == [4, 9] and seen["given"].lengths == [4]
    for r in out["decode"]:
        ratios = (r["lily"] / r["stock"], r["lily_raised"] / r["stock_raised"])
        assert r["ratio"] == min(ratios)
    prefill = out["prefill"][0]
    assert prefill["ratio"] == prefill["lily_raised"] / prefill["stock_raised"]
    assert out["raised"]["decode"][0]["samples"]["stock"]


def test_a_child_that_leaves_nothing_is_an_error(models, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_again", lambda *_: 9)
    with pytest.raises(RuntimeError, match="ended with 9 and no result"):
        measured(tmp_path, "--only", "raised")


def test_the_command_on_record_does_not_name_the_result():
    words = ["--output", "a.json", "--rounds", "3"]
    assert gpu.without_output(words) == ["--rounds", "3"]
    assert gpu.without_output(["--rounds", "3", "--output=a.json"]) == ["--rounds", "3"]
    assert gpu.without_output(["--rounds", "3"]) == ["--rounds", "3"]


def test_the_child_gets_its_environment(monkeypatch):

    ran = {}

    def run(command, env, cwd):
        ran.update(command=command, env=env, cwd=cwd)
        return type("Done", (), {"returncode": 3})

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.run_again(["--only", "decode"], gpu_report.RAISED) == 3
    assert ran["command"][1:] == ["-m", "benchmarks", "gpu", "--only", "decode"]
    assert (
        ran["env"]["MLX_MAX_OPS_PER_BUFFER"] == "1000" and ran["env"]["PATH"] == os.environ["PATH"]
    )
    assert (ran["cwd"] / "benchmarks").is_dir()


def test_kernels_need_the_decode_step(models):
    with pytest.raises(ValueError, match="the decode step does not run here"):
        models[0].language_model.train()
        gpu.kernels(models[0], 4, 1e12)


def test_checks(models, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "bundled_greedy", lambda: {"equal": True})
    monkeypatch.setattr(gpu_checks, "bundled_forced", lambda: {})
    monkeypatch.setattr(gpu.forced_from_caches, "__defaults__", (40,))
    out = measured(tmp_path, "--only", "checks")
    assert out["repeated"] == {"equal": True, "first_difference": None, "tokens": 104}
    assert out["prompt"]["tokens"] == 96 and out["teacher_forced"]["tokens"] == 16
    for name in ("teacher_forced", "forced_from_caches"):
        assert out[name]["largest_difference"] < 0.5


def test_greedy_tokens_of_the_bundled_model():
    with mx.stream(mx.cpu):
        assert gpu_checks.bundled_greedy() == {"equal": True, "first_difference": None}


def test_closeness_is_by_row():
    a, b = mx.array([[1.0, 4.0], [10.0, 40.0]]), mx.array([[1.0, 2.0], [50.0, 40.0]])
    found = gpu_checks.closeness(a, b)
    assert found == {"largest_difference": 1.0, "same_top_1": 0.5, "tokens": 2}


def test_repeated_finds_a_model_that_changes(models, monkeypatch):
    calls = []

    class Drifting:
        language_model = models[0].language_model

        def make_cache(self):
            return []

        def __call__(self, ids, cache):
            calls.append(1)
            return mx.full((1, ids.shape[1], 4), 1.0 if len(calls) < 10 else 1.0 + 1e-6)

    found = gpu_checks.repeated(Drifting(), length=8)
    assert found["equal"] is False
