"""The folders that a run is given: refused in one line where they cannot serve."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from test_command import CONFIGS, DEBUG, error_line

from deltares_jax.training import workdir as workdir_lib

NOBODY = 65534


def test_recipe_whose_data_is_not_prepared_is_refused(tmp_path, command):
    result = command(
        "train", "--config=configs/7b_delta_block.py", f"--workdir={tmp_path / 'run'}", timeout=60
    )
    line = error_line(result)
    assert "data.source='fineweb_edu/sample-10BT'" in line
    assert "not prepared" in line
    assert "configs/debug.py" in line


def test_data_folder_that_cannot_be_created_is_refused(tmp_path, command):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    result = command(
        "train", DEBUG, f"--workdir={tmp_path / 'run'}", f"--config.data.dir={folder}", timeout=60
    )
    line = error_line(result)
    assert f"data.dir={str(folder)!r}" in line
    assert "Not a directory" in line


def test_workdir_that_is_a_file_is_refused(tmp_path, command):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        line = error_line(command("train", DEBUG, f"--workdir={path}", timeout=60))
        assert f"--workdir={path} cannot be written: " in line
    assert (tmp_path / "file").read_text() == "mine"


def as_normal_user(*command: str, **environment: str) -> subprocess.CompletedProcess:
    if os.geteuid() == 0:  # root may write anywhere
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        command = (*user, *command)
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_workdir_that_is_not_writable_is_refused():
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root may write anywhere, and there is no setpriv")
        if as_normal_user(sys.executable, "-c", "import deltares_jax").returncode:
            pytest.skip("another user cannot run this interpreter")
    train = [sys.executable, "-m", "deltares_jax.train", f"--config={CONFIGS / 'debug.py'}"]
    with tempfile.TemporaryDirectory() as name:  # other users cannot even look into tmp_path
        folder = pathlib.Path(name)
        home, run = folder / "home", folder / "run"
        home.mkdir()
        home.chmod(0o777)
        run.mkdir()
        run.chmod(0o555)
        folder.chmod(0o555)
        try:
            for path in (run, folder / "new"):
                environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
                line = error_line(as_normal_user(*train, f"--workdir={path}", **environment))
                assert f"--workdir={path} cannot be written: Permission denied" in line
        finally:
            folder.chmod(0o755)


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/10", "10"])
def test_folder_inside_a_run_is_refused_with_the_run(inside, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"--workdir={run / inside} is inside the run {run};"):
        workdir_lib.open_workdir(str(run / inside))
    assert [path.name for path in run.rglob("*")] == ["checkpoints"]


def test_workdir_may_be_a_number_or_called_checkpoints(tmp_path):
    for name in ("runs/10", "runs/20", "checkpoints"):
        assert workdir_lib.open_workdir(str(tmp_path / name)) == tmp_path / name


def test_workdir_may_be_relative_in_the_home_folder_or_hold_a_space(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    for path, folder in {
        "./r1": here / "r1",
        "runs/r2": here / "runs" / "r2",
        "~/x": home / "x",
        str(tmp_path / "a b" / "größe"): tmp_path / "a b" / "größe",
    }.items():
        assert workdir_lib.open_workdir(path) == folder
        assert folder.is_dir()
        assert list(folder.iterdir()) == []  # the trial of writing leaves nothing
        assert workdir_lib.open_workdir(path) == folder  # a run that is there
