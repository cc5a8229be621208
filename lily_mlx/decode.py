"""Decoding one sequence, one token a step, in one primitive for the whole model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.sample_utils import greedy_sampler

from lily_mlx import _ext, selection, spec
from lily_mlx.cache import ArraysCache, adopt
from lily_mlx.layers import RMSNorm, SparseMoeBlock
from lily_mlx.loading import check_prompt
from lily_mlx.selection import TRAINING, Choice


class DecodePlan:
    """The weights of a text model as a decode step takes them, until any of them is replaced."""

    def __init__(self, text_model: nn.Module):
        """Args: text_model: lily's TextModel, evaluated or not.

        Raises:
            ValueError: arrays whose shapes do not fit each other.
        """
        self.choice = decode_choice(text_model)
        self._watch = _watch(text_model)
        self.native = _ext.DecodePlan(spec.weights(text_model)) if self.choice else None
        self.dtype = spec.activation_dtype(text_model)

    def stale(self, text_model: nn.Module) -> bool:
        """Whether a module or an array of `text_model` is not the one the plan was built from."""
        return self._watch.changed(text_model)


class DecodeSession:
    """The caches of one sequence, lent to the decode step."""

    def __init__(self, plan: DecodePlan, caches: list[Any]):
        self._plan = weakref.ref(plan)  # caches that outlive their model keep no weights
        self.state = _ext.DecodeState(plan.native)
        # The last step's token: the next step waits for it, and evaluating it runs every step.
        self.ticket: mx.array | None = None
        for layer, cache in enumerate(caches):
            cache._lend(self, layer)

    def serves(self, plan: DecodePlan) -> bool:
        """Whether steps with `plan` can go on in this session."""
        return self._plan() is plan and self.state.whole

    def take(self, layer: int) -> tuple[mx.array | None, mx.array | None]:
        """Run the steps built so far and give one layer's arrays up; the session ends."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            mx.eval(ticket)  # a step that fails says so once
        return self.state.take(layer)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied because somebody else held a buffer; 0 while a sequence has its own."""
        return self.state.copied_bytes

    @property
    def grown_bytes(self) -> int:
        """Bytes copied because keys and values outgrew their buffers."""
        return self.state.grown_bytes


def decode_choice(text_model: nn.Module) -> Choice:
    """Whether the decode step serves this model, or why not."""
    args, model = text_model.args, text_model.model
    if text_model.training:
        return TRAINING
    if text_model.sharding_group is not None or model.pipeline_size > 1:
        return Choice(None, "sharded", "a sharded model decodes layer by layer.")
    norms = [model.norm]
    for layer in model.layers:
        if type(layer.mlp) is not SparseMoeBlock:
            return Choice(None, "module", "a dense MLP decodes layer by layer.")
        for part in (layer.linear_attn if layer.is_linear else layer.self_attn, layer.mlp):
            refused = part.refusal()
            if refused is not None:
                return refused
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    if all(layer.is_linear for layer in model.layers):
        return Choice(None, "module", "a model without full attention decodes layer by layer.")
    if any(type(norm) is not RMSNorm for norm in norms):
        return Choice(None, "module", "a replaced norm decodes layer by layer.")
    if any(norm.eps != args.rms_norm_eps for norm in norms):
        return Choice(None, "module", "norms with different eps decode layer by layer.")
    try:
        return selection.step(spec.model(text_model))
    except ValueError as error:  # a module that no kernel can read
        return Choice(None, "module", str(error))


def _watch(text_model: nn.Module) -> Any:
    """Everything whose replacement makes the plan stale: submodules, and their arrays.

    It does not hold `text_model`, which holds the plan: a model is freed when it is let go.
    """
    watch = _ext.Watch()
    for _, module in text_model.named_modules():
        for name, value in module.items():
            if isinstance(value, list):
                watch.list_entries(value)
            if isinstance(value, (mx.array, nn.Module, list)):
                (watch.root_entry if module is text_model else watch.dict_entry)(module, name)
    return watch


def session_for(plan: DecodePlan, caches: list[Any]) -> DecodeSession | None:
    """The session that owns these caches, a new one, or None when the decode step cannot."""
    loan = getattr(caches[0], "_loan", None)
    if loan is not None and loan[0].serves(plan):
        session = loan[0]
        if all(getattr(c, "_loan", None) == (session, i) for i, c in enumerate(caches)):
            return session
    if not all(adopt(c) and c.one_sequence(plan.dtype) for c in caches):
        return None
    return DecodeSession(plan, caches)


def step(
    text_model: nn.Module, token: mx.array, caches: list[Any], with_logits: bool = True
) -> list[mx.array] | None:
    """Build one decode step: the next token [1, 1] and, with_logits, logits [1, 1, vocabulary].

    The next token is the one of the largest float32 logit, the lowest id of equals. The caches
    advance by one token, as they do when mlx-lm builds a step.

    Args:
        text_model: lily's TextModel.
        token: [1, 1] of whole numbers; may be the unevaluated result of the step before.
        caches: one cache object a layer.

    Returns:
        None when these caches, this model or this context (mx.compile) need the layers instead.
    """
    if _ext.is_tracer(token):
        return None
    plan = text_model.decode_plan()
    if plan.native is None or len(caches) != len(text_model.model.layers):
        return None
    session = session_for(plan, caches)
    if session is None:
        return None
    attention = [c for c in caches if not isinstance(c, ArraysCache)]
    position = attention[0].tokens
    if any(c.tokens != position for c in attention):
        return None
    out = _ext.decode_step(session.state, token, session.ticket, position, with_logits)
    session.ticket = out[0]
    for cache in caches:
        cache.count_one()
    return out


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    stream: Any = generation_stream,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: Any | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """mlx_lm.generate.generate_step, greedy decoding without leaving the GPU.

    Greedy decoding of one sequence feeds each step's token array to the next step. Anything else
    (a sampler, logits processors, a quantized KV cache, input embeddings, a model without a
    decode step) runs mlx-lm's own generate_step, on lily's model.

    Yields:
        (token, log probabilities [vocabulary], float32), the latter computed only when used.

    Raises:
        InputError: an empty prompt, a token outside the vocabulary, a prompt that is too long.
    """
    options = dict(
        max_tokens=max_tokens, prompt_cache=prompt_cache, prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
    )  # fmt: skip
    text_model = getattr(model, "language_model", None)
    greedy = sampler is None or sampler is greedy_sampler
    fast = (
        greedy
        and not logits_processors
        and kv_bits is None
        and input_embeddings is None
        and hasattr(text_model, "decode_plan")
        and not text_model.training
        and text_model.decode_plan().native is not None
    )
    if input_embeddings is None:
        check_prompt(prompt, model.args)
    if not fast:
        yield from stock_generate_step(
            prompt, model, stream, sampler=sampler, logits_processors=logits_processors,
            max_kv_size=max_kv_size, kv_bits=kv_bits, kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start, input_embeddings=input_embeddings, **options,
        )  # fmt: skip
        return
    yield from _greedy(prompt, model, stream, **options)


def _greedy(
    prompt: mx.array,
    model: nn.Module,
    stream: Any,
    *,
    max_tokens: int,
    prompt_cache: list[Any] | None,
    prefill_step_size: int,
    prompt_progress_callback: Callable[[int, int], None] | None,
) -> Generator[tuple[int, mx.array], None, None]:
    text_model = model.language_model
    caches = prompt_cache if prompt_cache is not None else model.make_cache()
    progress = prompt_progress_callback or (lambda *_: None)
    total = len(prompt)

    def submit(token: mx.array) -> tuple[mx.array, mx.array]:
        with mx.stream(stream):
            out = step(text_model, token, caches)
            if out is None:  # caches of another kind: the layers, then the same argmax
                logits = model(token, cache=caches)
                out = [mx.argmax(logits, axis=-1), logits]
            mx.async_eval(out[0])
            logits = out[1][0, 0]
            return out[0], logits - mx.logsumexp(logits, keepdims=True)

    with mx.stream(stream):
        progress(0, total)
        done = 0
        while total - done > 1:
            n = min(prefill_step_size, total - done - 1)
            model(prompt[done : done + n][None], cache=caches)
            mx.eval([c.state for c in caches])
            done += n
            progress(done, total)
            mx.clear_cache()

    token, logprobs = submit(prompt[-1:][None])
    n = 0
    while True:
        if n != max_tokens:
            following = submit(token)
        if n == 0:
            mx.eval(token)
            progress(total, total)
        if n == max_tokens:
            break
        yield token.item(), logprobs
        if n % 256 == 0:
            mx.clear_cache()
        token, logprobs = following
        n += 1
