"""Checkpoint folders of Qwen3.5 models: what turns the layouts in use into the model's parameters.

Nothing here builds a model or touches a kernel. MLX and mlx-lm find most damage themselves; what
is checked here is what they would load in silence or report without naming a file.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config

# The last two are the text models of the first two, saved without the outer config.
SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")

_VISION_PREFIXES = ("visual.", "vision_tower.", "vision_model.")
_EXPERT = re.compile(r"^(.*\bmlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)$")


class InputError(ValueError):
    """Input that cannot be used; the text is one sentence with the value and the way out."""


class MissingFileError(InputError, FileNotFoundError):
    """A file or folder that is not there."""

    # OSError's own __str__ prints errno and filename, which are not set here.
    __str__ = Exception.__str__


@contextmanager
def explained(
    path: Path,
    way_out: str,
    errors: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError, ArithmeticError),
) -> Iterator[None]:
    """Turn what json, MLX and mlx-lm raise into an `InputError` that names `path`."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise InputError(f"{path} cannot be loaded ({reason}); {way_out}.") from error


# --- tensors --------------------------------------------------------------------------------


def _is_ignored(name: str) -> bool:
    """Whether a tensor belongs to a vision tower or a multi-token-prediction head."""
    bare = name
    for prefix in ("model.", "language_model."):
        bare = bare.removeprefix(prefix)
    return bare.startswith(_VISION_PREFIXES) or "mtp." in name


def _describe(array: mx.array, kind: mx.Dtype | mx.DtypeCategory | None = None) -> str:
    return f"{tuple(array.shape)} {str(kind or array.dtype).rpartition('.')[2]}"


def text_config(args: Any) -> Mapping[str, Any]:
    """The text model's settings from a config dict, a `ModelArgs` or a `TextModelArgs`."""
    text = args if isinstance(args, Mapping) else vars(args)
    text = text.get("text_config") or text
    return text if isinstance(text, Mapping) else vars(text)


def stack_experts(weights: Mapping[str, mx.array], num_experts: int) -> dict[str, mx.array]:
    """Turn `*.mlp.experts.N.<proj>.<leaf>` into `*.mlp.switch_mlp.<proj>.<leaf>`.

    Each leaf (weight, scales, biases) of the `num_experts` experts is stacked along a new first
    axis: [rows, columns] becomes [num_experts, rows, columns]. Other tensors pass unchanged.

    Raises:
        InputError: an expert is missing, surplus, or differs from its peers in shape or dtype.
    """
    groups: dict[tuple[str, str, str], dict[int, mx.array]] = {}
    out: dict[str, mx.array] = {}
    for name, value in weights.items():
        if match := _EXPERT.match(name):
            mlp, expert, proj, leaf = match.groups()
            groups.setdefault((mlp, proj, leaf), {})[int(expert)] = value
        else:
            out[name] = value

    for (mlp, proj, leaf), members in groups.items():
        kinds = {number: _describe(array) for number, array in members.items()}
        usual = max(kinds.values(), key=list(kinds.values()).count)
        odd = set(members) ^ set(range(num_experts)) or {n for n in kinds if kinds[n] != usual}
        if odd:
            raise InputError(
                f"{mlp}.experts.{min(odd)}.{proj}.{leaf} is {kinds.get(min(odd), 'missing')}, but "
                f"text_config.num_experts = {num_experts} asks for experts 0 to {num_experts - 1}, "
                f"each {usual}; fetch all of the checkpoint's files or convert the model again."
            )
        out[f"{mlp}.switch_mlp.{proj}.{leaf}"] = mx.stack([members[n] for n in range(num_experts)])
    return out


def head_differs(weights: Mapping[str, mx.array]) -> bool:
    """Whether an output matrix is stored that is not the embeddings over again."""
    heads = {n.rpartition(".")[2]: a for n, a in weights.items() if "lm_head." in n}
    embeddings = {n.rpartition(".")[2]: a for n, a in weights.items() if "embed_tokens." in n}
    return any(
        leaf not in embeddings or not mx.array_equal(array, embeddings[leaf]).item()
        for leaf, array in heads.items()
    )


