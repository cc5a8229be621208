"""Checkpoint folders of Qwen3.5 models: reading config.json, naming tensors, checking both.

Nothing here builds a model or touches a kernel. Every refusal is an `InputError` whose text is
one sentence that names the file, the key and the value, and says what to do.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_moe")

# Which bit widths and group sizes each quantization mode of MLX has.
QUANTIZATION_MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_VISION_PREFIXES = ("visual.", "vision_tower.", "vision_model.")
_EXPERT = re.compile(r"^(.*\bmlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)$")


class InputError(ValueError):
    """Input that cannot be used; the text is one sentence with the value and the way out."""


class MissingFileError(InputError, FileNotFoundError):
    """A file or folder that is not there."""

    # OSError's own __str__ prints errno and filename, which are not set here.
    __str__ = Exception.__str__


# --- names ----------------------------------------------------------------------------------


def _is_vision(name: str) -> bool:
    bare = name
    for prefix in ("model.", "language_model."):
        bare = bare.removeprefix(prefix)
    return bare.startswith(_VISION_PREFIXES)


def _is_mtp(name: str) -> bool:
    return "mtp." in name


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
        if leaf in ("qweight", "qzeros", "g_idx"):
            raise InputError(
                f"{mlp}.experts.*.{proj}.{leaf} is in the AWQ/GPTQ format, which is not supported "
                "for experts; start from the unquantised model and run mlx_lm.convert -q."
            )
        missing = sorted(set(range(num_experts)) - set(members))
        if missing:
            raise InputError(
                f"{mlp}.experts.{missing[0]}.{proj}.{leaf} is missing ({len(missing)} of "
                f"text_config.num_experts = {num_experts} experts are); fetch the checkpoint's "
                "remaining files or correct num_experts in config.json."
            )
        surplus = sorted(set(members) - set(range(num_experts)))
        if surplus:
            raise InputError(
                f"{mlp}.experts.{surplus[0]}.{proj}.{leaf} is more than text_config.num_experts = "
                f"{num_experts} allows; correct num_experts in config.json."
            )
        first = members[0]
        for expert in range(1, num_experts):
            other = members[expert]
            if other.shape != first.shape or other.dtype != first.dtype:
                raise InputError(
                    f"{mlp}.experts.{expert}.{proj}.{leaf} is {_describe(other)} while expert 0 "
                    f"has {_describe(first)}; experts of one layer must share shape, dtype and "
                    "quantization, so convert the model again with one setting for all experts."
                )
        out[f"{mlp}.switch_mlp.{proj}.{leaf}"] = mx.stack(
            [members[expert] for expert in range(num_experts)]
        )
    return out


def sanitize(
    weights: Mapping[str, mx.array],
    args: Any,
    stock_sanitize: Callable[[dict[str, mx.array]], dict[str, mx.array]],
) -> dict[str, mx.array]:
    """Bring a checkpoint's tensors to the names and conventions of mlx-lm's Qwen3.5 model.

    On top of `stock_sanitize` (which renames `model.language_model.*`, splits fused experts,
    drops `mtp.*`, moves conv1d's axes and, when conv1d was in Hugging Face's layout, adds 1 to
    the norms) this stacks per-expert tensors, quantised or not, drops vision tensors under
    every prefix in use, and drops a stored lm_head when the embeddings are tied. Applying it to
    its own result changes nothing.

    Args:
        weights: tensor name to array, as read from the files; not modified.
        args: a `ModelArgs` (with `text_config`) or a `TextModelArgs`.
        stock_sanitize: mlx-lm's own `sanitize` bound to the model.

    Raises:
        InputError: the experts of a layer cannot be stacked or split.
    """
    text = text_config(args)
    kept = {k: v for k, v in weights.items() if not _is_vision(k) and not _is_mtp(k)}
    num_experts = int(text.get("num_experts") or 0)
    if num_experts > 0:
        kept = stack_experts(kept, num_experts)
    for name in kept:
        fused, found, _ = name.rpartition(".experts.gate_up_proj")
        if found and f"{fused}.experts.down_proj" not in kept:
            raise InputError(
                f"{name} has no {fused}.experts.down_proj beside it; fetch the checkpoint's "
                "remaining files."
            )
    out = dict(stock_sanitize(kept))
    if text.get("tie_word_embeddings"):
        out = {k: v for k, v in out.items() if not k.startswith("language_model.lm_head.")}
    return out


def _canonical(name: str) -> str:
    """The model's parameter that a stored tensor belongs to (for messages, not for loading)."""
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    name = re.sub(r"\.experts\.\d+\.", ".switch_mlp.", name)
    name = name.replace(".experts.gate_up_proj", ".switch_mlp.gate_proj.weight")
    return name.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")


