"""Which files a source reads, and the documents in them."""

import gzip
import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import use_library, write_files

from deltares_jax.data import documents, sources

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


def names_of(source: sources.Source) -> list[str]:
    return [file.name for part in source.parts for file in part.files]


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
    other = ["b/data.txt", "lib.so", *(f"x/{name}/y/module.py" for name in LEFT_OUT)]
    write_files(tmp_path, dict.fromkeys([*kept, *other], b"pass\n"))
    use_library(monkeypatch, tmp_path)
    source = sources.py_stdlib()
    assert names_of(source) == sorted(kept)
    assert len(source.parts) == 1  # a shard a split, not one a file


def test_held_out_documents_are_one_in_twenty_by_name_alone():
    source = sources.Source("text", "", ())
    part = sources.Part(0, ())
    names = [f"package{i % 7}/module{i}.py" for i in range(1000)]
    held_out = [name for name in names if source.split(part, name) == "validation"]
    assert 30 <= len(held_out) <= 70
    fixed = sources.Part(3, (), "validation")
    assert {source.split(fixed, name) for name in names} == {"validation"}


def test_library_without_sources_is_refused(monkeypatch, tmp_path):
    use_library(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=f"py_stdlib: no .py files under {tmp_path}"):
        sources.py_stdlib()


def test_files_of_ones_own_in_order(tmp_path):
    every = ["b.txt", "a.jsonl", "c/d.parquet", "c/a.jsonl.gz", "e.jsonl.zst", "z.txt", "y.txt"]
    write_files(tmp_path, dict.fromkeys([*every, "notes.md", "c/x.py"], b"x"))
    source = sources.text([str(tmp_path)], "text")
    assert names_of(source) == sorted(every)
    assert source.notes == (
        f"left out under --path: 2 of other kinds or linked, such as {tmp_path}/c/x.py",
    )
    # Files of one document share a part; files of records have one each.
    parts = [[file.name for file in part.files] for part in source.parts]
    singles = [["a.jsonl"], ["b.txt"], ["c/a.jsonl.gz"], ["c/d.parquet"], ["e.jsonl.zst"]]
    assert parts == [*singles, ["y.txt", "z.txt"]]
    assert [part.number for part in source.parts] == list(range(6))

    globbed = sources.text([f"{tmp_path}/c/*.jsonl.gz", f"{tmp_path}/b.txt"], "text")
    assert names_of(globbed) == ["a.jsonl.gz", "b.txt"]
    chosen = sources.select(source, [range(1, 3), range(6, 7)])
    assert names_of(chosen) == ["b.txt", "c/a.jsonl.gz", "z.txt"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["none"], "--path=none holds no files that end in .txt"),
        (["*.md"], "--path=.*md: .*notes.md must end in one of .txt"),
        (["a.txt", "*.txt"], "names .*a.txt twice"),
    ],
)
def test_paths_that_mean_nothing_are_refused(tmp_path, monkeypatch, paths, message):
    write_files(tmp_path, {"a.txt": b"x", "notes.md": b"x"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        sources.text(paths, "text")


def test_files_that_are_not_there_are_refused(tmp_path):
    write_files(tmp_path, {"a.txt": b"x", "b.txt": b"x"})
    with pytest.raises(ValueError, match="--files asks for file 4, but there are 2: 0-1"):
        sources.select(sources.text([str(tmp_path)], "text"), [range(1, 5)])


# --- documents


TEXTS = ["one", "", " ", "zwei\n\u00fc", "x" * 3000]


def as_file(kind: str, path: pathlib.Path, column: str = "text"):
    lines = b"".join(json.dumps({"n": 1, column: t}).encode() + b"\n" for t in TEXTS)
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines[:20]) + gzip.compress(lines[20:]))  # two members
    elif kind == "jsonl.zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(lines)
    else:
        rows = len(TEXTS)
        table = pa.table({"n": [1] * rows, column: TEXTS, "id": [f"<{i}>" for i in range(rows)]})
        pq.write_table(table, path, row_group_size=2)


KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_records_give_their_text(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    as_file(kind, path, "content")
    read = list(documents.read(path, path.name, "content"))
    assert [d.text for d in read] == [t.encode() for t in TEXTS]
    assert [d.name for d in read] == [f"{path.name}#{i}" for i in range(1, len(TEXTS) + 1)]
    assert read[-1].position == path.stat().st_size
    with pytest.raises(ValueError, match=rf"a.{kind} has no --column='text'; it has .*content"):
        list(documents.read(path, path.name, "text"))


def test_a_column_names_the_documents(tmp_path):
    as_file("parquet", tmp_path / "a.parquet")
    read = documents.read(tmp_path / "a.parquet", "a.parquet", "text", "id")
    assert [d.name for d in read] == [f"<{i}>" for i in range(len(TEXTS))]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_cut_file_is_named(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    as_file(kind, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"a.{kind} is damaged .*get the file {path} again"):
        list(documents.read(path, path.name, "text"))


def test_lines_without_text_are_told_from_empty_ones(tmp_path):
    lines = [b'{"text": "a"}', b"", b'{"text": ""}', b'{"text": null}', b'{"text": 3}', b'{"te']
    lines += [b"[1]", b'{"other": 1}', b"\xff", b'{"text": "\\ud800"}', b'{"text": "\xff"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    read = list(documents.read(tmp_path / "a.jsonl", "a.jsonl", "text"))
    assert [d.text for d in read] == [b"a", b"", *[None] * 6, b"\xed\xa0\x80", b"\xff"]


def test_parquet_with_bad_bytes_and_without_text(tmp_path):
    raw = pa.array([b"ok", b"\xff\xfe", None], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())  # not checked, as in real files
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts, "n": [1, 2, 3]}), path)
    assert [d.text for d in documents.read(path, path.name, "text")] == [b"ok", b"\xff\xfe", None]
    with pytest.raises(ValueError, match="--column='n' holds int64, not text"):
        list(documents.read(path, path.name, "n"))
