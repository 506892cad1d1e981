"""A checkpoint of Qwen3, or of the released code, to one of ours that a run starts from."""

import collections
import pathlib
import shutil
from typing import Any

import jax
import tokenizers
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax import config_notes
from deltares_jax.data import tokens
from deltares_jax.interop import files, hf_config, names, placing
from deltares_jax.models import sizes, variants
from deltares_jax.printing import human_count, say
from deltares_jax.training import checkpoint, optim, signals
from deltares_jax.training import workdir as workdir_lib

_OURS = {workdir_lib.KEPT, workdir_lib.CHECKPOINTS, workdir_lib.CONFIG, workdir_lib.RUN, ".lock"}


def _residual(found: dict[str, Any] | None, asked: dict[str, Any], layers: int) -> dict[str, Any]:
    """The `model.residual` section of a conversion.

    A plain model takes what is asked for, centred where the variant can be: zero queries then
    leave the model as it is, and learn from the first step. A routed one keeps its own.

    Args:
      found: in the checkpoint; None for a plain model.
      asked: by flags; None where one is not given.
      layers: of the model.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    if found is not None:
        for key, value in given.items():
            if value != found[key]:
                raise ValueError(
                    f"--{key}={value}, but the checkpoint has {key}={found[key]}; leave the flag "
                    "out: a routed model keeps its routing"
                )
        return found
    residual = {"variant": "baseline", "gate": "none", **given}
    if residual["variant"] not in variants.VARIANTS:
        return residual  # the checks of the config refuse it
    row = variants.VARIANTS[residual["variant"]]
    if row.grows == "block" and "num_blocks" not in given:
        raise ValueError(
            f"--num_blocks is missing: {residual['variant']} needs a number of blocks; "
            f"num_hidden_layers={layers}"
        )
    centered = "centered" in row.options and residual["gate"] != "alpha"
    return {"centered": centered, **residual}


def _config(
    hf: str,
    folder: pathlib.Path,
    values: dict[str, Any],
    stored: dict[str, files.Stored],
    asked: dict[str, Any],
) -> tuple[FrozenConfigDict, list[str]]:
    """The config of the converted checkpoint, and what to say about it."""
    model, notes = hf_config.read(values, str(folder / hf_config.FILE))
    if "head_dim" not in model:
        norm = "model.layers.0.self_attn.q_norm.weight"
        if norm not in stored or len(stored[norm].shape) != 1:
            raise ValueError(f"{norm} is missing in {folder}, or no vector")
        model["head_dim"] = stored[norm].shape[0]
        notes.append(f"head_dim is not in {hf_config.FILE}: {model['head_dim']}, as {norm} has it")
    model["residual"] = _residual(model.get("residual"), asked, model["num_layers"])
    config = config_lib.default()
    config.model.update(model)
    if (folder / tokens.FILE).exists():
        config.data.tokenizer = str(folder) if pathlib.Path(hf).expanduser().exists() else hf
        size = _tokenizer_size(folder / tokens.FILE)
        if size > config.model.vocab_size:
            raise ValueError(
                f"{folder / tokens.FILE} has ids up to {size - 1}, but vocab_size="
                f"{config.model.vocab_size} in {hf_config.FILE}: they would have no embedding"
            )
        notes.append(
            f"tokenizer: ids below {size:,}; the embedding has {config.model.vocab_size:,} rows, "
            "all are kept"
        )
    try:
        return config_lib.resolve(config), notes
    except ValueError as error:
        plain, where = values["model_type"] == hf_config.PLAIN, str(folder / hf_config.FILE)
        raise ValueError(hf_config.in_its_words(str(error), where, plain)) from None


def _tokenizer_size(path: pathlib.Path) -> int:
    try:
        ids = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read as a tokenizer.json ({error})") from None
    return 1 + max(ids, default=-1)


def _summary(model: FrozenConfigDict, hf: str) -> str:
    head = "tied" if model.tied else "untied"
    return (
        f"{hf}: {model.num_layers} layers, width {model.width}, {model.num_heads} heads and "
        f"{model.num_kv_heads} KV heads of {model.head_dim}, MLP {model.mlp_width}, vocabulary "
        f"{model.vocab_size:,}, {head}, rope_theta {model.rope_theta:.12g}, eps {model.norm_eps:g}"
    )


def _fresh_lines(
    config: FrozenConfigDict, stored: Any, wanted: dict[str, names.Tensor]
) -> list[str]:
    """Which parameters are new."""
    fresh = {t.leaf: t for name, t in wanted.items() if name not in stored}
    if not fresh:
        return ["new parameters: none"]
    listed = (
        f"{leaf} {[config.model.num_layers] * (t.layer is not None) + list(t.part)}"
        for leaf, t in fresh.items()
    )
    return [f"new parameters, at their start: {', '.join(listed)}"]


def _residual_notes(config: FrozenConfigDict, asked: dict[str, Any]) -> list[str]:
    has_blocks = variants.VARIANTS[config.model.residual.variant].grows == "block"
    return config_notes.notes(config) if has_blocks or asked.get("num_blocks") else []


def _open_out(out: str) -> pathlib.Path:
    """The folder to convert to; one where a conversion was cut short will do."""
    folder = workdir_lib.open_workdir(out, "--out")
    strangers = sorted({path.name for path in folder.iterdir()} - _OURS)
    if strangers or workdir_lib.steps(folder):
        what = strangers[0] if strangers else "a checkpoint"
        raise ValueError(f"--out={out} holds {what} already; give a new folder")
    return folder


def convert(hf: str, out: str, asked: dict[str, Any]) -> None:
    """Converts a checkpoint.

    Args:
      hf: its folder, or a hub id.
      out: folder of the run that gets it as its checkpoint of step 0, parameters alone.
      asked: of `model.residual`, by flags; None where one is not given.

    Raises:
      ValueError: the checkpoint is incomplete, damaged, or of another architecture; or `out` is in
        use.
      signals.Stop: it cannot be written.
    """
    target = _open_out(out)
    folder = files.locate(hf)
    values = files.read_json(folder / hf_config.FILE)
    stored = files.stored_tensors(folder)
    config, notes = _config(hf, folder, values, stored, asked)
    wanted = names.tensors(config.model)
    left_out = {names.HEAD} if config.model.tied else set()
    if hf_config.ignores_null_source(values):
        left_out |= {n for n in stored if n.endswith(names.NULL_SOURCES)}
    plain = values["model_type"] == hf_config.PLAIN
    needed = {n: t for n, t in wanted.items() if not (plain and optim.is_routing(t.leaf))}
    files.check(stored, needed, left_out, folder)

    if left_out & stored.keys():
        if names.HEAD in left_out & stored.keys():
            placing.check_tied_head(stored)
            notes.append(f"{names.HEAD} equals {names.EMBEDDING}: kept once, as they are tied")
        unread = sorted(left_out & stored.keys() - {names.HEAD})
        if unread:
            notes.append(f"{len(unread)} tensors are not read by this variant: {unread[0]}, …")
    dtypes = collections.Counter(stored[name].dtype for name in needed)
    counts = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    say(_summary(config.model, hf), *notes, f"tensors: {counts}; float32 here")
    params = placing.load(config.model, stored, needed)
    total = sizes.parameter_counts(config.model)
    say(
        f"{config.model.residual.variant}: {human_count(sum(total.values()))} parameters, "
        f"{total['routing']:,} of them for routing",
        *_residual_notes(config, asked),
        *_fresh_lines(config, stored, wanted),
    )
    with workdir_lib.locked(target):
        try:
            _save(target, config, params, folder)
        except (OSError, checkpoint.SaveError) as error:
            raise signals.Stop(f"--out={out}: {error}", signals.CANNOT_SAVE) from error
    say(
        f"{workdir_lib.shown(target)}: checkpoint of step 0, parameters alone",
        f"next: --config.init_from={workdir_lib.shown(target)}",
    )


def _save(
    target: pathlib.Path, config: FrozenConfigDict, params: Any, folder: pathlib.Path
) -> None:
    kept = target / workdir_lib.KEPT
    kept.mkdir(exist_ok=True)
    for name in (hf_config.FILE, *files.COMPANIONS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, kept / name)
    workdir_lib.write_run_files(target, config, jax.devices())
    with checkpoint.Checkpointer(target, keep=1) as checkpoints:
        checkpoints.save(0, {"params": params}, {"config": config.to_dict()})
        checkpoints.wait()
