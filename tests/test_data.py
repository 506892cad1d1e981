"""Documents, prepared data sets, rows and batches: no token lost, none used twice."""

import hashlib
import itertools
import math
import os
import pathlib
import subprocess
import sys
import sysconfig
import types

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from ml_collections import FrozenConfigDict

from deltares_jax.data import ngram, pipeline, prepare, sources, tokens
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.parallel import sharding

END = 256
RECORD = 4096
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "_vendor",
    "_bundled",
    "ensurepip",
}


def use_library(monkeypatch, root: pathlib.Path):
    """Makes `root` the standard library that is read."""
    paths = types.SimpleNamespace(get_paths=lambda: {"stdlib": str(root)})
    monkeypatch.setattr(sources, "sysconfig", paths)


def write_files(root: pathlib.Path, files: dict[str, bytes]):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def relative(paths: list[pathlib.Path], root: pathlib.Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in paths]


def stream_of(documents: list[bytes]) -> np.ndarray:
    """Byte tokens with end-of-text after each document, by other code than the package's."""
    parts = [np.array([*text, END], np.uint16) for text in documents]
    return np.concatenate(parts)


def flat(batches, key: str = "row") -> list[int]:
    return np.concatenate([batch[key] for batch in batches]).tolist()


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return [next(iterator) for _ in range(count)]


# --- sources


def test_library_files_leave_out_tests_and_vendored_code(monkeypatch, tmp_path):
    kept = [
        "abc.py",
        "b-more/m.py",
        "b/__init__.py",
        "b/tester.py",
        "doctest.py",
        "test.py",
        "unittest/case.py",
    ]
    kept += [f"many/m{i:02}.py" for i in range(60)]  # enough for both splits
    other = ["b/data.txt", "lib.so", *(f"x/{name}/y/module.py" for name in LEFT_OUT)]
    write_files(tmp_path, dict.fromkeys([*kept, *other], b"pass\n"))
    use_library(monkeypatch, tmp_path)
    splits = sources.py_stdlib_files()
    names = {split: relative(paths, tmp_path) for split, paths in splits.items()}
    assert list(names) == ["train", "validation"]
    assert sorted(names["train"] + names["validation"]) == sorted(kept)
    for split in names.values():
        assert split == sorted(split)


def test_held_out_files_are_one_in_twenty_by_path_alone(monkeypatch, tmp_path):
    names = [f"package{i % 7}/module{i}.py" for i in range(1000)]
    write_files(tmp_path / "one", dict.fromkeys(names, b"one"))
    write_files(tmp_path / "other", dict.fromkeys(names[::2], b"other text"))
    held_out = {}
    for root in (tmp_path / "one", tmp_path / "other"):
        use_library(monkeypatch, root)
        files = sources.py_stdlib_files()
        held_out[root.name] = set(relative(files["validation"], root))
        assert held_out[root.name].isdisjoint(relative(files["train"], root))
    assert 30 <= len(held_out["one"]) <= 70
    assert held_out["other"] == held_out["one"] & set(names[::2])


def test_library_without_sources_is_refused(monkeypatch, tmp_path):
    use_library(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=f"py_stdlib: no .py files under {tmp_path}"):
        sources.py_stdlib_files()


# --- packing


def packed(documents: list[bytes]) -> tuple[np.ndarray, tokens.Counts]:
    counts = tokens.Counts()
    named = ((str(i), text) for i, text in enumerate(documents))
    records = list(tokens.pack(named, tokens.ByteTokenizer(), counts))
    assert all(record.shape == (RECORD,) for record in records)
    assert counts.records == len(records)
    return np.concatenate(records) if records else np.zeros(0, np.uint16), counts


