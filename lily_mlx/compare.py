"""Measure lily and stock mlx-lm side by side, in one process, on one model.

How a figure is made:

- Both engines hold the same weight arrays and run in turn; which goes first alternates from
  round to round, and so does the order of the cells.
- Every cell is run once, untimed, at its exact shape before it is timed.
- Prefill is timed from the call until the first token is delivered (at which moment the next
  step has been submitted, as in ``mlx_lm.generate.generate_step``). Decode is timed from there
  to the last token, over one interval fewer than there are tokens.
- Decoding is greedy and does not stop at an end-of-text token. Stock computes the
  log-probabilities of the whole vocabulary for every token; lily's are lazy and, unused here, are
  not computed. That is part of what is compared.
- Peak memory is MLX's own, reset before each run.

A cell with a context starts from a stored prompt cache of that many tokens, copied for each run;
only its decode is timed.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from lily_mlx import float32
from lily_mlx.machine import load_average, machine, model_memory_bytes, versions
from lily_mlx.prompts import synthetic_prompt, text_prompt

ENGINES = ("lily", "stock")
FORMAT = 1


@dataclass
class Engine:
    """A loaded model together with the generator function that drives it."""

    name: str
    model: nn.Module
    step: Callable[..., Iterable[tuple[int, mx.array]]]
    tokenizer: Any
    config: dict[str, Any]
    shares_weights: bool = False
    """Are this engine's weights the arrays of the engine loaded before it?"""
    load_before: float | None = field(default_factory=load_average)
    """The machine's load average when the engine was loaded."""

    @property
    def vocab_size(self) -> int:
        return self.config.get("text_config", self.config)["vocab_size"]

    @property
    def max_positions(self) -> int | None:
        return self.config.get("text_config", self.config).get("max_position_embeddings")


@dataclass(frozen=True)
class Cell:
    """One row of the table: a prompt to prefill, or a stored context to decode from."""

    prompt: int
    context: int = 0

    @property
    def label(self) -> str:
        return f"context {self.context}" if self.context else f"prompt {self.prompt}"


