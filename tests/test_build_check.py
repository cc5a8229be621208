"""An extension that does not fit the installed MLX: one sentence, and what to do."""

import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest

from lily_mlx import _build_check, _ext
from lily_mlx._build_check import MLX_VERSION, check_extension, explain


def fake(loaded=MLX_VERSION, built=MLX_VERSION, echo=lambda x: x):
    return SimpleNamespace(loaded_mlx=lambda: loaded, built_for_mlx=built, echo=echo)


def test_the_extension_of_this_package_fits():
    check_extension(_ext)
    assert _ext.built_for_mlx == MLX_VERSION == mx.__version__


@pytest.mark.parametrize("loaded", ["0.32.3", "0.32.40", "0.33.0"])
def test_another_mlx_is_named_with_the_command_that_helps(loaded):
    with pytest.raises(ImportError, match="but mlx") as caught:
        check_extension(fake(loaded))
    text = str(caught.value)
    assert loaded in text and "pip install" in text and f"=={MLX_VERSION}" in text


@pytest.mark.parametrize("loaded", [f"{MLX_VERSION}+abc123", f"{MLX_VERSION}.dev20261130"])
def test_a_build_of_the_same_mlx_from_source_fits(loaded):
    check_extension(fake(loaded))


def test_the_backends_package_is_replaced_along_with_mlx(monkeypatch):
    have = {"mlx": "0.32.3", "mlx-cuda-13": "0.32.3"}
    monkeypatch.setattr(_build_check, "_installed", have.get)
    assert 'pip install "mlx[cuda13]==' in str(explain(ImportError("undefined symbol")))


def test_an_extension_with_another_nanobind_is_found_out():
    def refuse(_):
        raise TypeError("incompatible function arguments")

    with pytest.raises(ImportError, match="arrays do not cross") as caught:
        check_extension(fake(echo=refuse))
    assert "nanobind" in str(caught.value) and "pip install -e ." in str(caught.value)


def test_an_import_that_fails_shows_one_error_and_no_linker_message_above_it():
    code = "import sys; sys.modules['lily_mlx._ext'] = None; import lily_mlx"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("Error") == 1, done.stderr
    assert "lily_mlx's extension cannot be loaded" in done.stderr


def test_lily_mlx_may_be_imported_before_mlx():
    code = "import lily_mlx, mlx.core as mx; from lily_mlx import _ext; _ext.echo(mx.ones(2))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_loads_neither_mlx_lm_nor_transformers():
    code = "import lily_mlx, sys; assert not {'mlx_lm', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
