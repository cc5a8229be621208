"""The commands: `lily_mlx COMMAND …`, `python -m lily_mlx COMMAND …` or `lily_mlx.COMMAND …`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "generate": "write text: mlx_lm.generate with lily's kernels",
    "compare": "write text, then time lily and stock mlx-lm side by side",
    "server": "an OpenAI-style HTTP server: mlx_lm.server with lily's kernels",
    "info": "devices, versions, and which kernel serves each module of a model",
    "attach": "make stock mlx-lm commands run lily on a model folder",
    "detach": "undo attach, byte for byte",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lily_mlx COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "Without --model a command uses the small model in the package.",
            "`lily_mlx COMMAND --help` lists a command's flags; --version prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if arguments else 2)
    command, rest = arguments[0], arguments[1:]
    if command == "--version":
        from lily_mlx import __version__

        print(__version__)
    elif command in COMMANDS:
        module = "attach" if command == "detach" else command
        entry = "detach" if command == "detach" else "main"
        getattr(importlib.import_module(f"lily_mlx.cli.{module}"), entry)(rest)
    else:
        known = ", ".join(COMMANDS)
        print(f"lily_mlx: error: no command {command!r}; choose one of {known}.", file=sys.stderr)
        sys.exit(2)
