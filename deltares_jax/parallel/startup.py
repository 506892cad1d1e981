"""How the processes of a run find each other and start JAX together."""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import requests

from deltares_jax.parallel import peers as peers_lib
from deltares_jax.parallel.connection import split_address

_PORT = 8476  # where nothing says which
_METADATA = "computeMetadata/v1/instance/attributes"


@dataclasses.dataclass
class Place:
    """Where a process stands among the others; the same as the keys of `config.distributed`."""

    coordinator: str
    process_id: int
    num_processes: int


def find_place(config: Any, env: Mapping[str, str] | None = None) -> Place | None:
    """From flags, else variables named JAX_*, else Slurm, else a TPU slice; None for one process.

    Args:
      config: `config.distributed`; what it says comes first, key by key.
      env: variables, those of this process when None.

    Raises:
      ValueError: a part of it is missing.
    """
    env = os.environ if env is None else env
    found: dict[str, Any] = {}
    for source in (_jax, _slurm, _tpu):
        found = source(env)
        if found:
            break
    if config.coordinator:
        found["coordinator"] = config.coordinator
    if config.process_id >= 0:
        found["process_id"] = config.process_id
    if config.num_processes:
        found["num_processes"] = config.num_processes
    if found.get("num_processes", 1) == 1 and not config.coordinator:
        return None
    for key in ("coordinator", "process_id", "num_processes"):
        if key not in found:
            given = ", ".join(f"distributed.{name}={value}" for name, value in found.items())
            raise ValueError(f"{given} needs distributed.{key}, too; nothing else says it")
    split_address(found["coordinator"])
    if found["process_id"] >= found["num_processes"]:
        raise ValueError(
            f"distributed.process_id={found['process_id']} must be below "
            f"distributed.num_processes={found['num_processes']}"
        )
    return Place(**found) if found["num_processes"] > 1 else None


def _jax(env: Mapping[str, str]) -> dict[str, Any]:
    """Variables that launchers set; on Kubernetes an indexed Job numbers its pods by itself."""
    names = {
        "coordinator": ("JAX_COORDINATOR_ADDRESS",),
        "process_id": ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
        "num_processes": ("JAX_NUM_PROCESSES",),
    }
    found: dict[str, Any] = {}
    for key, variables in names.items():
        value = next((env[name] for name in variables if env.get(name)), None)
        if value is not None:
            found[key] = value if key == "coordinator" else int(value)
    return found if "coordinator" in found else {}


def _slurm(env: Mapping[str, str]) -> dict[str, Any]:
    """A step that srun has started."""
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return {}
    # The first of `node[012-014,7]-x,other`.
    nodes = env["SLURM_STEP_NODELIST"]
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    first = "".join(part or "" for part in match.groups())
    job = int(env["SLURM_JOB_ID"])  # so that two jobs on a host do not meet
    return {
        "coordinator": f"{first}:{20000 + job % 20000 * 2}",
        "process_id": int(env["SLURM_PROCID"]),
        "num_processes": int(env["SLURM_STEP_NUM_TASKS"]),
    }


def _tpu(env: Mapping[str, str]) -> dict[str, Any]:
    """A TPU slice of several hosts, or several slices: by variables (GKE), or the VM's metadata."""
    hosts, worker = env.get("TPU_WORKER_HOSTNAMES", ""), env.get("TPU_WORKER_ID", "")
    if not hosts and any(os.path.exists(path) for path in ("/dev/accel0", "/dev/vfio/0")):
        hosts = ",".join(
            end.split(":")[2]
            for end in _metadata("worker-network-endpoints", env).split(",")
            if end
        )
        worker = _metadata("agent-worker-number", env)
    names = hosts.split(",") if hosts else []
    slices = int(env.get("MEGASCALE_NUM_SLICES", 1))
    if not names or len(names) * slices == 1:
        return {}
    first = names[0]
    if slices > 1:
        first = env["MEGASCALE_COORDINATOR_ADDRESS"].rsplit(":", 1)[0]
    return {
        "coordinator": f"{first}:{_PORT}",
        "process_id": int(env.get("MEGASCALE_SLICE_ID", 0)) * len(names) + int(worker),
        "num_processes": len(names) * slices,
    }


def _metadata(name: str, env: Mapping[str, str]) -> str:
    host = env.get("GCE_METADATA_HOST", "metadata.google.internal")
    try:
        answer = requests.get(
            f"http://{host}/{_METADATA}/{name}", headers={"Metadata-Flavor": "Google"}, timeout=5
        )
    except requests.RequestException:  # a TPU elsewhere
        return ""
    return answer.text if answer.ok else ""


def join(config: Any, common: tuple[int, ...]) -> peers_lib.Peers | None:
    """Calls the roll, then starts JAX for all processes; None where there is one.

    Args:
      config: `config.distributed`.
      common: see `Peers`.

    Raises:
      PeerError: processes are missing.
      ValueError: the settings cannot be.
    """
    place = find_place(config)
    if place is None:
        return None
    peers = peers_lib.Peers(
        place.coordinator,
        place.process_id,
        place.num_processes,
        config.timeout,
        config.heartbeat,
        common,
    )
    host, port = split_address(place.coordinator)
    jax.distributed.initialize(
        f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}",
        place.num_processes,
        place.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=round(config.timeout),
        # Our own watch is to see it first, and to say who is lost.
        heartbeat_timeout_seconds=round(2 * config.heartbeat),
        shutdown_timeout_seconds=round(config.timeout),
    )
    return peers
