"""A checkpoint of ours to a folder of safetensors, for transformers or the released code."""

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax import config_checks
from deltares_jax.data import tokens
from deltares_jax.interop import files, hf_config, names, placing
from deltares_jax.printing import say
from deltares_jax.training import checkpoint, signals
from deltares_jax.training import workdir as workdir_lib

_SHARD_BYTES = 5 * 10**9


def _open_out(out: str) -> pathlib.Path:
    """The folder to write, which must be new or empty."""
    config_checks.local_folder("--out", out)
    target = pathlib.Path(out).expanduser().resolve()  # it is renamed to, which no link can be
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"--out={out} is there already; give a new folder")
    return target


def _shards(wanted: dict[str, names.Tensor], itemsize: int) -> list[list[str]]:
    """The tensors of each file, layers in their order."""
    order = sorted(wanted, key=lambda name: (wanted[name].layer or -1, name))
    shards: list[list[str]] = [[]]
    held = 0
    for name in order:
        size = int(np.prod(wanted[name].shape)) * itemsize
        if held and held + size > _SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


@jax.jit
def _layer(leaf: jax.Array, layer: int) -> jax.Array:
    return lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)


def _write_weights(params: Any, wanted: dict[str, names.Tensor], folder: pathlib.Path) -> list[str]:
    """Writes the tensors, one file at a time in the host's memory; returns the files' names."""
    leaves = placing.by_path(params)
    itemsize = next(iter(leaves.values())).dtype.itemsize
    shards = _shards(wanted, itemsize)
    weight_map: dict[str, str] = {}
    total, written = 0, []
    for number, inside in enumerate(shards, start=1):
        single = len(shards) == 1
        file = files.SINGLE if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = {}
        for name in inside:
            tensor = wanted[name]
            leaf = leaves[tensor.leaf]
            part = leaf if tensor.layer is None else _layer(leaf, tensor.layer)
            arrays[name] = tensor.to_theirs(np.asarray(part))
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # the library would have nobody else read it
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
        weight_map |= dict.fromkeys(inside, file)
        total += sum(array.nbytes for array in arrays.values())
        written.append(file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return written


def _companions(run: pathlib.Path, tokenizer: str) -> tuple[list[pathlib.Path], dict[str, Any]]:
    """Tokenizer and generation files to pass on, and the config.json of the imported model."""
    kept = run / workdir_lib.KEPT
    source = files.read_json(kept / hf_config.FILE) if (kept / hf_config.FILE).exists() else {}
    if not kept.is_dir() and tokenizer != tokens.BYTE:
        path = pathlib.Path(tokenizer).expanduser()
        kept = path.parent if path.is_file() else path
        if not path.exists():
            kept = config_lib.cache_folder() / "tokenizers" / tokenizer
    return [kept / name for name in files.COMPANIONS if (kept / name).is_file()], source


def export(workdir: str, step: int | None, out: str) -> None:
    """Writes a checkpoint as safetensors with a config.json.

    Args:
      workdir: of the run, or one of its checkpoints.
      step: which checkpoint; the newest when None.
      out: folder to write; it is there whole or not at all.

    Raises:
      ValueError: there is no such checkpoint, or `out` is there already or cannot be made.
      signals.Stop: it cannot be written.
    """
    target = _open_out(out)
    run, at = workdir_lib.locate(workdir, step)
    reader = checkpoint.Checkpointer(run)
    try:
        config = config_lib.resolve(config_lib.from_dict(reader.read_meta(at)["config"]))
        if config.model.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        params = reader.restore(at, {"params": placing.abstract(config.model)})["params"]
    except checkpoint.DamagedError as error:
        raise ValueError(f"--workdir={workdir}: {error}") from error
    companions, source = _companions(run, config.data.tokenizer)
    dtype = str(params["embedding"].dtype)
    values = hf_config.write(config.model, dtype, config.data.seq_len, source)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be made: {error.strerror}") from None
    try:
        written = _write_weights(params, names.tensors(config.model), partial)
        for path in companions:
            shutil.copyfile(path, partial / path.name)
        (partial / hf_config.FILE).write_text(json.dumps(values, indent=2) + "\n")
        partial.rename(target)
    except (OSError, safetensors.SafetensorError) as error:
        raise signals.Stop(f"--out={out} cannot be written: {error}", signals.CANNOT_SAVE) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(*_lines(config, f"{workdir_lib.shown(run)}@{at}", values, written, companions))


def _lines(
    config: FrozenConfigDict,
    source: str,
    values: dict[str, Any],
    written: list[str],
    companions: list[pathlib.Path],
) -> list[str]:
    variant, mode = config.model.residual.variant, values.get("attnres_mode")
    if mode is None:
        loads = "transformers.AutoModelForCausalLM loads it"
    elif hf_config.is_ours_alone(values):
        loads = (
            f"attnres_mode={mode}{', attnres_centered' * config.model.residual.centered}: the "
            "released code has no counterpart, and transformers refuses it; convert import reads it"
        )
    else:
        loads = f"attnres_mode={mode}: the released code loads it"
        if config.model.residual.gate != "none":
            loads += (
                "; its from_pretrained sets gates back to their start, load_state_dict does not"
            )
    passed = ", ".join(path.name for path in companions) or "none"
    count = f"{len(written)} files" if written[1:] else written[0]
    return [
        f"{source}: {variant}, vocabulary {config.model.vocab_size:,}, {values['torch_dtype']}, "
        f"in {count}",
        f"passed on: {passed}",
        loads,
    ]
