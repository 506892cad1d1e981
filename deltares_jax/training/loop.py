"""The train loop, the data flow from top to bottom; everything that is compiled is in step.py."""

import contextlib
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks
from deltares_jax.data import dataset, pipeline
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import report
from deltares_jax.training import checkpoint, compare, metrics, signals, step, summary
from deltares_jax.training import programs as programs_lib
from deltares_jax.training import start as start_lib
from deltares_jax.training import workdir as workdir_lib


def train(
    config: FrozenConfigDict, workdir: str, recipe: str = "", devices: Any = None
) -> dict[str, Any]:
    """Trains by a resolved config in `workdir`, resuming what is there; returns the summary.

    Args:
      config: from `config.resolve`.
      workdir: folder of the run.
      recipe: path of the recipe, and overrides; for the commands that are printed.
      devices: those to train on; all when None.

    Raises:
      ValueError: bad input, before the first step.
      signals.Stop: the run ended early; carries the exit code.
    """
    metrics.check(config)
    folder = workdir_lib.open_workdir(workdir)
    with workdir_lib.locked(folder), signals.StopRequest() as request:
        try:
            return _train(config, folder, recipe, devices, request)
        except checkpoint.SaveError as error:
            raise signals.Stop(str(error), signals.CANNOT_SAVE) from error


def _train(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    recipe: str,
    devices: Any,
    request: signals.StopRequest,
) -> dict[str, Any]:
    # 1. Where the run starts: its own checkpoints, else init_from, else its seed.
    programs_lib.set_up_jax(config)
    start = start_lib.find(config, folder)

    # 2. Devices, and what each of them will hold.
    devices = mesh_lib.find_devices(config, devices)
    shape = mesh_lib.mesh_shape(config.mesh, len(devices))
    mesh_lib.check_fits(config, shape)
    # Refuses what cannot run there.
    programs_lib.for_platform(config, devices[0].platform, shape["tensor"])
    mesh = mesh_lib.make_mesh(shape, devices)
    abstract_state, shardings = programs_lib.abstract_state(config, mesh)
    machine = programs_lib.report(config, mesh, abstract_state, shardings)

    # 3. Data.
    data = dataset.open_data(config)
    if start.whole and _other_data(config, start.meta, data.fingerprint):
        start.changes.append(
            f"data: row {start.meta['rows_seen']} of the old → the first row of the new order"
        )
        start.meta["rows_seen"] = 0
    metrics.say(*summary.start_lines(config, folder, machine, data, start))
    if start.step >= config.train.steps:
        metrics.say(
            f"this run is finished; to go on: --config.train.steps={2 * config.train.steps}"
        )
        return summary.finish(config, folder, recipe, data)
    request.check()

    # 4. State: restored into its shardings, or made in them.
    state = start_lib.make_state(config, start, abstract_state, shardings)
    workdir_lib.write_run_files(folder, config, devices)
    workdir_lib.carry_kept(start.run, folder)
    with (
        contextlib.closing(metrics.Writer(folder, config)) as writer,
        contextlib.closing(checkpoint.Checkpointer(folder, config.checkpoint.keep)) as checkpoints,
    ):
        # 5. Programs.
        programs = programs_lib.Programs(config, mesh)
        metrics.say(
            f"compiled in {metrics.human_time(programs.compile_seconds)}; "
            f"one step needs {report.human_bytes(programs.peak_bytes)} a device"
        )

        if start.run and not start.own and not start.whole:
            metrics.say(compare.line(config, mesh, programs, state.params, data))

        # 6. Steps. The device gets the next one before the numbers of the last are read.
        run = _Run(config, folder, checkpoints, writer, programs, data, start)
        with contextlib.closing(run.progress), contextlib.closing(run.batches):
            run.steps(state, request)
    return summary.finish(config, folder, recipe, data)


def _other_data(config: FrozenConfigDict, meta: dict[str, Any], fingerprint: str) -> bool:
    """Whether a resumed run sees other rows than before; refuses what it may not."""
    if meta["data"] != fingerprint and not config.data.allow_change:
        raise ValueError(
            f"this run cannot be resumed with other data: its fingerprint was {meta['data'][:12]}, "
            f"that of {config.data.mixture or config.data.source} is {fingerprint[:12]} (prepared "
            "anew, or another interpreter's library?); data.allow_change=True begins it anew"
        )
    before = (meta["data"], meta["config"]["data"]["seq_len"], meta["config"]["train"]["seed"])
    return before != (fingerprint, config.data.seq_len, config.train.seed)


