"""`lily_mlx.server`: mlx_lm.server with lily's kernels, on the same port and protocol."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lily_mlx.cli import _common
from lily_mlx.private import private_copy


def sharded_loader() -> Callable[..., Any]:
    """mlx_lm.utils.sharded_load, for a model spread over several processes, with lily's classes."""
    from lily_mlx.loading import load_model

    utils = private_copy("utils", "sharded")
    utils.load_model = load_model
    return utils.sharded_load


def main(argv: Sequence[str] | None = None) -> None:
    """Run mlx-lm's own server with the loader and stream_generate of the engine asked for."""
    from lily_mlx import BUNDLED_MODEL
    from lily_mlx.serving import isolate_requests, leave

    given = _common.arguments_of(argv)
    command = private_copy("server", "command")
    isolate_requests(command)

    class Parser(argparse.ArgumentParser):
        """mlx_lm.server builds its parser inside main: ours adds its flags to it."""

        def __init__(self, *_: Any, **__: Any):
            super().__init__(prog="lily_mlx.server", description="mlx_lm.server with lily.")

        def parse_args(self, *_: Any) -> argparse.Namespace:
            _common.add_engine_flags(self)
            self.set_defaults(model=str(BUNDLED_MODEL))
            arguments = super().parse_args(given)
            command.load = _common.loader(arguments)
            if arguments.engine == "lily":
                import lily_mlx

                command.stream_generate = lily_mlx.stream_generate
                command.sharded_load = sharded_loader()
            return arguments

    command.argparse = SimpleNamespace(ArgumentParser=Parser, Namespace=argparse.Namespace)
    try:
        _common.guarded("lily_mlx.server", command.main, "--traceback" in given)
    except SystemExit as stop:
        leave(command, stop.code)
        raise
    leave(command, 0)


if __name__ == "__main__":
    main()
