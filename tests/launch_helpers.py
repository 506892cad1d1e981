"""A copy of launch/ beside tools that only note how they were called."""

import os
import pathlib
import shutil
import subprocess

from conftest import ROOT

IMAGE = "us-docker.pkg.dev/p/r/i:tpu"
RUN = {"CONFIG": "configs/7b_delta_block.py", "WORKDIR": "gs://bucket/run"}
TPU = {"PROJECT": "p", "ZONE": "us-east5-a", "NAME": "b", "ACCELERATOR": "v5p-128"}
XPK = {**TPU, "CLUSTER": "c", "IMAGE": IMAGE, **RUN}
GKE = {
    "PROJECT": "p",
    "LOCATION": "us-east5",
    "CLUSTER": "c",
    "NAME": "b",
    "ACCELERATOR": "tpu-v5p-slice",
    "TOPOLOGY": "4x4x4",
    "IMAGE": IMAGE,
    **RUN,
}
PROJECT = {"PROJECT": "p", "ZONE": "us-east5-a", "BUCKET": "data-of-p"}
SLURM = {"NAME": "b", "NODES": "4", "GPUS_PER_NODE": "8", "TIME": "24:00:00", **RUN}
NODE = {"PLATFORM": "gpu", "CONFIG": "configs/debug.py", "WORKDIR": "runs/x"}
FLAG = "--config.data.mixture=a=0.5,/my data/b=0.5"
TOOLS = (
    "gcloud",
    "xpk",
    "kubectl",
    "squeue",
    "sbatch",
    "scancel",
    "scontrol",
    "git",
    "python3",
    "docker",
)
# Notes its words, and what it is given to read. The first line of the file ANSWERS/<word>, where
# one of its words is the name of a file there, is printed; with a `!` in front it is an error.
# All lines but the last are answers for one call; \n in a line is a new line.
FAKE = r"""#!/bin/bash
{ printf '%s\n' "${0##*/}"; for word in "$@"; do printf '%s\n' "$word"; done; } >>"$CALLS"
[ "${0##*/}" = kubectl ] && [ ! -t 0 ] && cat >>"$CALLS"
printf '\036' >>"$CALLS"
for word in "${0##*/}" "$@"; do
  file=$ANSWERS/$word
  if [ -n "$word" ] && [ -f "$file" ]; then
    answer=$(head -n 1 "$file")
    [ "$(wc -l <"$file")" -gt 1 ] && sed -i 1d "$file"
    case $answer in
      !*) echo "${answer#!}" >&2; exit 1 ;;
      *) printf '%b\n' "$answer" ;;
    esac
  fi
done
exit 0
"""


class Launch:
    """Runs the launch scripts in a folder of their own.

    Args:
      root: an empty folder.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root / "repository"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        self.calls_file, self.answers = root / "calls", root / "answers"
        self.answers.mkdir()
        (self.root / "configs").symlink_to(ROOT / "configs")
        (self.root / ".venv").mkdir()  # what uv makes
        (self.root / ".venv" / "installed").touch()
        home = root / "home"
        (home / ".cache" / "deltares_jax" / "data").mkdir(parents=True)
        for folder, tools in ((root / "bin", TOOLS), (home / ".local" / "bin", ("uv",))):
            folder.mkdir(parents=True)
            for tool in tools:
                self.tool(folder / tool, FAKE)
        self.bin = root / "bin"
        self.env = {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "USER": "me",
            "TMPDIR": str(root),
            "CALLS": str(self.calls_file),
            "ANSWERS": str(self.answers),
            "POLL_SECONDS": "0",
        }

    @staticmethod
    def tool(path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def answer(self, word: str, *lines: str) -> None:
        """What a tool answers that is called with a word."""
        (self.answers / word).write_text("".join(f"{line}\n" for line in lines))

    def xpk_runs(self, *names: str) -> None:
        """What xpk 1.16 answers that is asked for runs with a b in their names."""
        table = [f"{'Jobset Name':<14}   Created Time           Priority   Status"]
        table += [f"{name:<14}   2026-01-01T00:00:00Z   medium     Running" for name in names]
        text = [
            "[XPK] Starting workload list ",
            "[XPK] Task: `List Jobs with filter-by-status=EVERYTHING with filter-by-job=b` is "
            "implemented by `kubectl get workloads --ignore-not-found -o=json`",
            "[XPK] Workload List Output:",
            *table,
            "[XPK] See your workloads in Cloud Console: https://console.cloud.google.com/b",
        ]
        self.answer("--filter-by-job=b", "\\n".join(text))

    def calls(self) -> list[list[str]]:
        """The words of each call since the last time that was asked."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        return [call.removesuffix("\n").split("\n") for call in text.split("\036")[:-1]]

    def bash(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        """Runs a script of launch/, by its name, or `-c TEXT`."""
        if words[0] != "-c":
            words = (f"launch/{words[0]}", *words[1:])
        return subprocess.run(
            ["bash", *words],
            cwd=self.root,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )


def has_shellcheck() -> bool:
    """Whether shellcheck can be run; it must be there in CI."""
    return bool(os.environ.get("CI")) or shutil.which("shellcheck") is not None
