"""Does lily say what the model says? `python -m benchmarks quality`.

Each engine reads the same text, teacher-forced, and its distribution at every position is held
against that of a float32 run on dequantized weights: mean KL(float32 || engine), how often the
likeliest token is the same, and perplexity. `prefill` feeds chunks of tokens, `decode` one token
at a time, so that both families of kernels are judged.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks import common
from lily_mlx import compare, float32
from lily_mlx.cli.compare import length
from lily_mlx.report import render_grid

MODES = ("prefill", "decode")


def logprobs(model: nn.Module, ids: list[int], chunk: int) -> mx.array:
    """Teacher-forced log-probabilities [tokens, vocab], float32, ``chunk`` tokens a call."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    parts = []
    for start in range(0, len(ids), chunk):
        logits = model(mx.array([ids[start : start + chunk]]), cache=cache)[0]
        logits = logits.astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts[-1], [c.state for c in cache])
    return mx.concatenate(parts)


def judge(found: mx.array, reference: mx.array, ids: list[int]) -> dict[str, float]:
    """Figures of one engine's log-probabilities against the reference's, over all positions."""
    kl = (mx.exp(reference) * (reference - found)).sum(axis=-1)
    same = found.argmax(axis=-1) == reference.argmax(axis=-1)
    targets = mx.array(ids[1:])[:, None]
    loss = -mx.take_along_axis(found[:-1], targets, axis=-1)[:, 0]
    return {
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "top1": same.astype(mx.float32).mean().item(),
        "perplexity": math.exp(loss.mean().item()),
        "max_logprob_error": mx.abs(found - reference).max().item(),
    }


def main(given: list[str]) -> None:
    parser = common.parser("quality", __doc__)
    parser.add_argument("--engine", choices=common.ENGINES, default="both")
    parser.add_argument("--tokens", type=length, default=256, help="tokens to read (default: 256)")
    parser.add_argument("--chunk", type=length, default=64, help="prefill chunk (default: 64)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--text", metavar="FILE", help="read this file")
    arguments = parser.parse_args(given)

    def body() -> None:
        heading = common.heading("quality", given)
        engines = compare.load_engines(arguments.model, common.ENGINES[arguments.engine])
        text = common.prompt_text(arguments.text)
        ids = engines[0].tokenizer.encode(text)[: arguments.tokens]
        if len(ids) < 2:
            raise ValueError(f"The text has {len(ids)} tokens; at least 2 are needed.")
        common.progress(f"float32: {len(ids)} tokens")
        wide = float32.load_float32(arguments.model, share=engines[0].model)
        reference = logprobs(wide, ids, arguments.chunk)
        rows: list[dict[str, Any]] = [
            {"mode": "prefill", "engine": "float32", **judge(reference, reference, ids)}
        ]
        for mode in arguments.modes:
            for engine in engines:
                common.progress(f"{engine.name}: {mode}")
                chunk = arguments.chunk if mode == "prefill" else 1
                found = logprobs(engine.model, ids, chunk)
                rows.append({"mode": mode, "engine": engine.name, **judge(found, reference, ids)})
        model = compare.describe_model(engines[0], arguments.model)
        result = {
            **heading,
            "model": model,
            "settings": {"tokens": len(ids), "chunk": arguments.chunk},
            "rows": rows,
        }
        lines = [
            [
                f"{row['engine']} {row['mode']}",
                f"{row['kl_mean']:.2e}",
                f"{row['kl_max']:.2e}",
                f"{row['top1']:.2%}",
                f"{row['perplexity']:.4f}",
                f"{row['max_logprob_error']:.4f}",
            ]
            for row in rows
        ]
        groups = [
            ("", [""]),
            ("KL to float32, nats", ["mean", "largest"]),
            ("", ["same top-1"]),
            ("", ["perplexity"]),
            ("", ["logprob error"]),
        ]
        words = f"{len(ids)} tokens, teacher-forced, prefill in chunks of {arguments.chunk}."
        text = render_grid(groups, lines) + "\n\n" + words
        common.save(result, text, arguments, model["name"])

    common.guarded("quality", body, arguments.traceback)
