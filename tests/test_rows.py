"""Token streams over shards, and rows: every token is a target once, documents are kept apart."""

import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from data_helpers import END, RECORD, prepare_files, stream_of, write_files

from deltares_jax.data import dataset, manifest, sources
from deltares_jax.data.rows import Rows, TokenStream

# --- rows


@pytest.mark.parametrize("size", [2, 3, 16, 17, 18, 32, 33, 34, 100])
def test_every_token_but_the_first_is_a_target_once(size):
    rows = Rows(np.arange(size), 16, end_of_text=10**6)
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
    rows = Rows(np.array(stream, np.uint16), 4, E)
    assert len(rows) == len(expected)
    for i, fields in enumerate(expected):
        row = rows[i]
        assert {key: value.tolist() for key, value in row.items()} == fields
        dtypes = {key: value.dtype.name for key, value in row.items()}
        assert dtypes == dict.fromkeys(fields, "int32") | {"weights": "float32"}


@pytest.mark.parametrize("seq_len", [1000, RECORD - 1, RECORD, 5000])
def test_row_length_is_free_of_the_record_length(prepared, seq_len):
    data = dataset.Dataset(prepared, seq_len)
    stream, rows = data.streams["validation"], data.rows["validation"]
    count = data.manifest["splits"]["validation"]
    every = [rows[i] for i in range(len(rows))]
    targets = np.concatenate([row["targets"] for row in every])
    np.testing.assert_array_equal(targets[: count["tokens"] - 1], stream[1 : count["tokens"]])
    # All tokens but those that begin a document.
    assert sum(row["weights"].sum() for row in every) == count["tokens"] - count["documents"]


def test_without_masking_a_row_is_one_document():
    stream = np.array([1, 2, E, 3, 4, E], np.uint16)
    rows = Rows(stream, 4, E, document_masking=False)
    first, last = rows[0], rows[1]
    assert first["segments"].tolist() == [1] * 4
    assert first["positions"].tolist() == [0, 1, 2, 3]
    assert first["weights"].tolist() == [1] * 4  # also for the first token of the next document
    assert last["inputs"].tolist()[:2] == [4, E]
    assert last["segments"].tolist() == [1, 2, 2, 2]  # padding stays apart
    assert last["weights"].tolist() == [1, 0, 0, 0]


# --- streams over shards


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A data set of four shards with the stream that it must hold, by other code."""
    root = tmp_path_factory.mktemp("sharded")
    rng = np.random.default_rng(0)
    texts = []
    for i, lines in enumerate((3, 5000, 0, 1, 700)):
        documents = [
            rng.choice([97, 98, 99], n).astype(np.uint8).tobytes()
            for n in rng.integers(1, 40, lines)
        ]
        texts += documents
        content = b"".join(b'{"text": "%s"}\n' % text for text in documents)
        write_files(root / "in", {f"{i}.jsonl": content})
    folder = root / "out"
    monkey = pytest.MonkeyPatch()
    monkey.setattr(sources.Source, "split", lambda self, part, name: "train")
    prepare_files(folder, root / "in")
    monkey.undo()
    return folder, stream_of(texts)


def test_stream_runs_through_the_shards(sharded):
    folder, expected = sharded
    made = manifest.read(folder)
    shards = made["shards"]["train"]
    assert len(shards) == 4  # the empty file has none
    edges = np.cumsum([shard["tokens"] for shard in shards])
    assert edges[-1] == expected.size
    assert all(shard["tokens"] % RECORD for shard in shards)  # their last records are filled up
    stream = TokenStream(folder, "train", made)
    assert len(stream) == expected.size
    np.testing.assert_array_equal(stream[0 : len(stream)], expected)
    for edge in [0, RECORD, 5 * RECORD, *edges]:
        for start in range(max(0, edge - 2), min(edge + 2, expected.size)):
            for stop in (start + 1, start + 5, start + RECORD, start + 3 * RECORD):
                np.testing.assert_array_equal(stream[start:stop], expected[start:stop])


@pytest.mark.parametrize("seq_len", [7, 100, RECORD, 10_000])
def test_any_row_length_reads_all_tokens_of_all_shards(sharded, seq_len):
    folder, expected = sharded
    rows = dataset.Dataset(folder, seq_len).rows["train"]
    every = [rows[i] for i in range(len(rows))]
    targets = np.concatenate([row["targets"] for row in every])[: expected.size - 1]
    np.testing.assert_array_equal(targets, expected[1:])
    weighed = sum(row["weights"].sum() for row in every)
    documents = (expected == END).sum()
    assert weighed == expected.size - documents
    assert len(every) == math.ceil((expected.size - 1) / seq_len)


def test_token_outside_the_vocabulary_is_refused(sharded):
    folder, _ = sharded
    made = {**manifest.read(folder), "vocab_size": 99}  # no c, no end of text
    with pytest.raises(ValueError, match=f"{folder}: split train is damaged .token 256 in a voc"):
        TokenStream(folder, "train", made)


def test_damaged_shard_is_named(sharded, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sharded[0], folder)
    shard = sorted(folder.glob("*train.array_record*"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{shard} has {len(content) - 1} of {len(content)} b"):
        dataset.Dataset(folder, 16)
    middle = bytes(byte ^ 255 for byte in content[2000:20_000])  # of the same length
    shard.write_bytes(content[:2000] + middle + content[20_000:])
    rows = dataset.Dataset(folder, 16).rows["train"]
    with pytest.raises(ValueError, match=f"{folder}: split train is damaged .{shard}: "):
        _ = [rows[row] for row in range(len(rows))]
    shard.write_bytes(content[:-65536] + bytes(65536))
    with pytest.raises(ValueError, match=f"{folder}: split train is damaged .{shard}: "):
        dataset.Dataset(folder, 16)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard} has 0 of"):
        dataset.Dataset(folder, 16)


def test_many_shards_may_all_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.Source, "split", lambda self, part, name: "train")
    write_files(tmp_path / "in", {f"{i:03}.jsonl": b'{"text": "%d"}\n' % i for i in range(120)})
    prepare_files(tmp_path / "out", tmp_path / "in")
    code = f"""
import pathlib, resource
from deltares_jax.data import dataset
resource.setrlimit(resource.RLIMIT_NOFILE, (110, 300))
stream = dataset.Dataset(pathlib.Path("{tmp_path}/out"), 16).streams["train"]
print(len(stream[0:len(stream)]))
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))  # as many as there may be
del stream
stream = dataset.Dataset(pathlib.Path("{tmp_path}/out"), 16).streams["train"]
dataset.Dataset(pathlib.Path("{tmp_path}/out"), 16)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert int(result.stdout) == 10 * 2 + 90 * 3 + 20 * 4
    assert "ValueError: 240 shards need 340 open files, 300 are allowed" in result.stderr
