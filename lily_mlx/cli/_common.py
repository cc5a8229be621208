"""What the commands share: flags, errors as one sentence, mlx-lm's own mains with our loader."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

USAGE_ERROR = 2  # bad input, as argparse exits
INTERNAL_ERROR = 1

# What bad input raises, here and in MLX, mlx-lm, transformers and huggingface_hub.
BAD_INPUT = (ValueError, OSError, KeyError, RuntimeError, ImportError)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add --engine, --strict and --traceback."""
    parser.add_argument(
        "--engine",
        choices=("lily", "stock"),
        default="lily",
        help="lily: this package's kernels; stock: mlx-lm as it is (default: lily)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="Fail when some module of the model has no lily kernel, instead of using stock's",
    )
    add_traceback_flag(parser)


def add_traceback_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traceback", action="store_true", help="Show the full traceback of an error"
    )


def sentence(error: BaseException) -> str:
    """An exception as one line a user can act on."""
    if isinstance(error, KeyError) and error.args:
        text = f"{error.args[0]!r} is missing"
    elif isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    text = re.sub(r"\s+", " ", text).strip() or type(error).__name__
    if isinstance(error, BAD_INPUT):
        return text
    return f"{type(error).__name__}: {text} (--traceback shows where)"


def guarded(prog: str, body: Callable[[], None], show_traceback: bool) -> None:
    """Run a command's body; an error becomes one sentence on stderr and an exit code."""
    try:
        body()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        sys.exit(141)
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        else:
            print(f"{prog}: error: {sentence(error)}", file=sys.stderr)
        sys.exit(USAGE_ERROR if isinstance(error, BAD_INPUT) else INTERNAL_ERROR)


class Parsed:
    """Stands where mlx-lm expects a parser: the arguments were parsed already."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments

    def parse_args(self, *_: Any) -> argparse.Namespace:
        return self._arguments


def loader(arguments: argparse.Namespace) -> Callable[..., Any]:
    """mlx_lm.load, with the engine that the command line names."""
    from lily_mlx.loading import load

    def load_engine(path: str, *positional: Any, **named: Any) -> Any:
        # A draft model may be of any type, and lily serves the main model's only.
        if path == arguments.draft_model:
            return load(path, *positional, engine="stock", **named)
        return load(path, *positional, engine=arguments.engine, strict=arguments.strict, **named)

    return load_engine


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def arguments_of(argv: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if argv is None else argv)
