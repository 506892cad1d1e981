"""Where each layer of a checkpoint routes: a report with figures and numbers, on held-out text.

    python -m deltares_jax.routing --workdir=runs/debug --out=routing
    python -m deltares_jax.routing --workdir=runs/debug --compare=runs/other --knockout --out=both
    python -m deltares_jax.routing --workdir=runs/debug --text="import os" --out=of_text

Runs are compared on the same text. The folder gets report.html, which needs nothing else, the
figures as PNG, and the numbers as JSON and CSV.
"""

import pathlib
import shutil
from typing import Any

from absl import flags

from deltares_jax import command, config_checks, printing
from deltares_jax.data import names
from deltares_jax.training import signals

_WORKDIR = flags.DEFINE_string("workdir", "", "Run, or RUN/checkpoints/STEP.")
_STEP = flags.DEFINE_string("step", "", "Of --workdir: a number, last or best; last by default.")
_COMPARE = flags.DEFINE_multi_string(
    "compare", [], "Another run, or RUN/checkpoints/STEP; may be given several times."
)
_OUT = flags.DEFINE_string("out", "", "Folder to write; a new one.")
_DATA = flags.DEFINE_string(
    "data", "", "Text as NAME=SOURCE_OR_FOLDER[:SPLIT]; the run's first held-out set by default."
)
_TOKENS = flags.DEFINE_integer(
    "tokens", None, "Of the text, in whole rows; 0: all; by default as many as the run evaluates.",
    lower_bound=0,
)  # fmt: skip
_BATCH_SIZE = command.define_batch_size_flag()
_MESH = command.define_mesh_flag()
_TEXT = flags.DEFINE_string("text", None, "Show the weights at each of its tokens.")
_READERS = flags.DEFINE_list(
    "readers", [], "Of --text, as layers.3.attn,layers.3.mlp; three across the depth by default."
)
_KNOCKOUT = flags.DEFINE_boolean(
    "knockout", False, "Also the held-out loss without each source and without each reader."
)


def _open_out(out: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The folder to write, which must be new or empty, and the one that becomes it."""
    if not out:
        raise ValueError("--out is missing; for example --out=routing")
    config_checks.local_folder("--out", out)
    target = pathlib.Path(out).expanduser().absolute()
    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ValueError(f"--out={out} is there already; give a new folder")
        shutil.rmtree(partial, ignore_errors=True)  # of a report that was killed
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be made: {error.strerror}") from None
    return target, partial


def _check_flags() -> None:
    """Refuses what needs no run to be seen wrong."""
    if len(names.parse_sets(_DATA.value, "--data")) > 1:
        raise ValueError(f"--data={_DATA.value}: give one set; all runs read the same text")
    if _READERS.value and _TEXT.value is None:
        raise ValueError("--readers chooses what --text shows; give --text, too")


def _measure() -> tuple[Any, ...]:
    """What was read, the numbers of each run, and notes."""
    from deltares_jax.inference import routes

    given = [("--workdir", _WORKDIR.value), *(("--compare", path) for path in _COMPARE.value)]
    runs = routes.find(given, _STEP.value, _DATA.value)
    asked = routes.Asked(
        _TOKENS.value,
        _BATCH_SIZE.value,
        _MESH.value,
        _TEXT.value,
        _READERS.value,
        _KNOCKOUT.value,
        _DATA.value,
    )
    return routes.follow(runs, asked)


def main() -> int:
    """Writes the report; it is there whole or not at all."""
    signals.interrupt_on_request()
    _check_flags()
    target, partial = _open_out(_OUT.value)
    from deltares_jax.analysis import report  # brings in jax; a misspelt flag was refused before
    from deltares_jax.training import workdir

    try:
        text, numbers, notes = _measure()
        try:
            report.write(partial, text, numbers, notes)
            partial.rename(target)
        except OSError as error:
            why = f"--out={_OUT.value} cannot be written: {error.strerror}"
            raise signals.Stop(why, signals.CANNOT_SAVE) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for note in notes:
        printing.say(note)
    printing.put(f"written: {workdir.shown(target / 'report.html')}")
    return 0


if __name__ == "__main__":
    command.run(main, __doc__)
