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
_JAX = {
    "coordinator": ("JAX_COORDINATOR_ADDRESS",),
    "process_id": ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
    "num_processes": ("JAX_NUM_PROCESSES",),
}


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
      ValueError: a part of it is missing, or cannot be.
    """
    env = os.environ if env is None else env
    flags = {
        "coordinator": config.coordinator or None,
        "process_id": config.process_id if config.process_id >= 0 else None,
        "num_processes": config.num_processes or None,
    }
    found: dict[str, Any] = {}
    if None in flags.values() and config.num_processes != 1:
        found = next(filter(None, (source(env) for source in (_jax, _slurm, _tpu))), {})
    found |= {key: value for key, value in flags.items() if value is not None}
    if not found:
        return None
    alone = found.get("num_processes") == 1
    for key, variables in _JAX.items():
        if key not in found and not alone:
            given = ", ".join(f"distributed.{name}={value}" for name, value in found.items())
            raise ValueError(f"{given} needs distributed.{key} (or {variables[0]}), too")
    if "coordinator" in found:
        split_address(found["coordinator"])
    if not 0 <= found.get("process_id", 0) < found["num_processes"]:
        raise ValueError(
            f"distributed.process_id={found.get('process_id', 0)} must be at least 0 and below "
            f"distributed.num_processes={found['num_processes']} (by flags or the environment)"
        )
    return None if alone else Place(**found)


def _number(env: Mapping[str, str], name: str) -> int:
    value = _value(env, name)
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ValueError(f"{name}={value!r} must be a whole number")
    return int(value)


def _value(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ValueError(
            f"the environment is that of several processes, but has no {name}; set it, or "
            "distributed.coordinator, distributed.process_id and distributed.num_processes"
        )
    return env[name]


def _jax(env: Mapping[str, str]) -> dict[str, Any]:
    """Variables that launchers set; on Kubernetes an indexed Job numbers its pods by itself."""
    found: dict[str, Any] = {}
    for key, variables in _JAX.items():
        name = next((name for name in variables if env.get(name)), None)
        if name is not None:
            found[key] = env[name] if key == "coordinator" else _number(env, name)
    # Pods of a Job may also have nothing to do with each other.
    return found if any(env.get(variables[0]) for variables in _JAX.values()) else {}


def _slurm(env: Mapping[str, str]) -> dict[str, Any]:
    """A step that srun has started."""
    name = "SLURM_STEP_NUM_TASKS"
    count = _number(env, name) if env.get(name) else 1
    if count == 1:
        return {}
    # The first of `node[012-014,7]-x,other`.
    nodes = _value(env, "SLURM_STEP_NODELIST")
    match = re.match(r"(?:[^\[,]|\[\d[^\]]*\])+", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
    job = _number(env, "SLURM_JOB_ID")  # so that two jobs on a host do not meet
    return {
        "coordinator": f"{first}:{20000 + job % 20000 * 2}",
        "process_id": _number(env, "SLURM_PROCID"),
        "num_processes": count,
    }


def _tpu(env: Mapping[str, str]) -> dict[str, Any]:
    """A TPU slice of several hosts, or several slices: by variables (GKE), or the VM's metadata."""
    env = dict(env)
    hosts = env.get("TPU_WORKER_HOSTNAMES", "")
    if not hosts and any(os.path.exists(path) for path in ("/dev/accel0", "/dev/vfio/0")):
        hosts = ",".join(
            end.split(":")[2]
            for end in _metadata("worker-network-endpoints", env).split(",")
            if end
        )
        env["TPU_WORKER_ID"] = _metadata("agent-worker-number", env)
    names = hosts.split(",") if hosts else []
    several = env.get("MEGASCALE_NUM_SLICES")
    slices = _number(env, "MEGASCALE_NUM_SLICES") if several else 1
    if not names or len(names) * slices == 1:
        return {}
    first, index = names[0], _number(env, "TPU_WORKER_ID")
    if slices > 1:
        first = _value(env, "MEGASCALE_COORDINATOR_ADDRESS").rsplit(":", 1)[0]
        index += _number(env, "MEGASCALE_SLICE_ID") * len(names)
    return {
        "coordinator": f"{first}:{_PORT}",
        "process_id": index,
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