def test_odd_documents_are_packed_without_loss():
    documents = [
        b"def f():\n    return 1\n",
        b"",
        b"     ",
        bytes(range(97, 123)) * (10 * RECORD // 26 + 1),
        b"\xff\xfe",
        b"<|endoftext|>",
    ]
    stream, counts = packed(documents)
    expected = stream_of([text for text in documents if text])
    np.testing.assert_array_equal(stream[: counts.tokens], expected)
    assert (stream[counts.tokens :] == END).all()
    assert (expected == END).sum() == 5
    assert (counts.documents, counts.empty_documents) == (5, 1)
    assert counts.bytes == sum(map(len, documents))
    assert counts.tokens == counts.bytes + counts.documents
    assert counts.records == 11
    assert counts.sha256 == hashlib.sha256(expected.astype("<u2").tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("lengths", "records"),
    [([], 0), ([0], 0), ([RECORD - 1], 1), ([RECORD], 2), ([RECORD - 2, 1, 2 * RECORD - 2], 3)],
)
def test_records_that_documents_just_fill(lengths, records):
    documents = [bytes([i + 1]) * length for i, length in enumerate(lengths)]
    stream, counts = packed(documents)
    text = [d for d in documents if d]
    assert counts.records == records
    if text:
        np.testing.assert_array_equal(stream[: counts.tokens], stream_of(text))


def test_decode_shows_bad_bytes_and_document_ends():
    tokenizer = tokens.ByteTokenizer()
    ids = [*tokenizer.encode("é".encode()), END, *tokenizer.encode(b"\xffa")]
    assert tokenizer.decode(ids) == "é\n\ufffda"


# --- prepared data sets


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> pathlib.Path:
    """The folder of the interpreter's own standard library, prepared."""
    return prepare.prepare_py_stdlib(tmp_path_factory.mktemp("data"))


@pytest.fixture
def small(monkeypatch, tmp_path) -> pathlib.Path:
    """A cache folder to prepare a small library in."""
    root = tmp_path / "library"
    write_files(root, {f"m{i:02}.py": b"%d\n" % i * 40 * i for i in range(80)})
    use_library(monkeypatch, root)
    return tmp_path / "cache"


def test_records_are_the_files_bytes_in_order(prepared):
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    walked = set()
    for folder, _, names in os.walk(root):
        if LEFT_OUT.isdisjoint(pathlib.Path(folder).relative_to(root).parts):
            walked |= {os.path.join(folder, name) for name in names if name.endswith(".py")}
    splits = sources.py_stdlib_files()
    assert sorted(map(str, splits["train"] + splits["validation"])) == sorted(walked)

    manifest = prepare.read_manifest(prepared)
    builder = tfds.builder_from_directory(str(prepared))
    assert builder.info.file_format.value == "array_record"
    for split, paths in splits.items():
        contents = [path.read_bytes() for path in paths]
        documents = [content for content in contents if content]
        stream = np.frombuffer(b"".join(d + b"\0" for d in documents), np.uint8).astype(np.uint16)
        stream[np.cumsum([len(d) + 1 for d in documents]) - 1] = END
        assert manifest["splits"][split] == {
            "documents": len(documents),
            "empty_documents": len(contents) - len(documents),
            "bytes": sum(map(len, documents)),
            "tokens": sum(map(len, documents)) + len(documents),
            "records": math.ceil(stream.size / RECORD),
            "sha256": hashlib.sha256(stream.astype("<u2").tobytes()).hexdigest(),
        }
        source = builder.as_data_source(split=split)
        assert len(source) == math.ceil(stream.size / RECORD)
        text = np.concatenate([source[i]["tokens"] for i in range(len(source))])
        np.testing.assert_array_equal(text[: stream.size], stream)
        assert (text[stream.size :] == END).all()

        tokens_ = pipeline.TokenStream(prepared, split, manifest)
        assert len(tokens_) == stream.size
        last = stream.size
        for start, stop in [
            (0, 1),
            (RECORD - 1, RECORD),
            (RECORD - 1, RECORD + 1),
            (RECORD, 2 * RECORD),
            (5000, 5000 + 3 * RECORD),
            (last - 1, last),
            (last - 5, last + 100),
        ]:
            np.testing.assert_array_equal(tokens_[start:stop], stream[start:stop])


def test_text_that_just_fills_its_records(small, tmp_path):
    write_files(tmp_path / "library", {f"m{i:02}.py": b"#" * (RECORD - 1) for i in range(80)})
    dataset = pipeline.Dataset(prepare.prepare_py_stdlib(small), 16)
    for split, stream in dataset.streams.items():
        assert len(stream) == dataset.manifest["splits"][split]["records"] * RECORD
        last = dataset.rows[split][len(dataset.rows[split]) - 1]
        assert last["weights"].tolist() == [1] * 15 + [0]
        assert last["targets"].tolist() == [35] * 14 + [END, END]


def test_prepared_data_is_reused(small, capsys):
    folder = prepare.prepare_py_stdlib(small)
    assert str(folder) in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    assert folder / "manifest.json" in before
    assert prepare.prepare_py_stdlib(small) == folder
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before
    assert capsys.readouterr().err == ""


def test_other_text_has_another_fingerprint(small, monkeypatch, tmp_path):
    first = prepare.read_manifest(prepare.prepare_py_stdlib(small))
    again = prepare.read_manifest(prepare.prepare_py_stdlib(tmp_path / "again"))
    assert again == first
    changed = next(path for path in sources.py_stdlib_files()["train"] if path.stat().st_size)
    changed.write_bytes(b"#" + changed.read_bytes()[1:])  # the counts stay
    other = prepare.read_manifest(prepare.prepare_py_stdlib(tmp_path / "other"))
    assert other["splits"]["train"]["bytes"] == first["splits"]["train"]["bytes"]
    assert other["fingerprint"] != first["fingerprint"]


@pytest.mark.parametrize("cut", [[], ["dataset_info.json"], ["features.json"]])
def test_interrupted_preparation_is_done_anew(small, cut):
    folder = prepare.prepare_py_stdlib(small)
    manifest = prepare.read_manifest(folder)
    (folder / "manifest.json").unlink()
    for name in cut:
        (folder / name).write_bytes(b"")
    next(folder.glob("*train.array_record*")).write_bytes(b"cut")
    with pytest.raises(ValueError, match="holds no prepared data set"):
        pipeline.Dataset(folder, 16)
    assert prepare.prepare_py_stdlib(small) == folder
    dataset = pipeline.Dataset(folder, 16)
    assert dataset.manifest == manifest
    assert dataset.rows["train"][0]["inputs"].shape == (16,)


def test_two_runs_may_prepare_at_once(small, monkeypatch):
    """The other run finishes while this one is about to."""
    write_manifest = prepare._write_manifest
    others = []

    def slow(folder, counts):
        if not others:
            others.append(None)
            others.append(prepare.prepare_py_stdlib(small))
        return write_manifest(folder, counts)

    monkeypatch.setattr(prepare, "_write_manifest", slow)
    folder = prepare.prepare_py_stdlib(small)
    assert others == [None, folder]
    assert len(pipeline.Dataset(folder, 16).rows["train"])
    assert [path.name for path in small.iterdir()] == ["py_stdlib"]  # no half-made folder


@pytest.mark.parametrize("content", [b"", b'{"splits": ', b"\xff\xfe", b"[]", b"{}", b"null"])
def test_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/manifest\.json is damaged"):
        pipeline.Dataset(tmp_path, 16)


def test_damaged_records_are_named(small):
    folder = prepare.prepare_py_stdlib(small)
    records = next(folder.glob("*validation.array_record*"))
    content = records.read_bytes()
    records.write_bytes(content[: len(content) // 2])
    message = f"{folder}: split validation is damaged .* remove the folder"
    with pytest.raises(ValueError, match=message):
        pipeline.Dataset(folder, 16)
    records.unlink()
    with pytest.raises(ValueError, match=message):
        pipeline.Dataset(folder, 16)


def test_fewer_records_than_the_manifest_says(small):
    folder = prepare.prepare_py_stdlib(small)
    manifest = prepare.read_manifest(folder)
    manifest["splits"]["train"]["tokens"] += RECORD
    with pytest.raises(ValueError, match=f"{folder}: split train is damaged"):
        pipeline.TokenStream(folder, "train", manifest)


def test_data_dir_that_cannot_be_written(small, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"data.dir='{path}' cannot be created"):
            prepare.prepare_py_stdlib(path)

    blocked = tmp_path / "blocked"
    write_files(blocked, {"py_stdlib": b"in the way"})
    with pytest.raises(ValueError, match=f"data.dir='{blocked}': .* cannot be written"):
        prepare.prepare_py_stdlib(blocked)
    assert [path.name for path in blocked.iterdir()] == ["py_stdlib"]

    folder = prepare.prepare_py_stdlib(small)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    empty = tmp_path / "empty"
    with pytest.raises(ValueError, match=f"data.dir='{empty}' is not writable"):
        prepare.prepare_py_stdlib(empty)
    assert not list(empty.iterdir())
    assert prepare.prepare_py_stdlib(small) == folder  # reading is enough


def test_neither_tensorflow_nor_torch_is_imported(tmp_path):
    """Both can be imported here, so that even a guarded import shows."""
    write_files(tmp_path, {f"stubs/{name}/__init__.py": b"" for name in ("tensorflow", "torch")})
    write_files(tmp_path / "library", {f"m{i:02}.py": b"%d\n" % i * 99 for i in range(80)})
    code = f"""
import pathlib, sys, types
from deltares_jax.data import pipeline, prepare, sources
sources.sysconfig = types.SimpleNamespace(get_paths=lambda: {{"stdlib": "{tmp_path}/library"}})
dataset = pipeline.Dataset(prepare.prepare_py_stdlib(pathlib.Path("{tmp_path}/cache")), 16)
print(next(pipeline.train_batches(dataset.rows["train"], 0, 4, 0))["inputs"].shape)
print({{name.partition(".")[0] for name in sys.modules}} & {{"tensorflow", "torch"}})
"""
    path = os.pathsep.join([str(tmp_path / "stubs"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(4, 16)", "set()"]


# --- rows


@pytest.mark.parametrize("size", [2, 3, 16, 17, 18, 32, 33, 34, 100])
def test_every_token_but_the_first_is_a_target_once(size):
    rows = pipeline.Rows(np.arange(size), 16, end_of_text=10**6)
    targets, padding = [], 0
    for i in range(len(rows)):
        row = rows[i]
        real = row["weights"] == 1
        targets += row["targets"][real].tolist()
        np.testing.assert_array_equal(row["inputs"][real], row["targets"][real] - 1)
        padding += (row["weights"] == 0).sum()
        assert set(row["segments"][~real]).isdisjoint(row["segments"][real])
        assert len(set(row["segments"][~real])) <= 1
    assert targets == list(range(1, size))
    assert padding == len(rows) * 16 - (size - 1) < 16


E = 9  # end-of-text in the examples by hand
EXAMPLES = {
    "end of text inside a row, and as its last input": (
        [1, 2, 3, E, 4, 5, E, 6, 7, 8, E],
        [
            dict(
                inputs=[1, 2, 3, E],
                targets=[2, 3, E, 4],
                weights=[1, 1, 1, 0],
                segments=[1, 1, 1, 1],
                positions=[0, 1, 2, 3],
            ),
            dict(
                inputs=[4, 5, E, 6],
                targets=[5, E, 6, 7],
                weights=[1, 1, 0, 1],
                segments=[1, 1, 1, 2],
                positions=[0, 1, 2, 0],
            ),
            dict(  # a document that a row cuts restarts at 0; the last row is filled up
                inputs=[7, 8, E, E],
                targets=[8, E, E, E],
                weights=[1, 1, 0, 0],
                segments=[1, 1, 2, 2],
                positions=[0, 1, 0, 1],
            ),
        ],
    ),
    "end of text as the last target of a row": (
        [1, 2, 3, 4, E, 5, 6, 7, E],
        [
            dict(
                inputs=[1, 2, 3, 4],
                targets=[2, 3, 4, E],
                weights=[1, 1, 1, 1],
                segments=[1, 1, 1, 1],
                positions=[0, 1, 2, 3],
            ),
            dict(
                inputs=[E, 5, 6, 7],
                targets=[5, 6, 7, E],
                weights=[0, 1, 1, 1],
                segments=[1, 2, 2, 2],
                positions=[0, 0, 1, 2],
            ),
        ],
    ),
    "two documents of length 1": (
        [1, E, 2, E],
        [
            dict(
                inputs=[1, E, 2, E],
                targets=[E, 2, E, E],
                weights=[1, 0, 1, 0],
                segments=[1, 1, 2, 3],
                positions=[0, 1, 0, 0],
            )
        ],
    ),
    "a stream of two tokens": (
        [1, E],
        [
            dict(
                inputs=[1, E, E, E],
                targets=[E, E, E, E],
                weights=[1, 0, 0, 0],
                segments=[1, 2, 2, 2],
                positions=[0, 0, 1, 2],
            )
        ],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_by_hand(name):
    stream, expected = EXAMPLES[name]
    rows = pipeline.Rows(np.array(stream, np.uint16), 4, E)
    assert len(rows) == len(expected)
    for i, fields in enumerate(expected):
        row = rows[i]
        assert {key: value.tolist() for key, value in row.items()} == fields
        dtypes = {key: value.dtype.name for key, value in row.items()}
        assert dtypes == dict.fromkeys(fields, "int32") | {"weights": "float32"}


@pytest.mark.parametrize("seq_len", [1000, RECORD - 1, RECORD, 5000])
def test_row_length_is_free_of_the_record_length(prepared, seq_len):
    dataset = pipeline.Dataset(prepared, seq_len)
    stream, rows = dataset.streams["validation"], dataset.rows["validation"]
    count = dataset.manifest["splits"]["validation"]
    every = [rows[i] for i in range(len(rows))]
    targets = np.concatenate([row["targets"] for row in every])
    np.testing.assert_array_equal(targets[: count["tokens"] - 1], stream[1 : count["tokens"]])
    # All tokens but those that begin a document.
    assert sum(row["weights"].sum() for row in every) == count["tokens"] - count["documents"]


# --- training batches


def numbered(count: int) -> list[dict[str, np.ndarray]]:
    return [{"row": np.int32(i)} for i in range(count)]


@pytest.mark.parametrize("seen", [8, 16, 3, 19, 20, 21, 43, 80])
def test_batches_depend_on_the_position_alone(seen):
    """20 rows and batches of 8: also within a batch and across the ends of epochs."""
    rows = numbered(20)
    order = flat(take(pipeline.train_batches(rows, 7, 8, 0), 15))
    resumed = take(pipeline.train_batches(rows, 7, 8, seen), 4)
    assert [batch["row"].shape for batch in resumed] == [(8,)] * 4
    assert flat(resumed) == order[seen : seen + 32]


def test_other_batch_size_goes_on_with_the_same_rows():
    rows = numbered(20)
    order = flat(take(pipeline.train_batches(rows, 7, 1, 0), 66))
    first = flat(take(pipeline.train_batches(rows, 7, 8, 0), 3))
    second = flat(take(pipeline.train_batches(rows, 7, 3, 24), 4))
    third = flat(take(pipeline.train_batches(rows, 7, 30, 36), 1))  # more than an epoch
    assert first + second + third == order


def test_epochs_are_permutations_by_seed():
    rows = numbered(103)
    order = flat(take(pipeline.train_batches(rows, 7, 8, 0), 39))
    epochs = [order[i : i + 103] for i in (0, 103, 206)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(103))] * 3
    other = flat(take(pipeline.train_batches(rows, 8, 8, 0), 13))[:103]
    orders = {tuple(order) for order in [*epochs, other, range(103)]}
    assert len(orders) == 5


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_data_shards_train_on_every_token_once(tiny, shards):
    """One epoch of consecutive numbers, as the devices get it."""
    rows = pipeline.Rows(np.arange(32 * 16 + 1), 16, end_of_text=10**6)
    devices = jax.devices()[:shards]
    mesh = mesh_lib.make_mesh(mesh_lib.mesh_shape(tiny.mesh, shards), devices)
    seen = {device: [] for device in devices}
    for batch in take(pipeline.train_batches(rows, 0, 8, 0), 4):
        placed = jax.device_put(batch["targets"], sharding.batch_sharding(mesh))
        for shard in placed.addressable_shards:
            assert shard.data.shape == (8 // shards, 16)
            seen[shard.device] += np.asarray(shard.data).ravel().tolist()
    assert sorted(itertools.chain.from_iterable(seen.values())) == list(range(1, 32 * 16 + 1))


# --- evaluation batches


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_evaluation_rows_are_the_first_in_order_whatever_the_batch(count, batch_size):
    rows = pipeline.Rows(np.arange(200), 16, end_of_text=10**6)
    batches = list(pipeline.eval_batches(rows, count, batch_size))
    assert len(batches) == math.ceil(count / batch_size)
    for batch in batches:
        assert {value.shape for value in batch.values()} == {(batch_size, 16)}
    for key in ("inputs", "targets", "weights", "segments", "positions"):
        merged = np.concatenate([batch[key] for batch in batches])
        np.testing.assert_array_equal(merged[:count], [rows[i][key] for i in range(count)])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights[:count].all()
    assert not weights[count:].any()
    for batch, again in zip(batches, pipeline.eval_batches(rows, count, batch_size), strict=True):
        for key, value in batch.items():
            np.testing.assert_array_equal(value, again[key])


# --- count tables


@pytest.fixture
def numbers() -> np.ndarray:
    """301 tokens of 5, with 4 as end-of-text, none of them an empty document."""
    drawn = np.random.default_rng(0).choice(5, 600, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    kept = [drawn[0]] + [b for a, b in itertools.pairwise(drawn) if a != 4 or b != 4]
    return np.array(kept[:301], np.uint16)


def pairs_of(stream: np.ndarray) -> dict[tuple[int, int], int]:
    pairs: dict[tuple[int, int], int] = {}
    values = stream.tolist()
    for first, second in itertools.pairwise(values):
        if first != 4:
            pairs[first, second] = pairs.get((first, second), 0) + 1
    return pairs


@pytest.mark.parametrize("size", [2, 7, 8, 9, 14, 15, 301])
def test_bigram_counts_across_chunks(monkeypatch, numbers, size):
    monkeypatch.setattr(ngram, "_CHUNK", 7)
    counts = ngram.bigram_counts(numbers[:size], 5, 4)
    assert counts.shape == (5, 5)
    expected = pairs_of(numbers[:size])
    assert {(int(a), int(b)): counts[a, b] for a, b in np.argwhere(counts)} == expected


def test_table_losses_by_dictionary(numbers):
    train, held_out = numbers[:200], numbers[200:]
    pairs = pairs_of(train)
    totals = {a: sum(pairs.get((a, b), 0) + 1 for b in range(5)) for a in range(5)}
    follows = {b: sum(pairs.get((a, b), 0) for a in range(5)) + 1 for b in range(5)}
    bigram, unigram = [], []
    values = held_out[: 13 * 6 + 1].tolist()  # the targets of 13 rows of 6
    for first, second in itertools.pairwise(values):
        if first != 4:
            bigram.append(-math.log((pairs.get((first, second), 0) + 1) / totals[first]))
            unigram.append(-math.log(follows[second] / sum(follows.values())))
    counts = ngram.bigram_counts(train, 5, 4)
    rows = pipeline.Rows(held_out, 6, 4)
    for batch_size in (1, 4):  # the last batch is filled up
        batches = list(pipeline.eval_batches(rows, 13, batch_size))
        bigram_loss = ngram.bigram_loss(counts, batches)
        assert bigram_loss == pytest.approx(sum(bigram) / len(bigram), rel=1e-9)
        unigram_loss = ngram.unigram_loss(counts, batches)
        assert unigram_loss == pytest.approx(sum(unigram) / len(unigram), rel=1e-9)

    changed = [
        {**b, "targets": np.where(b["weights"] == 0, (b["targets"] + 1) % 5, b["targets"])}
        for b in batches
    ]
    assert any((a["targets"] != b["targets"]).any() for a, b in zip(batches, changed, strict=True))
    assert ngram.bigram_loss(counts, changed) == bigram_loss


# --- opening what the config names


def test_dataset_of_the_config(prepared, tiny, monkeypatch, tmp_path):
    tiny.data.dir = str(prepared.parents[2])
    dataset = pipeline.open_dataset(FrozenConfigDict(tiny))
    assert dataset.manifest == prepare.read_manifest(prepared)
    size = dataset.manifest["splits"]["train"]["tokens"]
    assert len(dataset.rows["train"]) == math.ceil((size - 1) / 16)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(prepared.parents[3]))
    tiny.data.dir = f"~/{prepared.parents[2].name}"
    assert pipeline.open_dataset(FrozenConfigDict(tiny)).manifest == dataset.manifest
    tiny.data.dir = os.path.relpath(prepared.parents[2])
    assert pipeline.open_dataset(FrozenConfigDict(tiny)).manifest == dataset.manifest
    assert not list(tmp_path.iterdir())  # nothing was prepared anew


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("source", "fineweb_edu/sample-10BT", "data.source='fineweb_edu/sample-10BT'.*py_stdlib"),
        ("tokenizer", "Qwen/Qwen3-0.6B", "data.tokenizer='Qwen/Qwen3-0.6B'.*available: byte"),
    ],
)
def test_unknown_source_or_tokenizer_is_refused(prepared, tiny, key, value, message):
    tiny.data.dir = str(prepared.parents[2])
    tiny.data[key] = value
    with pytest.raises(ValueError, match=message):
        pipeline.open_dataset(FrozenConfigDict(tiny))


def test_vocabulary_that_the_model_lacks_is_refused(prepared, tiny):
    tiny.data.dir = str(prepared.parents[2])
    tiny.model.vocab_size = 256
    message = "model.vocab_size=256 must be at least 257.*data.tokenizer='byte'"
    with pytest.raises(ValueError, match=message):
        pipeline.open_dataset(FrozenConfigDict(tiny))
