"""The config that a run saves, and what a resumed one may change."""

import json

import jax
import pytest
from config_helpers import nested, refuses, resolved
from ml_collections import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax import config_notes, config_resume
from deltares_jax.training import workdir

# The saved config.


def exact(config: FrozenConfigDict) -> str:
    """Every key with the type of its value: 1 and 1.0 differ."""
    return repr(sorted(config_lib.flatten(config).items()))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "optim.learning_rate": 1,
            "optim.eps": 1 / 3 * 1e-7,
            "train.seed": 2**32 - 1,
            "data.dir": 'a folder/größe "x"',
            "model.residual.gate": "scalar",
            "model.residual.centered": True,
            "model.norm_eps": 0,
        },
    ],
)
def test_config_saved_in_the_workdir_reloads_to_an_equal_one(tmp_path, values):
    config = resolved(values)
    workdir.write_run_files(tmp_path, config, jax.devices())
    saved = json.loads((tmp_path / workdir.CONFIG).read_text())
    assert exact(config_lib.resolve(config_lib.from_dict(saved))) == exact(config)
    assert config_resume.changed_on_resume(saved, config) == []


# Resume: the rule of every key, and another value to try it with.
RESUME = {
    "init_from": ("free", "runs/other@7"),
    "init_optimizer": ("free", True),
    "model.vocab_size": ("fixed", 300),
    "model.width": ("fixed", 64),
    "model.num_layers": ("fixed", 6),
    "model.num_heads": ("fixed", 8),
    "model.num_kv_heads": ("fixed", 4),
    "model.head_dim": ("fixed", 16),
    "model.mlp_width": ("fixed", 256),
    "model.tied": ("fixed", False),
    "model.rope_theta": ("fixed", 5000.0),
    "model.norm_eps": ("fixed", 1e-5),
    "model.dtype": ("free", "bfloat16"),
    "model.remat": ("free", "full"),
    "model.scan": ("free", "unrolled"),
    "model.attention": ("free", "reference"),
    "model.residual.variant": ("fixed", "attnres_block"),
    "model.residual.num_blocks": ("fixed", 4),
    "model.residual.gate": ("fixed", "scalar"),
    "model.residual.null_source": ("fixed", True),
    "model.residual.centered": ("fixed", True),
    "model.residual.kernel": ("free", "direct"),
    "data.source": ("data", "fineweb_edu/sample-10BT"),
    "data.dir": ("free", "elsewhere"),
    "data.tokenizer": ("data", "Qwen/Qwen3-0.6B"),
    "data.seq_len": ("data", 64),
    "data.mixture": ("data", "py_stdlib=1"),
    "data.document_masking": ("fixed", False),
    "data.repeat": ("free", False),
    "data.allow_change": ("free", True),
    "data.workers": ("free", 2),
    "train.steps": ("upwards", 400),
    "train.batch_size": ("free", 16),
    "train.accumulation": ("free", 2),
    "train.log_every": ("free", 10),
    "train.seed": ("data", 1),
    "train.nonfinite": ("free", "skip"),
    "train.nonfinite_limit": ("free", 3),
    "train.spike_factor": ("free", 5.0),
    "train.stall_factor": ("free", 0.0),
    "train.platform": ("free", "tpu"),
    "train.profile_steps": ("free", "5:6"),
    "train.compile_cache": ("free", "off"),
    "optim.learning_rate": ("fixed", 2e-3),
    "optim.final_learning_rate": ("fixed", 1e-5),
    "optim.warmup_steps": ("fixed", 10),
    "optim.schedule": ("fixed", "linear"),
    "optim.cooldown_steps": ("fixed", 20),
    "optim.weight_decay": ("fixed", 0.0),
    "optim.decay": ("fixed", "all"),
    "optim.b1": ("fixed", 0.8),
    "optim.b2": ("fixed", 0.99),
    "optim.eps": ("fixed", 1e-6),
    "optim.clip_norm": ("fixed", 0.5),
    "optim.z_loss": ("fixed", 1e-4),
    "optim.routing_learning_rate": ("fixed", 5e-3),
    "optim.freeze_base": ("fixed", True),
    "eval.every": ("free", 50),
    "eval.rows": ("free", 32),
    "eval.batch_size": ("free", 4),
    "eval.sets": ("free", "own=py_stdlib"),
    "checkpoint.every": ("free", 50),
    "checkpoint.every_minutes": ("free", 10.0),
    "checkpoint.keep": ("free", 5),
    "checkpoint.keep_period": ("free", 1000),
    "checkpoint.keep_best": ("free", 1),
    "metrics.tensorboard": ("free", False),
    "metrics.wandb": ("free", True),
    "metrics.routing_every": ("free", 10),
    "mesh.replica": ("free", 2),
    "mesh.data": ("free", 2),
    "mesh.fsdp": ("free", 4),
    "mesh.tensor": ("free", 2),
    "mesh.allow_replicated": ("free", True),
    "distributed.coordinator": ("free", "host0:9000"),
    "distributed.process_id": ("free", 1),
    "distributed.num_processes": ("free", 2),
    "distributed.timeout": ("free", 20.0),
    "distributed.heartbeat": ("free", 10.0),
}


