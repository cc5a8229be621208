"""Layer primitives against stock's modules: `python -m benchmarks layers`.

For each kind of layer of a model (Gated DeltaNet, attention, MoE) and each number of rows, lily's
module and stock's, on the same weight arrays and the same input, are timed in turn, and their
outputs are held against the same module in float32 on dequantized weights. `--shapes 35b` takes
one DeltaNet and one attention layer with the dimensions of Qwen3.6-35B-A3B and random weights.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5_moe
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from benchmarks import common
from lily_mlx import compare, float32
from lily_mlx.cli import _common
from lily_mlx.cli.compare import length
from lily_mlx.report import number, render_grid

SHAPES_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "rms_norm_eps": 1e-6,
        "vocab_size": 512,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
}


def random_model(config: dict[str, Any]) -> nn.Module:
    """A stock model with random weights, bf16 and 4-bit in groups of 64, gates 8-bit.

    Modules are quantized one after the other, so that no more than one is ever held in float32.
    """
    mx.random.seed(0)
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(copy.deepcopy(config)))
    model.set_dtype(mx.bfloat16, lambda dtype: mx.issubdtype(dtype, mx.floating))
    paths = [p for p, m in model.named_modules() if hasattr(m, "to_quantized")]
    for path in paths:

        def only_this(candidate: str, module: nn.Module, path: str = path) -> Any:
            return model.quant_predicate(candidate, module) if candidate == path else False

        nn.quantize(model, 64, 4, class_predicate=only_this)
        mx.eval(model.parameters())
    model.eval()
    return model


def lily_twin(stock: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Lily's model with the modules and the very arrays of a quantized stock model."""
    from lily_mlx.model import Model, ModelArgs

    twin = Model(ModelArgs.from_dict(copy.deepcopy(config)))
    quantized = {
        path: {"group_size": m.group_size, "bits": m.bits}
        for path, m in stock.named_modules()
        if hasattr(m, "bits")
    }
    nn.quantize(twin, 64, 4, class_predicate=lambda path, _: quantized.get(path, False))
    if not float32.share_weights(twin, stock):
        raise RuntimeError("lily's model does not have the parameters of stock's.")
    twin.eval()
    return twin


def float32_twin(stock: nn.Module, config: dict[str, Any]) -> nn.Module:
    """The float32 form of a stock model, which itself stays as it is."""
    twin = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(copy.deepcopy(config)))
    twin.update_modules(
        {"language_model": copy.deepcopy(stock.language_model)}
    )  # deepcopy shares the arrays
    return float32.to_float32(twin)


def kinds(model: nn.Module) -> dict[str, int]:
    """The first layer that has each kind of module."""
    found: dict[str, int] = {}
    for index, layer in enumerate(model.layers):
        names = ["linear_attn" if layer.is_linear else "self_attn", "mlp"]
        for name in names:
            found.setdefault(name, index)
    return found


class Case:
    """One module of one model at one shape: called as a decoder layer calls it."""

    def __init__(self, model: nn.Module, kind: str, index: int, x: mx.array, past: mx.array | None):
        self.module = model.layers[index][kind]
        self.kind = kind
        self.x = x.astype(model.layers[index].input_layernorm.weight.dtype)
        self.cache = None if kind == "mlp" else model.make_cache()[index]
        if past is not None and self.cache is not None:
            self._call(past.astype(self.x.dtype), self.cache)
            mx.eval(self.cache.state)

    def _call(self, x: mx.array, cache: Any) -> mx.array:
        if self.kind == "mlp":
            return self.module(x)
        make_mask = create_ssm_mask if self.kind == "linear_attn" else create_attention_mask
        return self.module(x, make_mask(x, cache), cache)

    def run(self) -> tuple[float, mx.array]:
        """Seconds of one call, its graph built and run, and the output."""
        cache = copy.deepcopy(self.cache)
        mx.synchronize()
        start = time.perf_counter()
        out = self._call(self.x, cache)
        mx.eval(out, *([cache.state] if cache is not None else []))
        mx.synchronize()
        return time.perf_counter() - start, out


