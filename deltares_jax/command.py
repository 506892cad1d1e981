"""What all commands share: flags, errors as one line, exit codes."""

import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from absl import flags, logging
from ml_collections import config_flags
from ml_collections.config_dict.config_dict import ConfigDict

from deltares_jax import __version__, config_checks, printing
from deltares_jax import config as config_lib
from deltares_jax.training.signals import NOT_SAVED, Stop

flags.disclaim_key_flags()  # what is defined here is a flag of the command that asks for it

BAD_INPUT = 2
MISSING_CONFIG = "--config is missing; for example --config=configs/debug.py"
_SHIPPED = pathlib.Path(__file__).parent / "configs"


def define_config_flag() -> None:
    """Defines --config and its overrides --config.a.b=value."""
    config_flags.DEFINE_config_file("config", None, "Recipe, for example configs/debug.py.")


def define_mesh_flag() -> flags.FlagHolder[str]:
    """Defines --mesh, for commands that load a checkpoint."""
    return flags.DEFINE_string(
        "mesh", "", "Such as fsdp=4,tensor=2; by default the run's, if it fits, or one that does."
    )


def define_batch_size_flag() -> flags.FlagHolder[int | None]:
    """Defines --batch_size, for commands that read held-out rows."""
    return flags.DEFINE_integer(
        "batch_size",
        None,
        "Rows at a time; that of the run by default.",
        lower_bound=1,
        upper_bound=2**16,
    )


def recipe_path() -> str:
    """The recipe as --config names it: a path, or a name of those that come with the package."""
    flag: Any = flags.FLAGS["config"]
    path = pathlib.Path(flag.config_filename)
    return f"configs/{path.name}" if path.parent == _SHIPPED else flag.config_filename


def overrides() -> dict[str, Any]:
    """Values of the keys that were given as --config.a.b=value."""
    values: dict[str, Any] = config_flags.get_override_values(flags.FLAGS["config"])
    return values


def find_recipe(flag: str, name: str) -> str:
    """The path of a recipe: a file, or `debug` or `configs/debug.py` of those of the package.

    Raises:
      ValueError: there is neither.
    """
    if pathlib.Path(name).is_file():
        return name
    bare = name.removeprefix("configs/").removesuffix(".py")
    shipped = _SHIPPED / f"{bare}.py"
    if bare and "/" not in bare and shipped.is_file():
        return str(shipped)
    known = [path.stem for path in _SHIPPED.glob("*.py")]
    what = "no such file, it is a folder" if pathlib.Path(name).is_dir() else "no such file"
    hint = config_checks.nearest(bare, known)
    raise ValueError(f"--{flag}={name}: {what}{hint}; recipes are under configs/")


def _check_overrides(argv: list[str]) -> None:
    """Refuses unknown keys with the nearest known one; absl's own message would name none."""
    known = config_lib.flatten(config_lib.default())
    for argument in argv[1:]:
        name = argument.lstrip("-").split("=", 1)[0]
        if argument.startswith("-") and name.startswith("config."):
            key = name.removeprefix("config.")
            if key not in known:
                raise ValueError(f"unknown config key {key}{config_checks.nearest(key, known)}")


def _first_line(error: BaseException) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = text.replace("\\n", "\n").replace("\\'", "'")  # a KeyError's text in another error's
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("Traceback ") for line in lines):  # ml_collections puts it into the text
        lines = [lines[0], lines[-1]]
    return " ".join(lines) or type(error).__name__


def _rule_of_type(message: str) -> str:
    """The message on a value that absl cannot convert, with the rule in place of Python's words."""
    match = re.match(r"flag --([\w.]+)=(.*?): ", message)
    if not match:
        return message
    name, value = match.groups()
    defaults = config_lib.flatten(config_lib.default())
    key = name.removeprefix("config.")
    kind = type(defaults[key]).__name__ if key in defaults else flags.FLAGS[name].flag_type()
    rules = {"bool": "true or false", "int": "a whole number", "float": "a number"}
    if match := re.search(r"is not (an? .+)$", message):  # of the right type, but out of range
        return f"--{name}={value} must be {match[1]}"
    return f"--{name}={value!r} must be {rules[kind]}" if kind in rules else message


