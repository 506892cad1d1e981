"""Plans: what does not fit, and the numbers of programs that are not run."""

import dataclasses
import functools
import json
import os
import re
import runpy
import subprocess
import sys

import jax
import pytest
from test_command import error_line

from deltares_jax import config as config_lib
from deltares_jax.models import sizes
from deltares_jax.parallel import chips, sharding, topology
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.training import plan_compare, plan_text, planning, programs, step

DEBUG = "--config=configs/debug.py"
CPU8 = topology.parse("cpu:8")


@pytest.fixture
def planned(tiny):
    """The tiny config, for eight devices."""
    return config_lib.resolve(tiny)


def ignore(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def refused(monkeypatch):
    """Compiling ends with a text of the compiler's."""

    def with_text(text: str) -> None:
        def refuse(*args):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(programs, "lower_train", lambda *args: None)
        monkeypatch.setattr(programs, "compile_for", refuse)

    return with_text


OUT_OF_MEMORY = {  # libtpu's words
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(52.50G) exceeds available HBM (15.75G).": 52.5 * 2**30,
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 1.25T of 15.48G hbm. Exceeded hbm capacity by 1.2T.": 1.25 * 2**40,
}


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_the_compilers_refusal_is_read(planned, refused, text):
    refused(text)
    report = planning.make(planned, CPU8, ignore)
    assert report["hbm_bytes_per_chip"]["total"] == OUT_OF_MEMORY[text]
    assert not report["fits"]
    assert report["compiled_flops"] is report["hbm_bytes_per_chip"]["arguments"] is None


def test_other_errors_of_the_compiler_are_not_taken_for_a_refusal(planned, refused):
    refused("INTERNAL: Used 3 hands")
    with pytest.raises(jax.errors.JaxRuntimeError, match="hands"):
        planning.make(planned, CPU8, ignore)


def test_an_evaluation_batch_that_does_not_fit_is_for_a_note(planned, refused):
    refused(next(iter(OUT_OF_MEMORY)))
    report = planning.make(planning.with_values(planned, {"eval.batch_size": 12}), CPU8, ignore)
    (note,) = report["notes"]
    assert "--config.eval.batch_size=16" in note


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"mesh.data": -1, "mesh.fsdp": 1, "train.batch_size": 8}, "mesh.fsdp=-1 mesh.data=1, "),
        ({"model.remat": "full", "train.batch_size": 16}, "a smaller batch (--find_batch) or "),
        ({"train.batch_size": 8}, "model.remat=full would help"),
        ({"train.batch_size": 8, "model.remat": "full"}, "a smaller model or data.seq_len would"),
    ],
)
def test_advice_is_what_is_left_to_do(planned, refused, values, advice):
    refused("RESOURCE_EXHAUSTED: Used 1.25T of 15.48G hbm")
    report = planning.make(planning.with_values(planned, values), CPU8, ignore)
    text = plan_text.too_big(report)
    assert f"; {advice}" in text
    assert ("remat" in text) == ("model.remat" not in values)


# Numbers.


@pytest.mark.parametrize(
    ("variant", "scan", "hardware", "expected"),
    [
        ("delta_block", "auto", "v5e:2x2", ["unrolled", "splash", "batched"]),
        ("delta_block", "blocks", "cpu:8", ["blocks", "reference", "batched"]),
        ("delta_block", "boundaries", "cpu:8", ["boundaries", "reference", "batched"]),
        ("delta_attnres", "boundaries", "cpu:8", ["unrolled", "reference", "direct"]),
        ("delta_attnres", "auto", "v5e:2x2", ["unrolled", "splash", "pallas"]),
        ("delta_attnres", "blocks", "v5e:2x2", ["blocks", "splash", "direct"]),
        ("baseline", "auto", "cpu:8", ["blocks", "reference", "none"]),
    ],
)
def test_a_plan_tells_what_auto_came_to(planned, variant, scan, hardware, expected):
    values = {"model.residual.variant": variant, "model.scan": scan, "data.seq_len": 128}
    form = planning.form(planning.with_values(planned, values), topology.parse(hardware))
    assert [form[key] for key in ("scan", "attention", "kernel")] == expected


