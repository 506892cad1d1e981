"""What may go wrong while data is prepared: an interruption, a full disk, damage, others."""

import fcntl
import pathlib
import threading

import numpy as np
import pytest
from data_helpers import RECORD, contents, prepare_files, write_files

from deltares_jax.data import packing, progress, runners, tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """Three files of records."""
    root = tmp_path_factory.mktemp("files")
    for i in range(3):
        lines = [b'{"text": "word %d of file %d"}\n' % (k, i) for k in range(200)]
        write_files(root, {f"{i}.jsonl": b"".join(lines)})
    return root


def test_prepare_says_that_it_waits_for_another(files, tmp_path, capsys):
    prepare_files(tmp_path, files)
    capsys.readouterr()
    with (tmp_path / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=prepare_files, args=(tmp_path, files))
        second.start()
        told = ""
        while "waiting" not in told:
            assert second.is_alive()
            told += capsys.readouterr().err
        fcntl.flock(held, fcntl.LOCK_UN)
        second.join()
    assert f"waiting for another process that prepares {tmp_path}" in told


def test_full_disk_is_told_and_the_rest_of_a_shard_removed(files, tmp_path):
    writer = packing.ShardWriter(pathlib.Path("/dev/full"), tokens.ByteTokenizer())
    writer.add(np.zeros(RECORD, np.uint16))
    with pytest.raises(ValueError, match=r"^/dev cannot be written: .*No space left on device"):
        writer.close()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "00000-train.array_record.x.partial").write_bytes(b"rest")
    prepare_files(tmp_path, files)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("name", ["plan.json", "parts/00001.json", "parts/kept.json"])
def test_damaged_notes_are_named(files, tmp_path, name):
    prepare_files(tmp_path, files)
    before = contents(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ValueError, match=f"{tmp_path / name} is damaged .*remove"):
        prepare_files(tmp_path, files)
    if name != "plan.json":  # without it nobody knows what the folder holds
        (tmp_path / name).unlink()
        prepare_files(tmp_path, files)
        assert contents(tmp_path) == before


def test_part_whose_result_is_not_seen_is_named(files, tmp_path):
    """As by workers on machines that write to folders of their own."""

    def elsewhere(job, todo, shown):
        runners.here(job, todo[:2] + todo[3:], shown)

    with pytest.raises(ValueError, match=f"{tmp_path}/parts lacks what came of 2.jsonl"):
        prepare_files(tmp_path, files, runner=elsewhere)


def test_time_left_counts_only_what_is_left(files, tmp_path, monkeypatch, capsys):
    prepare_files(tmp_path, files)
    for name in ("manifest.json", "parts/00001.json", "parts/00002.json"):
        (tmp_path / name).unlink()
    totals, real = [], progress.Progress
    monkeypatch.setattr(
        progress, "Progress", lambda total, limit: totals.append(total) or real(total, limit)
    )
    prepare_files(tmp_path, files)
    assert totals == [sum((files / f"{i}.jsonl").stat().st_size for i in (1, 2))]
    assert "1 of 3 parts were done before" in capsys.readouterr().err
