"""Plans: names of slices, what does not work, and the numbers of programs that are not run."""

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
from deltares_jax.parallel import chips, fit, sharding, topology
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.training import planning, programs, step

DEBUG = "--config=configs/debug.py"
CPU8 = topology.parse("cpu:8")


@pytest.fixture
def planned(tiny):
    """The tiny config, for eight devices."""
    return config_lib.resolve(tiny)


def ignore(text: str) -> None:
    """Progress that nobody reads."""


# Names.


@pytest.mark.parametrize(
    ("name", "expected", "num_chips", "links"),
    [
        ("v5p:4x4x4", "v5p:4x4x4", 64, 6),
        ("V5P-128", "v5p:4x4x4", 64, 6),  # counts cores
        ("v4-16", "v4:2x2x2", 8, 3),
        ("v4:2x2x1", "v4:2x2x1", 4, 2),
        ("v5e-16", "v5e:4x4", 16, 2),
        ("v5litepod-256", "v5e:16x16", 256, 4),
        ("v5e:8x16", "v5e:8x16", 128, 3),
        ("v6e-64", "v6e:8x8", 64, 2),
        ("v6e-1", "v6e:1x1", 1, 0),
        ("v7x:4x4x4", "tpu7x:4x4x4", 64, 6),
        ("tpu7x-8", "tpu7x:2x2x1", 4, 2),
        ("cpu:8", "cpu:8", 8, 0),
    ],
)
def test_names(name, expected, num_chips, links):
    parsed = topology.parse(name)
    assert (parsed.name, parsed.num_chips) == (expected, num_chips)
    if parsed.chip:
        assert parsed.links == links


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-17", "--topology=v5e-17: .*nearest: v5e:4x4, which is v5e-16$"),
        ("v5p-64x", "did you mean v5p-64"),
        ("v5p:3x4x4", "v5p:3x4x4: .*nearest: v5p:2x4x4"),
        ("v5e:4x4x4", "v5e:4x4x4: .*nearest: v5e:8x8"),
        ("v5e:16x32", "v5e:16x32: .*nearest: v5e:16x16"),
        ("foo", "--topology=foo: known are v4, v5e, v5p, v6e, tpu7x"),
        ("v5e", "known are"),
        ("cpu:0", "known are"),
        ("cpu:2x2", "known are"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(name)


def test_without_libtpu_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ValueError, match=r"v5e:4x4 needs libtpu: pip install -e '\.\[tpu\]'"):
        topology.devices(topology.parse("v5e-16"))


# Meshes.


def test_a_mesh_of_the_wrong_size_is_refused(planned):
    config = planning.with_values(planned, {"mesh.fsdp": 3})
    with pytest.raises(ValueError, match=r"mesh\.fsdp=3.*8 devices"):
        planning.make(config, CPU8, ignore)


def test_large_replicated_arrays_are_refused_as_by_train(planned, monkeypatch):
    monkeypatch.setattr("deltares_jax.parallel.report._LARGE_BYTES", 100)
    with pytest.raises(ValueError, match=r"mesh\.fsdp=8 .*would leave .*replicated: "):
        planning.make(planned, CPU8, ignore)


def test_meshes_that_work_are_named(planned):
    config = planning.with_values(planned, {"model.vocab_size": 264, "train.batch_size": 4})
    assert fit.working_meshes(config, 8) == [{"tensor": 2}]  # two KV heads
    for mesh in ({}, {"mesh.fsdp": 8}):
        asked = planning.with_values(config, mesh)
        with pytest.raises(ValueError, match=r"train\.batch_size=4 .*4 sequences on 8 ") as error:
            planning.make(asked, CPU8, ignore)
        assert "--config.mesh.tensor=2 " in str(error.value)
    overrides = fit.working_meshes(asked, 8)[0]
    assert mesh_lib.mesh_shape({**asked.mesh, **overrides}, 8)["fsdp"] == 4


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


# Numbers.


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


def test_refusals_are_one_line_and_leave_jax_alone(command):
    line = error_line(command("plan", DEBUG, "--topology=v5e-17"))
    assert "v5e-16" in line
    line = error_line(command("plan", DEBUG, "--topology=cpu:8", "--config.train.batch_size=9"))
    assert "train.batch_size=9" in line


