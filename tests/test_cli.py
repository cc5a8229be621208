"""What a user types: wrong input, missing flags, a changed mlx-lm, a traceback instead of words."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlx.core as mx
import pytest
import tiny

from lily_mlx import BUNDLED_MODEL, cli
from lily_mlx.cli import _common, attach, generate, info
from lily_mlx.private import private_copy

stock_generate = importlib.import_module("mlx_lm.generate")
stock_server = importlib.import_module("mlx_lm.server")

ENGINES = ("lily", "stock")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny float32 model: there both engines are exact enough to write the same tokens."""
    path = tmp_path_factory.mktemp("cli") / "model"
    tiny.checkpoint(path, quantize={"bits": 4, "group_size": 64})
    return path


def refused(main, words, capsys):
    """Run a command that must fail on bad input; return its one line on stderr."""
    with pytest.raises(SystemExit) as stopped:
        main([str(w) for w in words])
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2, error
    assert "Traceback" not in error
    return error


def written(words, capsys):
    generate.main([str(w) for w in words])
    return capsys.readouterr().out


# --- the dispatcher -------------------------------------------------------------------------


def test_every_command_has_help(capsys):
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0
        assert "usage" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_a_missing_or_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    capsys.readouterr()
    assert "'frobnicate'" in refused(cli.main, ["frobnicate"], capsys)


