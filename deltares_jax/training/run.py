"""The host's side of a run in progress: its position, its log, when it saves and stops."""

import dataclasses
import math
import time
from typing import Any

import jax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config_checks
from deltares_jax.data import pipeline
from deltares_jax.data.dataset import Data
from deltares_jax.training import clock as clock_lib
from deltares_jax.training import evaluation, metrics, signals, step
from deltares_jax.training.checkpoint import Checkpointer
from deltares_jax.training.probes import Probe
from deltares_jax.training.programs import Programs
from deltares_jax.training.stall import Watchdog
from deltares_jax.training.start import Start


@dataclasses.dataclass
class Tools:
    """What a run works with."""

    request: signals.StopRequest
    checkpoints: Checkpointer
    writer: metrics.Writer
    programs: Programs
    clock: clock_lib.Clock
    watchdog: Watchdog
    probe: Probe | None = None  # with metrics.routing_every


class Run:
    """Steps from a start to the end.

    Args:
      config: the resolved config.
      data: what it reads.
      start: where it starts.
      tools: see there.
    """

    def __init__(
        self,
        config: FrozenConfigDict,
        data: Data,
        start: Start,
        tools: Tools,
    ):
        self.config, self.data, self.start, self.tools = config, data, start, tools
        self.rows_seen = start.meta["rows_seen"]
        self.tokens_seen = start.meta["tokens_seen"]
        self.skipped, self.spikes = start.meta["skipped"], start.meta["spikes"]
        self.evaluated = set(tools.checkpoints.losses)
        self.saved = start.step if start.own else None
        self.saved_at = time.monotonic()
        # The summary needs both ends.
        self.always_logged = {1 if start.own else start.step + 1, config.train.steps}
        self.progress = metrics.Progress(start.step, config.train.steps)
        size, workers = config.train.batch_size, config.data.workers
        place = tools.programs.place
        self.batches = pipeline.train_batches(
            data.rows, data.order, size, self.rows_seen, *place, workers
        )
        self.unread: tuple[int, Any, Any, float | None] | None = None
        self.last_read = 0.0

    def close(self) -> None:
        """Ends the live line and the threads that read ahead."""
        self.progress.close()
        self.batches.close()

    def steps(self, state: step.TrainState) -> None:
        """Runs from the first to the last step; saves, evaluates and stops on request between.

        A step is saved before it is evaluated, so that whatever ends the evaluation costs nothing;
        the run that goes on makes up for it.
        """
        cfg, tools, first = self.config, self.tools, self.start.step
        last_of_data = first + self.data.steps_left(self.rows_seen, cfg.train.batch_size)
        profile = config_checks.parse_profile_steps(cfg.train.profile_steps, cfg.train.steps)
        if profile and profile[1] <= first:
            self.progress.note(f"no profile: steps {cfg.train.profile_steps} were made before")
        owed = self.start.own and self.evaluation_due(first) and first not in self.evaluated
        if owed and not self.evaluate(state, first):
            self.stop(state, first)
        tools.clock.turn_to("steps")
        for number in range(first + 1, cfg.train.steps + 1):
            if number > last_of_data:
                self.end_of_data(state, number - 1)
            if profile and number == max(profile[0], first + 1) <= profile[1]:
                jax.profiler.start_trace(str(tools.watchdog.path.parent / "profile"))
            with tools.clock.spent_on("input"):
                rows = next(self.batches)
            # The device gets the next step before the numbers of the last are read.
            state, numbers = tools.programs.train(state, tools.programs.put(rows))
            routed = tools.probe(number, state.params) if tools.probe else None
            self.move_on(number)
            self.read()
            # On one CPU device the step ends here; elsewhere it has only begun.
            ended = tools.clock.stepping() if numbers["loss"].is_ready() else None
            self.unread = (number, numbers, routed, ended)
            if profile and number == profile[1]:
                jax.block_until_ready(state)
                jax.profiler.stop_trace()
                self.progress.note(f"profile of steps {cfg.train.profile_steps} in profile/")
            last = number == cfg.train.steps
            stop, late = tools.programs.agree(bool(tools.request.name), self.minutes_are_up())
            due = cfg.checkpoint.every and number % cfg.checkpoint.every == 0
            save = last or stop or late or due
            evaluate = self.evaluation_due(number)
            if save or evaluate:
                self.read()
                tools.watchdog.moved()
            if save:
                self.save(state, number)
            if evaluate and (last or not stop):
                stop = not self.evaluate(state, number) or stop
            if stop and (not last or (evaluate and number not in self.evaluated)):
                self.stop(state, number)
        tools.watchdog.pause()
        with tools.clock.spent_on("save"):
            tools.checkpoints.wait()

    def minutes_are_up(self) -> bool:
        """Whether the last save is `checkpoint.every_minutes` ago."""
        minutes = self.config.checkpoint.every_minutes
        return bool(minutes) and time.monotonic() - self.saved_at >= 60 * minutes

    def evaluation_due(self, number: int) -> bool:
        """Whether the state after a step is evaluated."""
        every = self.config.eval.every
        last = number == self.config.train.steps
        return bool(self.data.eval_sets) and (last or number % every == 0)

    def stop(self, state: step.TrainState, number: int) -> None:
        """Ends the run on request, after a save."""
        # Another process of the run may have got the signal.
        why = self.tools.request.name or "a signal to another process"
        if self.saved != number:
            self.save(state, number)
        self.tools.checkpoints.wait()
        raise signals.Stop(
            f"stopped by {why} after step {number}, which is saved; "
            "the same command goes on from there",
            signals.SAVED,
        )

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
        saved = "nothing to save"
        if number > 0:
            if self.saved != number:
                self.save(state, number)
            self.tools.checkpoints.wait()
            saved = f"step {number} is saved"
        left = len(self.data.order) - self.rows_seen
        raise signals.Stop(
            f"the data ended after step {number} of {self.config.train.steps}: {left} rows are "
            f"left, a batch needs {self.config.train.batch_size}; {saved}. To go on: "
            "data.repeat=True, or fewer train.steps",
            signals.DATA_ENDED,
        )

    def read(self) -> None:
        """Reads and writes the numbers of the step before; stops where they are not finite."""
        self.tools.checkpoints.check()
        if self.unread is None:
            return
        number, numbers, routed, ended = self.unread
        self.unread = None
        values = {key: value.item() for key, value in jax.device_get(numbers).items()}
        self.tools.watchdog.step()
        self.count_skipped(number, values)
        self.tokens_seen += int(values["tokens"])
        clock = self.tools.clock.seconds()
        stepping = self.tools.clock.stepping() if ended is None else ended
        values["tokens_per_second"] = values["tokens"] / max(stepping - self.last_read, 1e-9)
        self.last_read = stepping
        values["tokens_seen"] = self.tokens_seen
        values["seconds"] = sum(clock.values())
        values["goodput"] = clock["steps"] / values["seconds"]
        if self.tools.probe and routed is not None:
            values |= self.tools.probe.row(routed)
            self.always_logged.add(number)
        if number % self.config.train.log_every == 0 or number in self.always_logged:
            self.tools.writer.write(number, values)
        self.progress.update(values, number, stepping / (number - self.start.step))

    def count_skipped(self, number: int, values: dict[str, Any]) -> None:
        """Takes the flags of a step out of its numbers; counts an update that was not made."""
        finite, spike = values.pop("finite"), values.pop("spike")
        train = self.config.train
        if not finite:
            what = (
                f"step {number}: loss {values['loss']}, gradient norm {values['grad_norm']}: not "
                "finite; the update was not made"
            )
            kept = f"the state of step {self.saved} is kept" if self.saved else "nothing was saved"
            if train.nonfinite == "stop":
                raise signals.Stop(f"{what}, {kept}", signals.NON_FINITE)
            if self.skipped >= train.nonfinite_limit:
                raise signals.Stop(
                    f"{what}, after {self.skipped} that were skipped, the most that "
                    f"train.nonfinite_limit={train.nonfinite_limit} allows; {kept}",
                    signals.NON_FINITE,
                )
            self.skipped += 1
            self.progress.note(f"{what}: {self.skipped} of {train.nonfinite_limit} are skipped")
            for name, value in values.items():
                if not math.isfinite(value):
                    values[name] = None  # JSON has no word for it
        if spike:
            self.spikes += 1
            self.progress.note(
                f"step {number}: gradient norm {values['grad_norm']:.4g} is over "
                f"{train.spike_factor} times the median of the last {step.NORMS}; the update was "
                f"not made, {self.spikes} in all"
            )
        if train.nonfinite == "skip":
            values["skipped"] = self.skipped
        if train.spike_factor:
            values["spikes"] = self.spikes

    def evaluate(self, state: step.TrainState, number: int) -> bool:
        """Writes the held-out loss; False where a request to stop ended it before."""
        tools = self.tools
        before = tools.clock.turn_to("evaluate")
        done = evaluation.evaluate(
            tools.programs,
            state.params,
            self.data,
            self.config.eval,
            self.stopped_between_batches,
        )
        tools.clock.turn_to(before)
        if done is None:
            return False
        row, notes = done
        for note in notes:
            self.progress.note(f"step {number}: {note}")
        tools.writer.write(number, row)
        self.evaluated.add(number)
        losses = tools.checkpoints.losses
        losses[number] = row["eval_loss"]
        finite = sorted(loss for loss in losses.values() if math.isfinite(loss))
        lowest = finite[: self.config.checkpoint.keep_best]
        if losses[number] in lowest and self.saved != number:
            self.save(state, number)
        return True

    def stopped_between_batches(self) -> bool:
        """Whether to leave an evaluation; the same on every process."""
        self.tools.watchdog.moved()
        return self.tools.programs.agree(bool(self.tools.request.name), False)[0]

    def save(self, state: step.TrainState, number: int) -> None:
        """Starts a save in the background."""
        with self.tools.clock.spent_on("save"):
            meta = {
                "rows_seen": self.rows_seen,
                "tokens_seen": self.tokens_seen,
                "skipped": self.skipped,
                "spikes": self.spikes,
                "clock": self.tools.clock.seconds(),
                "data": self.data.fingerprint,
                "config": self.config.to_dict(),
            }
            self.tools.checkpoints.save(number, state, meta)
        self.saved, self.saved_at = number, time.monotonic()