@pytest.mark.parametrize("answer", [0, 1, 2, 7, 8, 30])
@pytest.mark.parametrize("guess", [1, 3, 8, 30])
def test_search_finds_the_largest_from_any_guess(guess, answer):
    tried = []

    def fits(count):
        tried.append(count)
        return count <= answer

    assert planning.largest(fits, guess, 30) == answer
    assert len(tried) == len(set(tried)) <= 10
    assert set(tried) >= {n for n in (answer, answer + 1) if 1 <= n <= 30}


@pytest.mark.parametrize(
    ("limit", "extra", "largest"),
    [(399, 0, 8), (1000, 0, 56), (1000, 1, 48), (1199, 1, 64), (1199, -300, 88), (599, 300, 8)],
)
def test_the_batch_that_is_found_is_the_largest(planned, monkeypatch, limit, extra, largest):
    """A device needs 300 bytes, and 100 for every 8 rows; compiled in full, `extra` more."""
    tries = []

    def needed(config, quick):
        return 300 + 100 * config.train.batch_size // 8 + (0 if quick else extra)

    def make(config, topology, say):
        total = needed(config, quick=False)
        memory = {"total": total}
        return {
            "fits": total <= limit,
            "batch": config.train.batch_size,
            "hbm_bytes_per_chip": memory,
        }

    monkeypatch.setattr(planning, "compile_step", lambda config, mesh, quick: needed(config, quick))
    monkeypatch.setattr(planning, "make", make)
    monkeypatch.setattr(programs, "peak_bytes", lambda compiled, platform: compiled)
    monkeypatch.setattr(topology, "host_memory", lambda: limit * 8)
    report = planning.find_batch(planned, CPU8, tries.append)
    assert report["batch"] == largest
    assert report["fits"] == (limit >= 400 + extra)
    assert tries[0].startswith("batch 8: ")
    assert any(line.startswith(f"batch {largest}: ") and "in full" in line for line in tries)


# For TPUs, where libtpu is installed.


def for_tpu(size: str, variant: str, **model):
    config = config_lib.paper(size, variant, 2)
    config.model.update(model)
    return config


@pytest.mark.parametrize("name", ["v4-8", "v5e-1", "v5e-4", "v5p-8", "v6e-8", "tpu7x-8"])
def test_devices_are_those_of_the_chip_table(name):
    pytest.importorskip("libtpu")
    parsed = topology.parse(name)
    devices = topology.devices(parsed)
    assert len(devices) == parsed.num_chips * parsed.devices_per_chip
    assert chips.by_device_kind(devices[0].device_kind) is parsed.chip


@pytest.mark.parametrize("variant", ["baseline", "delta_block"])
def test_a_small_model_compiles_for_a_tpu(variant):
    pytest.importorskip("libtpu")
    small = {"width": 128, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128}
    config = for_tpu("600m", variant, mlp_width=256, vocab_size=512, **small)
    config.data.seq_len = 128
    config.train.batch_size = config.eval.batch_size = 4
    report = planning.make(config_lib.resolve(config), topology.parse("v5e:2x2"), ignore)
    memory = report["hbm_bytes_per_chip"]
    state = 3 * 4 * report["parameters"] / 4
    assert state < memory["arguments"] < memory["total"] < report["hbm_bytes_limit"]
    assert report["kernel_cycles"] > 0  # splash attention
    assert report["unpriced_kernels"] == []
    assert 0 < report["copy_cycles"] < report["compute_cycles"]
    assert report["work_cycles"] == report["compute_cycles"] - report["copy_cycles"]
    assert report["estimated_step_seconds"] >= report["compute_cycles"] / chips.CHIPS["v5e"].clock
    tokens = report["tokens_per_second_per_chip"]
    flops = sizes.flops_per_token(config.model, 128)["model"]
    assert report["mfu"] == pytest.approx(tokens * flops / 197e12)


@pytest.mark.slow
def test_7b_fits_64_v5p_chips():
    pytest.importorskip("libtpu")
    recipe = runpy.run_path("configs/7b_delta_block.py")["get_config"]()
    recipe.train.batch_size = 256
    report = planning.make(config_lib.resolve(recipe), topology.parse("v5p:4x4x4"), ignore)
    assert report["fits"]
    assert report["unpriced_kernels"] == []
    assert 0.3 < report["mfu"] < 0.7
