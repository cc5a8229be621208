"""Loading a model and its tokenizer, and checking prompts, with one clear sentence a failure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils as stock

from .attach import MODEL_FILE, is_attached
from .checkpoint import (
    InputError,
    MissingFileError,
    absent_files,
    check_config,
    check_finite,
    check_parameters,
    explained,
    quantization_label,
    read_config,
    read_json,
    read_tensors,
    read_weights,
    settled,
    text_config,
)

ENGINES = ("lily", "stock")


def lily_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type]:
    """mlx-lm's `get_model_classes` hook: lily's `Model` and `ModelArgs`."""
    from .model import Model, ModelArgs

    return Model, ModelArgs


def load_model(
    model_path: Path,
    lazy: bool = False,
    strict: bool = True,
    model_config: dict[str, Any] | None = None,
    get_model_classes: Callable[..., tuple[type[nn.Module], type]] = lily_classes,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """`mlx_lm.utils.load_model` with checks before and after; same arguments, same returns.

    config.json is checked first, then every tensor's name, shape and kind against the quantised
    model, then the values that `check_finite` lists.

    Args:
        lazy: leave the weights on disk until used. Their values are then not checked.
        strict: every parameter must be in the files and every tensor in the model.
        get_model_classes: gives (Model, ModelArgs) for a config; lily's own by default.
        trust_remote_code: as in mlx-lm; not needed for a folder prepared by `lily_mlx attach`.

    Raises:
        InputError: bad input, in one sentence. MissingFileError, a FileNotFoundError, when a
            file is not there.
    """
    model_path = Path(model_path)
    source = model_path / "config.json"
    config = {**read_config(model_path), **(model_config or {})}
    attached = is_attached(config)
    if config.get("model_file") is not None and not attached:
        raise InputError(
            f"{source} asks for its own model code ({config['model_file']!r}), which lily does "
            'not run; pass engine="stock" with trust_remote_code=True if you trust it.'
        )
    with explained(source, "correct it or download it again"):
        check_config(config, str(source))
        overrides = {**(model_config or {}), **settled(config, read_weights(model_path))}
    if attached:
        overrides["model_file"] = None
    way_out = (
        "check that config.json belongs to these weights, and that they are bfloat16 or quantised "
        "by mlx_lm.convert"
    )
    method = (quantization_label(config) or {}).get("quant_method")
    if config.get("quantization") is None and method:
        way_out += f", not by {method!r}"

    built: list[nn.Module] = []

    def checked_classes(config: dict[str, Any]) -> tuple[Callable[[Any], nn.Module], type]:
        model_class, args_class = get_model_classes(config=config)

        def build(args: Any) -> nn.Module:
            model = model_class(args)
            built.append(model)

            def load_weights(weights: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
                if strict:
                    check_parameters(model_path, model, dict(weights), way_out)
                return model_class.load_weights(model, weights, strict)

            # The instance's own attribute, so that the check comes after mlx-lm has quantised the
            # model; taken off again below.
            model.load_weights = load_weights
            return model

        return build, args_class

    try:
        with explained(model_path, way_out):
            model, config = stock.load_model(
                model_path,
                lazy,
                strict,
                model_config=overrides,
                get_model_classes=checked_classes,
                trust_remote_code=trust_remote_code,
            )
    except InputError as error:
        if not (absent := absent_files(model_path)):
            raise
        raise MissingFileError(
            f"{str(error).rstrip('.')}; {absent[0]}, which the index names, is missing."
        ) from error
    finally:
        for item in built:
            vars(item).pop("load_weights", None)
    if attached:
        config["model_file"] = MODEL_FILE
    if config.get("quantization_config") is None:
        config.pop("quantization_config", None)
    if not lazy:
        check_finite(model)
    return model, config


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    engine: str = "lily",
    strict: bool = False,
) -> tuple[nn.Module, Any] | tuple[nn.Module, Any, dict[str, Any]]:
    """Load a model and its tokenizer from a folder or a Hugging Face repository.

    Arguments and returns are those of `mlx_lm.load`, plus:

    Args:
        lazy: leave the weights on disk until used. NaN and infinity are then not looked for.
        engine: "lily" for lily's classes, "stock" for mlx-lm's own, which take any model type.
        strict: with "lily", every module must have a kernel; the first without one is an error
            that gives the reason. Otherwise such a module runs mlx-lm's own operations.

    Returns:
        (model, tokenizer), or (model, tokenizer, config) with `return_config`.

    Raises:
        InputError: bad input, in one sentence that names file, key, value and way out.
            MissingFileError, a FileNotFoundError, when a file is not there.
    """
    if engine not in ENGINES:
        raise InputError(f"engine={engine!r} is unknown; use one of {', '.join(ENGINES)}.")
    if strict and engine == "stock":
        raise InputError('strict=True asks for lily\'s kernels; use it with engine="lily".')

    model_path = find_model(path_or_hf_repo, revision)
    if adapter_path is not None:
        _check_adapter(Path(adapter_path))
    stored = read_config(model_path)
    if engine == "lily":
        _check_tokenizer(model_path)
        model, config = load_model(
            model_path, lazy, model_config=model_config, trust_remote_code=trust_remote_code
        )
    else:
        overrides = dict(model_config or {})
        attached = is_attached(stored)
        if attached:
            overrides["model_file"] = None
        model, config = stock.load_model(
            model_path, lazy, model_config=overrides, trust_remote_code=trust_remote_code
        )
        if attached:
            config["model_file"] = MODEL_FILE
    if adapter_path is not None:
        model = stock.load_adapters(model, adapter_path)
        model.eval()
    if strict:
        _require_kernels(model)
    tokenizer = stock.load_tokenizer(
        model_path, tokenizer_config, eos_token_ids=config.get("eos_token_id", None)
    )
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def find_model(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """The folder of a model: a local one, or a Hugging Face repository's, fetched if need be.

    Raises:
        MissingFileError: it is neither.
    """
    text = str(path_or_hf_repo)
    if not Path(text).exists() and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text):
        raise MissingFileError(
            f"{text} does not exist; give a model folder or a Hugging Face repository "
            "such as mlx-community/NAME."
        )
    try:
        return stock._download(text, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise MissingFileError(
            f"{text} is no folder here and could not be fetched from Hugging Face "
            f"({type(error).__name__}: {reason}); check the name, or the network."
        ) from error


def _check_tokenizer(model_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
    if not any(any(model_path.glob(name)) for name in names):
        raise MissingFileError(
            f"{model_path} has no tokenizer (none of {', '.join(names)}); download the model's "
            "tokenizer files into it."
        )
    settings = model_path / "tokenizer_config.json"
    if settings.exists():
        read_json(settings)


def _check_adapter(adapter_path: Path) -> None:
    """Look at an adapter before the model is loaded, which can take minutes."""
    settings = adapter_path / "adapter_config.json"
    kind = {"fine_tune_type": "lora", **read_json(settings)}
    needed = () if kind["fine_tune_type"] == "full" else ("num_layers", "lora_parameters")
    for key in needed:
        if key not in kind:
            raise InputError(
                f"{settings} has no {key}, so it is not an adapter of mlx_lm.lora (PEFT's must be "
                "converted first); give the folder that its --adapter-path named."
            )
    read_tensors(adapter_path / "adapters.safetensors")


def _require_kernels(model: nn.Module) -> None:
    without = [entry for entry in model.lily_report() if not entry["kernel"]]
    if without:
        first = without[0]
        more = f", nor for {len(without) - 1} other modules" if len(without) > 1 else ""
        raise InputError(
            f"strict=True, but there is no {first['kind']} kernel for {first['path']} "
            f"({first['reason'].rstrip('.')}){more}; without strict, mlx-lm's own operations run "
            "there."
        )


# --- prompts --------------------------------------------------------------------------------


def check_prompt(tokens: Sequence[int] | mx.array, args: Any) -> None:
    """Check a tokenised prompt against the model's limits, before any work is queued.

    Args:
        tokens: token ids, one axis: a list or an array of a whole-number dtype.
        args: the model's `args` (with `text_config`), its text model's, or a config dict.

    Raises:
        InputError: the prompt is empty, has more tokens than max_position_embeddings, or holds
            an id outside [0, vocab_size).
    """
    text = text_config(args)
    if isinstance(tokens, mx.array):
        if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise InputError(
                f"the prompt is an array of shape {tuple(tokens.shape)} and dtype "
                f"{str(tokens.dtype).removeprefix('mlx.core.')}; give token ids, whole numbers "
                "on one axis."
            )
        tokens = tokens.tolist()
    if len(tokens) == 0:
        raise InputError("the prompt has no tokens; give at least one.")
    limit = text.get("max_position_embeddings")
    if limit is not None and len(tokens) > limit:
        raise InputError(
            f"the prompt has {len(tokens)} tokens but the model's max_position_embeddings is "
            f"{limit}; shorten the prompt."
        )
    vocab_size = text.get("vocab_size", float("inf"))
    for position, token in enumerate(tokens):
        if not isinstance(token, Integral):
            raise InputError(
                f"the prompt holds {token!r} at position {position}; give token ids, whole "
                "numbers on one axis."
            )
        if not 0 <= token < vocab_size:
            raise InputError(
                f"token id {token} at position {position} is outside the vocabulary of "
                f"{vocab_size} (ids 0 to {vocab_size - 1}); was the prompt made by another "
                "model's tokenizer?"
            )
