r"""Converts checkpoints from and to the safetensors format of Qwen3.

    python -m deltares_jax.convert import --hf=Qwen/Qwen3-0.6B --variant=delta_block \
        --num_blocks=4 --out=runs/ft/init
    python -m deltares_jax.convert export --workdir=runs/ft --out=exported

import: a folder or hub id of a Qwen3 model, or of a model by the code released with Delta Attention
Residuals, becomes a checkpoint for --config.init_from. A plain model gets the routing of --variant;
centred where the variant can be, so that it starts as the model it was.

export: a baseline becomes a folder that transformers loads; other variants the same, with routing
tensors under the released code's names.
"""

import sys
from typing import Any

from absl import flags

from deltares_jax import command, config_checks

_IMPORT: dict[str, Any] = {
    "hf": flags.DEFINE_string("hf", None, "import: folder or hub id of the checkpoint."),
    "variant": flags.DEFINE_string(
        "variant", None, "import: residual variant for a plain Qwen3; baseline by default."
    ),
    "num_blocks": flags.DEFINE_integer("num_blocks", None, "import: blocks of the variant."),
    "gate": flags.DEFINE_string("gate", None, "import: none, scalar or alpha."),
    "null_source": flags.DEFINE_boolean("null_source", None, "import: a null source per reader."),
    "centered": flags.DEFINE_boolean(
        "centered", None, "import: on by default where the variant can be centred."
    ),
}
_EXPORT: dict[str, Any] = {
    "workdir": flags.DEFINE_string("workdir", None, "export: run, or RUN/checkpoints/STEP."),
    "step": flags.DEFINE_integer("step", None, "export: step of the run; the newest by default."),
}
_OUT: Any = flags.DEFINE_string("out", None, "Folder to write; a new one.")
_VERBS = {"import": (_IMPORT, "hf"), "export": (_EXPORT, "workdir")}


def main(verb: str) -> None:
    """Checks the flags, converts.

    Raises:
      ValueError: a flag or a checkpoint is refused, or a folder cannot be read or written.
      signals.Stop: the result cannot be written.
    """
    if verb not in _VERBS:
        raise ValueError(
            f"convert {verb or '(nothing)'} must be import or export"
            f"{config_checks.nearest(verb, _VERBS)}; see --help"
        )
    own, needed = _VERBS[verb]
    for name, flag in (_IMPORT | _EXPORT).items():
        if name not in own and flag.present:
            raise ValueError(f"--{name} has no meaning for convert {verb}; see --help")
    for name, value in ((needed, own[needed].value), ("out", _OUT.value)):
        if not value:
            raise ValueError(f"--{name} is missing; see --help")
    try:
        _convert(verb)
    except OSError as error:  # a run that may not be read, or a cache that cannot be written
        raise ValueError(f"{error.filename}: {error.strerror}") from error


def _convert(verb: str) -> None:
    if verb == "import":
        from deltares_jax.interop import importing

        asked = {name: flag.value for name, flag in _IMPORT.items() if name != "hf"}
        importing.convert(_IMPORT["hf"].value, _OUT.value, asked)
        return
    from deltares_jax.interop import exporting

    exporting.export(_EXPORT["workdir"].value, _EXPORT["step"].value, _OUT.value)


if __name__ == "__main__":
    has_verb = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    chosen = sys.argv.pop(1) if has_verb else ""
    command.run(lambda: main(chosen), __doc__)