def error(found: mx.array, reference: mx.array) -> tuple[float, float]:
    """Largest absolute error, and the error's norm over the reference's."""
    difference = found.astype(mx.float32) - reference
    norm = (mx.linalg.norm(difference.flatten()) / mx.linalg.norm(reference.flatten())).item()
    return mx.abs(difference).max().item(), norm


def measure(models: dict[str, nn.Module], wide: nn.Module, rows: list[int], past: int,
            rounds: int) -> list[dict[str, Any]]:  # fmt: skip
    """One entry for each kind and number of rows; the engines of ``models`` alternate."""
    stock = next(iter(models.values()))
    hidden = stock.layers[0].input_layernorm.weight.shape[0]
    entries = []
    for kind, index in kinds(stock).items():
        for count in rows:
            mx.random.seed(count)
            x = mx.random.normal((1, count, hidden))
            before = mx.random.normal((1, past, hidden)) if past else None
            cases = {n: Case(m, kind, index, x, before) for n, m in models.items()}
            # The float32 module reads the rounded input that the engines read.
            rounded = next(iter(cases.values())).x.astype(mx.float32)
            if before is not None:
                before = before.astype(next(iter(cases.values())).x.dtype).astype(mx.float32)
            _, reference = Case(wide, kind, index, rounded, before).run()
            for case in cases.values():
                case.run()
            seconds: dict[str, list[float]] = {n: [] for n in cases}
            entry: dict[str, Any] = {"module": kind, "layer": index, "rows": count, "past": past}
            for turn in range(rounds):
                for name in list(cases)[:: 1 if turn % 2 else -1]:
                    seconds[name].append(cases[name].run()[0])
            for name, case in cases.items():
                largest, relative = error(case.run()[1], reference)
                entry[name] = {
                    "seconds": statistics.median(seconds[name]),
                    "samples": seconds[name],
                    "max_error": largest,
                    "relative_error": relative,
                }
            entries.append(entry)
            common.progress(f"{kind}, {count} rows done")
    return entries


def main(given: list[str]) -> None:
    parser = common.parser("layers", __doc__)
    parser.add_argument("--shapes", choices=("model", "35b"), default="model")
    parser.add_argument("--engine", choices=common.ENGINES, default="both")
    parser.add_argument("--rows", type=length, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--past", type=int, default=64, help="rows in the cache (default: 64)")
    parser.add_argument("--rounds", type=_common.positive, default=5)
    arguments = parser.parse_args(given)

    def body() -> None:
        heading = common.heading("layers", given)
        names = common.ENGINES[arguments.engine]
        if arguments.shapes == "35b":
            stock = random_model(SHAPES_35B)
            built = {"stock": lambda: stock, "lily": lambda: lily_twin(stock, SHAPES_35B)}
            models = {name: built[name]() for name in names}
            wide = float32_twin(stock, SHAPES_35B)
            about = {
                "name": "35b-layers",
                "bytes": sum(v.nbytes for _, v in tree_flatten(stock.parameters())),
            }
        else:
            engines = compare.load_engines(arguments.model, names)
            models = {e.name: e.model for e in engines}
            wide = float32.load_float32(arguments.model, share=engines[0].model)
            about = compare.describe_model(engines[0], arguments.model)
        entries = measure(models, wide, arguments.rows, arguments.past, arguments.rounds)
        result = {
            **heading,
            "model": about,
            "settings": {"rounds": arguments.rounds, "past": arguments.past},
            "rows": entries,
        }
        both = len(names) == 2
        lines = []
        for entry in entries:
            line = [f"{entry['module']} {entry['rows']}"]
            line += [number(1e3 * entry[n]["seconds"]) for n in names]
            if both:
                ratio = entry[names[1]]["seconds"] / entry[names[0]]["seconds"]
                line.append(number(ratio) + "x")
            line += [f"{entry[n]['relative_error']:.1e}" for n in names]
            lines.append(line)
        groups = [
            ("", ["module, rows"]),
            ("milliseconds a call", [*names, *(["ratio"] if both else [])]),
            ("relative error", list(names)),
        ]
        common.save(result, render_grid(groups, lines), arguments, about["name"])

    common.guarded("layers", body, arguments.traceback)
