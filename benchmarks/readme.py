"""Write the figures of results/ into README.md: `python -m benchmarks readme`.

Everything between the two markers of README.md is replaced by what the result files say, and
docs/compare.png is drawn from the whole-model result, docs/gpu.png from the newest of a GPU.
`--check` changes nothing and fails when README.md does not say what the files say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import common, gpu_plot, gpu_report
from lily_mlx import plot
from lily_mlx.cli import _common
from lily_mlx.machine import busy, one_line
from lily_mlx.report import number, same_words, write_atomically

BEGIN = "<!-- begin figures: written by `python -m benchmarks readme` -->"
END = "<!-- end figures -->"
PICTURE_OF = "model-bundled-cpu.json"
PICTURE = "docs/compare.png"
GPU_PICTURE = "docs/gpu.png"


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table: the first column is left-aligned, the others right-aligned."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *lines])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"**{number(value)}x**"


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
            line += [number(row["engines"][n][f"{what}_tps"]) for n in names]
            line += [_ratio(row[f"{what}_ratio"])] if two else []
        line += [same_words(checks.get(row["label"]))] if two else []
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
            f"{row['label']}: {number(row['engines']['stock']['decode_tps'])}"
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
                number(1e3 * lily["seconds"]),
                number(1e3 * stock["seconds"]),
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


def _gpu_rates(result: dict[str, Any]) -> str:
    """Decode and prefill by length; a column that no row fills is left away."""
    columns = []
    for part in gpu_report.ROWS:
        for name in (*gpu_report.RATES, "ratio"):
            if any(row.get(name) for row in result.get(part, [])):
                columns.append((part, name))
    by_length: dict[int, dict[str, dict[str, Any]]] = {}
    for part, key in gpu_report.ROWS.items():
        for row in result.get(part, []):
            by_length.setdefault(row[key], {})[part] = row
    lines = []
    for length in sorted(by_length):
        line = [f"{length:,}"]
        for part, name in columns:
            value = by_length[length].get(part, {}).get(name)
            text = _ratio(value) if name == "ratio" else number(value)
            samples = gpu_report.samples(result, part, length, name)
            if part == "decode" and name.startswith("stock") and len(samples) > 1:
                text += f" ({min(samples):.0f} to {max(samples):.0f})"
            line.append(text)
        lines.append(line)
    names = [f"{part} {name.replace('_', ', ')}" for part, name in columns]
    return markdown_table(["tokens", *names], lines)


def _gpu_words(result: dict[str, Any]) -> str:
    """What the table's numbers are, what was left out, and what was checked."""
    words = ["Tokens a second; one sequence, greedy."]
    if result.get("decode"):
        words.append(
            "Decode: caches filled with random values; in brackets stock's least and most."
        )
    if result.get("prefill"):
        words.append("Prefill: chunks of 2,048, until the first token.")
    if any(r.get("stock_raised") for part in gpu_report.ROWS for r in result.get(part, [])):
        setting = " ".join(f"{k}={v}" for k, v in gpu_report.RAISED.items())
        words.append(f"Raised: with `{setting}`. Ratios are of rates in one process, the lesser.")
    cells: dict[tuple[str, str, str], list[int]] = {}
    for x in result.get("left_out", []):
        cells.setdefault((x["part"], x["engine"], x["why"]), []).append(x["context"])
    for (part, engine, why), lengths in cells.items():
        at = ", ".join(f"{n:,}" for n in lengths)
        words.append(f"Left out: {part} of {engine.replace('_', ', ')} at {at} ({why}).")
    rows = [r for part in gpu_report.ROWS for r in result.get(part, [])]
    runs = [r["repeatable"] for r in rows if r.get("repeatable") is not None]
    if runs:
        words.append(
            "Repeated runs are equal to the bit."
            if all(runs)
            else f"**{runs.count(False)} of {len(runs)} repeated runs differ.**"
        )
    where = {"teacher_forced": "token by token", "forced_from_caches": "from filled caches",
             "prompt": "as a prompt",
             "bundled_forced": "on the bundled model"}  # fmt: skip
    forced = [
        f"{result[name]['largest_difference']:.1e} {how} (same top-1 in "
        f"{result[name]['same_top_1']:.0%})"
        for name, how in where.items()
        if name in result
    ]
    if forced:
        words.append(
            "Logits on the same tokens differ from stock's by at most, of the largest logit: "
            + ", ".join(forced) + "."
        )  # fmt: skip
    if "bundled_greedy" in result:
        words.append(
            "64 greedy tokens of the bundled model equal those of the CPU reference."
            if result["bundled_greedy"]["equal"]
            else "**Greedy tokens of the bundled model differ from the CPU's.**"
        )
    missed = [t["what"] for t in gpu_report.targets(result) if not t["met"]]
    if missed:
        words.append(f"Missed of what this project wants: {'; '.join(missed)}.")
    return " ".join(words)


