"""Scores a checkpoint on tasks of lm-evaluation-harness, on any devices (extra `eval`).

    python -m deltares_jax.lm_eval --workdir=runs/600m --tasks=paper
    python -m deltares_jax.lm_eval --workdir=runs/debug --tasks=mine.yaml,hellaswag --limit=100

Tasks are names that the harness knows, or its YAML files; `paper` is the eight tasks of the paper,
without examples. Data sets come from the hub or its cache; local files need no network. The result
goes to lm_eval/ in the run's folder, as the harness's own JSON.
"""

import importlib.util
import json

from absl import flags

from deltares_jax import command, config, printing
from deltares_jax.training import signals

_WORKDIR = flags.DEFINE_string("workdir", "", "Run, or RUN/checkpoints/STEP.")
_STEP = flags.DEFINE_string("step", "", "Step of the run: a number, last or best; last by default.")
_TASKS = flags.DEFINE_string("tasks", "", "Names or YAML files, with commas; paper: its tasks.")
_TASK_PATH = flags.DEFINE_string("task_path", "", "Folder of task files to know by name.")
_LIMIT = flags.DEFINE_integer(
    "limit", None, "Examples of each task; all by default.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "Rows at a time.", lower_bound=1, upper_bound=2**16
)
_MESH = command.define_mesh_flag()


def main() -> int:
    """Runs the harness and prints its table."""
    signals.interrupt_on_request()
    if not _TASKS.value:
        raise ValueError("--tasks is missing; for example --tasks=paper")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm_eval needs the harness: pip install 'deltares-jax[eval]'")
    from deltares_jax.inference import tasks, trained  # brings in jax
    from deltares_jax.training import group, workdir

    with group.together(config.resolve(config.default())) as processes:
        folder, step = trained.find(_WORKDIR.value, _STEP.value)
        saved = trained.saved_config(folder, step)
        path = workdir.results_path(folder, "lm_eval", step)
        known = tasks.Tasks(_TASKS.value, _TASK_PATH.value)
        tokenizer = processes.one_by_one(lambda: trained.tokenizer(saved))
        model = trained.load(folder, step, saved, _MESH.value)
        printing.say(model.describe())
        batch_size = model.batch_size(_BATCH_SIZE.value)
        results, adapter = tasks.run(known, model, tokenizer, batch_size, _LIMIT.value)
        printing.put(*tasks.table(results))
        printing.put(*tasks.cut_lines(adapter.counts, saved.data.seq_len))
        printing.put(*(tasks.paper_lines(results) if known.paper else []))
        if processes.index == 0:
            workdir.write_results(path, json.loads(tasks.dumps(results)))
    return 0


if __name__ == "__main__":
    command.run(main, __doc__)
