"""The train command as a user types it: bad input, --print_config, --help, folders."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from deltares_jax import config as config_lib
from deltares_jax.training import workdir as workdir_lib

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
DEBUG = "--config=configs/debug.py"
NOBODY = 65534


def error_line(result: subprocess.CompletedProcess) -> str:
    """The one line that a refused command prints."""
    assert result.stdout == ""
    assert result.stderr.endswith("\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in line
    assert result.returncode == 2
    return line


def print_config(command, *arguments: str, **kwargs) -> dict:
    result = command("train", *arguments, "--print_config", **kwargs)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # Misspelt names.
        ([DEBUG, "--config.train.stesp=3"], ["train.stesp", "did you mean train.steps?"]),
        ([DEBUG, "--config.train.stesp", "3"], ["train.stesp", "did you mean train.steps?"]),
        ([DEBUG, "--config.trian.steps=3"], ["trian.steps", "did you mean train.steps?"]),
        (
            [DEBUG, "--config.model.num_blocks=4"],
            ["model.num_blocks", "did you mean model.residual.num_blocks?"],
        ),
        ([DEBUG, "--config.train=3"], ["unknown config key train "]),
        (["--confg.x=1"], ["--confg.x"]),
        (["--confg=configs/debug.py"], ["--confg ", "did you mean config?"]),
        (
            [DEBUG, "--confg.train.steps=3"],
            ["--confg.train.steps", "did you mean config.train.steps?"],
        ),
        ([DEBUG, "--wrkdir=x"], ["--wrkdir", "did you mean workdir?"]),
        # The recipe.
        ([], ["--config is missing", DEBUG]),
        (["--config.train.steps=3"], ["--config is missing", DEBUG]),
        (["--workdir=x", "--print_config"], ["--config is missing", DEBUG]),
        (["--config"], ["--config"]),
        (["--config="], ["--config=", "no such file"]),
        (["--config=configs/nope.py"], ["--config=configs/nope.py", "no such file"]),
        (["--config", "configs/nope.py"], ["--config=configs/nope.py", "no such file"]),
        (["--config=configs"], ["--config=configs", "no such file"]),
        # Values of another type.
        ([DEBUG, "--config.train.steps=1e3"], ["config.train.steps", "'1e3'"]),
        ([DEBUG, "--config.train.steps=100.0"], ["config.train.steps", "'100.0'"]),
        ([DEBUG, "--config.train.steps=None"], ["config.train.steps", "'None'"]),
        ([DEBUG, "--config.train.steps="], ["config.train.steps", "''"]),
        ([DEBUG, "--config.train.steps"], ["config.train.steps"]),
        ([DEBUG, "--config.optim.warmup_steps=None"], ["config.optim.warmup_steps", "'None'"]),
        ([DEBUG, "--config.mesh.data=x"], ["config.mesh.data", "'x'"]),
        ([DEBUG, "--config.optim.learning_rate=fast"], ["config.optim.learning_rate", "'fast'"]),
        ([DEBUG, "--config.model.tied=treu"], ["config.model.tied", "'treu'"]),
        ([DEBUG, "--print_config=maybe"], ["print_config", "'maybe'"]),
        # Values of the right type that break a rule.
        ([DEBUG, "--config.optim.learning_rate=nan"], ["optim.learning_rate=nan", "finite"]),
        ([DEBUG, "--config.model.remat=3"], ["model.remat='3'", "none, full"]),
        ([DEBUG, "--config.model.remat=treu"], ["model.remat='treu'", "none, full"]),
        ([DEBUG, "--config.model.residual.variant=None"], ["variant='None'", "delta_block"]),
        ([DEBUG, "--config.train.steps=0"], ["train.steps=0", "at least 1"]),
        ([DEBUG, "--config.train.accumulation=3"], ["train.batch_size=8", "accumulation=3"]),
        ([DEBUG, "--config.model.residual.num_blocks=3"], ["num_blocks=3", "2 or 4"]),
        # Anything else on the line.
        ([DEBUG, "configs/debug.py"], ["configs/debug.py", "--name=value"]),
        ([DEBUG, "train.steps=3"], ["train.steps=3", "--name=value"]),
    ],
    ids=lambda value: " ".join(value).replace("/", "|") if isinstance(value, list) else None,
)
def test_bad_input_is_refused_in_one_line(arguments, words, command):
    line = error_line(command("train", *arguments))
    for word in words:
        assert word in line


HEAD = "from deltares_jax.config import default, paper\ndef get_config():\n    config = default()\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n    pass\n", ["SyntaxError", "line 1"]),
        (HEAD + "      return config\n", ["IndentationError", "line 4"]),
        ("import no_such_module\n", ["no_such_module"]),
        ("config = 3\n", ["get_config"]),
        (HEAD, ["get_config()", "not NoneType"]),
        (HEAD + "    return 3\n", ["get_config()", "not int"]),
        (HEAD + "    config.train.stesp = 3\n    return config\n", ["stesp", '"steps" instead']),
        (HEAD + "    config.train.update({'stesp': 3})\n    return config\n", ["stesp", '"steps"']),
        (HEAD + "    config.trian.steps = 3\n    return config\n", ["trian", '"train" instead']),
        (HEAD + "    config.train.steps = 1.5\n    return config\n", ["steps", "1.5", "int"]),
        (HEAD + "    return paper('2b', 'baseline')\n", ["2b"]),
        (HEAD + "    return config.nothing\n", ["nothing"]),
    ],
)
def test_broken_recipe_is_refused_with_its_path(text, words, tmp_path, command):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    for arguments in ([f"--config={recipe}"], ["--config", str(recipe)]):
        line = error_line(command("train", *arguments))
        assert str(recipe) in line
        for word in words:
            assert word in line
        assert len(line) < 600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("config.unlock().train.stesp = 3", ["train.stesp", "did you mean train.steps?"]),
        ("config.train.steps = None", ["train.steps=None", "int"]),
        ("config.model.residual.gate = 'alfa'", ["model.residual.gate='alfa'", "alpha"]),
        ("config = type(config)({'model': {'width': 3}})", ["is missing"]),
    ],
)
def test_recipe_that_breaks_a_rule_is_refused_with_the_key(change, words, tmp_path, command):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"{HEAD}    {change}\n    return config\n")
    line = error_line(command("train", f"--config={recipe}"))
    for word in words:
        assert word in line


def test_traceback_on_request(command):
    environment = {"DELTARES_JAX_TRACEBACK": "1"}
    result = command("train", DEBUG, "--config.train.steps=0", env=environment)
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: train.steps=0 ")


@pytest.mark.parametrize(
    "arguments",
    [["--config.train.stesp=3"], ["--config.train.steps=0"], ["--print_config"], ["--help"]],
)
def test_input_is_checked_before_jax_is_imported(arguments, command):
    environment = {"PYTHONPROFILEIMPORTTIME": "1"}
    result = command("train", DEBUG, *arguments, env=environment)
    table = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[-1].strip() for line in table}
    assert "ml_collections" in imported
    assert not imported & {"jax", "jaxlib", "flax", "tensorflow_datasets", "orbax"}


# --print_config and --help.


@pytest.mark.parametrize("name", ["debug", "7b_delta_block"])
def test_print_config_prints_the_checked_recipe_and_leaves_nothing(name, tmp_path, command):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    environment = {"XDG_CACHE_HOME": str(cache), "HOME": str(home)}
    recipe = CONFIGS / f"{name}.py"
    values = print_config(
        command, f"--config={recipe}", "--config.train.seed=5", cwd=tmp_path, env=environment
    )
    expected = config_lib.default() if name == "debug" else config_lib.paper("7b", "delta_block")
    expected.train.seed = 5
    printed = config_lib.resolve(config_lib.from_dict(values))
    assert printed == config_lib.resolve(expected)
    assert [path.name for path in tmp_path.rglob("*")] == ["home"]


def test_overrides_take_the_type_of_their_key(command):
    values = print_config(
        command,
        DEBUG,
        "--config.optim.learning_rate=1",
        "--config.optim.warmup_steps=7",
        "--config.model.tied=false",
        "--config.model.residual.null_source",
        "--config.data.dir=a folder",
        "--config.train.steps=40",
        "--config.train.steps=50",  # the last one counts
    )
    assert type(values["optim"]["learning_rate"]) is float
    assert values["optim"]["learning_rate"] == 1.0
    assert values["optim"]["warmup_steps"] == 7
    assert values["model"]["tied"] is False
    assert values["model"]["residual"]["null_source"] is True
    assert values["data"]["dir"] == "a folder"
    assert values["train"]["steps"] == 50


def test_help_shows_an_example_and_the_flags(command):
    for flag in ("--help", "-h"):
        result = command("train", flag)
        assert (result.returncode, result.stderr) == (0, "")
        assert "python -m deltares_jax.train --config=configs/debug.py" in result.stdout
        assert "--workdir" in result.stdout
        assert "--print_config" in result.stdout


# Folders.


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