@dataclass
class Sample:
    """One timed run. Times are in seconds, memory in bytes."""

    engine: str
    cell: Cell
    round: int
    prefill_s: float | None
    decode_s: float
    peak_bytes: int
    tokens: list[int] = field(repr=False)

    @property
    def prefill_tps(self) -> float | None:
        return None if self.prefill_s is None else self.cell.prompt / self.prefill_s

    @property
    def decode_tps(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s


def step_function(engine: str) -> Callable[..., Iterable[tuple[int, mx.array]]]:
    """The generate_step of an engine; both have mlx-lm's signature."""
    if engine == "lily":
        from lily_mlx.decode import generate_step
    elif engine == "stock":
        from mlx_lm.generate import generate_step
    else:
        raise ValueError(f"Unknown engine {engine!r}: choose one of {', '.join(ENGINES)}.")
    return generate_step


def load_engines(
    path: str | Path, names: Iterable[str] = ENGINES, strict: bool = False, **kwargs: Any
) -> list[Engine]:
    """Load ``path`` once for each engine; the second uses the first one's weight arrays.

    Args:
        path: a model folder or a Hugging Face repository.
        names: the engines, in the order of the table's columns.
        strict: refuse to run when a module has no lily kernel.
        kwargs: passed on to :func:`lily_mlx.loading.load`.
    """
    from lily_mlx.loading import load

    engines: list[Engine] = []
    for name in names:
        step = step_function(name)
        model, tokenizer, config = load(
            str(path),
            engine=name,
            strict=strict and name == "lily",
            lazy=bool(engines),
            return_config=True,
            **kwargs,
        )
        shared = bool(engines) and float32.share_weights(model, engines[0].model)
        mx.eval(model.parameters())
        engines.append(Engine(name, model, step, tokenizer, config, shared))
    return engines


def make_cells(
    prompt_lengths: Iterable[int],
    contexts: Iterable[int],
    decode_tokens: int,
    max_positions: int | None,
) -> list[Cell]:
    """The rows to measure; a length that is too small or does not fit is refused."""
    cells = [Cell(n) for n in prompt_lengths] + [Cell(1, n) for n in contexts]
    if not cells:
        raise ValueError("Nothing to measure: give at least one prompt length or context.")
    if decode_tokens < 2:
        raise ValueError(f"Decode needs at least 2 tokens to time, not {decode_tokens}.")
    for cell in cells:
        asked = cell.context or cell.prompt
        if asked < 1:
            raise ValueError(f"A prompt or context needs at least 1 token, not {asked}.")
        if max_positions is not None and cell.prompt + cell.context + decode_tokens > max_positions:
            raise ValueError(
                f"{asked} tokens and {decode_tokens} to decode exceed the model's "
                f"{max_positions} positions: ask for fewer."
            )
    return cells


class Prompts:
    """Token ids of any length: of a text, or synthetic ones when there is no text."""

    def __init__(self, engine: Engine, text: str | None):
        self.kind = "synthetic" if text is None else "text"
        self._engine = engine
        self._text = text

    def __call__(self, length: int) -> list[int]:
        if self._text is None:
            return synthetic_prompt(self._engine.vocab_size, length)
        return text_prompt(self._engine.tokenizer, length, self._text)

    def of(self, cell: Cell) -> tuple[list[int], list[int]]:
        """The stored context and the prompt of a cell."""
        ids = self(cell.context + cell.prompt)
        return ids[: cell.context], ids[cell.context :]


def _filled_cache(engine: Engine, ids: list[int], prefill_step_size: int) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(engine.model)
    for _ in engine.step(
        mx.array(ids),
        engine.model,
        max_tokens=0,
        prompt_cache=cache,
        prefill_step_size=prefill_step_size,
    ):
        pass
    return cache


def timed_run(
    engine: Engine,
    cell: Cell,
    prompt: list[int],
    decode_tokens: int,
    stored: list[Any] | None = None,
    prefill_step_size: int = 2048,
    round_number: int = 0,
) -> Sample:
    """Run one cell once.

    Args:
        prompt: the ids to prefill.
        decode_tokens: tokens to generate; the first one ends the prefill.
        stored: a prompt cache to start from; it is copied, not changed.
        prefill_step_size: prompt tokens a chunk.
    """
    ids = mx.array(prompt)
    options: dict[str, Any] = {"max_tokens": decode_tokens, "prefill_step_size": prefill_step_size}
    if stored is not None:
        options["prompt_cache"] = copy.deepcopy(stored)
    mx.eval(ids)
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens: list[int] = []
    start = first = end = time.perf_counter()
    for token, _ in engine.step(ids, engine.model, **options):
        end = time.perf_counter()
        tokens.append(int(token))
        if len(tokens) == 1:
            first = end
        if len(tokens) == decode_tokens:
            break
    mx.synchronize()
    if len(tokens) != decode_tokens:
        raise RuntimeError(
            f"{engine.name} delivered {len(tokens)} tokens instead of {decode_tokens}."
        )
    return Sample(
        engine=engine.name,
        cell=cell,
        round=round_number,
        prefill_s=None if stored is not None else first - start,
        decode_s=end - first,
        peak_bytes=mx.get_peak_memory(),
        tokens=tokens,
    )


def measure(
    engines: list[Engine],
    cells: list[Cell],
    prompts: Prompts,
    decode_tokens: int,
    rounds: int,
    prefill_step_size: int = 2048,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Sample]:
    """Time every cell on every engine, ``rounds`` times, and return all samples.

    Args:
        progress: called with one line of text after each run, warm-up runs included.
    """
    if rounds < 1:
        raise ValueError(f"At least 1 round is needed, not {rounds}.")
    stored: dict[tuple[str, Cell], list[Any]] = {}
    samples: list[Sample] = []
    for number in range(rounds + 1):  # round 0 warms every cell
        order = engines if number % 2 else engines[::-1]
        for cell in cells if number % 2 else cells[::-1]:
            context, prompt = prompts.of(cell)
            for engine in order:
                key = (engine.name, cell)
                if context and key not in stored:
                    stored[key] = _filled_cache(engine, context, prefill_step_size)
                sample = timed_run(
                    engine,
                    cell,
                    prompt,
                    decode_tokens,
                    stored.get(key),
                    prefill_step_size,
                    number,
                )
                if number:
                    samples.append(sample)
                what = f"round {number}/{rounds}" if number else "warm-up"
                progress(f"{what}  {engine.name:5}  {cell.label}: {_speed(sample)}")
    return samples


def runs_of(engines: list[Engine], cells: list[Cell], rounds: int) -> int:
    """How many runs :func:`measure` makes."""
    return len(engines) * len(cells) * (rounds + 1)


def _speed(sample: Sample) -> str:
    decode = f"decode {sample.decode_tps:.1f} tok/s"
    if sample.prefill_tps is None:
        return decode
    return f"prefill {sample.prefill_tps:.1f} tok/s, {decode}"


# --- what the two engines say -------------------------------------------------------------


def _top(logprobs: mx.array, count: int = 5) -> list[dict[str, Any]]:
    values = logprobs.astype(mx.float32)
    best = mx.argsort(-values, axis=-1)[:count].tolist()
    return [{"token": i, "logprob": values[i].item()} for i in best]


def _logprobs_at(engine: Engine, cell: Cell, prompts: Prompts, index: int, chunk: int) -> mx.array:
    """The log-probabilities from which ``engine`` chose its token number ``index``."""
    context, prompt = prompts.of(cell)
    stored = _filled_cache(engine, context, chunk) if context else None
    options = {"prompt_cache": stored} if stored is not None else {}
    steps = engine.step(
        mx.array(prompt), engine.model, max_tokens=index + 1, prefill_step_size=chunk, **options
    )
    return [logprobs for _, logprobs in steps][index]


def first_difference(first: list[int], second: list[int]) -> int | None:
    """The index of the first token that differs, None when the two lists agree."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)


def check_tokens(
    engines: list[Engine],
    samples: list[Sample],
    prompts: Prompts,
    path: str | Path,
    use_float32: str = "auto",
    prefill_step_size: int = 2048,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """For each cell: do the engines write the same tokens, and if not, where do they part?

    At a difference both engines' five likeliest tokens are given, with their log-probabilities
    before and at the choice, and beside them those of a float32 run on dequantized weights that
    was fed the same tokens.

    Args:
        use_float32: "auto" runs it at a difference when its weights fit in half of the memory,
            "always" at every cell's first difference or last token, "never" not at all.
    """
    wide: nn.Module | None = None
    checks = []
    for cell in dict.fromkeys(s.cell for s in samples):
        runs = {e.name: [s.tokens for s in samples if (s.engine, s.cell) == (e.name, cell)]
                for e in engines}  # fmt: skip
        check: dict[str, Any] = {
            "cell": cell.label,
            "repeatable": {name: all(t == r[0] for t in r) for name, r in runs.items()},
            "tokens": {name: r[0] for name, r in runs.items()},
        }
        if len(engines) == 2:
            a, b = (runs[e.name][0] for e in engines)
            index = first_difference(a, b)
            check["same"] = index is None
            if index is not None or use_float32 == "always":
                at = len(a) - 1 if index is None else index
                check["at"] = at
                progress(f"{cell.label}: looking at token {at + 1}")
                check["top"] = {
                    e.name: _top(_logprobs_at(e, cell, prompts, at, prefill_step_size))
                    for e in engines
                }
                why_not = _float32_refusal(engines[0].model, use_float32)
                if why_not is None:
                    wide = wide or float32.load_float32(str(path), share=engines[0].model)
                    context, prompt = prompts.of(cell)
                    fed = mx.array([context + prompt + a[:at]])
                    logits = wide(fed)[0, -1]
                    check["top"]["float32"] = _top(logits - mx.logsumexp(logits))
                    choice = check["top"]["float32"][0]["token"]
                    check["float32_agrees"] = [
                        name for name, r in runs.items() if r[0][at] == choice
                    ]
                else:
                    check["float32"] = why_not
        checks.append(check)
    return checks


def _float32_refusal(model: nn.Module, use_float32: str) -> str | None:
    if use_float32 == "never":
        return "not asked for"
    need, have = float32.float32_bytes(model), model_memory_bytes()
    if use_float32 == "auto" and need > have / 2:
        return (
            f"left out: its weights take {need / 1e9:.1f} GB of this machine's {have / 1e9:.1f} GB"
        )
    return None


# --- the report, as report.py writes it ----------------------------------------------------------


def summarize(engines: list[str], samples: list[Sample]) -> list[dict[str, Any]]:
    """Medians, spreads and ratios, one entry a cell.

    The ratio is the first engine's median over the second's; the spread is (max - min) / median.
    """
    rows = []
    for cell in dict.fromkeys(s.cell for s in samples):
        row: dict[str, Any] = {
            "prompt": cell.prompt,
            "context": cell.context,
            "label": cell.label,
            "engines": {},
        }
        for name in engines:
            mine = [s for s in samples if (s.engine, s.cell) == (name, cell)]
            entry: dict[str, Any] = {"peak_bytes": max(s.peak_bytes for s in mine)}
            for what in ("prefill_tps", "decode_tps"):
                values = [getattr(s, what) for s in mine if getattr(s, what) is not None]
                middle = statistics.median(values) if values else None
                entry[what] = middle
                entry[what.replace("tps", "spread")] = (
                    (max(values) - min(values)) / middle if values else None
                )
            row["engines"][name] = entry
        if len(engines) == 2:
            first, second = (row["engines"][name] for name in engines)
            for what in ("prefill_tps", "decode_tps"):
                both = first[what] is not None and second[what] is not None
                row[what.replace("tps", "ratio")] = first[what] / second[what] if both else None
        rows.append(row)
    return rows


def is_bundled(path: str | Path) -> bool:
    """Is ``path`` the folder of the small model in the package?"""
    from lily_mlx import BUNDLED_MODEL

    return Path(path).exists() and Path(path).resolve() == Path(BUNDLED_MODEL).resolve()


def describe_model(engine: Engine, path: str | Path) -> dict[str, Any]:
    """Name, size and identity of the model; a folder's config and index are hashed."""
    folder = Path(path)
    name = "bundled" if is_bundled(path) else (folder.name if folder.exists() else str(path))
    digest = hashlib.sha256(json.dumps(engine.config, sort_keys=True, default=str).encode())
    parameters = [v for _, v in tree_flatten(engine.model.parameters())]
    return {
        "name": name,
        "type": engine.config.get("model_type"),
        "bytes": sum(v.nbytes for v in parameters),
        "quantization": engine.config.get("quantization", {}).get("bits"),
        "config_sha256": digest.hexdigest(),
    }


def build_report(
    engines: list[Engine],
    path: str | Path,
    samples: list[Sample],
    checks: list[dict[str, Any]],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Everything about one comparison, ready for JSON: every sample, medians, machine."""
    names = [e.name for e in engines]
    return {
        "format": FORMAT,
        "load_before": engines[0].load_before,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "model": describe_model(engines[0], path),
        "settings": settings,
        "engines": names,
        "shared_weights": all(e.shares_weights for e in engines[1:]),
        "rows": summarize(names, samples),
        "checks": checks,
        "samples": [
            {
                "engine": s.engine,
                "cell": s.cell.label,
                "round": s.round,
                "prefill_s": s.prefill_s,
                "decode_s": s.decode_s,
                "peak_bytes": s.peak_bytes,
            }
            for s in samples
        ],
    }


def run(
    engines: list[Engine],
    cells: list[Cell],
    prompts: Prompts,
    path: str | Path,
    decode_tokens: int,
    rounds: int,
    use_float32: str = "auto",
    prefill_step_size: int = 2048,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure, check the tokens, and report: see :func:`measure` and :func:`check_tokens`."""
    samples = measure(engines, cells, prompts, decode_tokens, rounds, prefill_step_size, progress)
    checks = check_tokens(engines, samples, prompts, path, use_float32, prefill_step_size, progress)
    settings = {
        "prompts": prompts.kind,
        "decode_tokens": decode_tokens,
        "rounds": rounds,
        "prefill_step_size": prefill_step_size,
    }
    return build_report(engines, path, samples, checks, settings)
