"""Prepares a data set: documents to tokens to records that training reads.

    python -m deltares_jax.data.prepare --source=fineweb_edu/sample-10BT --tokenizer=Qwen/Qwen3-0.6B
    python -m deltares_jax.data.prepare --source=text --path=notes,logs/*.jsonl.zst --out=mine

Given again after an interruption, the same command goes on from the last finished file. Sources:
py_stdlib, text (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet under --path), and
fineweb_edu/CONFIG, from the hub (HF_ENDPOINT gives another address) or from parquet files under
--path. Training finds what is prepared without --out by itself; else by data.dir.
"""

import os
import pathlib
import re
import shlex
import signal

from absl import flags

from deltares_jax import command, config_checks
from deltares_jax.data import build, runners, sources, tokens
from deltares_jax.data import manifest as manifest_lib
from deltares_jax.printing import say

_SOURCE = flags.DEFINE_string("source", "", "py_stdlib, text, or fineweb_edu/CONFIG.")
_PATH = flags.DEFINE_list("path", [], "Folders, files or globs, separated by commas.")
_COLUMN = flags.DEFINE_string("column", "text", "Key or column of the text in files of records.")
_REVISION = flags.DEFINE_string("revision", "main", "Branch, tag or commit on the hub.")
_FILES = flags.DEFINE_string("files", "", "Which input files, from 0: 0-3,7; all when empty.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    0,
    "Take whole documents while the training text stays within so many tokens; 0: all. Of a "
    "held-out file, a hundredth is taken, but 2^20 tokens at least.",
    lower_bound=0,
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", tokens.BYTE, "byte, a tokenizer.json or its folder, or a hub id."
)
_OUT = flags.DEFINE_string("out", "", "Folder to prepare in; the user's cache folder when empty.")
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_WORKERS = flags.DEFINE_integer(
    "workers", _CORES, "Processor cores to use.", lower_bound=1, upper_bound=1024
)
_BEAM_RUNNER = flags.DEFINE_string(
    "beam_runner", "", "Do the work as a Beam pipeline on this runner, for example DirectRunner."
)
_BEAM_OPTIONS = flags.DEFINE_list("beam_options", [], "Options of the pipeline, as --name=value.")


# By source: the flags that it does not read.
_UNUSED = {
    "py_stdlib": ("path", "column", "revision"),
    "text": ("revision",),
    sources.FINEWEB_EDU: ("column",),
}


def _numbers(text: str) -> list[range]:
    spans = []
    for span in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span.strip())
        last = int(match[2] or match[1]) if match else -1
        if not match or last < int(match[1]):
            raise ValueError(f"--files={text!r} must be numbers from 0 and spans, such as 0-3,7")
        spans.append(range(int(match[1]), last + 1))
    return spans


def _refuse(without: str, *unused: str) -> None:
    """Refuses flags that were given, but would do nothing."""
    for name in unused:
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} has no effect {without}; leave it out")


def _source() -> sources.Source:
    name, path, numbers = _SOURCE.value, _PATH.value, _numbers(_FILES.value)
    kind, _, config = name.partition("/")
    _refuse(f"with --source={name}", *_UNUSED.get(kind, ()))
    if path:
        _refuse("with --path", "revision")
    if name == "py_stdlib":
        return sources.select(sources.py_stdlib(), numbers)
    if name == "text":
        if not path:
            raise ValueError("--source=text needs --path, a folder or glob of your files")
        return sources.select(sources.text(path, _COLUMN.value), numbers)
    if kind == sources.FINEWEB_EDU and config:
        if len(path) > 1:
            raise ValueError(f"--path={','.join(path)} must be one folder for --source={name}")
        return sources.fineweb_edu(config, "".join(path), _REVISION.value, numbers)
    raise ValueError(
        f"--source={name!r} must be py_stdlib, text, or fineweb_edu/CONFIG such as "
        "fineweb_edu/sample-10BT"
    )


def main() -> int:
    """Prepares what the flags ask for, and says what it holds."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, workers too
    runners.set_threads(_WORKERS.value)
    config_checks.local_folder("--out", _OUT.value)
    out = pathlib.Path(os.path.expanduser(_OUT.value)).absolute()
    runner = runners.pool(_WORKERS.value)
    if _BEAM_RUNNER.value:
        _refuse("with --beam_runner", "workers")
        runner = runners.beam(_BEAM_RUNNER.value, _BEAM_OPTIONS.value)
    else:
        _refuse("without --beam_runner", "beam_options")
    try:
        source = _source()
        tokenizer = tokens.get_tokenizer(_TOKENIZER.value)
        if not _OUT.value:
            out = manifest_lib.folder_of(manifest_lib.root_of(""), source.name, tokenizer.name)
        made = build.prepare(source, tokenizer, out, _MAX_TOKENS.value, runner)
    except OSError as error:  # a full disk, a file that went away
        raise ValueError(f"{error.filename or out}: {error.strerror or error}") from None
    say(*manifest_lib.describe(made))
    in_part = made.get("files_in_part", [])  # not there in older data sets
    if in_part or made["files_read"] < made["files_listed"]:
        cut = f", {' and '.join(in_part)} in part" if in_part else ""
        say(
            f"--max_tokens={_MAX_TOKENS.value}: {made['files_read']} of {made['files_listed']} "
            f"files were read{cut}"
        )
    for split in sources.SPLITS:
        if split not in made["splits"]:
            say(f"there is no {split} split: no document went there")
    size = sum(shard["size"] for shards in made["shards"].values() for shard in shards)
    say(f"{out}: {size / 1e6:,.2f} MB of records, fingerprint {made['fingerprint'][:16]}…")
    keys = {"source": source.name, "tokenizer": tokenizer.name}
    if _OUT.value:
        keys["dir"] = str(out)
    names = (f"--config.data.{key}={shlex.quote(value)}" for key, value in keys.items())
    say(f"train on it: {' '.join(names)}")
    return 0


if __name__ == "__main__":
    command.run(main, __doc__, "interrupted; the same command goes on from the last finished file")
