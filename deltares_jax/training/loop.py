"""The train loop, the data flow from top to bottom; everything that is compiled is in step.py."""

import contextlib
import functools
import pathlib
from typing import Any

from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.data import dataset
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import report
from deltares_jax.training import (
    checkpoint,
    clock,
    compare,
    metrics,
    probes,
    run,
    signals,
    stall,
    summary,
)
from deltares_jax.training import group as group_lib
from deltares_jax.training import programs as programs_lib
from deltares_jax.training import remote as remote_lib
from deltares_jax.training import start as start_lib
from deltares_jax.training import workdir as workdir_lib


def train(
    config: FrozenConfigDict, workdir: str, recipe: str = "", devices: Any = None
) -> dict[str, Any]:
    """Trains by a resolved config in `workdir`, resuming what is there; returns the summary.

    Of several processes all but the first return an empty one.

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
    time = clock.Clock()
    with group_lib.together(config) as group:
        folder = workdir_lib.open_workdir(workdir)
        group.check_start(config, folder)
        alone = workdir_lib.locked(folder) if group.index == 0 else contextlib.nullcontext()
        mirrored = remote_lib.mirrored(folder, group.index == 0)
        kept = functools.partial(workdir_lib.newest_text, folder)
        with (
            workdir_lib.faults(folder),
            alone,
            mirrored,
            signals.StopRequest(kept) as request,
        ):
            try:
                return _train(config, folder, recipe, devices, request, group, time)
            except checkpoint.SaveError as error:
                why = f"stopped by {request.name}, but " if request.name else ""
                code = signals.NOT_SAVED if why else signals.CANNOT_SAVE
                raise signals.Stop(f"{why}{error}; {kept()}", code) from error
            except KeyboardInterrupt:
                if not request.name:
                    raise
                raise signals.Stop(
                    f"stopped by {request.name} and interrupted again; {kept()}", signals.NOT_SAVED
                ) from None


def _train(
    config: FrozenConfigDict,
    folder: pathlib.Path,
    recipe: str,
    devices: Any,
    request: signals.StopRequest,
    group: group_lib.Group,
    time: clock.Clock,
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
    data = group.one_by_one(lambda: dataset.open_data(config))
    group.agree({"data": data.fingerprint}, "prepare the same data on every host")
    rows, held_out = metrics.read_rows(folder)
    losses = dict(group.share([[s, row["eval_loss"]] for s, row in held_out.items()]))
    if start.step >= config.train.steps and not (data.eval_sets and start.step not in losses):
        start_lib.check_data(config, start, data.fingerprint)
        metrics.say(*summary.start_lines(config, folder, machine, data, start))
        metrics.say(
            f"this run is finished; to go on: --config.train.steps={2 * config.train.steps}"
        )
        return {} if group.index else summary.finish(config, folder, recipe, data)
    request.check()

    # 4. State: restored into its shardings, or made in them.
    start, state = start_lib.restore(
        config, folder, start, data.fingerprint, abstract_state, shardings, group.all
    )
    group.agree({"checkpoint": start.at}, "see that all hosts can read it")
    lines = start_lib.set_aside(start, folder)
    metrics.say(*lines, *summary.start_lines(config, folder, machine, data, start))
    time.add(start.meta["clock"], _lost(start, rows))
    if group.index == 0:
        workdir_lib.write_run_files(folder, config, devices)
        workdir_lib.carry_kept(start.run, folder)
    group.watch(folder)
    keep = (config.checkpoint.keep, config.checkpoint.keep_period, config.checkpoint.keep_best)
    with (
        contextlib.closing(metrics.Writer(folder, config, group.index == 0)) as writer,
        checkpoint.Checkpointer(folder, *keep) as checkpoints,
    ):
        if checkpoints.cleaned:
            metrics.say(f"removed what interrupted saves left: {', '.join(checkpoints.cleaned)}")
        if start.own:
            checkpoints.losses = {s: loss for s, loss in losses.items() if s <= start.step}

        # 5. Programs.
        time.turn_to("compile")
        programs = programs_lib.Programs(config, mesh, request.while_waiting)
        # What they do together fails if one comes to it half a minute late.
        request.while_waiting(lambda: group.share(None))
        metrics.say(
            f"compiled in {metrics.human_time(programs.compile_seconds)}; "
            f"one step needs {report.human_bytes(programs.peak_bytes)} a device"
        )

        probe = None
        if config.metrics.routing_every and data.steps_left(0, config.train.batch_size) >= 1:
            make = functools.partial(probes.Probe, config, mesh, programs, data)
            probe = request.while_waiting(make)
            metrics.say(probe.cost(state.params))
        if start.run and not start.step:
            line = functools.partial(compare.line, config, mesh, programs, state.params, data)
            metrics.say(request.while_waiting(line))

        # 6. Steps.
        watchdog = stall.Watchdog(folder, config.train.stall_factor, group.index)
        tools = run.Tools(request, checkpoints, writer, programs, time, watchdog, probe)
        with (
            contextlib.closing(watchdog),
            contextlib.closing(run.Run(config, data, start, tools)) as going,
        ):
            going.steps(state)
    return {} if group.index else summary.finish(config, folder, recipe, data, time.seconds())


def _lost(start: start_lib.Start, rows: dict[int, Any]) -> float:
    """Seconds that went into steps after the checkpoint, which have to be made again."""
    saved = sum(start.meta["clock"].values())
    return max([row.get("seconds", 0.0) - saved for row in rows.values()] + [0.0])