def test_only_keys_that_change_the_step_differ(planned):
    values = {"model.residual.num_blocks": 1, "optim.z_loss": 1.0, "data.dir": "x", "eval.rows": 1}
    assert plan_compare.differs(planned, planning.with_values(planned, values)) == {}
    values = {"model.remat": "full", "data.seq_len": 32, "mesh.tensor": 2}
    differs = plan_compare.differs(planned, planning.with_values(planned, values))
    assert differs == {
        "model.remat": ["none", "full"],
        "data.seq_len": [16, 32],
        "mesh.tensor": [1, 2],
    }


def test_the_plan_compiles_what_the_trainer_runs(planned):
    mesh, config = planning.lay_out(planned, CPU8)
    compiled = planning.compile_step(config, mesh)
    state = jax.eval_shape(functools.partial(step.init_state, planned))
    trained = programs.Programs(planned, mesh_lib.make_mesh(dict(mesh.shape), jax.devices()))
    expected = sharding.state_shardings(state, mesh)
    for program in (compiled, trained.train):
        found, _ = program.input_shardings[0]
        same = jax.tree.map(
            lambda a, b, leaf: a.is_equivalent_to(b, leaf.ndim), found, expected, state
        )
        assert jax.tree.all(same)
    assert programs.peak_bytes(compiled, "cpu") == trained.peak_bytes


def test_the_options_of_a_chip_reach_the_compiler_from_both(planned, monkeypatch):
    chip = dataclasses.replace(chips.CHIPS["v5e"], compiler_options={"xla_no_such_option": "1"})
    monkeypatch.setattr(chips, "by_device_kind", {"cpu": chip}.get)
    mesh, config = planning.lay_out(planned, CPU8)
    for compile_it in (planning.compile_step, programs.Programs):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            compile_it(config, mesh)


RECIPE = """
from deltares_jax.config import default
def get_config():
    config = default()
    config.model.update({"width": 32, "num_layers": 2, "head_dim": 8, "mlp_width": 64})
    config.model.residual.variant = "VARIANT"
    config.data.seq_len = 16
    return config
"""
FAST = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


@pytest.fixture
def recipes(tmp_path):
    """Flags for two small recipes."""
    for variant in ("baseline", "delta_block"):
        (tmp_path / f"{variant}.py").write_text(RECIPE.replace("VARIANT", variant))
    return f"--config={tmp_path}/delta_block.py", f"--compare={tmp_path}/baseline.py"


def test_json_of_two_recipes(command, recipes):
    overrides = ("--config.train.batch_size=16", "--config.model.residual.num_blocks=1")
    result = command("plan", *recipes, "--topology=cpu:8", "--json", *overrides, env=FAST)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    baseline, ratios = report["compare"], report["ratios"]
    assert report["differs"] == {}
    assert (report["variant"], baseline["variant"]) == ("delta_block", "baseline")
    assert report["chips"] == report["mesh"]["fsdp"] == 8
    for plan in (report, baseline):
        batch, memory = plan["batch"], plan["hbm_bytes_per_chip"]
        assert (batch["global"], batch["per_chip"], batch["tokens"]) == (16, 2, 16 * 16)
        assert memory["arguments"] + memory["temporaries"] == memory["total"]
        # Parameters and two moments in float32, cut in eight but for the small ones.
        assert 1 < memory["arguments"] / (12 * plan["parameters"] / 8) < 1.5
        assert plan["hbm_bytes_limit"] > memory["total"]
        assert plan["collective_bytes"].keys() == plan["collective_counts"].keys()
        whole = (memory, plan["collective_bytes"], plan["collective_counts"])
        assert {type(n) for numbers in whole for n in numbers.values()} == {int}
        assert plan["collective_bytes"]["all-gather"] > 0
        assert plan["compiled_flops"] > 0
        assert plan["estimated_step_seconds"] is plan["mfu"] is plan["compute_cycles"] is None
        assert plan["unpriced_kernels"] == []
        assert plan["versions"] == {"jax": jax.__version__}
    assert report["parameters"] - baseline["parameters"] == 2 * 2 * 2 * 32
    for key, part in (("hbm_total", "total"), ("hbm_temporaries", "temporaries")):
        mine, theirs = (plan["hbm_bytes_per_chip"][part] for plan in (report, baseline))
        assert ratios[key] == mine / theirs
    assert ratios["estimated_step_seconds"] is None