class _Run:
    """The host's side of a run in progress."""

    def __init__(
        self,
        config: FrozenConfigDict,
        folder: pathlib.Path,
        checkpoints: checkpoint.Checkpointer,
        writer: metrics.Writer,
        programs: programs_lib.Programs,
        data: dataset.Data,
        start: start_lib.Start,
    ):
        self.config, self.folder, self.checkpoints = config, folder, checkpoints
        self.writer, self.programs, self.data = writer, programs, data
        meta, first = start.meta, start.step
        self.rows_seen, self.tokens_seen = meta["rows_seen"], meta["tokens_seen"]
        self.first, self.saved = first, first if start.own else None
        # The summary needs both ends.
        self.always_logged = {1 if start.own else first + 1, config.train.steps}
        self.clock = metrics.Clock()
        self.earlier_seconds = meta["seconds"]
        self.progress = metrics.Progress(first, config.train.steps)
        place = (jax.process_index(), jax.process_count())
        size, workers = config.train.batch_size, config.data.workers
        self.batches = pipeline.train_batches(
            data.rows, data.order, size, self.rows_seen, *place, workers
        )
        self.unread: tuple[int, Any] | None = None
        self.last_read = 0.0

    def steps(self, state: step.TrainState, request: signals.StopRequest) -> None:
        """Runs from the first to the last step; evaluates, saves and stops on request between."""
        cfg = self.config
        batch_size = cfg.train.batch_size
        last_of_data = self.first + self.data.steps_left(self.rows_seen, batch_size)
        profile = config_checks.parse_profile_steps(cfg.train.profile_steps, cfg.train.steps)
        if profile and profile[1] <= self.first:
            self.progress.note(f"no profile: steps {cfg.train.profile_steps} were made before")
        request.check()
        for number in range(self.first + 1, cfg.train.steps + 1):
            if number > last_of_data:
                self.end_of_data(state, number - 1)
            self.clock.start()
            if profile and number == max(profile[0], self.first + 1) <= profile[1]:
                jax.profiler.start_trace(str(self.folder / "profile"))
            batch = self.programs.put(next(self.batches))
            state, numbers = self.programs.train(state, batch)
            self.move_on(number)
            self.read()
            self.unread = (number, numbers)
            if profile and number == profile[1]:
                jax.block_until_ready(state)
                jax.profiler.stop_trace()
                self.progress.note(f"profile of steps {cfg.train.profile_steps} in profile/")
            last, stop = number == cfg.train.steps, request.name
            due = cfg.checkpoint.every and number % cfg.checkpoint.every == 0
            if last or stop or due or (cfg.eval.every and number % cfg.eval.every == 0):
                self.read()
                self.clock.pause()
                if self.data.eval_sets and (last or number % cfg.eval.every == 0):
                    self.evaluate(state, number)
                if last or stop or due:
                    self.save(state, number)
            if stop and not last:
                self.checkpoints.wait()
                raise signals.Stop(
                    f"stopped by {stop} after step {number}, which is saved; "
                    "the same command goes on from there",
                    signals.SAVED,
                )
        self.checkpoints.wait()

    def move_on(self, number: int) -> None:
        """Moves the position past the batch of a step; says where a new epoch begins."""
        before = self.data.epochs(self.rows_seen)
        self.rows_seen += self.config.train.batch_size
        for name, (epoch, _, _) in self.data.epochs(self.rows_seen).items():
            if epoch > before[name][0] and self.config.data.repeat:
                self.progress.note(
                    f"step {number}: epoch {epoch} of {name} is complete; its rows come again, in "
                    "a new order"
                )

    def end_of_data(self, state: step.TrainState, number: int) -> None:
        """Ends the run where the data does, at the same step on every process."""
        self.read()
        self.clock.pause()
        saved = "nothing to save"
        if number > 0:
            if self.saved != number:
                self.save(state, number)
            self.checkpoints.wait()
            saved = f"step {number} is saved"
        left = len(self.data.order) - self.rows_seen
        raise signals.Stop(
            f"the data ended after step {number} of {self.config.train.steps}: {left} rows are "
            f"left, a batch needs {self.config.train.batch_size}; {saved}. To go on: "
            "data.repeat=True, or fewer train.steps",
            signals.DATA_ENDED,
        )

    def read(self) -> None:
        """Reads and writes the numbers of the step before; stops if they are not finite."""
        if self.unread is None:
            return
        number, numbers = self.unread
        self.unread = None
        values = {key: value.item() for key, value in jax.device_get(numbers).items()}
        if not values.pop("finite"):
            kept = f"the state of step {self.saved} is kept" if self.saved else "nothing was saved"
            raise signals.Stop(
                f"step {number}: loss {values['loss']}, gradient norm {values['grad_norm']}: not "
                f"finite; the update was not made, {kept}",
                signals.NON_FINITE,
            )
        self.tokens_seen += int(values["tokens"])
        now = self.clock.read()
        values["tokens_per_second"] = values["tokens"] / max(now - self.last_read, 1e-9)
        self.last_read = now
        values["tokens_seen"] = self.tokens_seen
        train = self.config.train
        if number % train.log_every == 0 or number in self.always_logged:
            self.writer.write(number, values)
        self.progress.update(values, number, now / (number - self.first))

    def evaluate(self, state: step.TrainState, number: int) -> None:
        """Held-out loss: sum of losses over count of targets, on the same rows each time."""
        cfg = self.config.eval
        place = (jax.process_index(), jax.process_count())
        row: dict[str, float] = {}
        for name, rows in self.data.eval_sets.items():
            count = min(cfg.rows, len(rows))
            sums = [
                self.programs.evaluate(state.params, self.programs.put(batch))
                for batch in pipeline.eval_batches(rows, count, cfg.batch_size, *place)
            ]
            loss, tokens = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
            mean = float(loss / tokens)
            suffix = f"/{name}" if row else ""  # the first set drives what follows the loss
            row[f"eval_loss{suffix}"] = mean
            row[f"eval_perplexity{suffix}"] = float(np.exp(mean))
            row[f"eval_tokens{suffix}"] = tokens
            of = f" of {name}" if len(self.data.eval_sets) > 1 else ""
            self.progress.note(
                f"step {number}: held-out loss{of} {mean:.4f} on {int(tokens):,} tokens"
            )
        self.writer.write(number, row)

    def save(self, state: step.TrainState, number: int) -> None:
        """Starts a save in the background."""
        meta = {
            "rows_seen": self.rows_seen,
            "tokens_seen": self.tokens_seen,
            "seconds": self.earlier_seconds + self.clock.read(),
            "data": self.data.fingerprint,
            "config": self.config.to_dict(),
        }
        self.checkpoints.save(number, state, meta)
        self.saved = number
