"""From a hub to a trained model: listing, downloads that fail, FineWeb-Edu, training, resume."""

import io
import re
import subprocess
import sys

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import contents
from hub_server import hub as running_hub
from ml_collections import FrozenConfigDict

from deltares_jax.data import build, dataset, hub, manifest, parts, sources, tokens
from deltares_jax.training import loop, metrics

DATA = "datasets/HuggingFaceFW/fineweb-edu"
MODEL = "Qwen/Tiny"


def parquet(first: int, count: int) -> bytes:
    texts = [
        f"document {i} of words " + "and words " * (i % 9) for i in range(first, first + count)
    ]
    table = pa.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{i:08}>" for i in range(first, first + count)],
            "dump": ["CC-MAIN-2013-20"] * count,
            "score": [3.5] * count,
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=50)
    return file.getvalue()


@pytest.fixture
def served(monkeypatch, bpe):
    """A hub with three files of sample-10BT, one of them held out, and a tokenizer."""
    monkeypatch.setattr(hub, "_PAUSES", (0.01, 0.01, 0.01))
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address + "/")
        for i, number in enumerate((0, 1, 13)):
            path = f"sample/10BT/{number:03}_00000.parquet"
            server.files[DATA, path] = parquet(200 * i, 200)
        server.files[MODEL, "tokenizer.json"] = (bpe / "tokenizer.json").read_bytes()
        yield server


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def prepare(out, max_tokens: int = 0, **kwargs) -> dict:
    source = sources.fineweb_edu("sample-10BT", **kwargs)
    return build.prepare(source, tokens.get_tokenizer(MODEL), out, max_tokens)