def _recipes_found(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command line with the path of the recipe in it; what --config was given as."""
    argv, named = list(argv), []
    for place, argument in enumerate(argv[1:], 1):
        name, equals, value = argument.partition("=")
        if name not in ("--config", "-config") or not (equals or place + 1 < len(argv)):
            continue
        named.append(value if equals else argv[place + 1])
        found = find_recipe("config", named[-1])
        if equals:
            argv[place] = f"{name}={found}"
        else:
            argv[place + 1] = found
    return argv, named


def _parse(argv: list[str]) -> None:
    _check_overrides(argv)
    argv, paths = _recipes_found(argv)
    where = f"--config={paths[-1]}" if paths else "--config"
    try:
        rest = flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        if error.flagname.startswith("config."):  # a known key, but no recipe to change
            raise ValueError(MISSING_CONFIG) from None
        known = [*flags.FLAGS, *(f"config.{k}" for k in config_lib.flatten(config_lib.default()))]
        hint = config_checks.nearest(error.flagname, known)
        raise ValueError(f"unknown flag --{error.flagname}{hint}; see --help") from None
    except flags.Error as error:
        raise ValueError(_rule_of_type(_first_line(error))) from None
    except Exception as error:  # whatever the recipe raised
        name = type(error).__name__
        raise ValueError(f"{where}: {name}: {_first_line(error)}") from error
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; flags have the form --name=value")
    if paths and not isinstance(flags.FLAGS.config, ConfigDict | dict):
        kind = type(flags.FLAGS.config).__name__
        raise ValueError(f"{where}: get_config() must return a config, not {kind}")


def _quiet_background() -> None:
    """Keeps the threads of a failed save from printing what our thread raises and says anyway."""
    noisy = {"orbax", "asyncio", "concurrent"}

    def is_ours(record: Any) -> bool:
        of_save = noisy & set(pathlib.Path(record.pathname).parts)
        return not of_save or record.levelname != "ERROR"

    def unraisablehook(error: Any) -> None:
        # TensorStore calls back into the event loop of a save that has ended.
        if str(error.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(error)

    logging.get_absl_handler().addFilter(is_ours)

    sys.unraisablehook = unraisablehook


def _help(doc: str) -> list[str]:
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    described = [f"  --{f.name}: {f.help} (default: {f.value!r})" for f in own]
    return [doc.strip(), "", "flags:", *described]


def run(main: Callable[[], int | None], doc: str, interrupted: str = "interrupted") -> None:
    """Parses the flags, runs `main` and exits with its code; after Ctrl-C says `interrupted`.

    A `ValueError`, the error of all bad input, becomes one line on stderr; with the environment
    variable DELTARES_JAX_TRACEBACK its traceback is printed before it.
    """
    printing.open_closed()
    logging.use_absl_handler()
    _quiet_background()
    logging.set_verbosity(logging.ERROR)  # what is wrong with a recipe is told in one line
    try:
        if any(a in ("-h", "-help", "--help", "--helpfull") for a in sys.argv[1:]):
            printing.put(*_help(doc))
            sys.exit(0)
        if "--version" in sys.argv[1:]:
            printing.put(f"deltares_jax {__version__}")
            sys.exit(0)
        _parse(sys.argv)
        logging.set_verbosity(logging.WARNING)
        code = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has left
        printing.discard_stdout()
        code = 0
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        code = NOT_SAVED
    except Stop as stop:
        print(f"error: {stop}" if stop.code < 128 else str(stop), file=sys.stderr)
        code = stop.code
        if stop.at_once:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    except ValueError as error:
        if os.environ.get("DELTARES_JAX_TRACEBACK"):
            traceback.print_exc()
        print(f"error: {_first_line(error)}", file=sys.stderr)
        code = BAD_INPUT
    sys.exit(code)
