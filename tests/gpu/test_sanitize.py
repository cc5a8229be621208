"""The sanitizer's command and its verdicts, with a stand-in for the tool; the workload on a CPU."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest

from . import sanitize


def fake(tmp_path, body):
    """A script in the sanitizer's place; it sees the whole command line."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


SEES_THE_PLANT = """case "$*" in
*sanitize\\ plant*|*"sanitize plant") echo "========= ERROR SUMMARY: 1 error"; exit 9;; esac
"""


def test_only_our_kernels_are_checked_by_their_names():
    names = sanitize.entries()
    assert "gated_delta_step_bf16" in names and len(names) == len(set(names))
    words = sanitize.command("cs", "racecheck", ["steps"], names)
    filters = [words[i + 1] for i, w in enumerate(words) if w == "--kernel-name"]
    assert filters == [f"kne={n}" for n in names]
    assert words[words.index("--error-exitcode") + 1] == str(sanitize.FOUND)
    assert words[-4:] == [sys.executable, "-m", "tests.gpu.sanitize", "steps"]
    assert "--report-api-errors" not in words


def test_initcheck_follows_all_kernels():
    """The writes of one that it does not see would not count."""
    words = sanitize.command("cs", "initcheck", ["steps"], sanitize.entries())
    assert "--kernel-name" not in words and "--check-api-memory-access" in words


def test_a_clean_run(tmp_path, capsys):
    tool = fake(tmp_path, SEES_THE_PLANT + 'echo "========= ERROR SUMMARY: 0 errors"')
    words = ["memcheck", "initcheck", "--sanitizer", tool, "--output", str(tmp_path / "logs")]
    with pytest.raises(SystemExit) as end:
        sanitize.main(words)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [f"{tool:10} {part:13}" for tool in words[:2] for part in sanitize.PARTS]
    assert len(lines) == 1 + len(parts)
    for line, part in zip(lines[1:], parts, strict=True):
        assert line.startswith(f"ok     {part} ERROR SUMMARY: 0 errors")
    logs = {p.stem for p in (tmp_path / "logs").iterdir()}
    products = {"memcheck-plant", "memcheck-product", "initcheck-product"}
    assert logs == products | {"-".join(part.split()) for part in parts}


@pytest.mark.parametrize(
    "tool,body,words",
    [
        ("memcheck", "exit 0", "did not see a planted fault"),
        (
            "racecheck",
            'echo "========= RACECHECK SUMMARY: 2 hazards"; exit 9',
            "2 hazards, status 9",
        ),
        ("racecheck", "sleep 5", "not done in 0 s"),
        ("initcheck", "echo unknown option; exit 1", "no summary, status 1"),
    ],
)
def test_what_is_found_fails(tmp_path, capsys, tool, body, words):
    with pytest.raises(SystemExit) as end:
        sanitize.main([tool, "--sanitizer", fake(tmp_path, body), "--seconds", "0.4"])
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert f"FAILED {tool}" in out and words in out


def test_without_the_tool_it_says_where_it_comes_from(monkeypatch):
    from metal.host import cuda_tools

    monkeypatch.setattr(sanitize.shutil, "which", lambda _: None)
    monkeypatch.setattr(cuda_tools, "_find", lambda *_: None)
    with pytest.raises(SystemExit, match="nvidia-cuda-sanitizer-api"):
        sanitize.main([])


def test_an_unknown_tool_is_named(capsys):
    with pytest.raises(SystemExit):
        sanitize.main(["leakcheck"])
    assert "there is no tool 'leakcheck'" in capsys.readouterr().err


@pytest.mark.parametrize("product,part", [(0, "chunk"), (1, "chunk-of-sums")])
def test_attention_is_made_of_sums_where_products_fail(tmp_path, capsys, product, part):
    body = f'case "$*" in *" product") exit {product};; *" {part}") exit 9;; esac'
    with pytest.raises(SystemExit):
        sanitize.main(["racecheck", "--sanitizer", fake(tmp_path, body)])
    out = capsys.readouterr().out
    assert "ok     racecheck  steps" in out and f"FAILED racecheck  {part} " in out
    assert ("product of zeros fails" in out) == bool(product)


def test_the_workload(capsys):
    """On the CPU: both ways to read the prompt go on with the same words, and caches grow."""
    with mx.stream(mx.cpu):
        for part in (*sanitize.PARTS, "product"):
            sanitize.workload(part)
    one_by_one, grown, chunk = (
        line.split(":")[1].split() for line in capsys.readouterr().out.splitlines()
    )
    assert one_by_one == chunk and len(chunk) == 9 and len(grown) == 8


@pytest.mark.parametrize("heads,kv_heads", [(8, 1), (4, 2)])
def test_attention_of_sums_is_attention(heads, kv_heads):
    with mx.stream(mx.cpu):
        mx.random.seed(0)
        q, k, v = (mx.random.normal((1, n, 40, 32)) for n in (heads, kv_heads, kv_heads))
        wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask="causal")
        got = sanitize.attention_of_sums(q, k, v, cache=None, scale=0.2, mask="causal")
        assert mx.abs(got - wanted).max().item() < 1e-5
