"""`lily_mlx attach DIR` and `lily_mlx detach DIR`: lily in stock mlx-lm commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lily_mlx.cli import _common


def _folder(prog: str, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("folder", type=Path, help="a local model folder")
    _common.add_traceback_flag(parser)
    return parser.parse_args(_common.arguments_of(argv))


def main(argv: Sequence[str] | None = None) -> None:
    """Write lily's two-line model file and its config key into a model folder."""
    arguments = _folder(
        "lily_mlx attach",
        "Make stock mlx-lm commands run lily on a model folder, with --trust-remote-code.",
        argv,
    )

    def body() -> None:
        from lily_mlx.attach import attach

        attach(arguments.folder)
        print(
            f"Attached. Stock commands now run lily on it:\n"
            f"  mlx_lm.generate --model {arguments.folder} --trust-remote-code\n"
            f"`lily_mlx detach {arguments.folder}` restores the folder."
        )

    _common.guarded("lily_mlx attach", body, arguments.traceback)


def detach(argv: Sequence[str] | None = None) -> None:
    """Restore a model folder as it was before attach."""
    arguments = _folder("lily_mlx detach", "Undo `lily_mlx attach`, byte for byte.", argv)

    def body() -> None:
        from lily_mlx.attach import detach as restore

        restore(arguments.folder)
        print(f"Detached: {arguments.folder} is as it was.")

    _common.guarded("lily_mlx detach", body, arguments.traceback)
