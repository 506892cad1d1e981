"""What an import refuses: files that are not complete, tensors and tokenizers that do not fit."""

import json

import convert_helpers as helpers
import jax
import numpy as np
import pytest
from convert_helpers import TIED, convert, refuses
from run_helpers import newest

from deltares_jax import load
from deltares_jax.interop import exporting, files
from deltares_jax.training import signals


@pytest.fixture
def tied(tmp_path):
    return helpers.copy_case(TIED, tmp_path / "in")


@pytest.fixture
def sharded(tied):
    helpers.write_tensors(tied, helpers.read_tensors(tied), shards=3)
    return tied


# head_dim.


def test_head_dim_that_is_not_stated_is_that_of_the_tensors(tied, tmp_path, capsys):
    helpers.edit_json(tied / "config.json", head_dim=...)
    convert(tied, tmp_path / "run")
    assert "head_dim is not in config.json: 16, as model.layers.0.self_attn.q_norm" in (
        capsys.readouterr().out
    )
    assert load(tmp_path / "run").config.model.head_dim == 16
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == 16


def test_head_dim_that_the_tensors_contradict_is_refused(tied, tmp_path):
    helpers.edit_json(tied / "config.json", head_dim=8)
    with refuses("model.safetensors: ", "has the shape", "by config.json it must be"):
        convert(tied, tmp_path / "run")


# Files and tensors.


def edit_tensors(folder, shards=1, **changes):
    tensors = helpers.read_tensors(folder) | {k.replace("__", "."): v for k, v in changes.items()}
    helpers.write_tensors(folder, {k: v for k, v in tensors.items() if v is not ...}, shards)


K_NORM = "model.layers.1.self_attn.k_norm.weight"


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def rename_in_index(folder, **changes):
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map = weight_map | {k.replace("__", "."): v for k, v in changes.items()}
    helpers.write_json(index, {"weight_map": {k: v for k, v in weight_map.items() if v}})


