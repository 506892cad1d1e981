"""The convert command as a user types it: folders, flags, hub ids, exit codes."""

import json
import os
import subprocess
import sys

import convert_helpers as helpers
import numpy as np
import pytest
from convert_helpers import TIED, convert, refuses
from hub_server import hub
from test_command import error_line
from test_saving import can

from deltares_jax import load
from deltares_jax.interop import exporting

CASE = helpers.GOLDEN / TIED


def test_command_takes_folders_as_they_are_typed(tmp_path, command):
    """Below the current folder, with a space, below the home; a run, or a step of one."""
    env = {"HOME": str(tmp_path), "PYTHONPATH": str(helpers.GOLDEN.parents[1])}
    flags = ["--variant=delta_block", "--num_blocks=2", "--out=./r 1"]
    result = command("convert", "import", f"--hf={CASE}", *flags, cwd=tmp_path, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert "blocks: 2, of layers 0-0, 1-1" in result.stdout
    assert "next: --config.init_from=r 1" in result.stdout
    assert load(tmp_path / "r 1").config.model.residual.centered
    flags = ["--workdir=r 1/checkpoints/0", "--out=~/out"]
    result = command("convert", "export", *flags, cwd=tmp_path, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert "the released code has no counterpart" in result.stdout
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044  # as other files
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["convert (nothing) must be import or export"]),
        (["improt", "--hf=x"], ["convert improt", "did you mean import?"]),
        (["import", "--out=x"], ["--hf is missing"]),
        (["export", "--workdir=x"], ["--out is missing"]),
        (["export", "--workdir=x", "--out=y", "--gate=none"], ["--gate has no meaning"]),
        (["import", f"--hf={CASE}", "--out=x", "--num_blocs=2"], ["--num_blocs", "num_blocks?"]),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(tmp_path, command, arguments, words):
    env = {"PYTHONPATH": str(helpers.GOLDEN.parents[1])}
    line = error_line(command("convert", *arguments, cwd=tmp_path, env=env))
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_serve_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    convert(CASE, tmp_path / "run")
    for out, words in {
        "file": ["--out=", "cannot be written"],
        "run": ["--out=", "holds a checkpoint already; give a new folder"],
        "run/checkpoints/0": ["is inside the run"],
    }.items():
        with refuses(*words):
            convert(CASE, tmp_path / out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with refuses("holds thesis.tex already"):
        convert(CASE, tmp_path / "other")
    for hf in (tmp_path / "mistyped", tmp_path / "file", "mistyped"):
        with refuses(f"--hf={hf} is neither a folder nor a hub id of the form OWNER/NAME"):
            convert(hf, tmp_path / "new")
    with refuses("--out='gs://bucket/x' must be a local folder"):
        convert(CASE, "gs://bucket/x")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with refuses("--hf=runs/mistyped is no folder, and no hub id that answers: http://127"):
        convert("runs/mistyped", tmp_path / "new")
    with refuses("nowhere is no run"):
        exporting.export(str(tmp_path / "nowhere"), None, str(tmp_path / "out"))
    with refuses("has no checkpoint of step 7; it has [0]"):
        exporting.export(str(tmp_path / "run"), 7, str(tmp_path / "out"))
    with refuses("--out=", "cannot be made: Not a directory"):
        exporting.export(str(tmp_path / "run"), None, str(tmp_path / "file" / "out"))
    assert (tmp_path / "file").read_text() == "mine"


# Permissions bind root, too, without these.
USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []


@pytest.mark.skipif(bool(USER) and not can(*USER, "true"), reason="root that cannot drop rights")
def test_folders_without_permission_are_refused(tmp_path):
    """The cache of hub ids among them."""
    cases = {
        f"import --hf={CASE} --out=shut/run": "--out=shut/run cannot be written",
        "import --hf=Qwen/Qwen3-0.6B --out=new": "shut/cache/deltares_jax",
        "export --workdir=run --out=shut/out": "--out=shut/out cannot be made",
    }
    convert(CASE, tmp_path / "run")
    (tmp_path / "shut" / "cache").mkdir(parents=True)
    for name in ("shut/cache", "shut"):
        (tmp_path / name).chmod(0o555)
    env = {"XDG_CACHE_HOME": str(tmp_path / "shut/cache"), "XLA_FLAGS": ""}
    env = {**os.environ, **env, "PYTHONPATH": str(helpers.GOLDEN.parents[1])}
    for flags, words in cases.items():
        line = [*USER, sys.executable, "-m", "deltares_jax.convert", *flags.split()]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert f"{words}: Permission denied" in error_line(done)
    assert not list((tmp_path / "shut").glob("*/*"))


def test_an_import_that_was_cut_short_may_be_given_again(tmp_path):
    convert(CASE, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "0").rename(
        tmp_path / "run" / "checkpoints" / "0.orbax-checkpoint-tmp"
    )
    convert(CASE, tmp_path / "run")
    assert load(tmp_path / "run").step == 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"variant": "delta_block"}, ["--num_blocks is missing: delta_block needs", "layers=2"]),
        ({"variant": "delta_block", "num_blocks": 0}, ["--num_blocks=0 must be at least 1"]),
        (
            {"variant": "delta_block", "num_blocks": 3},
            ["--num_blocks=3 must divide num_hidden_layers=2", "1 or 2"],
        ),
        (
            {"variant": "delta_blok", "num_blocks": 2},
            ["--variant='delta_blok'", "did you mean delta_block?)"],
        ),
        ({"variant": "baseline", "gate": "scalar"}, ["--gate=scalar is not defined for baseline"]),
        ({"variant": "attnres_full", "centered": True}, ["centered=True is not defined"]),
        ({"variant": "delta_attnres", "gate": "alpha", "centered": True}, ["never trains"]),
    ],
)
def test_routing_that_is_not_there_is_refused(tmp_path, asked, words):
    with refuses(*words):
        convert(CASE, tmp_path / "run", **asked)


