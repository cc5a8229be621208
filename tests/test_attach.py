"""attach makes stock mlx-lm run lily on a folder; detach gives the folder back byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
import tiny
from mlx.utils import tree_flatten

from lily_mlx.attach import BACKUP, MODEL_FILE, attach, detach
from lily_mlx.checkpoint import InputError
from lily_mlx.loading import load

PROMPT = mx.array([[3, 141, 59, 26]])
ROOT = Path(__file__).resolve().parent.parent


def picture(folder):
    """Every entry of a folder: its kind, mode, and content or target."""
    out = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else None
        if content is None and path.is_file():
            content = path.read_bytes()
        out[str(path.relative_to(folder))] = (info.st_mode, content)
    return out


@pytest.fixture(params=["moe", "dense"])
def folder(request, tmp_path):
    tiny.checkpoint(tmp_path / "model", request.param, quantize={"bits": 4, "group_size": 64})
    return tmp_path / "model"


@pytest.fixture
def snapshot(tmp_path):
    """A Hugging Face cache: a snapshot folder of links into a store of blobs."""
    tiny.checkpoint(tmp_path / "plain")
    blobs = tmp_path / "hub" / "blobs"
    links = tmp_path / "hub" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    links.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        os.replace(path, blobs / f"blob{number}")
        (links / path.name).symlink_to(f"../../blobs/blob{number}")
    return links


def test_stock_load_runs_lily(folder):
    before = picture(folder)
    plain, _ = load(str(folder))
    attach(folder)
    module = (folder / MODEL_FILE).read_text()
    assert "from lily_mlx.model import Model, ModelArgs" in module
    with pytest.raises(ValueError, match="trust_remote_code"):
        mlx_lm.load(str(folder))
    model, tokenizer = mlx_lm.load(str(folder), trust_remote_code=True)
    assert type(model) is type(plain)
    assert tokenizer.eos_token_ids == {256}
    assert mx.array_equal(model(PROMPT), plain(PROMPT))
    assert detach(folder)
    assert picture(folder) == before


def test_the_stock_command_runs_lily(folder):
    attach(folder)
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", str(folder)]
    command += ["--prompt", "hello", "--max-tokens", "4", "--temp", "0", "--trust-remote-code"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "Generation: " in run.stdout


def test_convert_reads_through_an_attached_folder(tmp_path):
    """mlx_lm.convert of a layout that it cannot read itself; the copy needs lily no more."""
    setting = {"quantize": True, "q_bits": 4, "q_group_size": 64}
    source, plain, copied = tmp_path / "hf", tmp_path / "plain", tmp_path / "converted"
    tiny.checkpoint(source, prefix="hf", experts="each", hf_conventions=True, vision="visual.")
    tiny.checkpoint(plain)
    with pytest.raises(ValueError, match="not in model"):
        mlx_lm.convert(str(source), str(tmp_path / "fails"), **setting)
    attach(source)
    mlx_lm.convert(str(source), str(copied), trust_remote_code=True, **setting)
    mlx_lm.convert(str(plain), str(tmp_path / "expected"), **setting)
    expected, _ = mlx_lm.load(str(tmp_path / "expected"))
    mlx_lm.load(str(copied), trust_remote_code=True)
    assert detach(copied)
    assert not (copied / MODEL_FILE).exists()
    model, _ = mlx_lm.load(str(copied))
    assert type(model) is type(expected)
    wanted = dict(tree_flatten(expected.parameters()))
    found = dict(tree_flatten(model.parameters()))
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)


def test_attach_and_detach_twice(folder):
    before = picture(folder)
    assert not detach(folder)
    assert attach(folder)
    attached = picture(folder)
    assert not attach(folder)
    assert picture(folder) == attached
    assert detach(folder)
    assert not detach(folder)
    assert picture(folder) == before
    assert attach(folder)
    assert picture(folder) == attached


@pytest.mark.parametrize(
    "layout",
    [
        lambda cfg: json.dumps(cfg),
        lambda cfg: json.dumps(cfg, indent=4).replace("\n", "\r\n") + "\r\n\r\n",
        lambda cfg: "\n\t " + json.dumps(cfg, indent="\t", ensure_ascii=False) + " ",
        lambda cfg: json.dumps({"model_file": None, **cfg}),
    ],
    ids=["one-line", "crlf", "tabs", "null-key"],
)
def test_any_layout_of_config_comes_back(folder, layout):
    path = folder / "config.json"
    cfg = {**json.loads(path.read_text()), "author": "Zoë"}
    path.write_bytes(layout(cfg).encode())
    os.chmod(path, 0o640)
    before = picture(folder)
    attach(folder)
    assert json.loads(path.read_bytes())["model_file"] == MODEL_FILE
    assert path.stat().st_mode & 0o777 == 0o640
    mlx_lm.load(str(folder), trust_remote_code=True)
    detach(folder)
    assert picture(folder) == before


def test_a_snapshot_of_links(snapshot):
    store = snapshot.parent.parent
    before = picture(store)
    attach(snapshot)
    attached = picture(store)
    assert {k: v for k, v in attached.items() if k.startswith("blobs")} == {
        k: v for k, v in before.items() if k.startswith("blobs")
    }
    assert not (snapshot / "config.json").is_symlink()
    mlx_lm.load(str(snapshot), trust_remote_code=True)
    detach(snapshot)
    assert picture(store) == before
    mlx_lm.load(str(snapshot))


def test_changes_made_while_attached_are_kept(folder):
    attach(folder)
    path = folder / "config.json"
    cfg = json.loads(path.read_text())
    cfg["note"] = "mine"
    path.write_text(json.dumps(cfg, indent=4))
    assert detach(folder)
    del cfg["model_file"]
    assert json.loads(path.read_text()) == cfg
    assert not (folder / BACKUP).exists() and not (folder / MODEL_FILE).exists()


def test_a_copy_without_the_backup_detaches(folder, tmp_path):
    """mlx_lm.convert and hand-made copies carry config.json and *.py along, no more."""
    before = picture(folder)
    attach(folder)
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns(BACKUP))
    detach(copied)
    assert picture(copied) == before


# --- interruptions --------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("step", range(3))
def test_interrupted_attach(folder, monkeypatch, step):
    """Stopped before any of its three renames: it loads, can be completed, can be undone."""
    before = picture(folder)
    attach(folder)
    attached = picture(folder)
    detach(folder)
    _stop_at(monkeypatch, step)
    with pytest.raises(Interrupted):
        attach(folder)
    monkeypatch.undo()
    mlx_lm.load(str(folder))
    assert not [name for name in picture(folder) if name.startswith(".")]
    half = picture(folder)
    attach(folder)
    assert picture(folder) == attached
    detach(folder)
    assert picture(folder) == before
    assert {k: v for k, v in half.items() if k in before} == before


@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_interrupted_detach(folder, monkeypatch, call):
    before = picture(folder)
    attach(folder)
    if call == "replace":
        _stop_at(monkeypatch, 0)
    else:
        monkeypatch.setattr(Path, "unlink", _raise)
    with pytest.raises(Interrupted):
        detach(folder)
    monkeypatch.undo()
    mlx_lm.load(str(folder), trust_remote_code=True)
    assert detach(folder)
    assert picture(folder) == before


def _raise(*_args, **_named):
    raise Interrupted


def _stop_at(monkeypatch, step):
    """Let `step` renames happen and stop the next one."""
    real, done = os.replace, []

    def replace(source, target):
        if len(done) == step:
            raise Interrupted
        done.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


# --- refusals -------------------------------------------------------------------------------


def refused(folder, *words, action=attach, error=InputError):
    before = picture(folder)
    with pytest.raises(error) as caught:
        action(folder)
    assert picture(folder) == before
    text = str(caught.value)
    assert "\n" not in text and text.endswith("."), text
    for word in words:
        assert word in text, text


def test_another_model_type(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llama"}))
    refused(folder, "'llama'", "qwen3_5, qwen3_5_moe", "nothing was changed")


def test_another_model_file(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_file": "theirs.py"}))
    refused(folder, "model_file = 'theirs.py'", "nothing was changed")
    assert not detach(folder)


def test_a_file_of_that_name_is_there(folder):
    (folder / MODEL_FILE).write_text("# theirs\n")
    refused(folder, MODEL_FILE, "not written by lily_mlx")
    assert not detach(folder)
    assert (folder / MODEL_FILE).exists()


@pytest.mark.parametrize("action", [attach, detach])
def test_no_model_folder(tmp_path, action):
    refused(tmp_path, "has no config.json", action=action, error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        action(tmp_path / "absent")


@pytest.mark.parametrize("action", [attach, detach])
def test_a_folder_that_may_not_be_written(action):
    # Not tmp_path: pytest closes its parents to the other user that root becomes here.
    top = Path(tempfile.mkdtemp())
    folder = top / "model"
    try:
        tiny.checkpoint(folder)
        if action is detach:
            attach(folder)
        top.chmod(0o755)
        folder.chmod(0o555)
        before = picture(folder)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match="cannot be written") as caught:
                action(folder)
        finally:
            if root:
                os.seteuid(0)
        assert isinstance(caught.value, InputError)
        assert "\n" not in str(caught.value)
        assert picture(folder) == before
    finally:
        folder.chmod(0o755)
        shutil.rmtree(top)
