"""`lily_mlx.generate`: mlx_lm.generate, flag for flag, with lily's kernels."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lily_mlx.cli import _common
from lily_mlx.private import private_copy


def build_parser(command: ModuleType) -> argparse.ArgumentParser:
    """mlx-lm's own parser and lily's flags.

    Args:
        command: a private copy of mlx_lm.generate.
    """
    parser = command.setup_arg_parser()
    parser.prog = "lily_mlx.generate"
    parser.description = "Write text: mlx_lm.generate with lily's kernels."
    _common.add_engine_flags(parser)
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Refuse values that mlx-lm would stumble over later, or answer with somebody else's words."""
    if arguments.max_tokens < -1 or arguments.max_tokens == 0:
        raise ValueError(
            f"--max-tokens {arguments.max_tokens}: give a number from 1, or -1 for no limit."
        )
    if arguments.prefill_step_size < 1:
        raise ValueError(f"--prefill-step-size {arguments.prefill_step_size} is not 1 or more.")
    if arguments.seed is not None and not 0 <= arguments.seed < 2**64:
        raise ValueError(f"--seed {arguments.seed} is outside 0 to 2^64 - 1.")
    settings = arguments.chat_template_config
    try:
        good = settings is None or isinstance(json.loads(settings), dict)
    except json.JSONDecodeError:
        good = False
    if not good:
        raise ValueError(
            f"--chat-template-config {settings} is no JSON object; give one such as "
            "'{\"enable_thinking\": false}'."
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run mlx-lm's own main with the loader and the generate function of the engine asked for."""
    from lily_mlx import BUNDLED_MODEL

    command = private_copy("generate", "command")
    command.DEFAULT_MODEL = str(BUNDLED_MODEL)
    arguments = build_parser(command).parse_args(_common.arguments_of(argv))

    def generate(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> str:
        import lily_mlx
        from lily_mlx.loading import check_prompt

        if options.get("input_embeddings") is None:
            check_prompt(prompt, model.args)
        if arguments.engine == "lily":
            return lily_mlx.generate(model, tokenizer, prompt, **options)
        return stock_generate(model, tokenizer, prompt, **options)

    def body() -> None:
        _check(arguments)
        command.main()

    def load_prompt_cache(path: str, *positional: Any, **named: Any) -> Any:
        if not Path(path).exists():
            raise ValueError(f"--prompt-cache-file {path} does not exist.")
        try:
            return stock_load_prompt_cache(path, *positional, **named)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{path} is no prompt cache ({_common.sentence(error)}); make one with "
                "mlx_lm.cache_prompt."
            ) from error

    stock_generate, stock_load_prompt_cache = command.generate, command.load_prompt_cache
    command.load_prompt_cache = load_prompt_cache
    command.setup_arg_parser = lambda: _common.Parsed(arguments)
    command.load = _common.loader(arguments)
    command.generate = generate
    _common.guarded("lily_mlx.generate", body, arguments.traceback)


if __name__ == "__main__":
    main()
