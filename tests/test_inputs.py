"""What is read: files by name, glob and folder, and the documents in them."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import END, prepare_files, write_files

from deltares_jax.data import dataset, documents, sources

ONE = b'{"text": "one"}\n'


def names_of(*paths) -> list[str]:
    """The files of a text source."""
    source = sources.text([str(path) for path in paths], "text")
    return [file.name for part in source.parts for file in part.files]


def test_text_of_json_lines_is_kept_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.Source, "split", lambda self, part, name: "train")
    lines = [
        b'\xef\xbb\xbf{"text": "mark"}',
        b'{"text": "caf\xe9"}',  # Latin-1
        b'{"text": "caf\\u00e9"}',
        b'{"text": "\\ud800"}',  # half of a pair
        b"[" * 100_000,
        b'{"other": "x"}',
    ]
    write_files(tmp_path / "in", {"a.jsonl": b"\n".join(lines)})
    made = prepare_files(tmp_path / "out", tmp_path / "in")
    count = made["splits"]["train"]
    assert (count["documents"], count["undecodable_documents"]) == (4, 2)
    assert count["skipped_documents"] == 2
    stream = dataset.Dataset(tmp_path / "out", 16).streams["train"]
    ids = stream[0 : len(stream)]
    texts = [bytes(text[:-1].tolist()) for text in np.split(ids, np.flatnonzero(ids == END) + 1)]
    assert texts[:-1] == [b"mark", b"caf\xe9", "café".encode(), b"\xed\xa0\x80"]


@pytest.mark.parametrize("kind", ["string", "large_string", "large_binary", "string_view"])
def test_parquet_columns_of_any_text_type(tmp_path, kind):
    texts = pa.array(["é", None, ""]).cast(getattr(pa, kind)())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    read = documents.read(tmp_path / "a.parquet", "a.parquet", "text")
    assert [document.text for document in read] == ["é".encode(), None, b""]


def test_parquet_column_of_numbers_is_refused(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: --column='text' holds int64, not text"):
        list(documents.read(tmp_path / "a.parquet", "a.parquet", "text"))


def test_paths_are_files_folders_and_globs(tmp_path):
    names = ("a/1.jsonl", "a/b/2.jsonl", "c/3.jsonl", "d[1]/4[2].jsonl")
    write_files(tmp_path, dict.fromkeys(names, ONE))
    assert names_of(tmp_path / "a") == ["1.jsonl", "b/2.jsonl"]
    assert names_of(tmp_path / "*") == list(names)  # also what is in folders that match
    assert names_of(tmp_path / "**") == list(names)  # each once
    assert names_of(tmp_path / "[ac]") == list(names[:3])
    assert names_of(tmp_path / "d[1]") == ["4[2].jsonl"]
    assert names_of(tmp_path / "d[1]" / "4[2].jsonl", tmp_path / "c") == ["4[2].jsonl", "3.jsonl"]


def test_empty_path_is_not_the_working_folder(tmp_path):
    write_files(tmp_path, {"a.jsonl": ONE})
    with pytest.raises(ValueError, match="has a comma too many"):
        names_of(tmp_path / "a.jsonl", "")


def test_what_is_left_out_is_told(tmp_path):
    write_files(tmp_path, {"in/a.jsonl": ONE, "in/b.tex": b"x", "far/c.jsonl": ONE})
    (tmp_path / "in" / "link").symlink_to(tmp_path / "far")
    source = sources.text([str(tmp_path / "in")], "text")
    (note,) = source.notes
    assert note.startswith("left out under --path: 2 of other kinds or linked, such as ")
    assert names_of(tmp_path / "in") == ["a.jsonl"]
    assert names_of(tmp_path / "in" / "link") == ["c.jsonl"]


def test_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.jsonl": ONE, "secret/b.jsonl": ONE})
    real = os.scandir

    def scandir(path):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=f"{tmp_path}/secret cannot be read: Permission denied"):
        sources.text([str(tmp_path)], "text")


def test_number_beyond_the_files_is_refused_at_once(tmp_path):
    write_files(tmp_path, {"a.jsonl": ONE})
    source = sources.text([str(tmp_path)], "text")
    with pytest.raises(ValueError, match="file 999999999999, but there are 1: 0-0"):
        sources.select(source, [range(10**12)])


@pytest.mark.parametrize("config", ["sample-10bt", "sample-10TB", "CC-MAIN-2024", "../x"])
def test_config_of_another_name_is_refused(tmp_path, config):
    with pytest.raises(ValueError, match="must be fineweb_edu/ and sample-10BT, sample-100BT, "):
        sources.fineweb_edu(config, str(tmp_path))


def test_files_of_another_config_are_not_taken(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "id": ["1"]}), tmp_path / "a.parquet")
    write_files(tmp_path, {"sample/100BT/a.parquet": (tmp_path / "a.parquet").read_bytes()})
    assert len(sources.fineweb_edu("sample-100BT", str(tmp_path)).parts) == 1
    with pytest.raises(ValueError, match=f"{tmp_path} holds sample/, but no sample/10BT/"):
        sources.fineweb_edu("sample-10BT", str(tmp_path))
