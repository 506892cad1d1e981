"""What the launch scripts refuse: with one line that names it, before anything is called."""

import shutil

import pytest
from launch_helpers import GKE, NODE, PROJECT, RUN, SLURM, TPU, XPK, Launch

V6E = {**GKE, "ACCELERATOR": "tpu-v6e-slice", "TOPOLOGY": "8x8"}
REPLICA = "--config.mesh.replica"


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)


@pytest.mark.parametrize(
    ("script", "verb", "names"),
    [
        ("tpu_vm.sh", "resume", ["PROJECT", "ZONE", "NAME", "ACCELERATOR", "CONFIG", "WORKDIR"]),
        ("xpk.sh", "create", ["PROJECT", "ZONE", "CLUSTER", "ACCELERATOR", "NAME", "IMAGE"]),
        ("gke.sh", "create", ["PROJECT", "LOCATION", "CLUSTER", "NAME", "TOPOLOGY", "IMAGE"]),
        ("slurm.sh", "create", ["NAME", "NODES", "GPUS_PER_NODE", "TIME", "CONFIG", "WORKDIR"]),
        ("node.sh", "start", ["PLATFORM", "CONFIG", "WORKDIR"]),
    ],
)
def test_missing_variables_are_named_together(launch, script, verb, names):
    done = launch.bash(script, verb)
    assert done.returncode == 2
    assert launch.calls() == []
    assert done.stderr.startswith("error: missing variables: ")
    assert done.stderr.count("\n") == 1
    for name in names:
        assert f"{name} (for example {name}=" in done.stderr


