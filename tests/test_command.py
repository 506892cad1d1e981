"""The train command as a user types it: bad input, --print_config, --help, lost output."""

import json
import pathlib
import shlex
import subprocess
import sys

import pytest

from deltares_jax import config as config_lib

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
DEBUG = "--config=configs/debug.py"


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
        (
            [DEBUG, "--config.optim.learning_rate=fast"],
            ["config.optim.learning_rate", "'fast'", "a number"],
        ),
        ([DEBUG, "--config.model.tied=treu"], ["config.model.tied", "'treu'"]),
        ([DEBUG, "--print_config=maybe"], ["print_config", "'maybe'", "true or false"]),
        ([DEBUG, "--config.train.batch_size=8.5"], ["train.batch_size='8.5'", "a whole number"]),
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


# Output that cannot be written.


@pytest.mark.parametrize("arguments", [("--print_config",), ("--help",)])
@pytest.mark.parametrize(
    ("redirection", "words"),
    [(">/dev/full", "No space left on device"), (">&-", "stdout is closed")],
)
def test_lost_output_ends_with_an_error(arguments, redirection, words):
    line = [sys.executable, "-m", "deltares_jax.train", DEBUG, *arguments]
    result = subprocess.run(
        ["sh", "-c", f"{shlex.join(line)} {redirection}"],
        capture_output=True,
        text=True,
        cwd=CONFIGS.parent,
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert result.returncode == 1


def test_a_run_outlives_its_output_and_says_so_once():
    script = "from deltares_jax.training.metrics import say; say('a'); say('b'); say('c')"
    for redirection, said in ((">/dev/full", 1), (">/dev/full 2>&1", 0)):
        line = shlex.join([sys.executable, "-c", script])
        result = subprocess.run(
            ["sh", "-c", f"{line} {redirection}"], capture_output=True, text=True
        )
        assert result.returncode == 0
        assert result.stderr.count("stdout cannot be written") == said
        assert len(result.stderr.splitlines()) == said


def test_ctrl_c_says_what_the_command_knows():
    script = """
from deltares_jax import command
def main():
    raise KeyboardInterrupt
command.define_config_flag()
command.run(main, "")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (144, "", "interrupted\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_stop_ends_a_command_even_where_a_library_loses_it(name, lost):
    program = f"""
import os, signal, time
from deltares_jax import command
from deltares_jax.training import signals

def main():
    signals.interrupt_on_request(grace=0.2)
    try:
        os.kill(os.getpid(), signal.{name})
    except KeyboardInterrupt:
        if not {lost}:
            raise
    time.sleep(60)

command.run(main, "")
"""
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (144, "interrupted\n")
