"""Make mlx-lm's own command-line tools run lily on a model folder, and undo it.

`attach` puts a two-line module file into the folder and names it in config.json's "model_file",
which mlx-lm honours under --trust-remote-code. The folder's own config.json entry, a file or a
link, is set aside under another name and put back by `detach`, so the folder ends as it began.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import SUPPORTED_MODEL_TYPES, InputError, read_config

MODEL_FILE = "lily_mlx_model.py"
BACKUP = "config.json.before_lily_mlx"

_MODEL_SOURCE = b"""\
# Written by `lily_mlx attach`; `lily_mlx detach` removes it.
from lily_mlx.model import Model, ModelArgs  # noqa: F401
"""
_KEY = f'"model_file": "{MODEL_FILE}", '.encode()


class ReadOnlyError(InputError, PermissionError):
    """A folder that cannot be written."""

    __str__ = Exception.__str__


def is_attached(config: Mapping[str, Any]) -> bool:
    """Whether a config.json's content names lily's model file."""
    return config.get("model_file") == MODEL_FILE


def attach(model_dir: str | Path) -> bool:
    """Make `mlx_lm.* --model model_dir --trust-remote-code` run lily.

    A folder of links, such as a Hugging Face snapshot, gets a config.json of its own; the file
    that the link points to is not touched. If this is interrupted, the folder loads as before,
    and calling it again completes it.

    Returns:
        True if the folder was changed, False if it was attached already.

    Raises:
        InputError: not a qwen3_5 or qwen3_5_moe folder, or it already has other model code.
            ReadOnlyError, a PermissionError, when it cannot be written.
    """
    folder = Path(model_dir)
    config = read_config(folder)
    path = folder / "config.json"
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{path}: model_type {model_type!r} cannot be attached (supported: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}); nothing was changed."
        )
    named = config.get("model_file")
    if named not in (None, MODEL_FILE):
        raise InputError(
            f"{path} already has model_file = {named!r}; nothing was changed, remove that key "
            "first if you want lily instead."
        )
    module = folder / MODEL_FILE
    if module.is_symlink() or (module.exists() and not _is_ours(module)):
        raise InputError(
            f"{module} exists and was not written by lily_mlx; nothing was changed, rename it."
        )
    # Each step leaves a folder that loads: config.json names the module only once it is there.
    changed = False
    try:
        if not module.exists() or module.read_bytes() != _MODEL_SOURCE:
            _write(module, _MODEL_SOURCE)
            changed = True
        if named is None:
            content = path.read_bytes()
            _set_aside(path, folder / BACKUP)
            _write(path, _with_key(content), like=path)
            changed = True
    except PermissionError as error:
        raise ReadOnlyError(
            f"{folder} cannot be written ({error.strerror}); copy the model to a folder of your "
            "own and attach that."
        ) from error
    except OSError as error:
        raise InputError(
            f"{folder} could not be changed ({error.strerror or error}); it loads as before."
        ) from error
    return changed


def detach(model_dir: str | Path) -> bool:
    """Undo `attach`: the folder is again, byte for byte, what it was.

    Changes made to config.json while it was attached are kept; only the model_file key goes.

    Returns:
        True if the folder was changed, False if there was nothing to undo.

    Raises:
        InputError: not a model folder. ReadOnlyError, when it cannot be written.
    """
    folder = Path(model_dir)
    config = read_config(folder)
    path, backup, module = folder / "config.json", folder / BACKUP, folder / MODEL_FILE
    changed = False
    try:
        if is_attached(config):
            content = path.read_bytes()
            if _lexists(backup) and _with_key(backup.read_bytes()) == content:
                os.replace(backup, path)
            else:
                _write(path, _without_key(content), like=path)
            changed = True
        # From here config.json does not name the module: what is left are leftovers.
        if _lexists(backup):
            backup.unlink()
            changed = True
        if module.exists() and _is_ours(module):
            module.unlink()
            changed = True
    except PermissionError as error:
        raise ReadOnlyError(
            f"{folder} cannot be written ({error.strerror}); detach it as a user who can."
        ) from error
    return changed


def _lexists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_ours(module: Path) -> bool:
    return b"from lily_mlx.model import Model, ModelArgs" in module.read_bytes()


def _with_key(content: bytes) -> bytes:
    """The config with the key inserted after its first brace, all other bytes kept."""
    stored = json.loads(content)
    if "model_file" in stored:  # null: a second key would lose against it
        return _dump({**stored, "model_file": MODEL_FILE})
    start = content.index(b"{") + 1
    return content[:start] + _KEY + content[start:]


def _without_key(content: bytes) -> bytes:
    if content.count(_KEY) == 1:
        return content.replace(_KEY, b"")
    # Another tool has rewritten the file, so its layout is not ours to keep.
    stored = json.loads(content)
    del stored["model_file"]
    return _dump(stored)


def _dump(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=4).encode()


def _set_aside(path: Path, backup: Path) -> None:
    """Keep the folder's config.json entry, be it a file or a link, under `backup`."""
    temporary = _temporary_name(backup)
    try:
        shutil.copy2(path, temporary, follow_symlinks=False)
        os.replace(temporary, backup)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes, like: Path | None = None) -> None:
    """Write a file whole or not at all; a link at `path` is replaced, not followed."""
    temporary = _temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if like is not None:
            shutil.copymode(like, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    """A fresh name in the same folder, so that os.replace stays on one file system."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    os.unlink(name)
    return Path(name)
