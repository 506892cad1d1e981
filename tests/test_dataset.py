"""What a config names as its data, and runs on it: position, mixtures, evaluation sets, the end."""

import json
import math
import os
import shutil

import numpy as np
import pytest
from data_helpers import prepare_files, write_files
from ml_collections import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.data import dataset, manifest, names, pipeline, sources, tokens

T = 16


def opened(tiny, **changes) -> dataset.Data:
    for key, value in changes.items():
        section, _, key = key.partition("__")
        tiny[section][key] = value
    return dataset.open_data(FrozenConfigDict(tiny))


# --- opening what the config names


def test_library_of_the_config(prepared, tiny, monkeypatch, tmp_path):
    cache = prepared.parents[2]
    tiny.data.dir = str(cache)
    data = dataset.open_data(FrozenConfigDict(tiny))
    part = data.parts["py_stdlib"]
    assert part.manifest == manifest.read(prepared)
    assert data.fingerprint == part.manifest["fingerprint"]
    size = part.manifest["splits"]["train"]["tokens"]
    assert len(part.rows["train"]) == math.ceil((size - 1) / T)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(cache.parent))
    for path in (f"~/{cache.name}", os.path.relpath(cache), str(prepared)):
        tiny.data.dir = path
        assert dataset.open_data(FrozenConfigDict(tiny)).fingerprint == data.fingerprint
    assert not list(tmp_path.iterdir())  # nothing was prepared anew


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__source": "fineweb_edu/sample-10BT"},
            "data.source='fineweb_edu/sample-10BT' with data.tokenizer='byte' is not prepared .*"
            ": python -m deltares_jax.data.prepare --source=fineweb_edu/sample-10BT --tok",
        ),
        ({"data__tokenizer": "Qwen/Qwen3-0.6B"}, "'Qwen/Qwen3-0.6B' is not prepared"),
        (
            {"data__mixture": "nowhere=1"},
            "data.mixture: 'nowhere' is neither a folder of prepared data",
        ),
        ({"model__vocab_size": 256}, "model.vocab_size=256 must be at least 257.*='byte'"),
        ({"eval__sets": "own=nowhere", "eval__every": 1}, "eval.sets: 'nowhere' is neither"),
        (
            {"data__mixture": "{corpora}/long=1,{corpora}/in/../long=1"},
            "data.mixture=.* names .*/long twice, as .*/long and as .*/in/../long",
        ),
        (
            {"data__source": "text", "data__tokenizer": "a b"},
            "--source=text --tokenizer='a b' --path=YOUR_FILES --out=.*/text/a--b; to train",
        ),
        (
            {"data__dir": "{corpora}/long"},
            "data.source='py_stdlib', but data.dir='.*long' holds 'text'",
        ),
        (
            {"data__source": "{corpora}/held"},
            "held: there is no text in split train",
        ),
        (
            {"eval__sets": "own={corpora}/short", "eval__every": 1},
            "short: there is no text in split validation",
        ),
        (
            {"data__source": "{corpora}/long", "data__tokenizer": "{bpe}"},
            "data.tokenizer=.*, but .*long was prepared with 'byte'",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused(prepared, tiny, corpora, bpe, changes, message):
    tiny.data.dir = str(prepared.parents[2])
    changes = {
        key: value.format(corpora=corpora, bpe=bpe) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        opened(tiny, **changes)


def test_tokenizer_that_changed_under_its_name_is_refused(tiny, corpora, bpe, tmp_path):
    shutil.copytree(bpe, tmp_path / "bpe")
    name = str(tmp_path / "bpe")
    for place in ("before", "after"):
        prepare_files(tmp_path / place, corpora / "in/long", tokenizer=tokens.get_tokenizer(name))
        definition = tmp_path / "bpe" / "tokenizer.json"
        definition.write_text(definition.read_text() + "\n")
    model = {"model__vocab_size": 300, "data__tokenizer": name, "eval__every": 1}
    before, after = tmp_path / "before", tmp_path / "after"
    for changes in (
        {"data__mixture": f"{before}=1,{after}=1"},
        {"data__mixture": "", "data__source": str(before), "eval__sets": f"x={after}"},
    ):
        with pytest.raises(ValueError, match=f"{after} was prepared with another '{name}'"):
            opened(tiny, **model, **changes)
    opened(tiny, eval__sets=f"x={before}")


def test_source_without_held_out_text_is_told(tiny, corpora):
    long, short = corpora / "long", corpora / "short"
    data = opened(tiny, data__mixture=f"{long}=1,{short}=1", eval__every=1)
    assert list(data.eval_sets) == [str(long)]
    told = [line for line in data.describe(0) if "no validation split" in line]
    assert told == [f"{short}: has no validation split to evaluate on"]


def test_tokenizer_that_moved_is_known_by_its_content(tiny, corpora, bpe, tmp_path):
    tokenizer = tokens.get_tokenizer(str(bpe))
    prepare_files(tmp_path / "out", corpora / "in" / "long", tokenizer=tokenizer)
    shutil.copytree(bpe, tmp_path / "moved")
    names_ = {"data__source": "text", "data__dir": str(tmp_path / "out")}
    model = {"model__vocab_size": 300}
    opened(tiny, data__tokenizer=str(tmp_path / "moved"), **names_, **model)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", {}),
        ("a=1", {"a": 1.0}),
        ("/d/x=0.7, fineweb_edu/default=0.3", {"/d/x": 0.7, "fineweb_edu/default": 0.3}),
    ],
)
def test_mixture_is_a_list_of_weights(text, parsed):
    assert names.parse_mixture(text) == parsed


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("data.mixture", "a", "'a' must have the form SOURCE_OR_FOLDER=WEIGHT"),
        ("data.mixture", "a=1,a=2", "names a twice"),
        ("data.mixture", "a=0", "the weight '0' of a must be a number from 1e-6 to 1e6"),
        ("data.mixture", "a=nan", "the weight 'nan' of a"),
        ("data.mixture", "a=x", "the weight 'x' of a"),
        ("eval.sets", "a", "'a' must have the form NAME="),
        ("eval.sets", "=b", "'=b' must have the form NAME="),
    ],
)
def test_list_of_another_form_is_refused(tiny, key, text, message):
    section, _, name = key.partition(".")
    tiny[section][name] = text
    with pytest.raises(ValueError, match=f"{key}='{text}'.*{message}"):
        config_lib.resolve(tiny)


