"""Prepared data sets: the same bytes however the work was cut, found again, damage named."""

import contextlib
import hashlib
import itertools
import math
import pathlib
import sysconfig

import numpy as np
import pytest
import tensorflow_datasets as tfds
from data_helpers import END, RECORD, contents, prepare_files, use_library, write_files

from deltares_jax.data import build, dataset, manifest, parts, progress, runners, sources, tokens

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def small(monkeypatch, tmp_path) -> pathlib.Path:
    """A cache folder to prepare a small library in."""
    root = tmp_path / "library"
    write_files(root, {f"m{i:02}.py": b"%d\n" % i * 40 * i for i in range(80)})
    use_library(monkeypatch, root)
    return tmp_path / "cache"


def prepare_library(folder: pathlib.Path) -> dict:
    return build.prepare(sources.py_stdlib(), tokens.ByteTokenizer(), folder)


def lines_of(count: int, words: str) -> bytes:
    return b"".join(
        b'{"text": "%s %d"}\n' % (words.encode() * (i % 7 + 1), i) for i in range(count)
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """Six files of records, of which the third is empty."""
    root = tmp_path_factory.mktemp("files")
    for i, count in enumerate((300, 900, 0, 700, 500, 800)):
        write_files(root, {f"{i}.jsonl": lines_of(count, f"word{i} ")})
    return root


def test_library_is_recorded_as_tfds_reads_it(prepared):
    """All files but tests and vendored ones, byte for byte, by other code than ours."""
    made = manifest.read(prepared)
    builder = tfds.builder_from_directory(str(prepared))
    assert builder.info.file_format.value == "array_record"
    root, (part,) = pathlib.Path(sysconfig.get_paths()["stdlib"]), sources.py_stdlib().parts
    for split in ("train", "validation"):
        texts = []
        for file in part.files:
            digest = hashlib.sha256(file.name.encode()).digest()
            held_out = int.from_bytes(digest[:8], "big") % 20 == 0
            if held_out == (split == "validation"):
                texts.append((root / file.name).read_bytes())
        full = [text for text in texts if text]
        stream = np.frombuffer(b"".join(d + b"\0" for d in full), np.uint8).astype(np.uint16)
        stream[np.cumsum([len(d) + 1 for d in full]) - 1] = END
        count = made["splits"][split]
        assert count["documents"] == len(full)
        assert count["empty_documents"] == len(texts) - len(full)
        assert count["bytes"] == sum(map(len, full))
        assert count["tokens"] == stream.size
        assert count["records"] == math.ceil(stream.size / RECORD)
        assert count["sha256"] == hashlib.sha256(stream.astype("<u2").tobytes()).hexdigest()
        source = builder.as_data_source(split=split)
        assert len(source) == count["records"]
        text = np.concatenate([source[i]["tokens"] for i in range(len(source))])
        np.testing.assert_array_equal(text[: stream.size], stream)
        assert (text[stream.size :] == END).all()


def test_several_shards_are_one_tfds_data_set(files, tmp_path):
    made = prepare_files(tmp_path, files)
    builder = tfds.builder_from_directory(str(tmp_path))
    data = dataset.Dataset(tmp_path, 16)
    for split, count in made["splits"].items():
        shards = made["shards"][split]
        assert [shard["file"] for shard in shards] == [
            f"text-{split}.array_record-{i:05}-of-{len(shards):05}" for i in range(len(shards))
        ]
        source = builder.as_data_source(split=split)
        assert len(source) == count["records"] == sum(shard["records"] for shard in shards)
        assert sum(shard["tokens"] for shard in shards) == count["tokens"]
        whole = np.concatenate([source[i]["tokens"] for i in range(len(source))])
        stream = data.streams[split][0 : count["tokens"]]
        np.testing.assert_array_equal(whole[whole != END], stream[stream != END])
        for shard in shards:
            content = (tmp_path / shard["file"]).read_bytes()
            assert shard["sha256"] == hashlib.sha256(content).hexdigest()
            assert shard["size"] == len(content)
    documents = sum(count["documents"] for count in made["splits"].values())
    assert documents == 300 + 900 + 700 + 500 + 800


def test_prepared_data_is_left_as_it_is(small, capsys):
    made = prepare_library(small)
    assert str(small) in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*") if path.is_file()}
    assert prepare_library(small) == made
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*") if path.is_file()} == before
    assert capsys.readouterr().err == ""


def test_other_text_has_another_fingerprint(small, tmp_path):
    first = prepare_library(small)
    assert prepare_library(tmp_path / "again") == first
    changed = next(file.where for file in sources.py_stdlib().parts[0].files if file.size)
    changed.write_bytes(b"#" + changed.read_bytes()[1:])  # the counts stay
    other = prepare_library(tmp_path / "other")
    assert {s: c["bytes"] for s, c in other["splits"].items()} == {
        s: c["bytes"] for s, c in first["splits"].items()
    }
    assert other["fingerprint"] != first["fingerprint"]


@pytest.mark.parametrize(
    "gone",
    [
        ["manifest.json"],
        ["manifest.json", "dataset_info.json", "parts/00003.json"],
        ["manifest.json", "text-train.array_record-00001-of-00005"],
        ["text-train.array_record-00001-of-00005"],
        ["features.json"],
    ],
)
def test_what_is_missing_is_made_again(files, tmp_path, gone):
    prepare_files(tmp_path, files)
    before = contents(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    prepare_files(tmp_path, files)
    assert contents(tmp_path) == before


def test_damaged_shard_is_found_by_its_checksum_and_made_again(files, tmp_path, capsys):
    prepare_files(tmp_path, files)
    before = contents(tmp_path)
    shard = tmp_path / "text-train.array_record-00001-of-00005"
    shard.write_bytes(shard.read_bytes()[:-9] + b"\x01" * 9)
    capsys.readouterr()
    prepare_files(tmp_path, files)
    assert f"{shard} is damaged: its sha256 is not that of the manifest" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_finished_files_are_not_read_again(files, tmp_path, monkeypatch):
    """Stopped in the fourth file, the work goes on there."""
    prepare_files(tmp_path / "whole", files)
    read_note, done = parts.work, []

    def until_the_fourth(job, part, *arguments):
        if part.number == 3 and len(done) == 3:
            raise KeyboardInterrupt
        done.append(part.number)
        return read_note(job, part, *arguments)

    monkeypatch.setattr(parts, "work", until_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        prepare_files(tmp_path / "cut", files)
    monkeypatch.undo()
    read = []
    real = parts.documents.read
    monkeypatch.setattr(
        parts.documents, "read", lambda path, *rest: read.append(path.name) or real(path, *rest)
    )
    prepare_files(tmp_path / "cut", files)
    assert read == ["3.jsonl", "4.jsonl", "5.jsonl"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("max_tokens", [1, 3000, 50_000, 90_000, 10**6])
def test_limit_takes_whole_documents_of_the_first_files(files, tmp_path, max_tokens):
    whole = prepare_files(tmp_path / "whole", files)
    everything = dataset.Dataset(tmp_path / "whole", 16).streams["train"]
    everything = everything[0 : len(everything)]
    fitting = [int(end) + 1 for end in np.flatnonzero(everything == END) if end < max_tokens]
    if not fitting:
        with pytest.raises(ValueError, match="6 files hold no text within --max_tokens=1"):
            prepare_files(tmp_path / "cut", files, max_tokens=max_tokens)
        return
    made = prepare_files(tmp_path / "cut", files, max_tokens=max_tokens)
    stream = dataset.Dataset(tmp_path / "cut", 16).streams["train"]
    assert len(stream) == made["splits"]["train"]["tokens"] == fitting[-1]
    np.testing.assert_array_equal(stream[0 : len(stream)], everything[: fitting[-1]])
    assert (made["files_read"] == 6) == (max_tokens >= whole["splits"]["train"]["tokens"])
    runner = runners.pool(3) if max_tokens == 50_000 else backwards
    prepare_files(tmp_path / "again", files, max_tokens=max_tokens, runner=runner)
    assert contents(tmp_path / "again") == contents(tmp_path / "cut")


def backwards(job, todo, shown):
    """Works on all files, the last one first."""
    for part in reversed(todo):
        parts.work(job, part, job.limit(parts.main_split(part)), shown.advance)


def test_limit_tells_what_was_read_in_part(files, tmp_path):
    made = prepare_files(tmp_path / "one", files / "1.jsonl", max_tokens=3000)
    assert (made["files_read"], made["files_listed"]) == (1, 1)
    assert made["files_in_part"] == ["1.jsonl"]
    whole = prepare_files(tmp_path / "whole", files / "1.jsonl", max_tokens=10**6)
    assert (whole["files_read"], whole["files_in_part"]) == (1, [])
    write_files(tmp_path / "in", {f"{i:02}.txt": b"x" * 99 for i in range(60)})
    notes = prepare_files(tmp_path / "notes", tmp_path / "in", max_tokens=2000)
    assert notes["splits"]["train"]["documents"] == 20
    taken = sum(count["documents"] for count in notes["splits"].values())
    assert (notes["files_read"], notes["files_in_part"]) == (taken, [])


def test_another_plan_in_the_same_folder_is_refused(files, tmp_path):
    prepare_files(tmp_path / "out", files)
    with pytest.raises(ValueError, match=r"begun with another max_tokens .0 there, 5000 asked"):
        prepare_files(tmp_path / "out", files, max_tokens=5000)
    with pytest.raises(ValueError, match=r"begun with other files;.* another folder"):
        prepare_files(tmp_path / "out", files / "0.jsonl", files / "1.jsonl")
    with pytest.raises(ValueError, match="has no --column='txt'; it has text"):
        prepare_files(tmp_path / "typo", files, column="txt")
    assert prepare_files(tmp_path / "typo", files) == manifest.read(tmp_path / "out")
    write_files(tmp_path / "full", {"thesis.tex": b"x"})
    with pytest.raises(ValueError, match=r"full holds other files \(thesis.tex\)"):
        prepare_files(tmp_path / "full", files)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_records_without_the_column_are_counted(tmp_path):
    lines = b'{"text": "a"}\n{"no": 1}\n{"text": null}\nnot json\n{"text": ""}\n'
    write_files(tmp_path, {"in/a.jsonl": lines, "none/a.jsonl": b"x\n" * 7})
    made = prepare_files(tmp_path / "out", tmp_path / "in")
    counts = made["splits"].values()
    total = {k: sum(c[f"{k}documents"] for c in counts) for k in ("", "skipped_", "empty_")}
    assert total[""] == 1
    text = " ".join(manifest.describe(made))
    for kind in ("skipped", "empty"):
        assert (f"{total[f'{kind}_']} {kind}" in text) == (total[f"{kind}_"] > 0)
    with pytest.raises(ValueError, match="1 files hold no text; 7 records without text in 'text'"):
        prepare_files(tmp_path / "out2", tmp_path / "none")


@pytest.mark.parametrize(
    "content", [b"", b'{"splits": ', b"\xff\xfe", b"[]", b'{"fingerprint": "0"}', b"null"]
)
def test_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/manifest\.json is damaged"):
        dataset.Dataset(tmp_path, 16)


def test_progress_tells_tokens_rate_and_time_left(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = progress.Progress(total=1000, max_tokens=0)
    shown.advance(100, 2000)
    assert capsys.readouterr().err == ""  # not a line for every document
    clock[0] += 40
    shown.advance(300, 2000)
    line = "4 k tokens, 100 tokens/s, 40.0% done, 1 min 00 s left\n"
    assert capsys.readouterr().err == line
    limited = progress.Progress(total=10**6, max_tokens=8000)
    clock[0] += 40
    limited.advance(1, 6000)
    assert "75.0% done" in capsys.readouterr().err


def test_work_cut_between_any_two_renames_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    for i, count in enumerate((300, 900, 0, 700)):
        write_files(tmp_path / "in", {f"{i}.jsonl": lines_of(count, "w ")})
    prepare_files(tmp_path / "whole", tmp_path / "in", max_tokens=9000)
    whole, real = contents(tmp_path / "whole"), pathlib.Path.replace
    for point in itertools.count():
        renames = itertools.count()

        def cut(path, target, renames=renames, point=point):
            if next(renames) == point:
                raise KeyboardInterrupt
            return real(path, target)

        out = tmp_path / str(point)
        monkeypatch.setattr(pathlib.Path, "replace", cut)
        with contextlib.suppress(KeyboardInterrupt):
            prepare_files(out, tmp_path / "in", max_tokens=9000)
        monkeypatch.setattr(pathlib.Path, "replace", real)
        if next(renames) <= point:
            break  # it was not cut
        prepare_files(out, tmp_path / "in", max_tokens=9000)
        assert contents(out) == whole
    assert point > 8
