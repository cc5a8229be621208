"""What would mislead: unfair order, warm-up counted, a hidden difference, a lost file."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import tiny
from mlx.utils import tree_flatten

from lily_mlx import compare, float32, plot, prompts
from lily_mlx.cli import compare as command
from lily_mlx.report import render, write_atomically, write_json

stock_step = importlib.import_module("mlx_lm.generate").generate_step
QUANTIZED = {"bits": 4, "group_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare") / "model"
    tiny.checkpoint(path, quantize=QUANTIZED, dtype=mx.bfloat16)
    return path


def engine(folder, name="stock", step=stock_step):
    model, tokenizer, config = mlx_lm.load(str(folder), return_config=True)
    return compare.Engine(name, model, step, tokenizer, config)


def measured(engines, cells, decode_tokens=3, rounds=2, **options):
    return compare.measure(
        engines, cells, compare.Prompts(engines[0], None), decode_tokens, rounds, **options
    )


# --- prompts and cells ----------------------------------------------------------------------


def test_prompts_have_the_length_asked_for_and_ids_of_the_vocabulary(folder):
    one = engine(folder)
    for length in (1, 7, 5000):
        for text in (None, prompts.PASSAGE, "a"):
            ids = compare.Prompts(one, text)(length)
            assert len(ids) == length
            assert all(0 <= i < tiny.VOCAB_SIZE for i in ids)


def test_text_without_tokens_is_refused(folder):
    with pytest.raises(ValueError, match="no tokens"):
        compare.Prompts(engine(folder), "")(3)


@pytest.mark.parametrize(
    ("lengths", "contexts", "decode", "words"),
    [
        ([], [], 4, "Nothing to measure"),
        ([4], [], 1, "at least 2 tokens"),
        ([0], [], 4, "at least 1 token"),
        ([60], [], 8, "64 positions"),
        ([4], [60], 8, "64 positions"),
    ],
)
def test_cells_that_cannot_be_measured_are_refused(lengths, contexts, decode, words):
    with pytest.raises(ValueError, match=words):
        compare.make_cells(lengths, contexts, decode, 64)


def test_lengths_may_be_given_in_k():
    assert [command.length(t) for t in ("300", "4K", "128k")] == [300, 4096, 131072]
    for text in ("0", "-3", "0K"):
        with pytest.raises(command.argparse.ArgumentTypeError):
            command.length(text)


# --- fairness -------------------------------------------------------------------------------


def test_both_engines_hold_the_same_weight_arrays(folder):
    lily, stock = compare.load_engines(folder)
    theirs = dict(tree_flatten(stock.model.parameters()))
    assert stock.shares_weights and len(theirs) > 50
    assert all(theirs[k] is v for k, v in tree_flatten(lily.model.parameters()))


def test_every_cell_is_warmed_and_the_order_alternates(folder):
    runs = []

    def watched(name):
        def step(prompt, model, **options):
            runs.append((name, len(prompt)))
            yield from stock_step(prompt, model, **options)

        return step

    both = [engine(folder, name, watched(name)) for name in ("lily", "stock")]
    samples = measured(both, [compare.Cell(5), compare.Cell(9)], rounds=2)
    first, second = (runs[4 * n : 4 * n + 4] for n in (1, 2))
    assert sorted(runs[:4]) == sorted(first)  # the warm-up runs every cell at its shape
    assert first == [("lily", 5), ("stock", 5), ("lily", 9), ("stock", 9)]
    assert second == [("stock", 9), ("lily", 9), ("stock", 5), ("lily", 5)]
    assert len(runs) == compare.runs_of(both, [compare.Cell(5), compare.Cell(9)], 2)
    assert len(samples) == 8 and all(s.round > 0 for s in samples)


def test_prefill_ends_with_the_first_token_and_decode_with_the_last(folder):
    sample = measured([engine(folder)], [compare.Cell(5)], decode_tokens=4, rounds=1)[0]
    assert len(sample.tokens) == 4
    assert sample.prefill_tps == pytest.approx(5 / sample.prefill_s)
    assert sample.decode_tps == pytest.approx(3 / sample.decode_s)
    assert sample.peak_bytes > 0


def test_an_engine_that_stops_early_is_an_error(folder):
    def step(prompt, model, **options):
        yield from list(stock_step(prompt, model, **options))[:2]

    with pytest.raises(RuntimeError, match="2 tokens instead of 3"):
        measured([engine(folder, step=step)], [compare.Cell(5)])


def test_a_stored_context_is_not_changed_by_the_runs_that_start_from_it(folder):
    one = engine(folder)
    cell = compare.Cell(1, 12)
    samples = measured([one], [cell], decode_tokens=4, rounds=3)
    assert all(s.tokens == samples[0].tokens for s in samples)
    assert all(s.prefill_s is None for s in samples)
    context, prompt = compare.Prompts(one, None).of(cell)
    whole = [t for t, _ in stock_step(mx.array(context + prompt), one.model, max_tokens=4)]
    assert samples[0].tokens == whole


def test_medians_spreads_and_ratios():
    cell = compare.Cell(10)

    def sample(name, seconds):
        return compare.Sample(name, cell, 1, seconds, 2 * seconds, 7, [1, 2, 3])

    samples = [sample("lily", s) for s in (1, 2, 5)] + [sample("stock", s) for s in (4, 4, 8)]
    row = compare.summarize(["lily", "stock"], samples)[0]
    assert row["engines"]["lily"]["prefill_tps"] == 5
    assert row["engines"]["stock"]["decode_tps"] == 0.25
    assert row["engines"]["lily"]["prefill_spread"] == pytest.approx((10 - 2) / 5)
    assert row["prefill_ratio"] == 2 and row["decode_ratio"] == 2


# --- differences ----------------------------------------------------------------------------


def test_equal_engines_are_called_the_same(folder):
    both = [engine(folder, "lily"), engine(folder)]
    samples = measured(both, [compare.Cell(6)])
    check = compare.check_tokens(both, samples, compare.Prompts(both[0], None), folder)[0]
    assert check["same"] and "top" not in check
    assert check["repeatable"] == {"lily": True, "stock": True}


def test_a_difference_is_shown_with_both_engines_and_float32(tmp_path):
    folder = tmp_path / "model"
    tiny.checkpoint(folder, quantize=QUANTIZED)  # float32, so that stock's sums are exact enough
    both = [engine(folder, "lily"), engine(folder)]
    head = both[0].model.language_model.lm_head
    head.scales, head.biases = -head.scales, -head.biases  # every logit changes its sign
    samples = measured(both, [compare.Cell(6)])
    asked = compare.Prompts(both[0], None)
    check = compare.check_tokens(both, samples, asked, folder)[0]
    assert not check["same"] and check["at"] == 0
    assert list(check["top"]) == ["lily", "stock", "float32"]
    assert check["float32_agrees"] == ["lily"]  # it has lily's weights, the changed ones
    for name, one in (("lily", 0), ("stock", 1)):
        assert check["top"][name][0]["token"] == check["tokens"][name][0]
        assert len(check["top"][name]) == 5, one
    report = compare.build_report(
        both, folder, samples, [check], {"rounds": 2, "decode_tokens": 3, "prompts": "synthetic"}
    )
    text = render(report)
    assert (
        "differ at 1 (float32: lily)" in text and "first difference" in text and "float32" in text
    )
    without = compare.check_tokens(both, samples, asked, folder, use_float32="never")[0]
    assert without["float32"] == "not asked for" and "float32" not in without["top"]


def test_the_float32_run_is_left_out_when_it_does_not_fit(folder, monkeypatch):
    model = engine(folder).model
    assert compare._float32_refusal(model, "auto") is None
    need = float32.float32_bytes(model)
    monkeypatch.setattr(compare, "model_memory_bytes", lambda: 2 * need - 1)
    assert "left out" in compare._float32_refusal(model, "auto")
    assert compare._float32_refusal(model, "always") is None


def test_the_first_difference_is_found():
    assert compare.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert compare.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert compare.first_difference([4], [5]) == 0


# --- the float32 yardstick --------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantize",
    [
        QUANTIZED,
        {"bits": 8, "group_size": 32},
        {"bits": 4, "group_size": 128},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        None,
    ],
)
def test_float32_model_is_the_dequantized_model(tmp_path, quantize):
    # Float32 scales: then stock's own quantized product is exact enough to be the judge.
    dtype = mx.bfloat16 if quantize is None else mx.float32
    tiny.checkpoint(tmp_path, quantize=quantize, dtype=dtype)
    source, _ = mlx_lm.load(str(tmp_path))
    before = {k: v.dtype for k, v in tree_flatten(source.parameters())}
    need = float32.float32_bytes(source)
    model = float32.load_float32(str(tmp_path), share=source)
    parameters = dict(tree_flatten(model.parameters()))
    assert {v.dtype for v in parameters.values()} == {mx.float32}
    assert sum(v.nbytes for v in parameters.values()) == need
    ids = mx.array([[1, 2, 3, 4, 5]])
    logits = model(ids)
    assert logits.dtype == mx.float32 and mx.isfinite(logits).all()
    if quantize is not None:  # CPU MLX has no bf16 product of unquantized experts to hold it to
        assert mx.allclose(logits, source(ids), rtol=1e-3, atol=1e-3)
    assert {k: v.dtype for k, v in tree_flatten(source.parameters())} == before


def test_float32_weights_do_not_keep_the_rounding_of_bf16_scales(folder):
    source = engine(folder).model
    model = float32.load_float32(str(folder), share=source)
    packed, wide = (m.language_model.lm_head for m in (source, model))
    exact = mx.dequantize(
        packed.weight,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        packed.group_size,
        packed.bits,
    )
    rounded = mx.dequantize(
        packed.weight, packed.scales, packed.biases, packed.group_size, packed.bits
    )
    assert mx.array_equal(wide.weight, exact)
    assert not mx.array_equal(wide.weight, rounded.astype(mx.float32))


def test_a_quantized_module_without_float32_form_is_refused():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = mx.ones((2,))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.strange = Strange()

    with pytest.raises(ValueError, match="Strange"):
        float32.to_float32(Model())


def test_weights_are_shared_only_between_equal_models(folder, tmp_path):
    first, second = engine(folder).model, engine(folder).model
    assert float32.share_weights(second, first)
    head = "language_model.lm_head.weight"
    assert dict(tree_flatten(second.parameters()))[head] is first.language_model.lm_head.weight
    tiny.checkpoint(tmp_path, quantize={"bits": 8, "group_size": 64}, dtype=mx.bfloat16)
    other = engine(tmp_path).model
    before = other.language_model.lm_head.weight
    assert not float32.share_weights(other, first)
    assert other.language_model.lm_head.weight is before


# --- files and the command --------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        write_atomically(target, None)
    with pytest.raises(TypeError):
        write_json({"model": object()}, target)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def arguments(folder, *more):
    return ["--model", str(folder), "--prompt-lengths", "5", "--decode-tokens", "3",
            "--rounds", "1", *more]  # fmt: skip


def test_the_command_measures_both_engines_and_writes_its_files(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command.main(arguments(folder, "--contexts", "8", "--output-dir", str(tmp_path)))
    shown, progress = capsys.readouterr()
    assert "lily writes:" in shown and "prompt 5" in shown and "context 8" in shown
    assert progress.count("warm-up") == 4 and progress.count("round 1/1") == 4
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["engines"] == ["lily", "stock"]
    assert {"cpu", "cores", "memory_bytes", "device"} <= report["machine"].keys()
    assert {"mlx", "mlx-lm", "python"} <= report["versions"].keys()
    assert len(report["samples"]) == 4
    assert all(row["decode_ratio"] > 0 for row in report["rows"])
    assert str(folder.parent) not in json.dumps(report)
    assert "prompt 5" in (tmp_path / "compare.txt").read_text()
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_all_but_the_plot_is_done(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command.main(
        arguments(folder, "--engines", "stock", "--no-passage", "--output-dir", str(tmp_path))
    )
    assert plot.MISSING in capsys.readouterr().out
    assert (tmp_path / "compare.json").exists() and not (tmp_path / "compare.png").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompt-lengths", "4K"], "512 positions"),
        (["--text", "/nowhere/text.txt"], "/nowhere/text.txt"),
        (["--engines", "stock", "stock"], "twice"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(folder, more, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments(folder, *more))
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip()
    assert last.startswith("lily_mlx.compare: error:") and words in last
    assert "\n" not in last


def benchmark(words, cwd):
    """Run `python -m benchmarks`, on the installed package: the sources may hold no extension."""
    code = (
        "import sys, lily_mlx; sys.path.insert(0, sys.argv.pop(1)); "
        "from benchmarks.__main__ import main; main()"
    )
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", code, root, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["quality", "--tokens", "6", "--chunk", "3"],
        ["layers", "--rows", "1", "3", "--past", "5", "--rounds", "1"],
        ["model", "--prompt-lengths", "4", "--decode-tokens", "2", "--rounds", "1"],
    ],
)
def test_the_benchmarks_run(folder, tmp_path, words):
    where = ["--model", str(folder), "--output-dir", str(tmp_path), "--label", "result"]
    done = benchmark([*words, *where], tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["routine"] == words[0] and result["rows"]
    assert (tmp_path / "result.txt").exists()


def test_the_readme_says_what_the_result_files_say(tmp_path):
    done = benchmark(["readme", "--check"], tmp_path)
    assert done.returncode == 0, done.stderr