def test_evaluation_sets_by_name_and_split():
    parsed = names.parse_sets("web=fineweb_edu/default,own=/d/x:train,b=c:validation,w=a:b")
    assert parsed == {
        "web": ("fineweb_edu/default", "validation"),
        "own": ("/d/x", "train"),
        "b": ("c", "validation"),
        "w": ("a:b", "validation"),
    }


# --- every token once, and nothing held out among them


def test_training_and_held_out_documents_do_not_meet(corpora):
    made = dataset.Dataset(corpora / "long", T)
    texts = {}
    for split, stream in made.streams.items():
        ids = stream[0 : len(stream)]
        ends = np.flatnonzero(ids == 256) + 1
        texts[split] = {part.tobytes() for part in np.split(ids, ends)[:-1]}
    assert len(texts["train"]) + len(texts["validation"]) == 400
    assert texts["train"].isdisjoint(texts["validation"])
    assert texts["validation"]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_an_epoch_trains_on_every_token_once(tmp_path, monkeypatch, processes):
    """Consecutive numbers, as documents of prepared files, over the shares of the processes."""
    monkeypatch.setattr(sources.Source, "split", lambda self, part, name: "train")
    numbers = range(0x4E00, 0x4E00 + 24 * 4 * 4)  # each is 3 bytes and an end, so 4 make a row
    lines = [json.dumps({"text": chr(number)}) + "\n" for number in numbers]
    write_files(tmp_path / "in", {"a.jsonl": "".join(lines[:101]).encode()})
    write_files(tmp_path / "in", {"b.jsonl": "".join(lines[101:]).encode()})
    prepare_files(tmp_path / "out", tmp_path / "in")
    rows = dataset.Dataset(tmp_path / "out", T).rows["train"]
    order = pipeline.Order([len(rows)], [1], 0)
    seen = []
    for process in range(processes):
        batches = pipeline.train_batches([rows], order, 24, 0, process, processes)
        seen += [next(batches)["inputs"] for _ in range(4)]
    assert {inputs.shape for inputs in seen} == {(24 // processes, T)}
    cells = np.concatenate([inputs.reshape(-1, 4) for inputs in seen])
    assert (cells[:, 3] == 256).all()
    trained = [ord(bytes(cell[:3].astype(np.uint8)).decode()) for cell in cells]
    assert sorted(trained) == list(numbers)
