"""Configuration: the defaults, the paper's recipe, all checks, and what a resumed run may change.

Free of jax, so that bad input is refused before a device starts. A recipe under configs/ changes
what `default()` or `paper()` returns; `resolve()` checks it once and freezes it.
"""

import os
import pathlib
from typing import Any

from ml_collections.config_dict.config_dict import ConfigDict, FrozenConfigDict

from deltares_jax import config_checks
from deltares_jax.models import sizes


def cache_folder() -> pathlib.Path:
    """The user's cache folder for prepared data and compiled programs.

    Raises:
      ValueError: the user has no home.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(home).expanduser() / "deltares_jax"
    except RuntimeError:
        raise ValueError("this user has no home folder for caches; set XDG_CACHE_HOME") from None


def _default_model() -> ConfigDict:
    return ConfigDict(
        {
            "vocab_size": 257,  # at least the ids of the tokenizer
            "width": 128,  # of embedding, stream and sources
            "num_layers": 4,  # attention and MLP each
            "num_heads": 4,  # of queries
            "num_kv_heads": 2,  # each is read by num_heads / num_kv_heads heads
            "head_dim": 32,  # set on its own, not width / num_heads
            "mlp_width": 512,  # inside the MLP
            "tied": True,  # the head is the embedding
            "rope_theta": 10000.0,  # base of the rotary embedding
            "norm_eps": 1e-6,  # of every RMSNorm, those of readers included
            "dtype": "float32",  # of compute; parameters and moments are float32 or wider
            "remat": "none",  # what the backward pass keeps: see depth.REMAT_POLICIES
            "scan": "auto",  # the form of the depth loop: see depth.FORMS
            "attention": "auto",  # see attention.IMPLEMENTATIONS
            "residual": {
                "variant": "delta_block",  # see variants.VARIANTS
                "num_blocks": 2,  # of consecutive layers; no effect without blocks
                "gate": "none",  # a factor of the mix, one for each reader
                "null_source": False,  # a learned vector as the first source of each reader
                "centered": False,  # weights minus 1/S: zero queries give the baseline
                "kernel": "auto",  # how routing is computed: see residual.block_logits
            },
        }
    )


def _default_distributed() -> ConfigDict:
    return ConfigDict(
        {
            "coordinator": "",  # host:port of process 0, which takes this port and the next
            "process_id": -1,  # -1, empty and 0: as the environment says, if it does
            "num_processes": 0,  # of the whole run
            "timeout": 300.0,  # seconds to wait for the others at the start
            "heartbeat": 60.0,  # seconds after which a silent one counts as lost
        }
    )


def _default_train() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 300,  # updates
            "batch_size": 8,  # sequences of an update, over all devices
            "accumulation": 1,  # micro-batches per update
            "log_every": 1,  # steps between rows of metrics.jsonl
            "seed": 0,  # of initial values and the order of the data
            "nonfinite": "stop",  # at a loss or gradient that is not finite; or skip the update
            "nonfinite_limit": 10,  # skipped updates of the run; one more stops it
            "spike_factor": 0.0,  # skips updates of a gradient norm over so many times its median
            "stall_factor": 50.0,  # stacks are logged after so many times a step's time; 0: never
            "platform": "",  # cpu, gpu or tpu: start on no other; empty: any
            "profile_steps": "",  # "10:15" traces steps 10 to 15
            "compile_cache": "auto",  # a folder, `auto` for the user's cache folder, `off`
        }
    )


def default() -> ConfigDict:
    """Every key there is, with its type and a default that trains on a laptop.

    Lengths are in tokens, batch sizes in sequences over all devices, cadences in steps.
    """
    config = ConfigDict()
    config.init_from = ""  # RUN or RUN@STEP: the weights of another run, where there is no own
    config.init_optimizer = False  # of init_from also optimizer, step and position in the data
    config.model = _default_model()
    config.data = ConfigDict(
        {
            "source": "py_stdlib",  # a name that data.prepare knows, or a prepared folder
            "dir": "",  # empty: the user's cache folder
            "tokenizer": "byte",  # as given to data.prepare
            "seq_len": 128,  # tokens of a row
            "mixture": "",  # "a=0.7,b=0.3": shares of the rows, of sources or folders
            "document_masking": True,  # tokens see their own document alone
            "repeat": True,  # a new order once the data is used up; else the run ends there
            "allow_change": False,  # resume with other data, from its first row
            "workers": 0,  # processes that read ahead; threads do
        }
    )
    config.train = _default_train()
    config.optim = ConfigDict(
        {
            "learning_rate": 1e-3,  # the peak
            "final_learning_rate": 1e-4,  # at the last step, but for a constant schedule
            "warmup_steps": 30,  # linear from 0
            "schedule": "cosine",  # wsd: constant, then down over cooldown_steps
            "cooldown_steps": 0,  # of wsd: the last steps, down to the final rate
            "weight_decay": 0.1,  # of AdamW, times the rate
            "decay": "matrices",  # what decays: matrices alone, or all parameters
            "b1": 0.9,  # of the first moment
            "b2": 0.95,  # of the second moment
            "eps": 1e-8,  # of AdamW
            "clip_norm": 1.0,  # of the global norm; 0 is off
            "z_loss": 0.0,  # factor of the squared log of the softmax sum
            "routing_learning_rate": 0.0,  # peak of the routing parameters; 0: as of all others
            "freeze_base": False,  # routing parameters alone are trained
        }
    )
    config.eval = ConfigDict(
        {
            "every": 100,  # 0 is off
            "rows": 64,  # the first of each set, the same each time
            "batch_size": 8,  # sequences at a time, over all devices
            "sets": "",  # "web=SOURCE,own=FOLDER:train"; empty: the sources' validation splits
        }
    )
    config.checkpoint = ConfigDict(
        {
            "every": 100,  # 0: only the last step
            "every_minutes": 0.0,  # since the last one; 0 is off
            "keep": 2,  # the newest
            "keep_period": 0,  # multiples of it stay for good
            "keep_best": 0,  # of the lowest held-out loss; they are saved when they are found
        }
    )
    config.metrics = ConfigDict(
        {
            "tensorboard": True,  # files in tensorboard/
            "wandb": False,  # needs the extra wandb
            "routing_every": 0,  # steps between two measurements of routing; 0 is off
        }
    )
    config.mesh = ConfigDict(
        {
            "replica": 1,  # cuts the batch, across slices
            "data": 1,  # cuts the batch
            "fsdp": -1,  # -1: the rest of the devices
            "tensor": 1,  # cuts heads, MLP width, vocabulary, and the sequence between
            "allow_replicated": False,  # large weights that fsdp and tensor leave whole
        }
    )
    config.distributed = _default_distributed()
    return config.lock()


def paper(size: str, variant: str, num_blocks: int = 4) -> ConfigDict:
    """The pretraining recipe of "Delta Attention Residuals" (section 4 and appendix).

    Args:
      size: a name in `sizes.SIZES`.
      variant: a name in `variants.VARIANTS`.
      num_blocks: blocks, for the variants that have them.
    """
    config = default()
    config.model.update(sizes.SIZES[size])
    config.model.vocab_size = 151936
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.model.residual.variant = variant
    config.model.residual.num_blocks = num_blocks
    config.data.update(
        {
            "source": "fineweb_edu/sample-10BT",
            "tokenizer": "Qwen/Qwen3-0.6B",
            "seq_len": 2048,
        }
    )
    large = size == "7b"
    config.train.update({"steps": 10_000, "batch_size": 64 if large else 32})
    config.optim.update(
        {
            "learning_rate": 3e-4 if large else 6e-4,
            "final_learning_rate": 3e-5 if large else 6e-5,
            "warmup_steps": 500 if large else 1000,
        }
    )
    config.eval.update({"every": 500, "rows": 512, "batch_size": 64 if large else 32})
    config.checkpoint.update({"every": 500, "keep": 3})
    return config


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of a nested config."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict | dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def from_dict(values: dict[str, Any]) -> ConfigDict:
    """A config from the nested dict that `config.json` holds.

    Raises:
      ValueError: a key is unknown or missing.
    """
    config, flat = default(), flatten(values)
    config_checks.known_keys(flat, flatten(config))
    for key, value in flat.items():
        config_checks.has_type(key, value, flatten(config)[key])
    config.update(values)
    return config


def resolve(config: ConfigDict) -> FrozenConfigDict:
    """Checks everything that needs no device and freezes the config.

    Raises:
      ValueError: names the key, the value and the rule that it breaks.
    """
    flat, reference = flatten(config), flatten(default())
    config_checks.known_keys(flat, reference)
    for key, value in flat.items():
        config_checks.has_type(key, value, reference[key])
    config_checks.values(flat)
    config_checks.combinations(flat)
    return FrozenConfigDict(config)


# What a resumed run may change, by the longest matching prefix: `fixed` is refused, `free` is
# logged, `upwards` may only grow, `data` needs data.allow_change. A checkpoint that lacks a key is
# taken to have its default, so that of a new key must do what was done before there was the key.
RESUME = {
    "init_from": "free",
    "init_optimizer": "free",
    "model": "fixed",
    "model.remat": "free",
    "model.scan": "free",
    "model.attention": "free",
    "model.dtype": "free",
    "model.residual.kernel": "free",
    "data": "data",
    "data.dir": "free",
    "data.document_masking": "fixed",
    "data.repeat": "free",
    "data.allow_change": "free",
    "data.workers": "free",
    "train.steps": "upwards",
    "train.batch_size": "free",
    "train.accumulation": "free",
    "train.log_every": "free",
    "train.seed": "data",
    "train.nonfinite": "free",
    "train.nonfinite_limit": "free",
    "train.spike_factor": "free",
    "train.stall_factor": "free",
    "train.platform": "free",
    "train.profile_steps": "free",
    "train.compile_cache": "free",
    "optim": "fixed",
    "eval": "free",
    "checkpoint": "free",
    "metrics": "free",
    "mesh": "free",
    "distributed": "free",
}
