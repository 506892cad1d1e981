"""Tasks of lm-evaluation-harness: found by name, run, shown beside the paper's numbers."""

import json
import os
import pathlib
from typing import Any

# Its processes would be forked from one in which JAX runs threads.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from deltares_jax.config_checks import nearest
from deltares_jax.data.tokens import Tokenizer
from deltares_jax.inference.generate import Generator
from deltares_jax.inference.harness import HarnessModel
from deltares_jax.inference.scorer import Scorer
from deltares_jax.inference.scoring import Counts
from deltares_jax.inference.trained import Trained
from deltares_jax.printing import one_line

PAPER = (
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "piqa",
    "winogrande",
    "boolq",
    "mmlu",
    "lambada_openai",
)
# Mean accuracy in percent of Qwen3-0.6B after fine-tuning; of which metric is not said.
PUBLISHED = {"baseline": 55.0, "attnres_block": 54.1, "delta_block": 55.6}
_RESAMPLED = 1000  # for standard errors of perplexities


class Tasks(TaskManager):
    """The tasks that are asked for.

    Args:
      names: of tasks, groups or YAML files, with commas; `paper` stands for `PAPER`.
      folder: of task files that may be named, too.

    Attributes:
      chosen: the names.
      paper: whether the paper's tasks are among them.

    Raises:
      ValueError: there is none of a name.
    """

    def __init__(self, names: str, folder: str = ""):
        if folder and not pathlib.Path(folder).is_dir():
            raise ValueError(f"--task_path={folder}: no such folder")
        self.chosen: list[str] = []
        for name in (name.strip() for name in names.split(",")):
            self.chosen += PAPER if name == "paper" else [name]
        self.paper = set(PAPER) <= set(self.chosen)
        # The harness reads some ten thousand files to know its own tasks.
        for include_defaults in (False, True):
            super().__init__(include_path=folder or None, include_defaults=include_defaults)
            missing = [
                name
                for name in self.chosen
                if name not in self.task_index and not pathlib.Path(name).is_file()
            ]
            if not missing:
                return
        hint = nearest(missing[0], ["paper", *self.all_tasks])
        raise ValueError(f"--tasks: {missing[0]!r} is neither a task nor a YAML file{hint}")

    def load(self, task_list: Any) -> Any:
        """Loads tasks with their data; what fails is named in one line."""
        try:
            return super().load(task_list)
        except Exception as error:  # of data sets, the hub, YAML: of many types
            raise ValueError(
                f"--tasks: {', '.join(self.chosen)} cannot be loaded ({type(error).__name__}: "
                f"{one_line(error)}); without network the data sets must be in the cache of the "
                "hub, or local files"
            ) from error


def run(
    tasks: Tasks, trained: Trained, tokenizer: Tokenizer, batch_size: int, limit: int | None
) -> tuple[dict[str, Any], HarnessModel]:
    """The harness's results, and the model that answered it.

    Args:
      tasks: what to run; the paper's, alone, without examples in the prompt; others as they say.
      trained: the model.
      tokenizer: of the model.
      batch_size: rows at a time, a multiple of `Trained.parts`.
      limit: examples of each task; all when None.
    """
    adapter = HarnessModel(
        tokenizer,
        Scorer(trained),
        Generator(trained, tokenizer.vocab_size),
        trained.config.data.seq_len,
        batch_size,
        trained.mesh.shape["tensor"],
    )
    results: dict[str, Any] = lm_eval.simple_evaluate(
        adapter,
        tasks=tasks.chosen,
        num_fewshot=0 if set(tasks.chosen) <= set(PAPER) else None,
        batch_size=batch_size,
        limit=limit,
        log_samples=False,
        bootstrap_iters=_RESAMPLED,
        task_manager=tasks,
    )
    results["deltares_jax"] = {
        "workdir": str(trained.folder),
        "step": trained.step,
        "variant": trained.config.model.residual.variant,
        "requests": vars(adapter.counts),
    }
    return results, adapter


def dumps(results: dict[str, Any]) -> str:
    """Results as JSON, in the harness's own form."""
    return json.dumps(results, default=handle_non_serializable, ensure_ascii=False)


def table(results: dict[str, Any]) -> list[str]:
    """The harness's own tables of tasks and groups."""
    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return [line for part in parts for line in part.splitlines()]


def cut_lines(counts: Counts, longest: int) -> list[str]:
    """What did not fit, if anything."""
    lines = []
    if counts.cut:
        lines.append(
            f"{counts.cut:,} of {counts.requests:,} requests lost the start of their context: "
            f"{counts.cut_tokens:,} tokens beyond data.seq_len={longest}"
        )
    if counts.split:
        lines.append(
            f"{counts.split:,} of {counts.requests:,} requests have a continuation of more than "
            f"{longest} tokens, scored in several rows"
        )
    if counts.shortened:
        lines.append(
            f"{counts.shortened:,} of {counts.requests:,} requests may take {longest // 2} tokens "
            f"instead of more than data.seq_len={longest} has room for"
        )
    return lines


def paper_lines(results: dict[str, Any]) -> list[str]:
    """Accuracies of the paper's tasks, their means, and the published ones."""
    rows = {name: results["results"][name] for name in PAPER}
    plain = {name: 100 * row["acc,none"] for name, row in rows.items()}
    normed = {n: 100 * row.get("acc_norm,none", row["acc,none"]) for n, row in rows.items()}
    lines = ["task               acc  acc_norm, where there is one"]
    lines += [f"{name:<15} {plain[name]:6.1f}  {normed[name]:6.1f}" for name in PAPER]
    means = [sum(values.values()) / len(PAPER) for values in (plain, normed)]
    lines.append(f"{'mean':<15} {means[0]:6.1f}  {means[1]:6.1f}")
    published = ", ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    lines.append(f"published means of Qwen3-0.6B, fine-tuned: {published}; of which is not said")
    return lines