def sanitize(
    weights: Mapping[str, mx.array],
    args: Any,
    stock_sanitize: Callable[[dict[str, mx.array]], dict[str, mx.array]],
) -> dict[str, mx.array]:
    """Bring a checkpoint's tensors to the names and conventions of mlx-lm's Qwen3.5 model.

    On top of `stock_sanitize` (which renames `model.language_model.*`, splits fused experts,
    drops `mtp.*`, moves conv1d's axes and, when conv1d was in Hugging Face's layout, adds 1 to
    the norms) this stacks per-expert tensors, quantised or not, drops vision tensors under
    every prefix in use, and drops a stored copy of tied embeddings. Applying it to its own
    result changes nothing.

    Args:
        weights: tensor name to array, as read from the files; not modified.
        args: a `ModelArgs` (with `text_config`) or a `TextModelArgs`.
        stock_sanitize: mlx-lm's own `sanitize` bound to the model.

    Raises:
        InputError: the experts of a layer cannot be stacked, or tied embeddings differ.
    """
    text = text_config(args)
    kept = {k: v for k, v in weights.items() if not _is_ignored(k)}
    num_experts = int(text.get("num_experts") or 0)
    if num_experts > 0:
        kept = stack_experts(kept, num_experts)
    out = dict(stock_sanitize(kept))
    if text.get("tie_word_embeddings"):
        if head_differs(out):
            raise InputError(
                "the stored lm_head differs from the embeddings that text_config."
                "tie_word_embeddings = true names in its place; set it to false in config.json."
            )
        out = {k: v for k, v in out.items() if not k.startswith("language_model.lm_head.")}
    return out


def check_parameters(
    path: Path, model: nn.Module, weights: Mapping[str, mx.array], way_out: str
) -> None:
    """Refuse tensors that are not, one for one, the parameters of the model in `path`.

    MLX compares names and shapes, but not whether codes stand where values belong: float8 bytes
    would pass for them.

    Args:
        model: built and quantised as config.json says.
        weights: tensors by parameter name; nothing is evaluated.

    Raises:
        InputError: with the first tensor that is missing, of another shape or kind, or surplus.
    """
    parameters = dict(tree_flatten(model.parameters()))
    missing = [f"{name} is missing" for name in parameters if name not in weights]
    other, surplus = [], []
    for name, array in sorted(weights.items()):
        wanted = parameters.get(name)
        if wanted is None:
            surplus.append(f"{name} has no place")
            continue
        kind = mx.floating if mx.issubdtype(wanted.dtype, mx.floating) else wanted.dtype
        if array.shape != wanted.shape or not mx.issubdtype(array.dtype, kind):
            other.append(f"{name} is {_describe(array)}, not {_describe(wanted, kind)}")
    faults = [
        found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
        for found in (missing, other, surplus)
        if found
    ]
    if faults:
        raise InputError(
            f"{path} holds other weights than config.json describes: {', '.join(faults)}; "
            f"{way_out}."
        )


# --- files ----------------------------------------------------------------------------------


def _require(path: Path) -> None:
    if not path.is_file():
        raise MissingFileError(f"{path.parent} has no {path.name}; download it or name its folder.")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object; an `InputError` says where it does not."""
    _require(path)
    with explained(path, "correct it or download it again"):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError(f"a JSON object is needed, not a {type(content).__name__}")
    return content


def read_tensors(path: Path) -> dict[str, mx.array]:
    """Open a safetensors file; the data stay on disk until used."""
    _require(path)
    with explained(path, "download it again, with 'git lfs pull' if git did", (RuntimeError,)):
        return mx.load(str(path))


def read_weights(model_path: Path) -> dict[str, mx.array]:
    """Open a folder's weight files: tensor names, as stored, to arrays still on disk.

    Raises:
        InputError: a file is damaged, or two files hold the same tensor, of which mlx-lm would
            take either.
    """
    owner: dict[str, str] = {}
    weights: dict[str, mx.array] = {}
    for file in sorted(model_path.glob("model*.safetensors")):
        for name, array in read_tensors(file).items():
            if _is_ignored(name):
                continue
            if name in owner:
                raise InputError(
                    f"{model_path} holds tensor {name!r} twice, in {owner[name]} and in "
                    f"{file.name}; remove the file that does not belong to this model."
                )
            owner[name], weights[name] = file.name, array
    return weights


def absent_files(model_path: Path) -> list[str]:
    """The files that the folder's index names and that are not there.

    Not an error by itself: they may hold vision tensors alone, or the index may be older than a
    conversion.
    """
    index = model_path / "model.safetensors.index.json"
    named = read_json(index).get("weight_map", {}).values() if index.exists() else ()
    return sorted(file for file in set(named) if not (model_path / file).exists())


# --- config.json ----------------------------------------------------------------------------


def read_config(model_path: Path) -> dict[str, Any]:
    """Read a model folder's config.json as mlx-lm does (generation_config.json's eos included).

    Raises:
        MissingFileError: no such folder, or no config.json in it.
        InputError: config.json is not a JSON object.
    """
    if not model_path.exists():
        raise MissingFileError(f"{model_path} does not exist; give a model folder.")
    read_json(model_path / "config.json")
    return load_config(model_path)


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_MOE_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def _rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' reading: what older configs keep beside rope_parameters belongs to them."""
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None and text.get(key) is not None:
            rope[key] = text[key]
    return rope


