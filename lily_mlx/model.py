"""The drop-in model class for mlx-lm: Qwen3.5/3.6, mixture of experts or dense."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_5_moe
from mlx_lm.models.pipeline import PipelineMixin
from mlx_lm.models.qwen3_5 import ModelArgs, TextModelArgs

from lily_mlx import _ext, checkpoint, decode, ops, selection, spec
from lily_mlx.cache import ArraysCache, KVCache
from lily_mlx.layers import Attention, GatedDeltaNet, RMSNorm, SparseMoeBlock, project
from lily_mlx.layers.linear import choose, refusal
from lily_mlx.selection import Choice, device_name

__all__ = ["Model", "ModelArgs", "TextModel"]


# Each module is built once and in stock's order, so that a seed set before loading draws the same
# numbers after it with either engine; hence no super().__init__.
class DecoderLayer(qwen3_5.DecoderLayer):
    """Stock's layer, with lily's modules under stock's names."""

    def __init__(self, args: TextModelArgs, layer_idx: int):
        nn.Module.__init__(self)
        self.is_linear = (layer_idx + 1) % args.full_attention_interval != 0
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(args)
        else:
            self.self_attn = Attention(args)
        self.input_layernorm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.num_experts > 0:
            self.mlp = SparseMoeBlock(args)
        else:
            self.mlp = qwen3_5.MLP(args.hidden_size, args.intermediate_size)

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        """x [B, T, hidden] -> [B, T, hidden]."""
        out = super().__call__(x, mask, cache)
        prefill = cache is not None and x.shape[1] > 1 and not self.training
        if prefill and not self.is_linear and device_name() == "cuda" and not _ext.is_tracer(out):
            mx.async_eval(out)  # the GPU starts while Python builds the layers that follow
        return out


DENSE = Choice(None, "module", "a dense MLP runs mlx-lm's own code.")


def embed_choice(dtype: mx.Dtype, table: nn.Module) -> Choice:
    """Whether lily's `embed` serves this embedding for activations of `dtype`."""
    return refusal(table) or selection.embed(dtype, spec.matrix(table))


class Qwen3_5TextModel(qwen3_5.Qwen3_5TextModel):
    """Stock's stack of layers, with lily's layers."""

    def __init__(self, args: TextModelArgs):
        nn.Module.__init__(self)
        PipelineMixin.__init__(self)
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.ssm_idx = 0
        self.fa_idx = args.full_attention_interval - 1

    def __call__(
        self,
        inputs: mx.array,
        cache: Any | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """inputs [B, T] token ids -> [B, T, hidden]."""
        dtype = self.norm.weight.dtype
        if (
            input_embeddings is None
            and not self.training
            and embed_choice(dtype, self.embed_tokens)
        ):
            input_embeddings = ops.embed(inputs, spec.weight_of(self.embed_tokens), dtype)
        return super().__call__(inputs, cache, input_embeddings=input_embeddings)


class TextModel(qwen3_5.TextModel):
    """Stock's text model; one token of one sequence runs as a single decode step."""

    def __init__(self, args: TextModelArgs):
        nn.Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.model = Qwen3_5TextModel(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        self.sharding_group = None
        self._plan: decode.DecodePlan | None = None

    def head(self) -> nn.Module:
        """The module that makes logits: lm_head, or the tied embedding."""
        return self.model.embed_tokens if self.args.tie_word_embeddings else self.lm_head

    def decode_plan(self) -> decode.DecodePlan:
        """The plan for the weights as they are now; rebuilt when any has been replaced."""
        if self._plan is None or self._plan.stale(self):
            self._plan = decode.DecodePlan(self)
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        """What copy, deepcopy and pickle take beside the parameters: a copy plans for itself."""
        return {**self.__dict__, "_plan": None}

    def __call__(
        self,
        inputs: mx.array,
        cache: Any | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """inputs [B, T] token ids -> logits [B, T, vocabulary].

        The logits are float32, where stock's have the model's dtype: bf16 ties neighbours that
        differ, and ties decide greedy tokens.
        """
        one_token = inputs.shape == (1, 1) and input_embeddings is None
        if one_token and cache is not None and not self.training:
            out = decode.step(self, inputs, cache)
            if out is not None:
                return out[1]
        if self.training or self.sharding_group is not None:
            return super().__call__(inputs, cache, input_embeddings=input_embeddings)
        hidden = self.model(inputs, cache, input_embeddings=input_embeddings)
        return project(hidden, self.head(), float32_out=True)[0]

    def make_cache(self) -> list[Any]:
        """A cache object a layer: mlx-lm's kinds, able to lend their arrays to a decode step."""
        return [ArraysCache(size=2) if l.is_linear else KVCache() for l in self.layers]


class Model(qwen3_5.Model):
    """Qwen3.5/3.6 for mlx-lm: same parameters, paths and methods as stock's two model classes."""

    def __init__(self, args: ModelArgs):
        nn.Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.language_model = TextModel(TextModelArgs.from_dict(args.text_config))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Stock's sanitize, and the layouts that it misses (see lily_mlx.checkpoint)."""
        moe = self.language_model.args.num_experts > 0
        stock = (qwen3_5_moe if moe else qwen3_5).Model.sanitize
        return checkpoint.sanitize(weights, self.args, lambda w: stock(self, w))

    def lily_report(self) -> list[dict[str, str | None]]:
        """Which kernel serves each part: dicts of path, kind, kernel (or None) and reason."""
        text = self.language_model
        dtype = spec.activation_dtype(text)
        rows: list[tuple[str, str, Choice]] = [
            (
                "language_model.model.embed_tokens",
                "embed",
                embed_choice(dtype, text.model.embed_tokens),
            ),
        ]
        if text.args.num_experts > 0:
            rows.insert(0, ("language_model", "decode_step", text.decode_plan().choice))
        for i, layer in enumerate(text.layers):
            name = "linear_attn" if layer.is_linear else "self_attn"
            path = f"language_model.model.layers.{i}"
            for part in (name, "mlp"):
                if isinstance(layer[part], qwen3_5.MLP):
                    rows.append((f"{path}.mlp", "mlp", DENSE))
                    continue
                for sub, kind, choice in layer[part].report(dtype):
                    rows.append((f"{path}.{part}.{sub}".rstrip("."), kind, choice))
        if not text.args.tie_word_embeddings:
            head = choose(dtype, text.lm_head, float32=True)
            rows.append(("language_model.lm_head", "project", head))
        return [
            {"path": path, "kind": kind, "kernel": choice.kernel, "reason": choice.reason}
            for path, kind, choice in rows
        ]