def test_python_dash_m_runs_the_commands(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lily_mlx", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage: lily_mlx" in done.stdout


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("two\n  lines"), 2, "two lines"),
        (KeyError("hidden_size"), 2, "'hidden_size' is missing"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), 2, "a/b: No such file"),
        (AttributeError("x"), 1, "AttributeError: x (--traceback"),
        (ValueError(), 2, "ValueError"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_sentence_and_a_code(error, code, words, capsys):
    def body():
        raise error

    with pytest.raises(SystemExit) as stopped:
        _common.guarded("prog", body, show_traceback=False)
    line = capsys.readouterr().err
    assert stopped.value.code == code
    assert words in line and line.count("\n") <= 1


def test_traceback_is_shown_when_asked_for(folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", str(folder), "--max-tokens", "0", "--traceback"])
    assert stopped.value.code == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--prefill-step-size", "0"], "--prefill-step-size 0"),
        (["--prompt-cache-file", "/nowhere/cache.safetensors"], "/nowhere/cache.safetensors"),
        (["--prompt-cache-file", BUNDLED_MODEL / "model.safetensors"], "is no prompt cache"),
        (["--chat-template-config", "{"], "--chat-template-config { is no JSON object"),
        (["--chat-template-config", "[1]"], "--chat-template-config [1] is no JSON object"),
        (["--seed", "-1"], "--seed -1"),
        (["--adapter-path", "/nowhere/adapter"], "/nowhere/adapter"),
        (["--ignore-chat-template", "--prompt", ""], "no tokens"),
        (["--ignore-chat-template", "--prompt", "word " * 300], "max_position_embeddings"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(folder, engine, words, expected, capsys):
    line = refused(generate.main, ["--model", folder, "--engine", engine, *words], capsys)
    assert line.startswith("lily_mlx.generate: error:") and "\n" not in line
    assert expected in line


@pytest.mark.parametrize("damage", ["config", "weights", "no weights"])
def test_a_damaged_model_is_refused_in_one_sentence(tmp_path, damage, capsys):
    tiny.checkpoint(tmp_path, quantize={"bits": 4, "group_size": 64})
    if damage == "config":
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_5')
    elif damage == "weights":
        os.truncate(tmp_path / "model.safetensors", 1000)
    else:
        (tmp_path / "model.safetensors").unlink()
    for main, words in ((generate.main, ["--model", tmp_path]), (info.main, [tmp_path])):
        line = refused(main, words, capsys)
        assert "\n" not in line and str(tmp_path) in line


def test_strict_belongs_to_lily(folder, capsys):
    words = ["--model", folder, "--engine", "stock", "--strict"]
    assert "strict" in refused(generate.main, words, capsys)


# --- generate -------------------------------------------------------------------------------


def test_generate_has_every_flag_of_mlx_lm(folder):
    ours = generate.build_parser(private_copy("generate", "test"))
    theirs = stock_generate.setup_arg_parser()
    flags = {a.option_strings[-1]: a for a in theirs._actions}
    mine = {a.option_strings[-1]: a for a in ours._actions}
    assert flags.keys() <= mine.keys()
    for name, action in flags.items():
        assert mine[name].default == action.default, name
    assert {"--engine", "--strict", "--traceback"} == mine.keys() - flags.keys()


def test_generate_prints_what_mlx_lm_prints(folder, capsys, monkeypatch):
    words = ["--model", str(folder), "--max-tokens", "12", "--prompt", "hello there"]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *words])
    stock_generate.main()
    theirs = capsys.readouterr().out.split("==========")
    for engine in ENGINES:
        ours = written([*words, "--engine", engine], capsys).split("==========")
        assert len(ours) == len(theirs) == 3
        assert ours[:2] == theirs[:2], engine
        assert [line.split(":")[0] for line in ours[2].split("\n")] == [
            line.split(":")[0] for line in theirs[2].split("\n")
        ]


def test_mlx_lm_itself_stays_as_it_is(folder, capsys):
    before = dict(vars(stock_generate)), dict(vars(stock_server))
    written(["--model", folder, "--max-tokens", "2"], capsys)
    with pytest.raises(SystemExit):
        cli.main(["server", "--help"])
    assert (dict(vars(stock_generate)), dict(vars(stock_server))) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_the_flags_reach_the_engine(folder, engine, capsys, monkeypatch):
    base = ["--model", folder, "--engine", engine, "--verbose", "F", "--max-tokens", "8"]
    greedy = written(base, capsys)
    sampled = ["--temp", "1.5", "--seed", "3"]
    assert written([*base, *sampled], capsys) == written([*base, *sampled], capsys)
    assert written([*base, *sampled], capsys) != greedy
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert written([*base, "--prompt", "-"], capsys) == written(
        [*base, "--prompt", "hello"], capsys
    )
    assert written([*base, "--prefill-step-size", "3"], capsys) == greedy
    assert written([*base, "--chat-template-config", '{"enable_thinking": false}'], capsys)
    assert written([*base, "--kv-bits", "8", "--kv-group-size", "32"], capsys)


def test_a_saved_prompt_cache_is_continued(folder, tmp_path, capsys, monkeypatch):
    saved = tmp_path / "prompt.safetensors"
    words = ["--model", str(folder), "--prompt", "hello there", "--prompt-cache-file", str(saved)]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.cache_prompt", *words])
    importlib.import_module("mlx_lm.cache_prompt").main()
    before = saved.read_bytes()
    capsys.readouterr()
    rest = ["--prompt-cache-file", saved, "--prompt", "more", "--verbose", "F", "--max-tokens", "6"]
    lily, stock = (written([*rest, "--engine", e], capsys) for e in ENGINES)
    assert lily == stock
    assert saved.read_bytes() == before


def test_sampling_with_a_seed_writes_what_mlx_lm_writes(folder, capsys):
    base = ["--model", folder, "--max-tokens", "12", "--verbose", "F"]
    for flags in (
        ["--temp", "0.8", "--top-p", "0.9", "--seed", "5"],
        ["--temp", "1.0", "--top-k", "20", "--min-p", "0.05", "--seed", "6"],
        ["--max-kv-size", "64"],
        ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"],
    ):
        lily, stock = (written([*base, *flags, "--engine", e], capsys) for e in ENGINES)
        assert lily == stock, flags


@pytest.mark.parametrize("engine", ENGINES)
def test_speculative_decoding_is_refused_in_a_sentence(folder, engine, capsys):
    words = ["--model", folder, "--draft-model", folder, "--engine", engine, "--max-tokens", "4"]
    line = refused(generate.main, words, capsys)
    assert "\n" not in line and "Speculative decoding" in line


def _running(words):
    """The generate command in a process of its own, once its first words have come."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lily_mlx", "generate", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.read(20)
    return process


def test_an_interrupt_ends_generation_quietly(endless):
    process = _running(["--model", endless, "--max-tokens", "100000", "--prompt", "hello"])
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b"")


def test_a_reader_that_has_gone_ends_generation_quietly(endless):
    process = _running(["--model", endless, "--max-tokens", "100000", "--prompt", "hello"])
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A tiny model that meets no end-of-text token."""
    path = tmp_path_factory.mktemp("endless") / "model"
    tiny.checkpoint(path, max_position_embeddings=200000)
    for name in ("config.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        content = json.loads(text)
        content.pop("eos_token_id", None)
        content.pop("eos_token", None)
        (path / name).write_text(json.dumps(content))
    return path


# --- the package's own model ----------------------------------------------------------------


def test_without_model_the_bundled_one_is_used(capsys):
    assert written(["--max-tokens", "2", "--verbose", "F"], capsys).strip()
    info.main(["--json"])
    assert json.loads(capsys.readouterr().out)["model"]["path"] == str(BUNDLED_MODEL)


# --- info -----------------------------------------------------------------------------------


def test_info_tells_of_every_module_once(folder, capsys):
    import lily_mlx.loading

    model, _ = lily_mlx.loading.load(str(folder), lazy=True)
    report = model.lily_report()
    info.main([str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    modules = found["model"]["modules"]
    assert sum(m["count"] for m in modules) == len(report)
    assert all(m["kernel"] or m["reason"] for m in modules)
    assert {"machine", "versions", "backend"} <= found.keys()
    info.main([str(folder)])
    shown = capsys.readouterr().out
    for m in modules:
        assert m["path"] in shown and (m["kernel"] or m["reason"]) in shown


def test_info_without_a_model(capsys):
    info.main(["--no-model", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "model" not in found and found["versions"]["mlx"] == mx.__version__


def test_info_groups_equal_layers_and_keeps_unequal_ones_apart():
    def entry(layer, kernel, reason=None):
        return {"path": f"model.layers.{layer}.mlp", "kind": "moe", "kernel": kernel,
                "reason": reason}  # fmt: skip

    report = [entry(n, "moe") for n in (0, 1, 2, 5)] + [entry(3, None, "mxfp4 has no kernel")]
    served, not_served = info.group(report)
    assert served["count"] == 4 and served["path"] == "model.layers.*.mlp"
    assert info._spans(served["layers"]) == "0-2, 5"
    assert not_served["count"] == 1 and not_served["reason"] == "mxfp4 has no kernel"


# --- attach and detach ----------------------------------------------------------------------


def test_attach_and_detach_restore_the_folder(tmp_path, capsys):
    tiny.checkpoint(tmp_path, quantize={"bits": 4, "group_size": 64})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    cli.main(["attach", str(tmp_path)])
    assert "--trust-remote-code" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} != before
    cli.main(["detach", str(tmp_path)])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("main", [attach.main, attach.detach])
def test_attach_to_no_model_is_refused(tmp_path, main, capsys):
    assert "\n" not in refused(main, [tmp_path / "none"], capsys)
    assert "\n" not in refused(main, [tmp_path], capsys)
    assert list(tmp_path.iterdir()) == []


# --- the server -----------------------------------------------------------------------------


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _post(port, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture(params=ENGINES)
def server(request, folder, tmp_path):
    port = _free_port()
    log = tmp_path / "server.log"
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "lily_mlx", "server", "--model", str(folder),
             "--port", str(port), "--engine", request.param],
            cwd=tmp_path,
            stdout=sink,
            stderr=sink,
        )  # fmt: skip
    try:
        for _ in range(600):
            if process.poll() is not None:
                pytest.fail(f"the server stopped: {log.read_text()}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_the_server_answers_and_outlives_bad_requests(server):
    good = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    first = _post(server, good)
    assert first["usage"]["completion_tokens"] == 4
    for bad in (b"{", {"messages": []}, {**good, "max_tokens": -5}, {**good, "temperature": "x"}):
        with pytest.raises(urllib.error.HTTPError) as error:
            _post(server, bad)
        assert 400 <= error.value.code < 600
    again = _post(server, good)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_the_server_has_every_flag_of_mlx_lm(monkeypatch):
    def flags(main):
        seen = []

        def parse(parser, *_):
            seen.append({a.option_strings[-1] for a in parser._actions})
            raise SystemExit

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
        with pytest.raises(SystemExit):
            main()
        return seen[0]

    theirs = flags(stock_server.main)
    ours = flags(lambda: cli.main(["server"]))
    assert ours == theirs | {"--engine", "--strict", "--traceback"}


def test_a_sharded_server_loads_lily_too(folder):
    from lily_mlx.cli.server import sharded_loader
    from lily_mlx.model import Model

    model, _ = sharded_loader()(str(folder), None, mx.distributed.init())
    assert isinstance(model, Model)
    assert stock_server.sharded_load.__globals__["load_model"].__module__ == "mlx_lm.utils"


def test_readme_names_every_command():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    for command in cli.COMMANDS:
        assert f"lily_mlx {command}" in readme or f"lily_mlx.{command}" in readme, command


def test_the_tests_that_readme_names_are_there():
    folder = Path(__file__).resolve().parent
    file = ""
    for named, test in re.findall(r"`(test_\w+\.py)?::(\w+)`", (folder / "README.md").read_text()):
        file = named or file
        assert f"def {test}(" in (folder / file).read_text(), f"{file}::{test}"
