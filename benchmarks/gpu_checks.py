"""Lily on a GPU against the CPU's tokens, against stock's logits, and against itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import lily_mlx
from benchmarks import common
from lily_mlx import decode

GOLDEN = common.ROOT / "tests/goldens/bundled_greedy.json"


def bundled_greedy() -> dict[str, Any]:
    """64 greedy tokens of the bundled model, token by token, against those of the CPU reference."""
    golden = json.loads(GOLDEN.read_text())
    model, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))
    text_model, caches = model.language_model, model.make_cache()
    token, out = None, []
    for i in golden["prompt"]:
        token, _ = decode.step(text_model, mx.array([[i]]), caches)
    for _ in golden["greedy"]:
        out.append(token.item())
        token, _ = decode.step(text_model, token, caches)
    same = [a == b for a, b in zip(out, golden["greedy"], strict=True)]
    return {"equal": all(same), "first_difference": None if all(same) else same.index(False)}


def bundled_forced() -> dict[str, float]:
    """`teacher_forced` on the bundled model, along the golden tokens."""
    golden = json.loads(GOLDEN.read_text())
    ours, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))
    stock, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL), engine="stock")
    return teacher_forced(ours, stock, mx.array(golden["prompt"] + golden["greedy"]))


def _random_ids(model: nn.Module, count: int) -> mx.array:
    mx.random.seed(count)
    return mx.random.randint(0, model.language_model.args.vocab_size, (count,))


def teacher_forced(
    ours: nn.Module,
    stock: nn.Module,
    ids: mx.array | None = None,
    caches_of: Callable[[nn.Module], list[Any]] = lambda model: model.make_cache(),
) -> dict[str, float]:
    """Logits of the two engines, fed with the same tokens one by one; see `closeness`.

    Args:
        caches_of: makes a model's caches, after the random seed has been set.
    """
    ids = _random_ids(ours, 16) if ids is None else ids
    mx.eval(ids)
    rows = []
    for model in (ours, stock):
        mx.random.seed(0)
        caches, out = caches_of(model), []
        for i in range(len(ids)):
            out.append(model(ids[i].reshape(1, 1), cache=caches)[0].astype(mx.float32))
            mx.eval(out[-1])
        rows.append(mx.concatenate(out))
    return closeness(*rows)


def prompt(ours: nn.Module, stock: nn.Module, length: int = 96) -> dict[str, float]:
    """Logits of the two engines at every token of a prompt that is one chunk."""
    ids = _random_ids(ours, length)[None]
    return closeness(*(m(ids, cache=m.make_cache())[0].astype(mx.float32) for m in (ours, stock)))


def closeness(a: mx.array, b: mx.array) -> dict[str, float]:
    """Logits [n, vocabulary]: largest difference over the row's largest logit, equal top-1."""
    worst = (mx.abs(a - b).max(-1) / mx.abs(b).max(-1)).max().item()
    same = (mx.argmax(a, -1) == mx.argmax(b, -1)).astype(mx.float32).mean().item()
    return {"largest_difference": worst, "same_top_1": same, "tokens": a.shape[0]}


def repeated(model: nn.Module, length: int = 96, steps: int = 8) -> dict[str, Any]:
    """A prompt and a few decode steps, twice: whether all logits are the same bits."""
    ids = _random_ids(model, length)
    runs = []
    for _ in range(2):
        caches = model.make_cache()
        out = [model(ids[None], cache=caches)[0].astype(mx.float32)]
        for i in range(steps):
            out.append(model(ids[i].reshape(1, 1), cache=caches)[0].astype(mx.float32))
            mx.eval(out)
        runs.append(mx.concatenate(out))
    same = mx.all(runs[0].view(mx.uint32) == runs[1].view(mx.uint32), axis=-1)
    first = None if mx.all(same).item() else mx.argmin(same).item()
    return {"equal": first is None, "first_difference": first, "tokens": length + steps}