# --- files ----------------------------------------------------------------------------------

_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Read and check a safetensors file's header against the file's length; data is not read.

    Returns:
        Tensor name to {"dtype": str, "shape": list of int, "data_offsets": [begin, end]}.

    Raises:
        InputError: the file is cut off, is no safetensors file, or contradicts itself.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if (prefix + file.read(42)).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{path} is a Git LFS pointer, not the weights; run 'git lfs pull' in that folder."
            )
        file.seek(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) == 8 and length > size - 8 and size > 8 and length < 1 << 32:
            raise InputError(
                f"{path} is cut off: its header needs {length} bytes but the file has {size}; "
                "download it again."
            )
        raw = file.read(length) if 2 <= length <= size - 8 else b""
    try:
        header = json.loads(raw)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise InputError(
            f"{path} is not a safetensors file ({size} bytes, no readable header); "
            "download it again."
        )
    header.pop("__metadata__", None)

    end_of_data = 0
    for name, entry in header.items():
        end_of_data = max(end_of_data, _check_header_entry(path, name, entry))
    data = size - 8 - length
    if data != end_of_data:
        what = "is cut off" if data < end_of_data else "does not match its header"
        raise InputError(
            f"{path} {what}: its tensors need {end_of_data} bytes of data but the file has "
            f"{data}; download it again."
        )
    return header


def _check_header_entry(path: Path, name: str, entry: Any) -> int:
    """Check one tensor's header entry and return where its data ends."""
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        count = math.prod(shape)
        valid = 0 <= begin <= end and all(isinstance(d, int) and d >= 0 for d in shape)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise InputError(f"{path} has a damaged header at tensor {name!r}; download it again.")
    width = _DTYPE_BYTES.get(dtype)
    if width is None:
        raise InputError(
            f"{path} stores tensor {name!r} as {dtype}, which MLX cannot read; convert the model "
            "to bfloat16 or an MLX quantization first."
        )
    if end - begin != count * width:
        raise InputError(
            f"{path} has a damaged header: tensor {name!r} of shape {tuple(shape)} and dtype "
            f"{dtype} needs {count * width} bytes, but {end - begin} are given; download it again."
        )
    return end


def check_files(model_path: Path) -> dict[str, str]:
    """Check the weight files of a model folder without reading their data.

    Returns:
        Tensor name, as stored, to the name of the file that holds it.

    Raises:
        MissingFileError: no weights, or a file that the index names is not there.
        InputError: a file is damaged, or two files hold the same tensor.
    """
    files = sorted(model_path.glob("model*.safetensors"))
    if not files:
        raise MissingFileError(
            f"{model_path} holds no weights (no file matches model*.safetensors); download them "
            "or convert the model with mlx_lm.convert."
        )
    owner: dict[str, str] = {}
    for file in files:
        for name in read_safetensors_header(file):
            if name in owner and not _is_vision(name) and not _is_mtp(name):
                raise InputError(
                    f"{model_path} holds tensor {name!r} twice, in {owner[name]} and in "
                    f"{file.name}; remove the file that does not belong to this model."
                )
            owner[name] = file.name
    _check_index(model_path / "model.safetensors.index.json", owner)
    return owner


