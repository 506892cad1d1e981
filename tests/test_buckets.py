"""Prepared data in buckets, at gs:// and s3://, against servers of this machine."""

import json

import bucket_helpers
import fsspec
import numpy as np
import pytest

from deltares_jax import config as config_lib
from deltares_jax.data import dataset


@pytest.fixture(scope="module", params=[bucket_helpers.gs_bucket, bucket_helpers.s3_bucket])
def bucket(request):
    """The address of a bucket in which files can be put by fsspec."""
    return request.param()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, as on a new machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deltares_jax" / "buckets"


def put(folder, address: str) -> None:
    system = fsspec.filesystem(address.split(":")[0])
    for path in folder.iterdir():
        if path.is_file():
            system.pipe_file(f"{address}/{path.name}", path.read_bytes())


def config_of(tiny, **data):
    tiny.data.update(data)
    tiny.eval.every = 0
    return config_lib.resolve(tiny)


def test_data_of_a_bucket_is_that_of_a_folder(bucket, corpora, tiny, cache, capsys):
    put(corpora / "long", f"{bucket}/sets/text/byte")
    put(corpora / "long", f"{bucket}/long")
    local = dataset.open_data(config_of(tiny, source="text", dir=str(corpora / "long")))
    for place in (
        {"source": "text", "dir": f"{bucket}/sets"},
        {"source": "text", "dir": f"{bucket}/long/"},
        {"source": f"{bucket}/long", "dir": ""},
        {"mixture": f"{bucket}/long=1", "dir": ""},
    ):
        data = dataset.open_data(config_of(tiny, **place))
        assert data.fingerprint == local.fingerprint
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(data.rows[0][7][name], local.rows[0][7][name])
    # The same data set is copied once, whatever names it.
    assert len(list(cache.iterdir())) == 1
    assert capsys.readouterr().err.count("copying ") == 1


def test_a_copy_that_was_interrupted_is_completed(bucket, corpora, tiny, cache, capsys):
    put(corpora / "long", f"{bucket}/again")
    config = config_of(tiny, source=f"{bucket}/again")
    (part,) = dataset.open_data(config).parts.values()
    shards = [shard for split in part.manifest["shards"].values() for shard in split]
    (part.folder / "manifest.json").unlink()
    (part.folder / shards[0]["file"]).write_bytes(b"half")
    assert dataset.open_data(config).fingerprint == part.manifest["fingerprint"]
    assert capsys.readouterr().err.count("copying ") == 2


def test_what_is_not_whole_in_the_bucket_is_refused(bucket, corpora, tiny, cache):
    put(corpora / "long", f"{bucket}/bad")
    made = json.loads((corpora / "long" / "manifest.json").read_text())
    shard = made["shards"]["train"][0]
    system = fsspec.filesystem(bucket.split(":")[0])
    config = config_of(tiny, source=f"{bucket}/bad")
    for content in (b"other" * 100, b"x" * shard["size"]):
        system.pipe_file(f"{bucket}/bad/{shard['file']}", content)
        with pytest.raises(ValueError, match=rf"data.source='{bucket}/bad': .*is damaged"):
            dataset.open_data(config)
    system.rm_file(f"{bucket}/bad/{shard['file']}")
    with pytest.raises(ValueError, match=rf"{shard['file']} is missing; copy it there again"):
        dataset.open_data(config)
    for place in (f"{bucket}/nowhere", f"{bucket}-of-nobody/x"):
        with pytest.raises(ValueError, match=r"no prepared data set|cannot be read"):
            dataset.open_data(config_of(tiny, source=place))


def test_a_missing_package_is_named(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs gcsfs: pip install 'deltares-jax\[gcs\]'"):
        dataset.open_data(config_of(tiny, source="gs://bucket/x"))
