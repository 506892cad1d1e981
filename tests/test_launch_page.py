"""The page of launch/ with its commands, the manifest, and the scripts as shellcheck sees them."""

import os
import re
import subprocess

import pytest
import yaml
from conftest import ROOT
from launch_helpers import FLAG, GKE, RUN, Launch, has_shellcheck

REPLICA = "--config.mesh.replica=4"


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)


def test_the_manifest_of_several_slices(launch):
    done = launch.bash("gke.sh", "render", FLAG, REPLICA, '--config.a="\\', SLICES="2", **GKE)
    assert "@" not in done.stdout.split("\n", 1)[1]
    manifest = yaml.safe_load(done.stdout)
    assert manifest["metadata"]["name"] == "b"
    (slices,) = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert (slices["replicas"], job["parallelism"], job["completions"]) == (2, 16, 16)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x4"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    trainer = ["python", "-m", "deltares_jax.train", f"--config={RUN['CONFIG']}"]
    trainer += [f"--workdir={RUN['WORKDIR']}", "--config.train.platform=tpu", FLAG, REPLICA]
    assert container["command"] == ["launch/restart.sh", *trainer, '--config.a="\\']
    (rule,) = job["podFailurePolicy"]["rules"]
    final = rule["onExitCodes"]["values"]
    assert {2, 3, 4, 5, 6} <= set(final)
    assert not {0, 1, 7, 134, 137, 139, 143, 144} & set(final)


def test_commands_of_the_page(launch):
    """With the variables that the page sets before, each script does what it is given there."""
    text = (ROOT / "launch" / "README.md").read_text()
    lines = (
        "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).replace("\\\n", "").splitlines()
    )
    env: dict[str, str] = {}
    scripts = []
    for line in lines:
        if line.startswith("export "):
            done = launch.bash("-c", f"{line}\nenv", **env)
            env |= dict(pair.split("=", 1) for pair in done.stdout.splitlines() if "=" in pair)
        for found in re.findall(r"launch/(?!restart)\S+\.sh [^;)]+", line):
            words = found.removeprefix("launch/").replace("$BUCKET", env["BUCKET"]).split()
            done = launch.bash(*words, "--dry_run", **env)
            assert (done.returncode, done.stderr) == (0, ""), found
            assert done.stdout
            scripts.append(words[0])
        for module, rest in re.findall(r"python -m deltares_jax\.(\S+)(.*)", line):
            text = (ROOT / "deltares_jax" / f"{module.replace('.', '/')}.py").read_text()
            for flag in re.findall(r"--(\w+)=", rest.replace("--config=", "")):
                assert re.search(rf'DEFINE_\w+\(\s*"{flag}"', text), flag
        if line.startswith(("gcloud", "docker")):
            done = launch.bash("-c", f"set -eu; {line}", **env)  # no variable of it is unset
            assert (done.returncode, done.stderr) == (0, "")
            assert launch.calls()[-1][0] == line.split()[0]
        if line.startswith("docker build"):
            target = re.search(r"--file=(\S+) --target=(\S+)", line)
            assert f" AS {target[2]}\n" in (ROOT / target[1]).read_text()
    made = {path.name for path in (ROOT / "launch").glob("*.sh")}
    assert set(scripts) == made - {"lib.sh", "restart.sh"}
    assert launch.calls() == []


@pytest.mark.skipif(not has_shellcheck(), reason="shellcheck is not installed")
def test_shellcheck():
    scripts = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch"]
    done = subprocess.run(
        ["shellcheck", "--external-sources", *scripts, ROOT / ".ci" / "run"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(os.access(script, os.X_OK) for script in scripts)
