"""Write the figures of results/ into README.md: `python -m benchmarks readme`.

Everything between the two markers of README.md is replaced by what the result files say, and
docs/compare.png is drawn from the whole-model result. `--check` changes nothing and fails when
README.md does not say what the files say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import common
from lily_mlx import compare, plot
from lily_mlx.cli import _common
from lily_mlx.machine import busy, one_line

BEGIN = "<!-- begin figures: written by `python -m benchmarks readme` -->"
END = "<!-- end figures -->"
PICTURE_OF = "model-bundled-cpu.json"
PICTURE = "docs/compare.png"


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table: the first column is left-aligned, the others right-aligned."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *lines])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"**{compare.number(value)}x**"


def _model(result: dict[str, Any]) -> str:
    names = result["engines"]
    two = len(names) == 2
    header = [""]
    for what in ("prefill", "decode"):
        header += [f"{what} {n}" for n in names] + ([f"{what} ratio"] if two else [])
    checks = {c["cell"]: c for c in result["checks"]}
    header += ["tokens"] if two else []
    lines = []
    for row in result["rows"]:
        line = [row["label"]]
        for what in ("prefill", "decode"):
            line += [compare.number(row["engines"][n][f"{what}_tps"]) for n in names]
            line += [_ratio(row[f"{what}_ratio"])] if two else []
        line += [compare.same_words(checks.get(row["label"]))] if two else []
        lines.append(line)
    settings = result["settings"]
    text = markdown_table(header, lines)
    text += (
        f"\n\nTokens a second; medians of {settings['rounds']} rounds, "
        f"{settings['decode_tokens']} tokens decoded greedily."
    )
    long = result.get("stock_long_buffers")
    if long:
        setting = " ".join(f"{k}={v}" for k, v in long["environment"].items())
        figures = ", ".join(
            f"{row['label']}: {compare.number(row['engines']['stock']['decode_tps'])}"
            for row in long["rows"]
        )
        text += f" Stock's decode with `{setting}`: {figures}."
    return text


def _layers(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        lily, stock = row["lily"], row["stock"]
        lines.append(
            [
                f"{row['module']}, {row['rows']} row{'s' if row['rows'] > 1 else ''}",
                compare.number(1e3 * lily["seconds"]),
                compare.number(1e3 * stock["seconds"]),
                _ratio(stock["seconds"] / lily["seconds"]),
                f"{lily['relative_error']:.1e}",
                f"{stock['relative_error']:.1e}",
            ]
        )
    header = ["", "lily ms", "stock ms", "ratio", "lily error", "stock error"]
    words = "The error is the norm of the difference from float32 over the norm of the output."
    return markdown_table(header, lines) + "\n\n" + words


def _quality(result: dict[str, Any]) -> str:
    lines = [
        [
            f"{row['engine']}, {row['mode']}",
            f"{row['kl_mean']:.1e}",
            f"{row['top1']:.2%}",
            f"{row['perplexity']:.3f}",
        ]
        for row in result["rows"]
    ]
    header = ["", "mean KL to float32", "same top-1", "perplexity"]
    words = f"{result['settings']['tokens']} tokens of English, teacher-forced."
    return markdown_table(header, lines) + "\n\n" + words


def _load(result: dict[str, Any]) -> str:
    """A warning when the machine had other work to do."""
    load = result["load_before"]
    warning = f"; **the machine was busy: load average {load} before the run**"
    return warning if busy(result) else ""


def _decode(result: dict[str, Any]) -> str:
    lines = []
    for row in result["decode"]:
        stock = row.get("stock")
        lines.append(
            [
                f"{row['context']:,}",
                compare.number(row["lily"]),
                compare.number(stock) if stock else "-",
                _ratio(row["lily"] / stock if stock else None),
            ]
        )
    table = markdown_table(["tokens in the caches", "lily tok/s", "stock tok/s", "ratio"], lines)
    forced, greedy = result.get("teacher_forced"), result["bundled_greedy"]
    words = "One sequence, greedy, caches filled with random values."
    if forced:
        words += (
            f" Teacher-forced, the two engines' logits differ by at most "
            f"{forced['largest_difference']:.1e} of the largest, with the same top-1 in "
            f"{forced['same_top_1']:.0%}."
        )
    if greedy["equal"]:
        words += " 64 greedy tokens of the bundled model equal those of the CPU reference."
    shortest = min(int(k.removeprefix("kernels_")) for k in result if k.startswith("kernels_"))
    kernels = result[f"kernels_{shortest}"]
    rows = [
        [
            r["label"],
            str(r["dispatches"]),
            f"{r['us']:.1f}",
            f"{r['total_us']:.0f}",
            f"{r['floor_us']:.0f}",
        ]
        for r in sorted(kernels, key=lambda r: -r["total_us"])
    ]
    header = [f"kernel (a step at {shortest} tokens)", "n", "us each", "us", "floor us"]
    rate = result["copy_tb_s"]
    floor = f"Floor: declared bytes at the {rate:.2f} TB/s of a copy in the same run."
    return "\n\n".join([table, words, markdown_table(header, rows), floor])


TITLES = {
    "model": (_model, "Speed of the whole model"),
    "layers": (_layers, "Layer primitives"),
    "quality": (_quality, "Closeness to float32"),
}


def figures(folder: Path) -> str:
    """The block of README.md: one section a result file, routines in the order of TITLES."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    parts = []
    for routine, (write, title) in TITLES.items():
        for result in (r for r in results if r.get("routine") == routine):
            name, size = result["model"]["name"], result["model"]["bytes"] / 1e6
            parts.append(
                f"**{title}** ({name} model, {size:,.1f} MB; {one_line(result['machine'])}; "
                f"mlx {result['versions']['mlx']}, mlx-lm {result['versions']['mlx-lm']}; "
                f"{result['date']}{_load(result)}):\n\n{write(result)}\n\n"
                f"    {result['command']}"
            )
    for result in (r for r in results if "bundled_greedy" in r):
        parts.append(
            f"**Decode at the shapes of Qwen3.6-35B-A3B** (random 4-bit weights, "
            f"{result['weights_gb']:.1f} GB; {result['device']}; mlx {result['mlx']}; {result['note']}):\n\n"
            f"{_decode(result)}\n\n    python -m benchmarks gpu"
        )
    if not parts:
        raise ValueError(f"No results in {folder}: run `python -m benchmarks model` first.")
    return "\n\n".join(parts)


def renewed(readme: str, block: str) -> str:
    """README's text with the block between its markers replaced."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each.")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="fail when README.md is out of date")
    _common.add_traceback_flag(parser)
    arguments = parser.parse_args(given)

    def body() -> None:
        path = common.ROOT / "README.md"
        text = path.read_text()
        new = renewed(text, figures(common.RESULTS))
        if arguments.check:
            if new != text:
                raise ValueError("README.md is out of date: run `python -m benchmarks readme`.")
            return
        compare.write_atomically(path, new)
        source = common.RESULTS / PICTURE_OF
        if not source.exists():
            print(f"No picture: {source.name} is not there.")
        elif not plot.available():
            print(plot.MISSING)
        else:
            plot.plot(json.loads(source.read_text()), common.ROOT / PICTURE)
        print("README.md says what benchmarks/results says.")

    common.guarded("readme", body, arguments.traceback)
