"""The package's PTX: what its kernels compile to, in one file; what is not is refused."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import pytest

from lily_mlx import _ext, kernels, ptx, ptx_archive
from lily_mlx.ptx_archive import ArchiveError


@pytest.fixture(scope="module")
def packaged():
    return ptx_archive.read(ptx_archive.PACKAGED)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the kernel sources in the package's place."""
    folder = tmp_path / "metal"
    shutil.copytree(kernels.folder(), folder, ignore=shutil.ignore_patterns("host", "__pycache__"))
    monkeypatch.setattr(kernels, "folder", lambda: folder)
    return folder


def names(path):
    """The keys that register gives."""
    found = set()
    ptx.register(lambda key, *_: found.add(key), path)
    return found


def test_the_package_has_what_its_models_run(packaged):
    assert set(packaged.pipelines) == set(ptx.packaged())
    assert set(packaged.texts) == {name for name, _ in packaged.pipelines.values()}
    for name, entry in packaged.pipelines.values():
        assert f".visible .entry {entry}(" in packaged.texts[name]


def test_it_is_not_stale(packaged, tmp_path):
    """Compiled again it is the same, so long as the compiler is."""
    toolchain = pytest.importorskip("metal.host.toolchain")
    try:
        ptx.build(ptx.packaged().values(), tmp_path / "made")
    except toolchain.HostError as error:
        pytest.skip(f"no compiler for PTX here: {error}")
    made = ptx_archive.read(tmp_path / "made")
    for field in dataclasses.fields(made):
        same = getattr(made, field.name) == getattr(packaged, field.name)
        assert same, f"stale {field.name}: run python -m lily_mlx.ptx"


def test_the_same_kernels_are_the_same_bytes(packaged, tmp_path):
    """Whatever order they were compiled in."""
    backwards = {
        field.name: dict(reversed(getattr(packaged, field.name).items()))
        for field in dataclasses.fields(packaged)
    }
    ptx_archive.write(packaged, tmp_path / "one")
    ptx_archive.write(ptx_archive.Archive(**backwards), tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert ptx_archive.read(tmp_path / "one") == packaged


@pytest.mark.parametrize("name", ["linear/gemv.metal", "common.h"])
def test_another_source_is_refused(sources, name):
    """A kernel's own file, or one that it includes."""
    assert names(ptx_archive.PACKAGED)
    with (sources / name).open("a") as file:
        file.write("// changed\n")
    with pytest.raises(ArchiveError, match=rf"another {name} than .*: python -m lily_mlx.ptx\.$"):
        names(ptx_archive.PACKAGED)
    (sources / name).unlink()
    with pytest.raises(ArchiveError, match=f"another {name} than"):
        names(ptx_archive.PACKAGED)


def test_what_no_kernel_of_it_includes_may_change(sources):
    with (sources / "linear/tile_nax.h").open("a") as file:
        file.write("// changed\n")
    assert names(ptx_archive.PACKAGED)


def test_a_text_that_was_changed_is_refused(packaged, tmp_path, monkeypatch):
    name = next(iter(packaged.texts))
    texts = packaged.texts | {name: packaged.texts[name].replace("add", "sub")}
    monkeypatch.setattr(ptx_archive, "digest", lambda data, honest=ptx_archive.digest: honest(
        packaged.texts[name].encode() if data == texts[name].encode() else data))  # fmt: skip
    ptx_archive.write(dataclasses.replace(packaged, texts=texts), tmp_path / "changed")
    monkeypatch.undo()
    with pytest.raises(ArchiveError, match=f"damaged .{name} is not what was compiled"):
        names(tmp_path / "changed")


@pytest.mark.parametrize("cut", [0, 1000, -1000])
def test_a_damaged_file_is_refused(tmp_path, cut):
    data = ptx_archive.PACKAGED.read_bytes()
    (tmp_path / "cut").write_bytes(data[:cut])
    with pytest.raises(ArchiveError, match="cut is damaged .*; install lily_mlx again, or python"):
        names(tmp_path / "cut")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArchiveError, match="there is no PTX at .*: python -m lily_mlx.ptx"):
        names(tmp_path / "none")


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """What the backend is told, with an empty folder as the user's cache."""
    added = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lily_mlx._ext.cuda_add_kernel", lambda k, *rest: added.update({k: rest}),
                        raising=False)  # fmt: skip
    ptx.refusal.cache_clear()
    yield added
    ptx.refusal.cache_clear()


def test_the_users_own_kernels_are_registered_besides(packaged, registered):
    key, place = next(iter(packaged.pipelines.items()))
    own = dataclasses.replace(packaged, pipelines={key + "_other": place})
    ptx_archive.write(own, ptx_archive.user_archive())
    assert ptx.refusal() == "" and set(registered) == {*packaged.pipelines, key + "_other"}
    name, entry = place
    assert registered[key] == (packaged.texts[name], entry)


def test_a_refusal_is_told_and_the_rest_is_registered(packaged, registered):
    old = dataclasses.replace(packaged, sources={"gemv.h": "of an older version"})
    ptx_archive.write(old, ptx_archive.user_archive())
    reason = f"{ptx_archive.user_archive()} was compiled from another gemv.h than "
    assert ptx.refusal().startswith(reason) and ptx.refusal().endswith("ptx --model DIR.")
    assert set(registered) == set(packaged.pipelines)


def test_kernels_are_added_and_what_was_compiled_otherwise_goes(packaged, tmp_path):
    toolchain = pytest.importorskip("metal.host.toolchain")
    kernels.load()
    found = {p["key"]: p for p in _ext.gated_delta_pipelines("cuda", "bfloat16")}
    first, *rest = found.values()
    path = tmp_path / "own"
    try:
        assert ptx.build([first], path) == 1
    except toolchain.HostError as error:
        pytest.skip(f"no compiler for PTX here: {error}")
    assert ptx.build(rest, path) == len(rest) and ptx.build(rest, path) == 0
    made = ptx_archive.read(path)
    assert made.pipelines == {key: packaged.pipelines[key] for key in found}
    for other in ({"compiled": {"architecture": "sm_90"}}, {"sources": {"gemv.h": ""}}):
        ptx_archive.write(dataclasses.replace(made, **other), path)
        assert ptx.build([first], path) == 1 and names(path) == {first["key"]}


def test_without_a_compiler_the_command_says_so_and_keeps_the_file(monkeypatch, tmp_path):
    toolchain = pytest.importorskip("metal.host.toolchain")

    def none():
        raise toolchain.HostError("the Metal host needs clang 19")

    monkeypatch.setattr(toolchain, "clang", none)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    toolchain.identity.cache_clear()
    toolchain._version.cache_clear()
    before = ptx_archive.PACKAGED.read_bytes()
    with pytest.raises(SystemExit, match="needs clang 19"):
        ptx.main([])
    toolchain.identity.cache_clear()
    assert ptx_archive.PACKAGED.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(packaged, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match="cannot be written .*name another place with --output"):
        ptx_archive.write(packaged, tmp_path / "file" / "ptx.tar.xz")


def test_importing_the_package_reads_no_archive():
    """Only an NVIDIA machine needs it."""
    code = (
        "import sys; sys.addaudithook(lambda what, given: what == 'open' and print(given[0]))\n"
        "import lily_mlx.selection"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "selection" in done.stdout and ptx_archive.PACKAGED.name not in done.stdout