SECOND = "model-00002-of-00003.safetensors"
DAMAGE = {
    "a shard is gone": (lambda f: (f / SECOND).unlink(), [SECOND, "is not there"]),
    "a shard is cut": (lambda f: cut(f / SECOND), [SECOND, "is cut or damaged"]),
    "a shard is empty": (lambda f: (f / SECOND).write_bytes(b""), [SECOND, "is cut or damaged"]),
    "the index names no such tensor": (
        lambda f: rename_in_index(f, model__layers__9__x=SECOND),
        [SECOND, "does not hold model.layers.9.x"],
    ),
    "the index leaves a tensor out": (
        lambda f: rename_in_index(f, model__norm__weight=None),
        ["holds model.norm.weight", "index.json does not name"],
    ),
    "the index has a tensor elsewhere": (
        lambda f: rename_in_index(f, model__norm__weight="model-00001-of-00003.safetensors"),
        ["model-00001-of-00003.safetensors does not hold model.norm.weight"],
    ),
    "a file is of no index": (
        lambda f: (f / "model.safetensors").write_bytes((f / SECOND).read_bytes()),
        ["model.safetensors: ", "names no tensor of it"],
    ),
    "the index is no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        ["index.json is damaged"],
    ),
    "the index names no files": (
        lambda f: rename_in_index(f, model__norm__weight=2),
        ["index.json is damaged: its weight_map must give each tensor a file's name"],
    ),
    "a shard is a folder": (
        lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()),
        [f"{SECOND}: Is a directory"],
    ),
    "the index is gone": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        ["must hold model.safetensors.index.json", "it has model-00001-of-00003.safetensors"],
    ),
    "a layer has no norm": (
        lambda f: edit_tensors(f, 3, **{K_NORM: ...}),
        [f"{K_NORM} is missing"],
    ),
    "a tensor of no model": (
        lambda f: edit_tensors(f, 3, **{"score.weight": np.ones((2, 32), np.float32)}),
        ["safetensors: score.weight belongs to no model"],
    ),
    "a wrong shape": (
        lambda f: edit_tensors(f, 3, **{K_NORM: np.ones(8, np.float32)}),
        ["safetensors: ", K_NORM, "has the shape [8]; by config.json it must be [16]"],
    ),
    "a wrong type": (
        lambda f: edit_tensors(f, 3, **{K_NORM: np.ones(16, np.float64)}),
        ["safetensors: ", K_NORM, "is of type F64; it must be one of BF16, F16, F32"],
    ),
    "not a number": (
        lambda f: edit_tensors(f, 3, **{K_NORM: np.full(16, np.nan, np.float32)}),
        ["safetensors: ", K_NORM, "not finite"],
    ),
    "no weights": (
        lambda f: [p.unlink() for p in [*f.glob("*.safetensors"), *f.glob("*.index.json")]],
        ["must hold", "it has none"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json: No such file"]),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json is dam"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_incomplete_checkpoint_is_refused_and_leaves_nothing(sharded, tmp_path, damage):
    change, words = DAMAGE[damage]
    change(sharded)
    with refuses(*words):
        convert(sharded, tmp_path / "run")
    assert newest(tmp_path / "run") is None


def test_types_may_be_mixed_and_are_counted(tied, tmp_path, capsys):
    tensors = helpers.read_tensors(tied)
    kinds = [helpers.TYPES[kind] for kind in ("BF16", "F16", "F32")]
    mixed = {n: array.astype(kinds[i % 3]) for i, (n, array) in enumerate(tensors.items())}
    helpers.write_tensors(tied, mixed, shards=2)
    convert(tied, tmp_path / "run")
    assert "tensors: 8 BF16, 8 F16, 8 F32; float32 here" in capsys.readouterr().out
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    for name, array in helpers.read_tensors(tmp_path / "out").items():
        np.testing.assert_array_equal(array, tensors[name].astype(np.float32), err_msg=name)


def test_head_of_a_tied_model_is_dropped_where_it_is_the_embedding(tied, tmp_path, capsys):
    embedding = helpers.read_tensors(tied)["model.embed_tokens.weight"]
    edit_tensors(tied, **{"lm_head.weight": embedding})
    convert(tied, tmp_path / "run")
    assert "lm_head.weight equals model.embed_tokens.weight: kept once" in capsys.readouterr().out
    other = embedding.copy()
    other[5, 5] += 1
    edit_tensors(tied, **{"lm_head.weight": other})
    with refuses("lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"):
        convert(tied, tmp_path / "other")


def test_untied_model_without_a_head_is_refused(tied, tmp_path):
    helpers.edit_json(tied / "config.json", tie_word_embeddings=False)
    with refuses("lm_head.weight is missing", "by tie_word_embeddings=false"):
        convert(tied, tmp_path / "run")
    helpers.edit_json(tied / "config.json", tie_word_embeddings=...)  # false by default
    with refuses("lm_head.weight is missing"):
        convert(tied, tmp_path / "run")


def test_null_sources_that_a_mode_ignores_are_left_out(tied, tmp_path, capsys):
    new = {}
    for layer in (0, 1):
        for kind in ("attn", "mlp"):
            start = f"model.layers.{layer}.{kind}_"
            new[f"{start}res_proj.weight"] = np.zeros((1, 32), np.float32)
            new[f"{start}res_norm.weight"] = new[f"{start}null_source"] = np.ones(32, np.float32)
    edit_tensors(tied, **new)
    changes = {"architectures": ["Qwen3AttnResForCausalLM"], "attnres_use_null_source": True}
    helpers.edit_json(
        tied / "config.json", model_type="qwen3_attnres", attnres_mode="delta_replace", **changes
    )
    convert(tied, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "4 tensors are not read by this variant: model.layers.0.attn_null_source" in printed
    assert "new parameters: none" in printed
    with refuses("--gate=scalar, but the checkpoint has gate=none"):
        convert(tied, tmp_path / "other", gate="scalar")


# Tokenizer and rows of the embedding.


def write_tokenizer(folder, size):
    import tokenizers

    words = {f"w{i}": i for i in range(size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_rows_above_the_tokenizer_are_kept_and_its_files_passed_on(tied, tmp_path, capsys):
    write_tokenizer(tied, 60)
    (tied / "merges.txt").write_text("a b\n")
    convert(tied, tmp_path / "run")
    assert "tokenizer: ids below 60; the embedding has 97 rows, all are kept" in (
        capsys.readouterr().out
    )
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    assert helpers.read_tensors(tmp_path / "out")["model.embed_tokens.weight"].shape == (97, 32)
    for name in ("tokenizer.json", "merges.txt", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tied / name).read_bytes()
    assert "passed on: tokenizer.json, merges.txt, generation" in capsys.readouterr().out


def test_tokenizer_larger_than_the_model_is_refused(tied, tmp_path):
    write_tokenizer(tied, 130)
    with refuses("tokenizer.json has ids up to 129, but vocab_size=97"):
        convert(tied, tmp_path / "run")
    (tied / "tokenizer.json").write_text("{}")
    with refuses("tokenizer.json cannot be read"):
        convert(tied, tmp_path / "run")


# What is left by an export that was cut short.


def test_export_that_fails_half_way_leaves_no_folder(tied, tmp_path, monkeypatch):
    convert(tied, tmp_path / "run")

    def full(*arguments, **options):
        (tmp_path / "seen").write_text(str(list(tmp_path.glob(".out*"))))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.safetensors.numpy, "save_file", full)
    with pytest.raises(signals.Stop, match=r"--out=.*cannot be written: .*No space left") as stop:
        exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    assert stop.value.code == signals.CANNOT_SAVE
    assert ".partial" in (tmp_path / "seen").read_text()
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_weights_without_their_config_are_not_taken_as_a_checkpoint(tied, tmp_path):
    """An export that is killed leaves that: config.json is written last."""
    convert(tied, tmp_path / "run")
    partial = tmp_path / ".out.partial"
    exporting.export(str(tmp_path / "run"), None, str(partial))
    (partial / "config.json").unlink()
    (tmp_path / "out").mkdir()  # an empty one will do
    with refuses("config.json: No such file"):
        convert(partial, tmp_path / "again")
    assert files.stored_tensors(partial)  # all of them are there
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "out"))
    assert not partial.exists()


def test_large_models_are_exported_to_several_files(tied, tmp_path, monkeypatch):
    """Through a link, to the folder behind it; each file has whole tensors, the index all."""
    convert(tied, tmp_path / "run", variant="delta_attnres")
    monkeypatch.setattr(exporting, "_SHARD_BYTES", 40_000)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    exporting.export(str(tmp_path / "run"), None, str(tmp_path / "link"))
    written = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    numbers = range(1, len(written) + 1)
    assert written == [f"model-{n:05}-of-{numbers[-1]:05}.safetensors" for n in numbers]
    assert max((tmp_path / "out" / name).stat().st_size for name in written) < 45_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = helpers.read_tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    convert(tmp_path / "out", tmp_path / "again")
    before, after = (load(tmp_path / name).params for name in ("run", "again"))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_an_export_does_not_overwrite(tied, tmp_path):
    convert(tied, tmp_path / "run")
    with refuses("--out=", "is there already; give a new folder"):
        exporting.export(str(tmp_path / "run"), None, str(tied))