def _gpu_kernels(result: dict[str, Any], context: int) -> str:
    kernels = sorted(result[f"kernels_{context}"], key=lambda r: -r["total_us"])
    rows = [
        [
            r["label"],
            str(r["dispatches"]),
            f"{r['us']:.1f}",
            f"{r['total_us']:.0f}",
            f"{r['floor_us']:.0f}",
            number(r["over_floor"]) if r["floor_us"] >= 0.5 else "-",
            f"{r['share_of_copy']:.0%}",
        ]
        for r in kernels
    ]
    total, floor = (sum(r[k] for r in kernels) for k in ("total_us", "floor_us"))
    count = str(sum(r["dispatches"] for r in kernels))
    rows.append(["all", count, "", f"{total:.0f}", f"{floor:.0f}", number(total / floor),
                 f"{floor / total:.0%}"])  # fmt: skip
    step = result.get(f"step_{context}")
    if step:
        rows.append(["the step, measured", "", "", f"{step['us']:.0f}", "", "", ""])
    header = [f"kernel (a step at {context:,} tokens)", "n", "us each", "us", "floor us",
              "times floor", "of copy rate"]  # fmt: skip
    lost = [
        f"{r['label']} ({r['total_us'] - r['floor_us']:.0f} us)" for r in gpu_report.worst(kernels)
    ]
    words = f"Farthest above their floors in a step: {', '.join(lost)}."
    return markdown_table(header, rows) + "\n\n" + words


def _gpu(result: dict[str, Any]) -> str:
    parts = [_gpu_rates(result), _gpu_words(result)]
    contexts = gpu_report.contexts_of_kernels(result)
    parts += [_gpu_kernels(result, context) for context in contexts]
    if contexts:
        parts.append(
            f"Floor: declared bytes at the {result['copy_tb_s']:.2f} TB/s of a copy in the same "
            "run; each kernel is timed by itself, all its dispatches of a step in a row."
        )
    return "\n\n".join(parts)


def _ablate(result: dict[str, Any]) -> str:
    lines = [
        [
            f"{row['arm']} ({row['what']})",
            f"{row['kind']} at {row['at']:,}",
            number(row["production"]),
            number(row["without"]),
            _ratio(row["ratio"]),
            "pays" if row["pays"] else "does not pay here",
        ]
        for row in result["rows"]
    ]
    words = [
        f"{row['arm'].capitalize()}: from a run of its own, `{row['run']}`."
        for row in result["rows"]
        if "run" in row
    ]
    words += [f"Left out, {x['arm']}: {x['why']}." for x in result["left_out"]]
    table = markdown_table(["arm", "", "production", "without", "ratio", ""], lines)
    return "\n\n".join([table, " ".join(words)] if words else [table])


TITLES = {
    "model": (_model, "Speed of the whole model"),
    "layers": (_layers, "Layer primitives"),
    "quality": (_quality, "Closeness to float32"),
    "ablate": (_ablate, "Each choice against what it replaces, tokens a second"),
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
    of_gpus = gpu_results(results)
    for result in of_gpus:
        picture = ""
        if result is of_gpus[-1]:
            what = "Decode and prefill, lily_mlx and stock mlx-lm, by length"
            picture = f"![{what}]({GPU_PICTURE})\n\n"
        commands = dict.fromkeys(result.get("commands", [result["command"]]))
        parts.append(
            f"**{result['device']} at the shapes of Qwen3.6-35B-A3B** (random 4-bit weights, "
            f"{result['weights_gb']:.1f} GB; mlx {result['versions']['mlx']}, mlx-lm "
            f"{result['versions']['mlx-lm']}; {result['date']}):\n\n{picture}{_gpu(result)}\n\n"
            + "\n".join(f"    {c}" for c in commands)
        )
    if not parts:
        raise ValueError(f"No results in {folder}: run `python -m benchmarks model` first.")
    return "\n\n".join(parts)


def gpu_results(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `python -m benchmarks gpu`, the oldest first."""
    found = [r for r in results if r.get("routine") == "gpu" and "weights_gb" in r]
    return sorted(found, key=lambda r: r["date"])


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
        write_atomically(path, new)
        source = common.RESULTS / PICTURE_OF
        if not source.exists():
            print(f"No picture: {source.name} is not there.")
        elif not plot.available():
            print(plot.MISSING)
        else:
            plot.plot(json.loads(source.read_text()), common.ROOT / PICTURE)
            files = sorted(common.RESULTS.glob("*.json"))
            for result in gpu_results([json.loads(path.read_text()) for path in files])[-1:]:
                gpu_plot.plot(result, common.ROOT / GPU_PICTURE)
        print("README.md says what benchmarks/results says.")

    common.guarded("readme", body, arguments.traceback)
