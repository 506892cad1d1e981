r"""Compiles a recipe's train step for devices that are not there: memory and time before booking.

    python -m deltares_jax.plan --config=configs/7b_delta_block.py --topology=v5p:4x4x4
    python -m deltares_jax.plan --config=configs/7b_delta_block.py --topology=v5p-128 --json
    python -m deltares_jax.plan --config=configs/7b_delta_block.py --topology=v5p:4x4x4 \
        --compare=configs/7b_baseline.py
    python -m deltares_jax.plan --config=configs/1b_delta_block.py --topology=v5e-16 --find_batch

Topologies are v4, v5e, v5p, v6e and tpu7x by shape (v5p:4x4x4) or accelerator type (v5p-128); they
need libtpu (pip install -e '.[tpu]') but no TPU. cpu:8 needs nothing. Exit code 3: does not fit.
"""

import json
import runpy
import sys

from absl import flags
from ml_collections.config_dict.config_dict import ConfigDict, FrozenConfigDict

from deltares_jax import command, printing
from deltares_jax import config as config_lib
from deltares_jax.parallel import topology as topology_lib
from deltares_jax.training.signals import Stop

DOES_NOT_FIT = 3

_TOPOLOGY = flags.DEFINE_string("topology", "", "What to compile for, for example v5p:4x4x4.")
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object and nothing else.")
_COMPARE = flags.DEFINE_string(
    "compare",
    "",
    "Another recipe to compile; overrides hold for it, too, but for those of model.residual.",
)
_FIND_BATCH = flags.DEFINE_boolean("find_batch", False, "Find the largest batch that fits.")


def _other_recipe(path: str) -> FrozenConfigDict:
    """The recipe to compare with, under the same overrides."""
    found = command.find_recipe("compare", path)
    try:
        config = runpy.run_path(found)["get_config"]()
    except Exception as error:  # whatever the recipe raised
        raise ValueError(f"--compare={path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(f"--compare={path}: get_config() must return a config")
    shared = {k: v for k, v in command.overrides().items() if not k.startswith("model.residual.")}
    config.update_from_flattened_dict(shared)
    return config_lib.resolve(config)


def main() -> int:
    """Checks the flags, compiles, prints."""
    if not flags.FLAGS.config:
        raise ValueError(command.MISSING_CONFIG)
    if not _TOPOLOGY.value:
        raise ValueError("--topology is missing; for example --topology=v5p:4x4x4")
    if _FIND_BATCH.value and _COMPARE.value:
        raise ValueError("--find_batch and --compare do not go together; take the batch found")
    printing.need_stdout()
    topology = topology_lib.parse(_TOPOLOGY.value)
    config = config_lib.resolve(flags.FLAGS.config)
    other = _other_recipe(_COMPARE.value) if _COMPARE.value else None
    topology_lib.devices(topology)  # brings in jax, started without accelerators
    from deltares_jax.training import plan_compare, plan_text, planning

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    plan = planning.find_batch if _FIND_BATCH.value else planning.make
    report = plan(config, topology, say)
    plans = [report]
    if other:
        plans.append(planning.make(other, topology, say))
        differs, ratios = plan_compare.differs(config, other), plan_compare.ratios(*plans)
    if _JSON.value:
        extra = {"compare": plans[1], "differs": differs, "ratios": ratios} if other else {}
        printing.put(json.dumps(report | extra, indent=2))
    else:
        table = plan_text.table(report, plans[1], ratios, differs) if other else []
        printing.put(*plan_text.lines(report), *table)
    for report in plans:
        if not report["fits"]:
            raise Stop(plan_text.too_big(report), DOES_NOT_FIT)
    return 0


if __name__ == "__main__":
    command.define_config_flag()
    command.run(main, __doc__)
