"""mlx_lm.server with lily's loader, and with requests that fail alone.

mlx-lm's server generates in one thread, which an exception ends: from then on every request fails.
Here a request is tried out before it joins the others, and if the thread fails all the same, the
requests in flight get the error and it goes on with the next ones. The port opens once the model
is loaded; where it cannot be, or the port is taken, the server ends with the reason.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from types import ModuleType
from typing import Any

import mlx.core as mx

from lily_mlx.checkpoint import InputError, text_config
from lily_mlx.loading import check_prompt


def isolate_requests(command: ModuleType) -> None:
    """Give a private copy of mlx_lm.server a request queue and a prompt cache that outlive errors.

    Args:
        command: the copy; its ResponseGenerator, LRUPromptCache and _run_http_server are replaced,
            and its `generation_has_run` says whether there was a generation thread.
    """
    command.generation_has_run = False
    command.ResponseGenerator = _response_generator(command)
    command.LRUPromptCache = _prompt_cache(command.LRUPromptCache)
    serve = command._run_http_server

    def serve_and_stop(host: str, port: int, response_generator: Any) -> None:
        try:
            serve(host, port, response_generator)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"{host}:{port}: {reason}; choose another --host or --port.") from error
        finally:
            response_generator.stop_and_join()

    command._run_http_server = serve_and_stop


def leave(command: ModuleType, code: Any) -> None:
    """End the process with `code`, if this command's generation thread has run in it.

    MLX frees a thread's objects after Python has joined it. An interpreter that shuts down at that
    moment aborts the process, so this one does not shut down.
    """
    if not command.generation_has_run:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _response_generator(command: ModuleType) -> type:
    class ResponseGenerator(command.ResponseGenerator):
        """mlx-lm's, which refuses a bad request before it can end the generation thread."""

        def __init__(self, *arguments: Any):
            # The queues on which clients wait; one that its client has dropped goes by itself.
            self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
            self._load_ended = threading.Event()
            self._load_error: Exception | None = None
            super().__init__(*arguments)
            try:
                self._load_ended.wait()
            except KeyboardInterrupt:
                self._stop = True
                raise
            if self._load_error is not None:
                raise self._load_error

        def _next_request(self, timeout: float | None = None) -> Any:
            request = super()._next_request(timeout)
            if request is not None:
                self._waiting.add(request[0])
            return request

        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            tokenized = super()._tokenize(tokenizer, request, args)
            settings = self.model_provider.model.args
            check_prompt(tokenized[0], settings)
            _check_sampling(command, tokenizer, args, text_config(settings).get("vocab_size"))
            self._make_state_machine(self.model_provider.model_key, tokenizer, args.stop_words)
            return tokenized

        def _run_generate(self) -> None:
            command.generation_has_run = True
            try:
                # In this thread, since arrays belong to the streams of the thread that makes them.
                self.model_provider.load_default()
            except Exception as error:
                self._load_error = error
                return
            finally:
                self._load_ended.set()
            while not self._stop:
                try:
                    self._generate()
                except Exception as error:
                    logging.exception("Generation failed; the requests in flight fail with it.")
                    waiting = list(self._waiting)
                    self._waiting.clear()
                    for queue in waiting:
                        queue.put(RuntimeError(f"generation failed: {error}"))
                    if not waiting:  # nothing that was asked for is the cause: it would recur
                        self._generation_failed = True
                        return
                    self.prompt_cache = command.LRUPromptCache(self.prompt_cache.max_size)

    return ResponseGenerator


def _check_sampling(command: ModuleType, tokenizer: Any, args: Any, vocab_size: int | None) -> None:
    """Raise on sampling arguments that would fail, or write out of bounds, inside a batch.

    The samplers are tried on logits that are never computed: mlx-lm checks some values only there.
    """
    if args.seed is not None and not 0 <= args.seed < 2**64:
        raise InputError(f"seed {args.seed} is outside 0 to 2^64 - 1.")
    if vocab_size is None:
        return
    for token in args.logits.logit_bias or {}:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"logit_bias names token {token}, outside the vocabulary of {vocab_size}."
            )
    logits = mx.zeros((1, vocab_size))
    for process in command._make_logits_processors(args):
        logits = process(mx.zeros((1,), mx.int32), logits)
    command._make_sampler(args, tokenizer)(logits)


def _prompt_cache(stock: type) -> type:
    class LRUPromptCache(stock):
        """mlx-lm's, which leaves at least one token to be run."""

        def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
            """(caches or None, the tokens they do not hold), the latter never empty.

            mlx-lm's own returns no tokens for a prompt that it holds whole, after which there are
            no logits to go on from; the caches of a shorter prefix serve then.
            """
            cache, rest = super().fetch_nearest_cache(model, tokens)
            if cache is None or rest:
                return cache, rest
            if len(tokens) == 1:
                return None, tokens
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            return cache, [*rest, tokens[-1]]

    return LRUPromptCache