def _check_index(path: Path, owner: Mapping[str, str]) -> None:
    """Refuse an absent file that the index names, if it holds what no other file does.

    An index left over from before a conversion names files that nobody needs, and files of
    vision or mtp tensors alone are not even downloaded.
    """
    if not path.exists():
        return
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{path} has no 'weight_map'; download it again.")
    present = {_canonical(name) for name in owner}
    for name, file in sorted(weight_map.items()):
        if _is_vision(name) or _is_mtp(name) or _canonical(name) in present:
            continue
        if not (path.parent / str(file)).exists():
            raise MissingFileError(
                f"{path.parent / str(file)}, where {path.name} puts tensor {name!r}, is missing; "
                "download the rest of the model."
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object; an `InputError` says where it does not."""
    try:
        content = json.loads(path.read_bytes())
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text; download it again.") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "correct it or download it again."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object; download it again.")
    return content


# --- config.json ----------------------------------------------------------------------------


def read_config(model_path: Path) -> dict[str, Any]:
    """Read a model folder's config.json as mlx-lm does (generation_config.json's eos included).

    Raises:
        MissingFileError: no such folder, or no config.json in it.
        InputError: config.json is not a JSON object or has no model_type.
    """
    path = model_path / "config.json"
    if not model_path.exists():
        raise MissingFileError(f"{model_path} does not exist; give a model folder.")
    if not model_path.is_dir():
        raise InputError(f"{model_path} is a file; give the folder that holds config.json.")
    if not path.exists():
        raise MissingFileError(
            f"{model_path} has no config.json, so it is not a model folder; give the folder that "
            "holds config.json and model*.safetensors."
        )
    read_json(path)
    return load_config(model_path)


_TEXT_KEYS = (
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
_MOE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_OPTIONAL_SIZES = (
    "head_dim",
    "linear_conv_kernel_dim",
    "full_attention_interval",
    "max_position_embeddings",
)


def check_config(config: Mapping[str, Any], source: str = "config.json") -> None:
    """Check a Qwen3.5 config: its model_type, the keys the model needs, and that they agree.

    mlx-lm fills a missing key with a default of another model; here it is refused.

    Args:
        config: the whole config, with or without a nested `text_config`.
        source: what to call it in messages.

    Raises:
        InputError: see above; also for an unknown quantization.
    """
    check_model_type(config, source)
    nested = "text_config" in config
    text = config["text_config"] if nested else config
    prefix = "text_config." if nested else ""
    if not isinstance(text, Mapping):
        raise InputError(f"{source}: text_config must be an object, not {text!r}.")

    def size(key: str) -> int:
        value = text[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{source}: {prefix}{key} = {value!r} must be a positive whole number; "
                "correct it or download the file again."
            )
        return value

    moe = config["model_type"] == "qwen3_5_moe" or bool(text.get("num_experts"))
    needed = _TEXT_KEYS + (_MOE_KEYS if moe else ("intermediate_size",))
    for key in needed:
        if text.get(key) is None:
            raise InputError(
                f"{source} has no {prefix}{key}, which a {config['model_type']} model needs; "
                "add it or download the file again."
            )
    sizes = {key: size(key) for key in needed + _OPTIONAL_SIZES if text.get(key) is not None}

    def at_most(low: str, high: str) -> None:
        if sizes[low] > sizes[high]:
            raise InputError(
                f"{source}: {prefix}{low} = {sizes[low]} is more than {high} = {sizes[high]}; "
                "correct one of them."
            )

    def divides(divisor: str, number: str) -> None:
        if sizes[number] % sizes[divisor]:
            raise InputError(
                f"{source}: {prefix}{number} = {sizes[number]} is not a multiple of {divisor} = "
                f"{sizes[divisor]}; correct one of them."
            )

    if moe:
        at_most("num_experts_per_tok", "num_experts")
    divides("num_key_value_heads", "num_attention_heads")
    divides("linear_num_key_heads", "linear_num_value_heads")

    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or not isinstance(rope.get("rope_theta"), (int, float)):
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
    layer_types = text.get("layer_types")
    if layer_types is not None:
        interval = sizes.get("full_attention_interval", 4)
        expected = [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(sizes["num_hidden_layers"])
        ]
        if list(layer_types) != expected:
            raise InputError(
                f"{source}: {prefix}layer_types is not one full_attention layer after every "
                f"{interval - 1} linear_attention layers for num_hidden_layers = "
                f"{sizes['num_hidden_layers']}; set full_attention_interval (now {interval}) to "
                "the model's own spacing."
            )
    check_quantization(config, source)


def check_model_type(config: Mapping[str, Any], source: str = "config.json") -> None:
    """Refuse a model that lily_mlx has no classes for."""
    model_type = config.get("model_type")
    if model_type is None:
        raise InputError(
            f"{source} has no model_type; add it (supported: {', '.join(SUPPORTED_MODEL_TYPES)})."
        )
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{source}: model_type {model_type!r} has no lily engine (supported: "
            f'{", ".join(SUPPORTED_MODEL_TYPES)}); pass engine="stock" to run it with mlx-lm.'
        )


_ENTRY_KEYS = {"group_size", "bits", "mode", "global_scale", "quantize_input"}


def _check_setting(source: str, where: str, setting: Mapping[str, Any]) -> None:
    for key in ("group_size", "bits"):
        if key not in setting:
            raise InputError(
                f"{source}: {where} has no {key}; add it or convert the model with mlx_lm.convert."
            )
    mode = setting.get("mode", "affine")
    if mode not in QUANTIZATION_MODES:
        raise InputError(
            f"{source}: {where}.mode = {mode!r} is not a quantization mode of MLX (known: "
            f"{', '.join(QUANTIZATION_MODES)}); convert the model with mlx_lm.convert."
        )
    allowed = dict(zip(("bits", "group_size"), QUANTIZATION_MODES[mode], strict=True))
    for key, values in allowed.items():
        if setting[key] not in values or isinstance(setting[key], bool):
            raise InputError(
                f"{source}: {where}.{key} = {setting[key]!r} does not exist in mode {mode!r} "
                f"(allowed: {', '.join(map(str, values))}); correct it or convert the model again."
            )


def check_quantization(config: Mapping[str, Any], source: str = "config.json") -> None:
    """Check the model-wide quantization and every per-tensor entry for values MLX knows."""
    quantization = config.get("quantization")
    if quantization is None:
        _check_foreign_quantization(config, source)
        return
    if not isinstance(quantization, Mapping):
        raise InputError(
            f"{source}: quantization must be an object with group_size and bits, not "
            f"{quantization!r}."
        )
    _check_setting(source, "quantization", quantization)
    for path, entry in quantization.items():
        if path in _ENTRY_KEYS or isinstance(entry, bool):
            continue
        if not isinstance(entry, Mapping):
            if "." not in path:
                continue  # a plain setting of another tool, not a tensor's entry
            raise InputError(
                f"{source}: quantization[{path!r}] = {entry!r} must be true, false or an object "
                "with group_size and bits."
            )
        unknown = sorted(set(entry) - _ENTRY_KEYS)
        if unknown:
            raise InputError(
                f"{source}: quantization[{path!r}] has the unknown key {unknown[0]!r} (known: "
                f"{', '.join(sorted(_ENTRY_KEYS))}); remove it."
            )
        _check_setting(source, f"quantization[{path!r}]", entry)


_QUANT_METHODS = ("mxfp4", "mxfp8", "compressed-tensors", "modelopt", "awq", "gptq")


def _check_foreign_quantization(config: Mapping[str, Any], source: str) -> None:
    foreign = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not foreign:
        return
    if not isinstance(foreign, Mapping) or "quant_method" not in foreign:
        raise InputError(
            f"{source} has a quantization_config without quant_method and no 'quantization'; add "
            "'quantization' with group_size and bits, as mlx_lm.convert writes it."
        )
    method = foreign["quant_method"]
    power_of_two_fp8 = foreign.get("scale_fmt") == "ue8m0" and list(
        foreign.get("weight_block_size") or ()
    ) == [32, 32]
    if method not in _QUANT_METHODS and not (method == "fp8" and power_of_two_fp8):
        raise InputError(
            f"{source}: quantization_config.quant_method = {method!r} cannot be decoded for this "
            "model; start from the bfloat16 checkpoint and run mlx_lm.convert -q."
        )


# --- tensors against the model --------------------------------------------------------------

# For messages: which keys of config.json give a parameter its shape.
_SHAPE_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(embed_tokens|lm_head)$", ("vocab_size", "hidden_size")),
    (r"mlp\.gate$", ("num_experts", "hidden_size")),
    (r"switch_mlp\.\w+$", ("num_experts", "moe_intermediate_size", "hidden_size")),
    (r"shared_expert\.\w+$", ("shared_expert_intermediate_size", "hidden_size")),
    (r"mlp\.\w+_proj$", ("intermediate_size", "hidden_size")),
    (r"self_attn\.[qo]_proj$", ("num_attention_heads", "head_dim", "hidden_size")),
    (r"self_attn\.[kv]_proj$", ("num_key_value_heads", "head_dim", "hidden_size")),
    (r"self_attn\.[qk]_norm$", ("head_dim",)),
    (
        r"linear_attn\.(conv1d|in_proj_qkv)$",
        (
            "linear_num_key_heads",
            "linear_key_head_dim",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "hidden_size",
        ),
    ),
    (
        r"linear_attn\.(in_proj_z|out_proj)$",
        ("linear_num_value_heads", "linear_value_head_dim", "hidden_size"),
    ),
    (r"linear_attn\.in_proj_[ab]$", ("linear_num_value_heads", "hidden_size")),
    (r"linear_attn\.norm$", ("linear_value_head_dim",)),
    (r"linear_attn$", ("linear_num_value_heads",)),
    (r"", ("hidden_size",)),
)


def _describe(array: mx.array) -> str:
    return f"{tuple(array.shape)} {str(array.dtype).removeprefix('mlx.core.')}"


class _Report:
    """Says where a tensor came from and which config keys fix its shape."""

    def __init__(self, text: Mapping[str, Any], files: Mapping[str, str]):
        self.text = text
        self.files = {_canonical(name): file for name, file in files.items()}
        for name, file in files.items():  # a fused tensor feeds two parameters
            if name.endswith(".experts.gate_up_proj"):
                self.files[_canonical(name).replace("gate_proj", "up_proj")] = file
        self.any_file = sorted(set(files.values()))[0] if files else "the checkpoint"

    def tensor(self, name: str) -> str:
        file = self.files.get(_canonical(name))
        return f"tensor {name!r}" + (f" in {file}" if file else "")

    def keys(self, module: str) -> str:
        names = next(keys for pattern, keys in _SHAPE_KEYS if re.search(pattern, module))
        found = [f"{key} = {self.text[key]}" for key in names if key in self.text]
        return ", ".join(found)


def _split(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf


def check_weights(
    model: nn.Module,
    weights: Mapping[str, mx.array],
    config: Mapping[str, Any],
    files: Mapping[str, str],
) -> None:
    """Check sanitised tensors against the model they are about to be loaded into.

    Names, shapes and dtypes are compared; a packed tensor's bits and group size are computed
    from its shape and must be ones that MLX has and that its entry in config.json, if any,
    states. Nothing is evaluated: lazily loaded arrays stay on disk.

    Args:
        model: the model, built from `config` and not yet quantised.
        weights: tensors by parameter name, after `sanitize`.
        config: the whole config.json.
        files: `check_files`' result, to name files in messages.

    Raises:
        InputError: the first disagreement found.
    """
    report = _Report(text_config(config), files)
    parameters = dict(tree_flatten(model.parameters()))
    modules = dict(model.named_modules())
    quantization = config.get("quantization")
    if quantization is None and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        if method in ("awq", "gptq"):
            return  # repacked by mlx-lm after this point, under other names
        quantization = {}

    packed = {
        module
        for module, leaf in map(_split, weights)
        if leaf == "scales" and hasattr(modules.get(module), "to_quantized")
    }
    _check_names(report, parameters, weights, packed, config)

    for name, array in sorted(weights.items()):
        module, leaf = _split(name)
        if module in packed:
            continue
        _check_dense(report, name, array, parameters[name])
        entry = quantization.get(module) if quantization else None
        if leaf == "weight" and entry:
            raise InputError(
                f"config.json's quantization[{module!r}] says that it is quantised, but "
                f"{report.tensor(name)} is {_describe(array)} without scales; set the entry to "
                "false or convert the model again."
            )
    for module in sorted(packed):
        _check_packed(report, module, weights, parameters, quantization)


def _check_names(
    report: _Report,
    parameters: Mapping[str, mx.array],
    weights: Mapping[str, mx.array],
    packed: set[str],
    config: Mapping[str, Any],
) -> None:
    leaves = ("weight", "scales", "biases", "bias", "global_scale")
    unknown = []
    for name in sorted(weights):
        module, leaf = _split(name)
        if name not in parameters and not (module in packed and leaf in leaves):
            unknown.append(name)
    if packed and config.get("quantization") is None and not config.get("quantization_config"):
        name = f"{min(packed)}.scales"
        raise InputError(
            f"{report.tensor(name)} belongs to a quantised model, but config.json has no "
            "'quantization'; use the config.json that was saved with these weights."
        )
    if unknown:
        raise InputError(
            f"{report.tensor(unknown[0])} has no place in this {config['model_type']} model"
            + _others(unknown)
            + f"; check that config.json (num_hidden_layers = {report.text['num_hidden_layers']}) "
            "and the weights belong together."
        )
    missing = [name for name in parameters if name not in weights]
    for module in sorted(packed):
        if weights[f"{module}.scales"].dtype != mx.uint8 and f"{module}.biases" not in weights:
            missing.append(f"{module}.biases")
    if missing:
        hint = "fetch the checkpoint's remaining files, or check that config.json belongs to it"
        if missing[0].endswith("lm_head.weight"):
            hint = "set tie_word_embeddings to true if the model has no output matrix of its own"
        raise InputError(
            f"tensor {missing[0]!r} is not in {report.any_file} or its companion files"
            + _others(missing)
            + f"; {hint} (num_hidden_layers = {report.text['num_hidden_layers']})."
        )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""


def _check_dense(report: _Report, name: str, array: mx.array, expected: mx.array) -> None:
    if not mx.issubdtype(array.dtype, mx.floating):
        raise InputError(
            f"{report.tensor(name)} is {_describe(array)}, but a floating-point tensor is needed "
            "(float8 and integer checkpoints are read as whole numbers); start from the bfloat16 "
            "checkpoint or one quantised by mlx_lm.convert."
        )
    if array.shape != expected.shape:
        raise InputError(
            f"{report.tensor(name)} has shape {tuple(array.shape)}, but config.json "
            f"({report.keys(_split(name)[0])}) asks for {tuple(expected.shape)}; check that both "
            "belong to the same model."
        )


def _check_packed(
    report: _Report,
    module: str,
    weights: Mapping[str, mx.array],
    parameters: Mapping[str, mx.array],
    quantization: Mapping[str, Any] | None,
) -> None:
    name = f"{module}.weight"
    weight, scales = weights[name], weights[f"{module}.scales"]
    biases = weights.get(f"{module}.biases")
    *rows, columns = parameters[name].shape

    if weight.dtype != mx.uint32:
        raise InputError(
            f"{report.tensor(name)} has scales but is {_describe(weight)}; packed codes must be "
            "uint32, so convert the model again with mlx_lm.convert."
        )
    if list(weight.shape[:-1]) != rows or list(scales.shape[:-1]) != rows:
        raise InputError(
            f"{report.tensor(name)} has shape {tuple(weight.shape)} with scales "
            f"{tuple(scales.shape)}, but config.json ({report.keys(module)}) asks for "
            f"{tuple(rows)} before the packed axis; check that both belong to the same model."
        )
    affine = scales.dtype != mx.uint8
    if affine and biases is not None and biases.shape != scales.shape:
        raise InputError(
            f"{report.tensor(module + '.biases')} has shape {tuple(biases.shape)} but the scales "
            f"have {tuple(scales.shape)}; convert the model again."
        )
    for leaf, array in (("scales", scales), ("biases", biases)):
        if affine and array is not None and not mx.issubdtype(array.dtype, mx.floating):
            raise InputError(
                f"{report.tensor(f'{module}.{leaf}')} is {_describe(array)}; affine scales and "
                "biases must be floating-point, so convert the model again."
            )
    if not affine and biases is not None:
        raise InputError(
            f"{report.tensor(module + '.biases')} accompanies uint8 scales, whose modes have no "
            "biases; convert the model again."
        )

    bits, bits_rest = divmod(weight.shape[-1] * 32, columns)
    group, group_rest = divmod(columns, scales.shape[-1])
    modes = ("affine",) if affine else ("mxfp4", "mxfp8", "nvfp4")
    mode = next(
        (
            m
            for m in modes
            if bits in QUANTIZATION_MODES[m][0] and group in QUANTIZATION_MODES[m][1]
        ),
        None,
    )
    if bits_rest or group_rest or mode is None:
        raise InputError(
            f"{report.tensor(name)} {tuple(weight.shape)} with scales {tuple(scales.shape)} is no "
            f"packing of {columns} columns that MLX has; check that config.json "
            f"({report.keys(module)}) belongs to these weights."
        )
    if quantization is None:
        return
    entry = quantization.get(module)
    if entry is False:
        raise InputError(
            f"config.json's quantization[{module!r}] = false, but {report.tensor(name)} is packed "
            f"with {bits} bits and group size {group}; remove the entry."
        )
    setting = quantization if entry is True else entry
    if setting is None:
        return  # mlx-lm takes bits and group size from the shapes
    stated = (setting["bits"], setting["group_size"], setting.get("mode", "affine"))
    if stated != (bits, group, mode):
        raise InputError(
            f"config.json says {stated[0]} bits, group size {stated[1]}, mode {stated[2]} for "
            f"{module!r}, but {report.tensor(name)} is packed with {bits} bits, group size "
            f"{group}, mode {mode}; correct the entry or convert the model again."
        )


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
        module, leaf = _split(name)
        if leaf == "scales" and array.dtype == mx.uint8:
            checks.append((name, _float8_scales_ok(array, modes.get(module))))
        elif mx.issubdtype(array.dtype, mx.floating) and (
            array.ndim == 1 or leaf in ("scales", "biases", "global_scale")
        ):
            checks.append((name, mx.isfinite(array).all()))
    for start in range(0, len(checks), batch):
        _raise_on_bad(checks[start : start + batch])


def _float8_scales_ok(scales: mx.array, mode: str | None) -> mx.array:
    # NaN is 0xff in the exponent-only format of mxfp4/mxfp8, 0x7f and 0xff in nvfp4's e4m3.
    if mode == "nvfp4":
        return mx.all((scales & 0x7F) != 0x7F)
    return mx.all(scales != 0xFF)


def _raise_on_bad(checks: Iterable[tuple[str, mx.array]]) -> None:
    checks = list(checks)
    mx.eval([ok for _, ok in checks])
    for name, ok in checks:
        if not ok.item():
            raise InputError(
                f"tensor {name!r} holds NaN or infinity, so the weights are damaged; download "
                "or convert the model again."
            )