@pytest.mark.parametrize(
    ("script", "words", "env", "text"),
    [
        (
            "tpu_vm.sh",
            ["create"],
            {**TPU, "ZONE": "us-east5"},
            "ZONE='us-east5' must have the form",
        ),
        ("tpu_vm.sh", ["create"], {**TPU, "ACCELERATOR": "v5p"}, "for example ACCELERATOR=v5p-128"),
        ("tpu_vm.sh", ["create"], {**TPU, "TIER": "cheap"}, "on_demand|spot|reserved"),
        ("tpu_vm.sh", ["stop", "--config.a=1"], TPU, "unknown flag --config.a=1 of stop"),
        ("tpu_vm.sh", ["run", "--worker=0"], {**TPU, **RUN}, "unknown flag --worker=0; flags of"),
        ("tpu_vm.sh", ["run", "--dry_run=yes"], {**TPU, **RUN}, "unknown flag --dry_run=yes"),
        ("tpu_vm.sh", ["start"], TPU, "'start' is none of create wait install"),
        ("tpu_vm.sh", [], TPU, "one of create wait install"),
        ("tpu_vm.sh", ["run", "now"], TPU, "unexpected argument 'now' after run"),
        (
            "gke.sh",
            ["render"],
            {**V6E, "TOPOLOGY": "3x3"},
            "9 chips, no multiple of CHIPS_PER_HOST=4",
        ),
        ("gke.sh", ["render"], {**GKE, "WORKDIR": "hdfs://b/x"}, "WORKDIR='hdfs://b/x' must have"),
        # A folder of the pod is gone when it is.
        ("gke.sh", ["render"], {**GKE, "WORKDIR": "runs/x"}, "WORKDIR='runs/x' must have the form"),
        ("xpk.sh", ["create"], {**XPK, "WORKDIR": "/runs/x"}, "WORKDIR='/runs/x' must have"),
        ("slurm.sh", ["create"], {**SLURM, "WORKDIR": "gs:/b/a"}, "WORKDIR='gs:/b/a' must have"),
        ("gke.sh", ["render"], {**GKE, "SLICES": "2"}, "needs --config.mesh.replica=2"),
        (
            "xpk.sh",
            ["create", f"{REPLICA}=3"],
            {**XPK, "SLICES": "2"},
            "or a multiple of it, not '3'",
        ),
        ("gke.sh", ["render"], {**GKE, "TOPOLOGY": "8x8"}, "for example TOPOLOGY=4x4x4"),
        ("gke.sh", ["render"], {**GKE, "TOPOLOGY": "0x4x4"}, "for example TOPOLOGY=4x4x4"),
        ("gke.sh", ["render"], {**V6E, "TOPOLOGY": "4x4x4"}, "for example TOPOLOGY=8x8"),
        ("gke.sh", ["render"], {**V6E, "TOPOLOGY": "08x08"}, "for example TOPOLOGY=8x8"),
        (
            "gke.sh",
            ["render"],
            {**GKE, "IMAGE": "deltares_jax:tpu"},
            "IMAGE='deltares_jax:tpu' must",
        ),
        ("xpk.sh", ["create"], {**XPK, "IMAGE": "a.dev/b c"}, "IMAGE='a.dev/b c' must have"),
        ("xpk.sh", ["cluster"], {**XPK, "TIER": "sopt"}, "on_demand|spot|reserved"),
        ("xpk.sh", ["cluster"], {**XPK, "TIER": "reserved"}, "missing variables: RESERVATION"),
        ("tpu_vm.sh", ["run"], {**TPU, **RUN, "CONFIG": "7c"}, "CONFIG='7c' is no file"),
        ("gke.sh", ["render"], {**GKE, "CONFIG": "/bin/ls"}, "CONFIG='/bin/ls' is no file of the"),
        ("node.sh", ["start"], {**NODE, "CONFIG": "nonexistent.py"}, "CONFIG='nonexistent.py' is"),
        ("node.sh", ["install"], {"PLATFORM": "cpu", "HOME": ""}, "missing variables: HOME"),
        ("project.sh", ["data"], {**PROJECT, "HOME": ""}, "missing variables: HOME"),
        ("project.sh", ["data"], {**PROJECT, "DATA": "/no/such/folder"}, "data.prepare"),
        (
            "slurm.sh",
            ["delete"],
            {**SLURM, "TMPDIR": "/no/such/folder"},
            "TMPDIR=/no/such/folder must be",
        ),
        ("slurm.sh", ["create"], {**SLURM, "NODES": "two"}, "NODES='two' must have the form"),
        ("restart.sh", [], {}, "no command to run"),
        (
            "restart.sh",
            ["true"],
            {"RESTART_LIMIT": "-1"},
            "RESTART_LIMIT=-1 must be a whole number",
        ),
        ("restart.sh", ["true"], {"RESTART_LIMIT": "9" * 20}, "must be a whole number of at most"),
        ("restart.sh", ["--foo", "true"], {}, "unknown flag --foo"),
    ],
)
def test_what_cannot_be_is_refused(launch, script, words, env, text):
    done = launch.bash(script, *words, **env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr
    assert launch.calls() == []


@pytest.mark.parametrize(
    ("script", "verb", "env", "tool", "where"),
    [
        ("slurm.sh", "create", SLURM, "squeue", "commands of Slurm"),
        ("xpk.sh", "delete", XPK, "xpk", "pip install xpk"),
        ("gke.sh", "create", GKE, "kubectl", "gke-gcloud-auth-plugin"),
        ("tpu_vm.sh", "delete", TPU, "gcloud", "https://cloud.google.com/sdk"),
    ],
)
def test_a_missing_tool_is_named(launch, script, verb, env, tool, where):
    (launch.bin / tool).unlink()
    for file in ("bash", "readlink", "sed"):  # and nothing of this machine
        (launch.bin / file).symlink_to(shutil.which(file))
    done = launch.bash(script, verb, **env, PATH=str(launch.bin))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tool} is not installed; ")
    assert where in done.stderr
    assert launch.calls() == []


def test_install_sends_a_checkout(launch):
    launch.answer("status", "!fatal: not a git repository (or any of the parent directories)")
    launch.answer("archive", "!fatal: not a git repository (or any of the parent directories)")
    done = launch.bash("tpu_vm.sh", "install", **TPU)
    assert done.returncode == 2
    assert "\nerror: git archive failed; install sends the last commit" in done.stderr
    assert {call[0] for call in launch.calls()} == {"git"}


@pytest.mark.parametrize("verb", ["wait", "install", "logs", "stop", "delete"])
def test_the_accelerator_is_needed_to_ask_for_a_slice_alone(launch, verb):
    env = {name: value for name, value in TPU.items() if name != "ACCELERATOR"}
    launch.answer("describe", "ACTIVE")
    assert launch.bash("tpu_vm.sh", verb, **env).returncode == 0
    assert launch.calls()


def test_a_script_may_be_a_link(launch, tmp_path):
    link = tmp_path / "link.sh"
    link.symlink_to(launch.root / "launch" / "tpu_vm.sh")
    done = launch.bash("-c", f"cd /; {link} logs --dry_run; {link} --help", **TPU)
    assert (done.returncode, done.stderr) == (0, "")
    assert "node.sh\\ log" in done.stdout
    assert "launch/tpu_vm.sh create" in done.stdout
