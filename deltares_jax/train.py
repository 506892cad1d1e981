"""Trains a model by a recipe.

    python -m deltares_jax.train --config=configs/debug.py
    python -m deltares_jax.train --config=configs/debug.py --config.train.steps=500 --workdir=runs/x

Any key of the recipe can be overridden as --config.a.b=value; --print_config shows them all. The
same command again resumes the run in its workdir.
"""

import json
import pathlib

from absl import flags

from deltares_jax import command
from deltares_jax import config as config_lib

_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of the run; runs/<recipe> when empty.")
_PRINT = flags.DEFINE_boolean("print_config", False, "Print the checked config as JSON and exit.")


def main() -> int:
    """Checks the config, then trains."""
    if not flags.FLAGS.config:
        raise ValueError(command.MISSING_CONFIG)
    config = config_lib.resolve(flags.FLAGS.config)
    if _PRINT.value:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    recipe = command.recipe_path()
    workdir = _WORKDIR.value or f"runs/{pathlib.Path(recipe).stem}"
    from deltares_jax.training import loop  # brings in jax; bad input was refused before

    loop.train(config, workdir, recipe=recipe)
    return 0


if __name__ == "__main__":
    command.define_config_flag()
    command.run(main, __doc__)