SMALL_HOST = """
import runpy
from deltares_jax.parallel import topology
topology.host_memory = lambda: 8 * 2**20
runpy.run_module("deltares_jax.plan", run_name="__main__", alter_sys=True)
"""


def test_what_is_too_big_ends_with_the_figure(recipes):
    arguments = [recipes[0], "--topology=cpu:8", "--config.train.batch_size=800"]
    result = subprocess.run(
        [sys.executable, "-c", SMALL_HOST, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **FAST},
        timeout=240,
    )
    assert result.returncode == 3, result.stderr
    *_, line = result.stderr.splitlines()
    assert re.match(
        r"error: does not fit: .*batch_size=800 needs .* MiB more than its 1\.0 MiB", line
    )
    assert re.search(r"limit +1\.0 MiB, headroom -", result.stdout)
    assert "step: dtype float32, remat none, scan unrolled, attention reference" in result.stdout


def test_refusals_are_one_line_and_leave_jax_alone(command):
    line = error_line(command("plan", DEBUG, "--topology=v5e-17"))
    assert "v5e-16" in line
    line = error_line(command("plan", DEBUG, "--topology=cpu:8", "--config.train.batch_size=9"))
    assert "train.batch_size=9" in line
    line = error_line(command("plan", DEBUG, "--topology=cpu:8", "--compare=configs/"))
    assert "--compare=configs/: no such file, it is a folder" in line


# For TPUs, where libtpu is installed.


def for_tpu(size: str, variant: str, **model):
    config = config_lib.paper(size, variant, 2)
    config.model.update(model)
    return config


@pytest.mark.parametrize(
    ("variant", "name", "width"),
    [
        ("delta_block", "v5e:2x2", 128),
        pytest.param("baseline", "v5e:2x2", 128, marks=pytest.mark.slow),
        # Kernels for the readers of two layers, and of one.
        pytest.param("delta_attnres", "v5e:2x2", 1280, marks=pytest.mark.slow),
        pytest.param("delta_attnres", "v5p:2x2x1", 4096, marks=pytest.mark.slow),
        pytest.param("attnres_full", "v6e:2x2", 128, marks=pytest.mark.slow),
    ],
)
def test_a_small_model_compiles_for_a_tpu(variant, name, width):
    pytest.importorskip("libtpu")
    small = {"width": width, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128}
    config = for_tpu("600m", variant, mlp_width=256, vocab_size=512, **small)
    config.data.seq_len = 128
    config.train.batch_size = config.eval.batch_size = 4
    slice_, chip = topology.parse(name), chips.CHIPS[name.partition(":")[0]]
    report = planning.make(config_lib.resolve(config), slice_, ignore)
    memory = report["hbm_bytes_per_chip"]
    state = 3 * 4 * report["parameters"] / 4
    assert state < memory["arguments"] < memory["total"] < report["hbm_bytes_limit"]
    assert report["kernel_cycles"] > 0  # splash attention
    assert report["unpriced_kernels"] == []
    assert 0 < report["copy_cycles"] < report["compute_cycles"]
    by_bytes = report["work_cycles"] - report["compute_cycles"] + report["copy_cycles"]
    assert by_bytes > 0 if report["form"]["kernel"] == "pallas" else by_bytes == 0
    assert report["estimated_step_seconds"] >= report["compute_cycles"] / chip.clock
    tokens = report["tokens_per_second_per_chip"]
    flops = sizes.flops_per_token(config.model, 128)["model"]
    assert report["mfu"] == pytest.approx(tokens * flops / chip.peak_flops)


@pytest.mark.slow
def test_7b_fits_64_v5p_chips():
    pytest.importorskip("libtpu")
    recipe = runpy.run_path("configs/7b_delta_block.py")["get_config"]()
    recipe.train.batch_size = 256
    report = planning.make(config_lib.resolve(recipe), topology.parse("v5p:4x4x4"), ignore)
    assert report["fits"]
    assert report["unpriced_kernels"] == []
    assert 0.3 < report["mfu"] < 0.7