def test_from_the_hub_through_training_to_resume(served, cache, tiny, tmp_path, capsys):
    """The prepare command, then training that finds the data by the names in its config."""
    command = [sys.executable, "-m", "deltares_jax.data.prepare", f"--tokenizer={MODEL}"]
    result = subprocess.run(
        [*command, "--source=fineweb_edu/sample-10BT", "--workers=1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "fineweb_edu/sample-10BT train: 400 documents" in result.stdout
    assert "fineweb_edu/sample-10BT validation: 200 documents" in result.stdout
    served.shutdown()  # training needs no network
    tiny.data.update({"source": "fineweb_edu/sample-10BT", "tokenizer": MODEL})
    tiny.model.vocab_size = 320
    tiny.model.num_layers = 1
    tiny.model.residual.variant = "baseline"
    tiny.optim.schedule = "constant"  # the same program for any number of steps
    tiny.train.steps = tiny.eval.every = 3
    loop.train(FrozenConfigDict(tiny), str(tmp_path / "run"), devices=jax.devices()[:1])
    tiny.train.steps = 6
    loop.train(FrozenConfigDict(tiny), str(tmp_path / "run"), devices=jax.devices()[:1])
    printed = capsys.readouterr().out
    (place,) = re.findall(r"next is row 25 of ([\d,]+) in epoch 1", printed)
    rows, held_out = metrics.read_rows(tmp_path / "run")
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    assert sorted(held_out) == [3, 6]
    made = dataset.Dataset(
        manifest.folder_of(cache / "deltares_jax/data", tiny.data.source, MODEL), 16
    )
    assert int(place.replace(",", "")) == len(made.rows["train"])

    tiny.model.vocab_size = 299  # the tokenizer has 300
    with pytest.raises(ValueError, match=r"model.vocab_size=299 must be at least 300"):
        dataset.open_data(FrozenConfigDict(tiny))


def test_limit_is_of_the_training_text(served, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_HELD_OUT_TOKENS", 300)
    made = prepare(tmp_path, max_tokens=2000)
    assert 1900 < made["splits"]["train"]["tokens"] <= 2000
    assert 200 < made["splits"]["validation"]["tokens"] <= 300
    assert (made["files_read"], made["files_listed"]) == (2, 3)
    monkeypatch.undo()
    assert parts.Job(tmp_path, None, {}, 10**9).limit("validation") == 10**7
    assert parts.Job(tmp_path, None, {}, 5000).limit("validation") == 5000


@pytest.mark.parametrize("fault", [404, 429, 503, "cut"])
def test_faults_that_pass_are_tried_again(served, tmp_path, capsys, cache, fault):
    straight = prepare(tmp_path / "straight")
    for name in ("10BT", "001_00000.parquet", "tokenizer.json"):
        served.faults[name] = [fault, fault]
    for path in cache.rglob("tokenizer.json"):
        path.unlink()
    assert prepare(tmp_path / "faults") == straight
    assert contents(tmp_path / "faults") == contents(tmp_path / "straight")
    told = "the connection was cut" if fault == "cut" else f"HTTP {fault}"
    assert f"001_00000.parquet: {told}; attempt 2 of 4 in 0.01 s" in capsys.readouterr().err


def test_cut_download_goes_on_where_it_ended(served, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_CHUNK", 1000)
    served.faults["000_00000.parquet"] = ["cut"]
    prepare(tmp_path)
    asked = [at for path, at in served.requests if path.endswith("000_00000.parquet")]
    size = len(served.files[DATA, "sample/10BT/000_00000.parquet"])
    assert asked == ["", f"bytes={size // 2 // 1000 * 1000}-"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [(404, "HTTP 404"), (503, "HTTP 503"), ("cut", "the connection was cut")],
)
def test_faults_that_stay_end_in_one_line(served, tmp_path, fault, told):
    served.faults["013_00000.parquet"] = [fault] * 99
    url = f"{served.address}/{DATA}/resolve/main/sample/10BT/013_00000.parquet"
    with pytest.raises(ValueError, match=f"^{url}: {told}, 4 times; check the network.*$"):
        prepare(tmp_path)
    served.faults.clear()
    before = len(served.requests)
    left = tmp_path / "parts" / "sample--10BT--000_00000.parquet"  # by work that was killed
    left.write_bytes(b"PAR1")
    made = prepare(tmp_path)  # goes on with what there is
    assert not list(tmp_path.rglob("*.parquet*"))
    paths = [path for path, _ in served.requests[before:]]
    assert not [path for path in paths if path.endswith(("000_00000.parquet", "001_00000.parquet"))]
    assert made["splits"]["validation"]["documents"] == 200


def test_refusal_is_not_tried_again(served):
    served.faults["10BT"] = [403] * 99
    with pytest.raises(ValueError, match=r"10BT.*: HTTP 403 Forbidden; check the name"):
        sources.fineweb_edu("sample-10BT")
    assert len(served.requests) == 1


def test_address_that_is_none_is_refused_at_once(served, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "localhost:9")
    with pytest.raises(ValueError, match="HF_ENDPOINT=localhost:9 must begin with http://"):
        tokens.get_tokenizer(MODEL)


def test_files_that_changed_on_the_hub_are_not_mixed(served, tmp_path):
    served.faults["013_00000.parquet"] = [404] * 99
    with pytest.raises(ValueError, match="HTTP 404"):
        prepare(tmp_path)
    served.faults.clear()
    path = "sample/10BT/001_00000.parquet"
    served.files[DATA, path] = served.files[DATA, path].replace(b"dump", b"DUMP")
    with pytest.raises(ValueError, match="begun with other files"):
        prepare(tmp_path)


def test_nobody_there_is_one_line(served, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError, match=r"no connection, 4 times; .*HF_ENDPOINT=http://127.0.0.1:9"
    ):
        tokens.get_tokenizer(MODEL)


def test_file_of_another_content_is_named_by_its_checksum(served, tmp_path):
    source = sources.fineweb_edu("sample-10BT")
    path = "sample/10BT/001_00000.parquet"
    content = served.files[DATA, path]
    served.files[DATA, path] = content[:-8] + b"PAR0PAR0"
    with pytest.raises(
        ValueError, match=r"001_00000.parquet: the sha256 is not the one that the h"
    ):
        build.prepare(source, tokens.get_tokenizer(MODEL), tmp_path)


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_truncated_parquet_is_named(served, tmp_path, where):
    served.checksums = False
    path = "sample/10BT/001_00000.parquet"
    served.files[DATA, path] = served.files[DATA, path][:-1000]
    folder = ""
    if where == "folder":
        for (_, name), content in served.files.items():
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_bytes(content)
        folder = str(tmp_path / "in")
    with pytest.raises(ValueError, match=r"001_00000.parquet is damaged .*get the file /.* again"):
        prepare(tmp_path / "out", path=folder)
    assert not list((tmp_path / "out").rglob("*.parquet"))  # else it would be found again


def test_folder_of_the_files_gives_the_same_data(served, tmp_path):
    for (owner, path), content in served.files.items():
        if owner == DATA:
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in" / path.rpartition("/")[2]).write_bytes(content)
    of_hub = prepare(tmp_path / "hub")
    of_folder = prepare(tmp_path / "folder", path=str(tmp_path / "in"))
    assert of_folder["fingerprint"] == of_hub["fingerprint"]


def test_held_out_file_is_always_read(served, tmp_path):
    made = prepare(tmp_path, numbers=[range(1, 2)])
    assert made["splits"]["train"]["documents"] == 200
    assert made["splits"]["validation"]["documents"] == 200
    data = dataset.Dataset(tmp_path, 64)
    decode = tokens.load(tmp_path, made).decode
    assert decode(data.streams["train"][0:40]).startswith("document 200 of")
    assert decode(data.streams["validation"][0:40]).startswith("document 400 of")


def test_other_configs_hold_out_documents_by_their_id(served, tmp_path):
    folder = "data/CC-MAIN-2013-20/train-00000-of-00014.parquet"
    served.files[DATA, folder] = parquet(0, 1000)
    source = sources.fineweb_edu("CC-MAIN-2013-20")
    made = build.prepare(source, tokens.ByteTokenizer(), tmp_path)
    splits = made["splits"]
    assert 2 <= splits["validation"]["documents"] <= 30
    assert splits["train"]["documents"] + splits["validation"]["documents"] == 1000
    everything = sources.fineweb_edu("default")
    assert [file.name for part in everything.parts for file in part.files] == [folder]
    assert everything.split(everything.parts[0], "<urn:uuid:00000007>") == source.split(
        source.parts[0], "<urn:uuid:00000007>"
    )


def test_long_listings_come_in_pages(served):
    whole = sources.fineweb_edu("sample-10BT")
    served.page = 2
    assert sources.fineweb_edu("sample-10BT") == whole
    assert [part.split for part in whole.parts] == ["train", "train", "validation"]


def test_revision_is_asked_for_and_written_down(served, tmp_path):
    made = prepare(tmp_path, revision="v1.2")
    assert manifest.read(tmp_path)["revision"] == made["revision"] == "v1.2"
    paths = [path for path, _ in served.requests if "fineweb" in path]
    assert all("/v1.2/" in path for path in paths)


def test_tokenizer_is_downloaded_once_and_checked(served, bpe):
    first = tokens.get_tokenizer(MODEL)
    count = len(served.requests)
    assert tokens.get_tokenizer(MODEL).sha256 == first.sha256
    assert len(served.requests) == count
    np.testing.assert_array_equal(
        first.encode_batch([b"import os"])[0],
        tokens.get_tokenizer(str(bpe)).encode_batch([b"import os"])[0],
    )
