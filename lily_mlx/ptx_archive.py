"""PTX in one file: a .tar.xz of index.json and of the texts that it names.

index.json says what the texts were made from, a SHA-256 of each file of kernel source and of each
text, and which text and entry a pipeline's key stands for. A text whose sources are not those of
this package computes something else: `read` and `check` refuse it. The same kernels give the same
bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).parent / "ptx.tar.xz"
"""What the package carries."""

INDEX = "index.json"
BUILD = "python -m lily_mlx.ptx"


class ArchiveError(Exception):
    """PTX that may not be used; the message is one sentence with the way out."""


@dataclass
class Archive:
    """Compiled pipelines.

    Attributes:
        compiled: how: the compiler's flags and the architecture.
        sources: SHA-256 of each file of kernel source that the texts were made from.
        pipelines: (name of the text, entry) by the pipeline's key.
        texts: the PTX by name.
    """

    compiled: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    pipelines: dict[str, tuple[str, str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def user_archive() -> Path:
    """Where `python -m lily_mlx.ptx --model` puts the kernels of other models."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "lily_mlx" / PACKAGED.name


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sources_of(file: str, folder: Path) -> dict[str, str]:
    """SHA-256 of a kernel source and of what it includes from its own folder, by name."""
    found: dict[str, str] = {}
    left = [file]
    while left:
        name = left.pop()
        if name not in found:
            data = (folder / name).read_bytes()
            found[name] = digest(data)
            left += re.findall(r'^\s*#\s*include\s+"([^"]+)"', data.decode(), re.M)
    return found


def read(path: Path) -> Archive:
    """The archive in a file.

    Raises:
        ArchiveError: there is none, or it is damaged.
    """
    try:
        import lzma
        import tarfile
    except ImportError as error:
        raise ArchiveError(f"{path} needs a Python that was built with lzma ({error}).") from None
    try:
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        index: dict[str, Any] = json.loads(files[INDEX])
        wrong = [name for name, sha256 in index["texts"].items() if digest(files[name]) != sha256]
        if wrong:
            raise ValueError(f"{wrong[0]} is not what was compiled")
        return Archive(
            index["compiled"],
            index["sources"],
            {key: (name, entry) for key, (name, entry) in index["pipelines"].items()},
            {name: files[name].decode() for name in index["texts"]},
        )
    except FileNotFoundError:
        raise ArchiveError(f"there is no PTX at {path}: {BUILD}.") from None
    except (OSError, lzma.LZMAError, tarfile.TarError, AttributeError, LookupError, TypeError,
            ValueError) as error:  # fmt: skip
        raise ArchiveError(
            f"{path} is damaged ({error}); install lily_mlx again, or {BUILD}."
        ) from None


def check(archive: Archive, path: Path, folder: Path) -> None:
    """Refuse an archive that was not made from the kernel sources in `folder`.

    Args:
        path: where it was, for the sentence.

    Raises:
        ArchiveError: a source is another, or is not there.
    """
    for name, sha256 in archive.sources.items():
        source = folder / name
        if not source.is_file() or digest(source.read_bytes()) != sha256:
            again = BUILD if path == PACKAGED else f"{BUILD} --model DIR"
            raise ArchiveError(f"{path} was compiled from another {name} than {source}: {again}.")


def write(archive: Archive, path: Path) -> None:
    """Put an archive into a file, which is whole at every moment. Texts that no pipeline runs go.

    Raises:
        ArchiveError: the folder cannot be written to.
    """
    import lzma
    import tarfile

    used = {name: archive.texts[name] for name, _ in archive.pipelines.values()}
    index = {
        "compiled": archive.compiled,
        "sources": archive.sources,
        "texts": {name: digest(text.encode()) for name, text in used.items()},
        "pipelines": archive.pipelines,
    }
    files = {INDEX: json.dumps(index, indent=0, sort_keys=True) + "\n", **used}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            data = files[name].encode()
            member = tarfile.TarInfo(name)  # of no time and no owner
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(lzma.compress(plain.getvalue()))
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise ArchiveError(
            f"{path} cannot be written ({error.strerror}); name another place with --output."
        ) from None
