"""The launch scripts: what they call, in which state of the machines, and what they refuse."""

import pytest
from launch_helpers import FLAG, GKE, IMAGE, PROJECT, RUN, SLURM, TPU, XPK, Launch

CASES = [
    ("tpu_vm.sh", "create", TPU, ["queued-resources create"]),
    ("tpu_vm.sh", "create", {**TPU, "QUEUED": "no", "TIER": "spot"}, ["tpu-vm create", "--spot"]),
    ("tpu_vm.sh", "wait", TPU, ["describe"]),
    ("tpu_vm.sh", "install", TPU, ["git archive", "tpu-vm scp", "--worker=all", "node.sh install"]),
    ("tpu_vm.sh", f"run {FLAG}", {**TPU, **RUN}, ["--worker=all", "node.sh start", "data.mixture"]),
    ("tpu_vm.sh", "logs", TPU, ["--worker=0", "node.sh log"]),
    ("tpu_vm.sh", "stop", TPU, ["--worker=all", "node.sh stop"]),
    ("tpu_vm.sh", "resume", {**TPU, **RUN}, ["create", "scp", "node.sh install", "node.sh resume"]),
    ("tpu_vm.sh", "delete", TPU, ["queued-resources delete", "--force"]),
    ("xpk.sh", "cluster", XPK, ["cluster create", "--tpu-type=v5p-128", "--on-demand"]),
    ("xpk.sh", f"create {FLAG}", XPK, ["workload create", "launch/restart.sh", "data.mixture"]),
    ("xpk.sh", "logs", XPK, ["get-credentials", "kubectl logs", "jobset-name=b"]),
    ("xpk.sh", "delete", XPK, ["workload delete"]),
    ("xpk.sh", "delete_cluster", XPK, ["cluster delete"]),
    ("gke.sh", f"create {FLAG}", GKE, ["get-credentials", "kubectl apply", "kind: JobSet"]),
    ("gke.sh", "logs", GKE, ["get-credentials", "kubectl logs"]),
    ("gke.sh", "delete", GKE, ["kubectl delete jobset b"]),
    ("slurm.sh", f"create {FLAG}", SLURM, ["sbatch", "--nodes=4", "launch/slurm.sbatch"]),
    ("slurm.sh", "stop", SLURM, ["scancel --full --signal=TERM"]),
    ("slurm.sh", "delete", SLURM, ["scancel --name=b"]),
    ("project.sh", "create", PROJECT, ["services enable", "buckets create"]),
    ("project.sh", "data", PROJECT, ["storage rsync", "gs://data-of-p/data"]),
    (
        "project.sh",
        "image",
        {**PROJECT, "IMAGE": IMAGE},
        ["--target=tpu", f"docker push {IMAGE}"],
    ),
    ("node.sh", "install", {"PLATFORM": "gpu"}, ["requirements-cuda.txt", "--no-deps ."]),
]


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)


def words_of(command: str) -> list[str]:
    return command.split(" ", 1)


@pytest.mark.parametrize(("script", "verb", "env", "shown"), CASES)
def test_a_dry_run_prints_what_is_run(launch, script, verb, env, shown):
    def nothing_there() -> None:
        # Of a slice that is asked for, the answer comes after the question whether there is one.
        states = {"resume": ["!NOT_FOUND", "ACTIVE"], "create": ["!NOT_FOUND"]}
        launch.answer("describe", *states.get(verb.split()[0], ["ACTIVE"]))
        launch.xpk_runs("a-b", *["b"] * (verb == "delete"))

    nothing_there()
    printed = launch.bash(script, *words_of(verb), "--dry_run", **env)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert launch.calls() == []
    for text in shown:
        assert text in printed.stdout.replace("\\", "")

    assert launch.bash(script, *words_of(verb), **env).returncode == 0
    real = launch.calls()
    nothing_there()
    launch.bash("-c", printed.stdout)
    again = launch.calls()
    assert real == again != []


@pytest.mark.parametrize("state", ["ACTIVE", "WAITING_FOR_RESOURCES", "PROVISIONING"])
def test_create_asks_once(launch, state):
    launch.answer("describe", state)
    done = launch.bash("tpu_vm.sh", "create", **TPU)
    assert done.returncode == 0
    assert done.stderr == f"b is there already: {state}\n"
    assert [call[4] for call in launch.calls()] == ["describe"]


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ("DELETING", "again in a minute"),
        ("STOPPING", "again in a minute"),
        ("STOPPED", "gcloud compute tpus tpu-vm start b --project=p"),
        ("PREEMPTED", "resume asks for it again"),
        ("HIDDEN", "delete, then create"),
    ],
)
def test_what_does_not_come_right_is_an_error(launch, state, advice):
    """In `create` and `wait`, which polls for nothing in such a state."""
    launch.answer("describe", state)
    for verb in ("create", "wait"):
        done = launch.bash("tpu_vm.sh", verb, QUEUED="no", **TPU)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: b is {state}; ")
        assert advice in done.stderr
    assert [call[4] for call in launch.calls()] == ["describe"] * 2