def check_config(config: Mapping[str, Any], source: str = "config.json") -> None:
    """Check the settings of a Qwen3.5 config that no tensor's shape contradicts when wrong.

    mlx-lm fills a missing key with a default of another model; here it is refused.

    Args:
        config: the whole config, with or without a nested `text_config`.
        source: what to call it in messages.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{source}: model_type {model_type!r} has no lily engine (supported: "
            f'{", ".join(SUPPORTED_MODEL_TYPES)}); pass engine="stock" to run it with mlx-lm.'
        )
    text = text_config(config)
    prefix = "text_config." if text is not config else ""
    moe = "moe" in model_type or bool(text.get("num_experts"))
    for key in _SIZES + (_MOE_SIZES if moe else ("intermediate_size",)):
        value = text.get(key)
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"{source}: {prefix}{key} is {'missing' if value is None else repr(value)}, but a "
                f"{model_type} model needs a positive whole number; download the file again."
            )
    if moe and text["num_experts_per_tok"] > text["num_experts"]:
        raise InputError(
            f"{source}: {prefix}num_experts_per_tok = {text['num_experts_per_tok']} is more than "
            f"num_experts = {text['num_experts']}; correct one of them."
        )
    if not isinstance(_rope_parameters(text).get("rope_theta"), (int, float)):
        raise InputError(
            f"{source} has no {prefix}rope_parameters.rope_theta, without which mlx-lm would "
            "assume 100000; add the value that the model was trained with."
        )
    activation = text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise InputError(
            f"{source}: {prefix}hidden_act = {activation!r} is not what Qwen3.5 models use; only "
            "'silu' is supported."
        )


def settled(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """What must replace settings that mlx-lm reads in one of the two places where they stand.

    Args:
        config: the whole config, after `check_config`.
        weights: `read_weights`' result.

    Returns:
        Keys of `config` with the values to load with; empty for most checkpoints.
    """
    text = text_config(config)
    changed: dict[str, Any] = {}
    rope = _rope_parameters(text)
    if rope != text.get("rope_parameters"):
        changed["rope_parameters"] = rope
    if text.get("tie_word_embeddings"):
        if head_differs(weights):
            warnings.warn(
                "config.json ties lm_head to the embeddings, but the one that is stored differs "
                "from them and is used.",
                stacklevel=3,
            )
            changed["tie_word_embeddings"] = False
    elif config.get("tie_word_embeddings") and not any("lm_head." in name for name in weights):
        changed["tie_word_embeddings"] = True
    if changed and text is not config:
        changed = {"text_config": {**text, **changed}}
    plain = weights and all(mx.issubdtype(a.dtype, mx.floating) for a in weights.values())
    if plain and config.get("quantization") is None and quantization_label(config):
        changed["quantization_config"] = None  # left over from before a dequantisation
    return changed


def quantization_label(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's quantization_config, which may stand in its text_config."""
    return config.get("quantization_config") or text_config(config).get("quantization_config")


# --- values ---------------------------------------------------------------------------------


def check_finite(model: nn.Module, batch: int = 64) -> None:
    """Refuse a model with NaN or infinity in scales, biases, norms or other small tensors.

    Reads every quantisation scale and bias and every parameter with one axis (about a tenth of
    a 4-bit model's bytes); packed codes cannot hold a NaN, and large unquantised matrices are
    not read.

    Args:
        model: the loaded model.
        batch: how many tensors to look at per evaluation; bounds the scratch memory.

    Raises:
        InputError: naming the first such tensor.
    """
    modes = {
        path: getattr(module, "mode", None)
        for path, module in model.named_modules()
        if "scales" in module
    }
    checks: list[tuple[str, mx.array]] = []
    for name, array in tree_flatten(model.parameters()):
        module, _, leaf = name.rpartition(".")
        if leaf == "scales" and array.dtype == mx.uint8:
            # NaN is 0xff in the exponent-only format of mxfp4/mxfp8, 0x7f or 0xff in nvfp4's e4m3.
            nan = 0x7F if modes.get(module) == "nvfp4" else 0xFF
            checks.append((name, mx.all((array & nan) != nan)))
        elif mx.issubdtype(array.dtype, mx.floating) and (
            array.ndim == 1 or leaf in ("scales", "biases", "global_scale")
        ):
            checks.append((name, mx.isfinite(array).all()))
    for start in range(0, len(checks), batch):
        part = checks[start : start + batch]
        mx.eval([ok for _, ok in part])
        for name, ok in part:
            if not ok.item():
                raise InputError(
                    f"tensor {name!r} holds NaN or infinity, so the weights are damaged; download "
                    "or convert the model again."
                )
