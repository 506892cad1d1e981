"""Trains a model by a recipe.

    python -m deltares_jax.train --config=configs/debug.py
    python -m deltares_jax.train --config=configs/debug.py --config.train.steps=500 --workdir=runs/x

Any key of the recipe can be overridden as --config.a.b=value; --print_config shows them all. The
same command again resumes the run in its workdir.
"""

import json
import pathlib
import shlex

from absl import flags

from deltares_jax import command, printing
from deltares_jax import config as config_lib
from deltares_jax.training import signals

_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of the run; runs/<recipe> when empty.")
_PRINT = flags.DEFINE_boolean("print_config", False, "Print the checked config as JSON and exit.")


def _recipe(variant: str) -> str:
    """The recipe and its overrides, as a run of another variant repeats them.

    That of an option of routing would be refused, or without effect, on the baseline. Where a
    process stands among others is not for another run.
    """
    words = [shlex.quote(command.recipe_path())]
    for key, value in command.overrides().items():
        if key.startswith("distributed."):
            continue
        of_routing = key.startswith("model.residual.")
        if key != "model.residual.variant" and (variant == "baseline" or not of_routing):
            words.append(f"--config.{key}={shlex.quote(str(value))}")
    return " ".join(words)


def main() -> int:
    """Checks the config, then trains."""
    signals.end_on_request()  # until the loop listens
    if not flags.FLAGS.config:
        raise ValueError(command.MISSING_CONFIG)
    config = config_lib.resolve(flags.FLAGS.config)
    if _PRINT.value:
        printing.put(json.dumps(config.to_dict(), indent=2))
        return 0
    workdir = _WORKDIR.value or f"runs/{pathlib.Path(command.recipe_path()).stem}"
    from deltares_jax.training import loop  # brings in jax; bad input was refused before

    loop.train(config, workdir, recipe=_recipe(config.model.residual.variant))
    return 0


if __name__ == "__main__":
    command.define_config_flag()
    command.run(main, __doc__, "interrupted; what was saved before is kept")
