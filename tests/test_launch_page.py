"""The page of launch/ with its commands, the manifest, and the scripts as shellcheck sees them."""

import math
import os
import re
import subprocess

import pytest
import yaml
from conftest import ROOT
from docs_helpers import blocks
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


@pytest.mark.parametrize("slice_type", ["v5p-128", "v6e-64"])
def test_commands_of_the_page(launch, slice_type):
    """In one shell, from top to bottom, each script does what it is given there."""
    page = [block.text for block in blocks(ROOT / "launch" / "README.md")]
    # What is for v6e stands after what is for v5p.
    own = [text for text in page if slice_type == "v6e-64" or "v6e" not in text]
    lines = "".join(own).replace("\\\n", "").splitlines()
    env: dict[str, str] = {}
    scripts, printed = [], {}
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
            printed[" ".join(words[:2])] = done.stdout
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
    # The JobSet is for the cluster that was made last.
    assert f"--tpu-type={slice_type} --num-slices=2 " in printed["xpk.sh cluster"]
    (slices,) = yaml.safe_load(printed["gke.sh render"])["spec"]["replicatedJobs"]
    assert slices["replicas"] == 2
    nodes = slices["template"]["spec"]["template"]["spec"]["nodeSelector"]
    assert slice_type[:3] in nodes["cloud.google.com/gke-tpu-accelerator"]
    sides = nodes["cloud.google.com/gke-tpu-topology"].split("x")
    assert math.prod(map(int, sides)) == 64


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
