"""What is shipped: a wheel, containers and their lock files, and the checks of a public host."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement

import deltares_jax
from deltares_jax import command as command_lib

DOCKERFILE = ROOT / "launch" / "Dockerfile"
TARGETS = ("tpu", "cuda", "cpu")
# What was downloaded once is not again: XDG_CACHE_HOME is a new folder in every session.
DOWNLOADS = {
    f"{tool.upper()}_CACHE_DIR": str(pathlib.Path.home() / ".cache" / tool)
    for tool in ("uv", "pip")
}


def run(*words: object, env: dict[str, str] | None = None, **kwargs) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        env={**DOWNLOADS, **os.environ, "XLA_FLAGS": "", **(env or {})},
        timeout=900,
        **kwargs,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def stages() -> dict[str, list[tuple[str, str]]]:
    """{stage: its instructions, those of the stage that it is built on first}."""
    text = "\n".join(
        line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            stage = found[match[2]] = list(found.get(match[1], []))
        elif line:
            stage.append(tuple(line.split(" ", 1)))
    return found


def test_versions_are_one():
    with (ROOT / "CITATION.cff").open() as file:
        citation = yaml.safe_load(file)
    assert citation["version"] == deltares_jax.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # it asks for them


@pytest.mark.parametrize("module", ["convert", "data.prepare"])  # the rest has no words before
def test_commands_tell_their_version(command, module):
    done = command(module, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"deltares_jax {deltares_jax.__version__}\n"


def test_recipes_are_found_by_name(command, tmp_path, monkeypatch):
    done = command("train", "--config=debug", "--print_config", cwd=tmp_path)
    assert json.loads(done.stdout)["data"]["source"] == "py_stdlib"
    monkeypatch.chdir(tmp_path)
    for name in ("debug", "debug.py", "configs/debug.py"):
        found = pathlib.Path(command_lib.find_recipe("config", name))
        assert found.read_text() == (ROOT / "configs" / "debug.py").read_text()
    with pytest.raises(ValueError, match=r"--config=debgu: no such file \(did you mean debug\?\)"):
        command_lib.find_recipe("config", "debgu")
    # A file of one's own comes first.
    (tmp_path / "debug").touch()
    assert command_lib.find_recipe("config", "debug") == "debug"


@pytest.mark.parametrize("target", TARGETS)
def test_the_lock_files_hold_what_is_declared(target):
    lines = (ROOT / "launch" / f"requirements-{target}.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line[0] not in "# ")
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["gcs"], *extras["s3"], *extras.get(target, [])]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
    assert {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}.get(target, "jax") in pinned


def test_the_dockerfile():
    # Installed beside the interpreter, which need not be on PATH.
    hadolint = pathlib.Path(sys.executable).with_name("hadolint")
    if not hadolint.exists() and not os.environ.get("CI"):
        pytest.skip("hadolint is not installed")
    run(hadolint, DOCKERFILE)
    assert set(TARGETS) < set(stages())


def test_the_checks_of_a_public_host_are_ours():
    with (ROOT / ".github" / "workflows" / "ci.yml").open() as file:
        (job,) = yaml.safe_load(file)["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"):
        with form.open() as file:
            assert all(part["attributes"]["label"] for part in yaml.safe_load(file)["body"])


@pytest.mark.slow
def test_the_run_lines_of_the_cpu_container_install_it(tmp_path):
    context = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().split("*\n", 1)[1]
    kept = re.findall("^!(.+)$", context, re.MULTILINE)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    env = {
        "PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "PYTHONPATH": "",
    }
    root = tmp_path / "app"
    root.mkdir()
    for instruction, rest in stages()["cpu"]:
        if instruction == "COPY":
            source, target = rest.split()
            for name in kept if source == "." else [source]:
                place = root / target / (name if source == "." else pathlib.Path(name).name)
                place.parent.mkdir(exist_ok=True)
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, place, symlinks=True, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / name, place)
        elif instruction == "RUN":
            run("sh", "-c", rest, cwd=root, env=env)
        elif instruction == "CMD":
            assert "--config" in run(*json.loads(rest), cwd=root, env=env)
    empty = tmp_path / "empty"
    empty.mkdir()
    printed = run("python", "-m", "deltares_jax.train", "--config=debug", "--print_config",
                  cwd=empty, env=env)  # fmt: skip
    assert json.loads(printed)["train"]["steps"] == 300


@pytest.mark.slow
def test_a_wheel_trains_in_an_empty_folder(tmp_path):
    source = tmp_path / "source"  # nothing that an earlier build left there gets in
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split(
        "\n"
    )[:-1]
    for name in (name for name in names if (ROOT / name).exists()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    uv = (sys.executable, "-m", "uv")
    run(*uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("deltares_jax-*.whl")
    python, constraints = tmp_path / "venv/bin/python", ROOT / "launch/requirements-cpu.txt"
    env = {"PYTHONPATH": "", "VIRTUAL_ENV": ""}
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    run(
        *uv, "pip", "install", "--quiet", f"--python={python}", f"--constraint={constraints}", wheel
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    small = ("train.steps=2", "optim.warmup_steps=1", "eval.rows=8", "model.num_layers=2",
             "model.residual.num_blocks=1")  # fmt: skip
    train = (
        python,
        "-m",
        "deltares_jax.train",
        "--config=debug",
        *(f"--config.{key}" for key in small),
    )
    printed = run(*train, cwd=empty, env=env)
    assert "step 2/2" in printed
    assert "--config=configs/debug.py" in printed  # the next command, which works there, too
    rows = (empty / "runs/debug/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 2]
    assert str(ROOT) not in run(python, "-c", "import deltares_jax; print(deltares_jax.__file__)",
                                cwd=empty, env=env)  # fmt: skip
