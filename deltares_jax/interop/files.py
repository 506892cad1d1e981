"""The files of a safetensors checkpoint: found, fetched, and checked against what a model needs."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import safetensors

from deltares_jax import config as config_lib
from deltares_jax.data import hub
from deltares_jax.interop import hf_config
from deltares_jax.interop.names import HEAD, Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What goes with a model besides its weights: passed on as it is.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPES = ("BF16", "F16", "F32")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor is, and what its file says of it."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]


def locate(hf: str) -> pathlib.Path:
    """The folder of a checkpoint: a local one, or a hub id's files, downloaded and checked.

    Raises:
      ValueError: there is none.
    """
    folder = pathlib.Path(hf).expanduser().absolute()
    if folder.is_dir():
        return folder
    if folder.exists() or not hub.is_repository(hf):
        raise ValueError(
            f"--hf={hf} is neither a folder nor a hub id of the form OWNER/NAME; give the folder "
            f"that holds {hf_config.FILE}"
        )
    folder = config_lib.cache_folder() / "models" / hf
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {hf_config.FILE, INDEX, *COMPANIONS}
    try:
        listed = hub.list_files(hf, "main", "", kind="models")
    except ValueError as error:
        raise ValueError(f"--hf={hf} is no folder, and no hub id that answers: {error}") from None
    remotes = [
        remote
        for remote in listed
        if remote.path in wanted or re.fullmatch(r"[^/]+\.safetensors", remote.path)
    ]
    for old in set(folder.glob("*.*")) - {folder / remote.path for remote in remotes}:
        if not old.name.endswith(".download"):
            old.unlink()  # of an earlier revision
    for remote in remotes:
        target = folder / remote.path
        if target.exists() and hub.file_sha256(target) != remote.sha256:
            target.unlink()  # another revision; small files have no sha256 there and come again
        hub.download(remote, target)
    return folder


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: the file is missing or holds none.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return values


def _shards(folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """The files of weights, and what the index says: tensor → file; empty without an index."""
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    index = folder / INDEX
    if not index.exists():
        if present == [SINGLE]:
            return present, {}
        found = present or sorted(p.name for p in folder.glob("*.bin"))
        raise ValueError(
            f"{folder} must hold {INDEX}, or {SINGLE} and no other file of weights; it has "
            f"{', '.join(found[:4]) or 'none'}{_more(found[3:])}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is damaged: its weight_map names no tensor")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is damaged: its weight_map must give each tensor a file's name")
    absent = sorted(set(weight_map.values()) - set(present))
    if absent:
        raise ValueError(f"{index} names {absent[0]}, which is not there{_more(absent)}")
    stale = sorted(set(present) - set(weight_map.values()))
    if stale:
        raise ValueError(
            f"{folder / stale[0]}: {INDEX} names no tensor of it{_more(stale)}; remove the one "
            "that is not of this model"
        )
    return present, weight_map


def stored_tensors(folder: pathlib.Path) -> dict[str, Stored]:
    """What the files of weights hold, from their headers.

    Raises:
      ValueError: a file is missing, cut or damaged, or is not what the index says.
    """
    found: dict[str, Stored] = {}
    names, weight_map = _shards(folder)
    for path in map(folder.joinpath, names):
        try:
            path.open("rb").close()  # safetensors tells a wrong reason where it cannot
            with safetensors.safe_open(path, "np") as file:
                for tensor in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(tensor)
                    if tensor in found:
                        raise ValueError(f"{tensor} is in {found[tensor].file} and in {path}")
                    found[tensor] = Stored(path, part.get_dtype(), tuple(part.get_shape()))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is cut or damaged ({error}); fetch it again") from None
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from None
    if weight_map:
        absent = sorted(
            tensor
            for tensor, name in weight_map.items()
            if tensor not in found or found[tensor].file.name != name
        )
        if absent:
            raise ValueError(
                f"{folder / weight_map[absent[0]]} does not hold {absent[0]}{_more(absent)}, which "
                f"{INDEX} says is there; fetch both again"
            )
        unnamed = sorted(found.keys() - weight_map.keys())
        if unnamed:
            raise ValueError(
                f"{found[unnamed[0]].file} holds {unnamed[0]}{_more(unnamed)}, which {INDEX} does "
                "not name; fetch both again"
            )
    return found


def check(
    stored: dict[str, Stored], wanted: dict[str, Tensor], left_out: set[str], folder: pathlib.Path
) -> None:
    """Refuses a checkpoint that does not hold just what the model needs.

    Args:
      stored: from `stored_tensors`.
      wanted: from `names.tensors`.
      left_out: names that may be there and are not read.
      folder: of the checkpoint.

    Raises:
      ValueError: names the tensor and the file.
    """
    missing = sorted(wanted.keys() - stored.keys())
    if missing:
        why = " by tie_word_embeddings=false" if missing[0] == HEAD else ""
        raise ValueError(
            f"{missing[0]} is missing in {folder}{_more(missing)}; {hf_config.FILE} asks for it"
            + why
        )
    extra = sorted(stored.keys() - wanted.keys() - left_out)
    if extra:
        raise ValueError(
            f"{stored[extra[0]].file}: {extra[0]} belongs to no model that {hf_config.FILE} "
            f"describes{_more(extra)}"
        )
    for name, at in stored.items():
        if name in wanted and at.shape != wanted[name].shape:
            raise ValueError(
                f"{at.file}: {name} has the shape {list(at.shape)}; by {hf_config.FILE} it must be "
                f"{list(wanted[name].shape)}"
            )
        if at.dtype not in DTYPES:
            raise ValueError(
                f"{at.file}: {name} is of type {at.dtype}; it must be one of {', '.join(DTYPES)}"
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if names[1:] else ""
