"""Every engine gives the bundled model's logits as transformers gave them on the same weights.

The goldens (tests/goldens) are float32 logits of transformers on the CPU; nobody here wrote that
engine. An engine is a function from the checkpoint to a model, called as mlx-lm calls one.
"""

from __future__ import annotations

import hashlib
import json

import mlx.core as mx
import numpy as np
import pytest
from goldens.util import (
    BUNDLE,
    HERE,
    Golden,
    largest_error,
    load_float32,
    load_goldens,
    load_quantized_float32,
)
from mlx_lm.models.cache import make_prompt_cache

from lily_mlx.model import Model, ModelArgs

# mlx-lm's own largest difference is 2e-5 with logits up to 20; another order of summation stays
# near that, while a wrong gate, norm or position shows from 1e-2 on.
TOLERANCE = 5e-4


def lily_classes(config: dict) -> tuple[type, type]:
    return Model, ModelArgs


ENGINES = {
    "stock-dequantized": load_float32,
    "stock-quantized": load_quantized_float32,
    "lily-dequantized": lambda: load_float32(lily_classes),
    "lily-quantized": lambda: load_quantized_float32(lily_classes),
}

GOLDENS = load_goldens()


@pytest.fixture(scope="module", params=list(ENGINES))
def model(request: pytest.FixtureRequest):
    return ENGINES[request.param]()


@pytest.fixture(params=GOLDENS, ids=[golden.name for golden in GOLDENS])
def golden(request: pytest.FixtureRequest) -> Golden:
    return request.param


def rows(model, ids: np.ndarray, cache=None) -> np.ndarray:
    """The logits [ids, vocabulary] of one sequence in float32."""
    return np.array(model(mx.array(ids)[None], cache=cache)[0].astype(mx.float32))


def test_whole_prompt(model, golden: Golden) -> None:
    assert largest_error(golden, rows(model, golden.ids)) < TOLERANCE


def test_prompt_in_chunks(model, golden: Golden) -> None:
    """A chunk of 7 rows, the rest but one, the last row: the states carry over."""
    cache = make_prompt_cache(model)
    last = len(golden.ids) - 1
    cuts = sorted({0, min(7, last), last, last + 1})
    parts = [rows(model, golden.ids[a:b], cache) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    assert largest_error(golden, np.concatenate(parts)) < TOLERANCE


def test_decode_steps(model) -> None:
    """The chat prompt, then its greedy continuation token by token."""
    golden = next(golden for golden in GOLDENS if golden.name == "chat")
    cache = make_prompt_cache(model)
    steps = 24
    first = len(golden.ids) - steps
    rows(model, golden.ids[:first], cache)
    logits = np.concatenate(
        [rows(model, golden.ids[i : i + 1], cache) for i in range(first, len(golden.ids))]
    )
    assert largest_error(golden, logits) < TOLERANCE
    assert logits[:-1].argmax(1).tolist() == golden.ids[first + 1 :].tolist()


def test_goldens_are_of_this_model() -> None:
    """A retrained model needs new goldens: python tests/goldens/make.py."""
    record = json.loads((HERE / "record.json").read_text())
    stored = hashlib.sha256((BUNDLE / "model.safetensors").read_bytes()).hexdigest()
    assert record["model_sha256"] == stored


def test_bundle_takes_at_most_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in BUNDLE.iterdir()) <= 8_000_000