def test_other_runs_are_created_once_too(launch):
    launch.xpk_runs("a-b", "b")
    done = launch.bash("xpk.sh", "create", **XPK)
    assert "b is there already" in done.stderr
    launch.answer("squeue", "17 PENDING")
    done = launch.bash("slurm.sh", "create", **SLURM)
    assert "b is there already: 17 PENDING" in done.stderr
    assert [call[0] for call in launch.calls()] == ["xpk", "squeue"]


def test_what_the_project_has_is_not_made_again(launch):
    launch.answer("describe", "READY")
    done = launch.bash("project.sh", "create", **PROJECT)
    assert "data-of-p is there already" in done.stderr
    assert [call[3] for call in launch.calls()] == ["tpu.googleapis.com", "describe"]


def test_an_error_of_the_question_is_no_answer(launch):
    launch.answer("describe", "!PERMISSION_DENIED: not yours")
    for verb in ("create", "delete", "resume"):
        done = launch.bash("tpu_vm.sh", verb, **TPU, **RUN)
        assert done.returncode == 1
        assert "PERMISSION_DENIED: not yours" in done.stderr
    assert [call[4] for call in launch.calls()] == ["describe"] * 3


def test_wait_returns_when_the_slice_is_there(launch):
    launch.answer("describe", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    done = launch.bash("tpu_vm.sh", "wait", **TPU)
    assert done.returncode == 0
    assert done.stderr == "b: WAITING_FOR_RESOURCES\nb: PROVISIONING\n"
    launch.answer("describe", "FAILED")
    assert launch.bash("tpu_vm.sh", "wait", **TPU).returncode == 1


@pytest.mark.parametrize(
    ("states", "made"),
    [
        (["SUSPENDED", "ACTIVE"], "describe delete create describe scp ssh ssh"),
        (["FAILED", "ACTIVE"], "describe delete create describe scp ssh ssh"),
        (["!NOT_FOUND", "ACTIVE"], "describe create describe scp ssh ssh"),
        (["PROVISIONING", "ACTIVE"], "describe describe scp ssh ssh"),
        (["ACTIVE"], "describe ssh ssh"),
        (["SUSPENDING"], "describe"),
        (["STOPPED", "STARTING", "READY"], "describe start describe describe ssh ssh"),
    ],
)
def test_resume_makes_up_for_what_was_lost(launch, states, made):
    launch.answer("describe", *states)
    done = launch.bash("tpu_vm.sh", "resume", **TPU, **RUN)
    assert done.returncode == (1 if states == ["SUSPENDING"] else 0)
    calls = [call for call in launch.calls() if call[0] == "gcloud"]
    assert " ".join(call[4] for call in calls) == made
    if done.returncode == 0:
        assert "node.sh resume" in " ".join(calls[-1])


def test_resume_installs_where_that_was_cut_short(launch):
    launch.answer("describe", "ACTIVE")
    launch.answer("ssh", "Warning: barely known host\\nbare", "")
    assert launch.bash("tpu_vm.sh", "resume", **TPU, **RUN).returncode == 0
    calls = [call for call in launch.calls() if call[0] == "gcloud"]
    assert [call[4] for call in calls] == ["describe", "ssh", "scp", "ssh", "ssh"]
    assert "node.sh install" in " ".join(calls[3])
    assert "node.sh resume" in " ".join(calls[4])


def test_resume_leaves_alone_what_is_installed(launch):
    """Whatever ssh prints."""
    launch.answer("describe", "ACTIVE")
    launch.answer("ssh", "Warning: barely known host", "")
    assert launch.bash("tpu_vm.sh", "resume", **TPU, **RUN).returncode == 0
    assert [call[4] for call in launch.calls()] == ["describe", "ssh", "ssh"]


@pytest.mark.parametrize(
    ("verb", "word", "made"),
    [
        ("create", "create", ["describe", "create"]),
        ("install", "scp", ["scp"]),
        ("install", "ssh", ["scp", "ssh"]),
        ("resume", "create", ["describe", "create"]),
    ],
)
def test_what_fails_is_the_end_of_the_script(launch, verb, word, made):
    launch.answer("describe", "!NOT_FOUND")
    launch.answer(word, "!ERROR: (gcloud) no such accelerator in this zone")
    done = launch.bash("tpu_vm.sh", verb, **TPU, **RUN)
    assert done.returncode == 1
    assert "no such accelerator in this zone" in done.stderr
    assert [call[4] for call in launch.calls() if call[0] == "gcloud"] == made


def test_help_names_every_variable(launch):
    for script, _, env, _ in CASES:
        done = launch.bash(script, "--help")
        assert done.returncode == 0
        inside = launch.bash("-c", f"cd launch && ./{script} --help")  # from another folder
        assert inside.stdout.splitlines()[0] == done.stdout.splitlines()[0] != ""
        for name in env:
            assert f"\n{name} " in done.stdout