def resume(saved: dict, asked: dict) -> list[str]:
    config = FrozenConfigDict(config_lib.from_dict(nested(asked)))
    return config_resume.changed_on_resume(nested(saved), config)


def test_resume_rule_of_every_key_is_tested():
    assert set(RESUME) == set(config_lib.flatten(config_lib.default()))


@pytest.mark.parametrize(("key", "rule", "other"), [(key, *row) for key, row in RESUME.items()])
def test_resume_refuses_or_lists_a_change(key, rule, other):
    usual = config_lib.flatten(config_lib.default())[key]
    line = f"{key}: {usual} → {other}"
    if rule in ("fixed", "data"):
        with refuses("cannot be resumed", line, "--workdir"):
            resume({}, {key: other})
        allowed = {key: other, "data.allow_change": True}
        if rule == "data":
            assert resume({}, allowed) == ["data.allow_change: False → True", line]
        else:
            with refuses("cannot be resumed", line):
                resume({}, allowed)
    else:
        assert resume({}, {key: other}) == [line]
    back = f"{key}: {other} → {usual}"
    if rule == "free":
        assert resume({key: other}, {}) == [back]
    else:  # steps may not become fewer
        with refuses("cannot be resumed", back):
            resume({key: other}, {})


@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_resume_refuses_a_change_from_or_to_float64(other):
    for saved, asked in ((other, "float64"), ("float64", other)):
        with refuses(f"model.dtype: {saved} → {asked}"):
            resume({"model.dtype": saved}, {"model.dtype": asked})


def test_resume_names_every_change_that_it_refuses():
    asked = {"model.width": 64, "train.log_every": 7, "train.steps": 200, "optim.b1": 0.8}
    with refuses("model.width: 128 → 64", "optim.b1: 0.9 → 0.8", "train.steps: 300 → 200") as error:
        resume({}, asked)
    assert "log_every" not in str(error.value)


def test_resume_of_a_run_with_keys_of_another_version():
    older = config_lib.default().to_dict()
    del older["optim"]["z_loss"], older["distributed"]
    assert config_resume.completed(older) == config_lib.default().to_dict()
    with refuses("model.experts: 8 → absent"):
        resume({"model.experts": 8}, {})
    with refuses("router.kind: top → absent"):
        resume({"router.kind": "top"}, {})
    assert resume({"metrics.csv": True}, {}) == ["metrics.csv: True → absent"]


@pytest.mark.parametrize(
    ("every", "period", "said"), [(7, 10, True), (0, 50, True), (7, 14, False), (100, 50, False)]
)
def test_period_of_steps_that_are_not_saved_is_said(every, period, said):
    keys = {"checkpoint.every": every, "checkpoint.keep_period": period}
    lines = [line for line in config_notes.notes(resolved(keys)) if "keep_period" in line]
    assert bool(lines) == said, lines
    assert all(f"checkpoint.every={every} saves" in line for line in lines)