def test_blocks_that_the_released_code_makes_are_said(tmp_path, capsys):
    """Seven layers in three blocks: the last is shorter."""
    tensors = {}
    for name, array in helpers.read_tensors(CASE).items():
        for layer in range(7):
            tensors[name.replace("layers.0", f"layers.{layer}")] = array
    kept = {name: array for name, array in tensors.items() if "layers.1." not in name}
    kept |= {
        name.replace("layers.0", "layers.1"): array
        for name, array in tensors.items()
        if "layers.0." in name
    }
    source = helpers.copy_case(TIED, tmp_path / "in")
    helpers.write_tensors(source, kept)
    helpers.edit_json(source / "config.json", num_hidden_layers=7, layer_types=...)
    convert(source, tmp_path / "run", variant="delta_block_released", num_blocks=3)
    assert "blocks: 3, of layers 0-2, 3-5, 6-6" in capsys.readouterr().out
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["attnres_mode"], values["attnres_num_blocks"]) == ("delta_block", 3)


def test_hub_ids_are_fetched_and_another_revision_replaces_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = helpers.copy_case("qwen3_v4_untied", tmp_path / "other")
    with hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)

        def publish(folder):
            server.files = {
                ("Qwen/Qwen3-tiny", path.name): path.read_bytes() for path in folder.iterdir()
            }
            server.files["Qwen/Qwen3-tiny", "README.md"] = b"not needed"
            server.files["Qwen/Qwen3-tiny", "onnx/model.safetensors"] = b"not needed"

        publish(CASE)
        server.faults["model.safetensors"] = ["cut"]
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        convert("Qwen/Qwen3-tiny", tmp_path / "one")
        fetched = {path.rpartition("/")[2] for path, _ in server.requests if "resolve" in path}
        assert fetched == {"config.json", "generation_config.json", "model.safetensors"}
        server.requests.clear()
        convert("Qwen/Qwen3-tiny", tmp_path / "again")
        fetched = {path.rpartition("/")[2] for path, _ in server.requests if "resolve" in path}
        assert "model.safetensors" not in fetched
        publish(other)
        convert("Qwen/Qwen3-tiny", tmp_path / "two")
    theirs = helpers.read_tensors(other)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(load(tmp_path / "two").params["embedding"], theirs)
    assert not load(tmp_path / "two").config.model.tied
