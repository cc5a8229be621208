"""`lily_mlx.compare`: lily and stock mlx-lm side by side on one model, in one process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx import compare
from lily_mlx.cli import _common
from lily_mlx.machine import machine, one_line
from lily_mlx.prompts import PASSAGE
from lily_mlx.report import render, write_atomically, write_json

# (prompt lengths, tokens to decode): about a minute on two CPU cores with the bundled model.
CPU_DEFAULTS = ([32, 128], 24)
GPU_DEFAULTS = ([256, 1024, 4096], 64)

OPENING = "She looked out at the sea, and"


def length(text: str) -> int:
    """An argparse type: a count of tokens, such as 300, 4K or 128K."""
    scale = 1024 if text[-1:] in "kK" else 1
    value = int(text[:-1] if scale > 1 else text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value * scale


def build_parser(prog: str = "lily_mlx.compare") -> argparse.ArgumentParser:
    from lily_mlx import BUNDLED_MODEL

    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write a passage with lily, then time lily and stock mlx-lm in turn on the "
        "same weights, and compare their tokens.",
    )
    parser.add_argument(
        "--model",
        default=str(BUNDLED_MODEL),
        help="model folder or Hugging Face repository (default: the small model in the package)",
    )
    parser.add_argument(
        "--prompt-lengths",
        type=length,
        nargs="+",
        metavar="N",
        help="prompts to prefill and then decode from, in tokens; 4K means 4096 "
        "(default: 32 128 on a CPU, 256 1K 4K on a GPU)",
    )
    parser.add_argument(
        "--contexts",
        type=length,
        nargs="+",
        metavar="N",
        default=[],
        help="also decode after this much stored context",
    )
    parser.add_argument(
        "--decode-tokens",
        type=length,
        metavar="N",
        help="tokens to decode in each run (default: 24 on a CPU, 64 on a GPU)",
    )
    parser.add_argument(
        "--rounds", type=_common.positive, default=3, help="timed rounds (default: 3)"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=compare.ENGINES,
        default=list(compare.ENGINES),
        help="which engines to run; the ratio is the first over the second (default: both)",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="take the prompts from this text file; `synthetic` uses ids that need no text "
        "(default: a passage of English for the bundled model, synthetic ids for others)",
    )
    parser.add_argument(
        "--float32",
        choices=("auto", "always", "never"),
        default="auto",
        help="the float32 run beside a difference: when it fits in memory, always, or never",
    )
    parser.add_argument(
        "--prefill-step-size", type=_common.positive, default=2048, help="prompt tokens a chunk"
    )
    parser.add_argument("--strict", action="store_true", help="fail when a module has no kernel")
    parser.add_argument("--no-passage", action="store_true", help="do not write the passage first")
    parser.add_argument("--trust-remote-code", action="store_true", help="as in mlx_lm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG (needs matplotlib)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="write compare.json, compare.txt and, with matplotlib, compare.png there",
    )
    _common.add_traceback_flag(parser)
    return parser


class Progress:
    """A bar on a terminal, a line a run elsewhere; on stderr, so that stdout is the report."""

    def __init__(self, total: int):
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="run", leave=False, dynamic_ncols=True)

    def __call__(self, text: str) -> None:
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(self._bar.n < self._bar.total)  # looking at a difference is no run

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _text(arguments: argparse.Namespace) -> str | None:
    if arguments.text == "synthetic":
        return None
    if arguments.text is not None:
        return Path(arguments.text).read_text()
    return PASSAGE if compare.is_bundled(arguments.model) else None


def write_passage(engine: compare.Engine, bundled: bool, tokens: int = 80) -> None:
    """Generate a passage with an engine and print it as it comes."""
    from mlx_lm.sample_utils import make_sampler

    if engine.name == "lily":
        from lily_mlx import stream_generate
    else:
        from mlx_lm import stream_generate
    tokenizer = engine.tokenizer
    shown = OPENING
    ids = tokenizer.encode(OPENING)
    if not bundled and tokenizer.has_chat_template:
        message = [{"role": "user", "content": "Describe the sea in one paragraph."}]
        shown, ids = "", tokenizer.apply_chat_template(message, add_generation_prompt=True)
    print(f"{engine.name} writes:\n\n{shown}", end="", flush=True)
    before = len(tokenizer.decode(ids)) if not shown else len(shown)
    mx.random.seed(0)
    for part in stream_generate(
        engine.model, tokenizer, ids, tokens, sampler=make_sampler(0.6, top_p=0.9)
    ):
        if part.finish_reason == "stop":
            break
        ids.append(part.token)
        # Of the whole: mlx-lm's streaming decoder drops the space before the first word.
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the middle of a character
            print(text[before:], end="", flush=True)
            before = len(text)
    print("\n")


def run(arguments: argparse.Namespace, progress: Callable[[int], Progress] = Progress) -> dict:
    """Measure what the command line asks for, print the report, write the files."""
    if len(set(arguments.engines)) != len(arguments.engines):
        raise ValueError("--engines names an engine twice.")
    defaults = GPU_DEFAULTS if machine()["device"] == "gpu" else CPU_DEFAULTS
    decode_tokens = arguments.decode_tokens or defaults[1]
    lengths = arguments.prompt_lengths or ([] if arguments.contexts else defaults[0])
    text = _text(arguments)

    print(one_line(machine()), flush=True)
    engines = compare.load_engines(
        arguments.model,
        arguments.engines,
        arguments.strict,
        trust_remote_code=arguments.trust_remote_code,
    )
    cells = compare.make_cells(lengths, arguments.contexts, decode_tokens, engines[0].max_positions)
    prompts = compare.Prompts(engines[0], text)
    about = compare.describe_model(engines[0], arguments.model)
    print(f"model {about['name']} ({about['type']}), {about['bytes'] / 1e6:,.1f} MB\n", flush=True)
    if not arguments.no_passage:
        write_passage(engines[0], compare.is_bundled(arguments.model))

    shown = progress(compare.runs_of(engines, cells, arguments.rounds))
    try:
        report = compare.run(
            engines,
            cells,
            prompts,
            arguments.model,
            decode_tokens,
            arguments.rounds,
            arguments.float32,
            arguments.prefill_step_size,
            shown,
        )
    finally:
        shown.close()
    rendered = render(report, engines[0].tokenizer.decode)
    print(("" if sys.stderr.isatty() else "\n") + rendered)
    _write(arguments, report, rendered)
    return report


def _write(arguments: argparse.Namespace, report: dict[str, Any], rendered: str) -> None:
    folder = arguments.output_dir
    json_file = arguments.json or (folder and folder / "compare.json")
    picture = arguments.plot or (folder and folder / "compare.png")
    written = []
    if json_file:
        write_json(report, json_file)
        written.append(json_file)
    if folder:
        heading = f"{report['date']}  {one_line(report['machine'])}\n\n"
        write_atomically(folder / "compare.txt", heading + rendered + "\n")
        written.append(folder / "compare.txt")
    if picture:
        from lily_mlx import plot

        if plot.available():
            plot.plot(report, picture)
            written.append(picture)
        else:
            print(f"\n{plot.MISSING}")
    if written:
        print("\nWrote " + ", ".join(map(str, written)) + ".")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(_common.arguments_of(argv))
    _common.guarded("lily_mlx.compare", lambda: run(arguments) and None, arguments.traceback)


if __name__ == "__main__":
    main()
