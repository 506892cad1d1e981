"""The prepare command: killed and given again, bad flags, Beam, what is imported."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from data_helpers import contents, prepare_files, write_files

from deltares_jax.data import runners, tokens

ROOT = pathlib.Path(__file__).parents[1]


def prepare_command(*arguments: str, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-m", "deltares_jax.data.prepare", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def test_killed_work_goes_on_to_the_same_bytes_with_other_workers(tmp_path, bpe):
    text = pathlib.Path(__file__).read_text()
    for i in range(6):
        lines = [json.dumps({"text": text[k:]}) + "\n" for k in range(i, 60 + i)]
        write_files(tmp_path / "in", {f"{i}.jsonl": "".join(lines).encode()})
    shared = ["--source=text", f"--path={tmp_path}/in", f"--tokenizer={bpe}"]
    out = tmp_path / "out"
    killed = prepare_command(*shared, f"--out={out}", "--workers=2", start_new_session=True)
    while not list(out.glob("parts/*.json")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)  # its workers end by themselves
    killed.communicate(timeout=60)
    done = {path: path.stat().st_mtime_ns for path in out.glob("parts/0*.json")}
    assert 0 < len(done) < 6
    again = prepare_command(*shared, f"--out={out}", "--workers=2")
    printed, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert {path: path.stat().st_mtime_ns for path in done} == done
    tokenizer = tokens.get_tokenizer(str(bpe))
    made = prepare_files(tmp_path / "straight", tmp_path / "in", tokenizer=tokenizer)
    assert contents(out) == contents(tmp_path / "straight")
    assert f"fingerprint {made['fingerprint'][:16]}" in printed
    assert f"--config.data.source=text --config.data.tokenizer={bpe}" in printed


def test_two_may_prepare_at_once(tmp_path):
    """One does the work, the other waits for it."""
    both = [prepare_command("--source=py_stdlib", f"--out={tmp_path}") for _ in range(2)]
    (first, errors), (second, more) = (process.communicate(timeout=120) for process in both)
    assert [process.returncode for process in both] == [0, 0], errors + more
    assert first == second
    assert (errors + more).count(f"preparing py_stdlib under {tmp_path}") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--source='' must be py_stdlib, text, or fineweb_edu/CONFIG"),
        (["--source=text"], "--source=text needs --path"),
        (["--source=py_stdlib", "--files=3-1"], "--files='3-1' must be numbers from 0 and spans"),
        (["--source=py_stdlib", "--sorce=x"], "unknown flag --sorce (did you mean source?)"),
        (["--source=py_stdlib", "--out=/dev/null/x"], "/dev/null/x cannot be written: Not a dir"),
        (["--source=py_stdlib", "--out=gs://b/x"], "--out='gs://b/x' must be a local folder"),
        (["--source=py_stdlib", "--path=x"], "--path has no effect with --source=py_stdlib"),
        (["--source=text", "--beam_options=--x=1"], "--beam_options has no effect without --beam"),
        (["--workers=0"], "--workers=0 must be an integer in the range [1, 1024]"),
    ],
)
def test_bad_flags_are_one_line(arguments, words):
    process = prepare_command(*arguments)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith(f"error: {words}")
    assert len(errors.splitlines()) == 1
    assert printed == ""


def test_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "cache").touch()
    process = prepare_command(
        "--source=py_stdlib",
        "--tokenizer=OWNER/NAME",
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.fullmatch(rf"error: {tmp_path}/cache/.*: Not a directory\n", errors)


def test_stop_on_request_leaves_one_line(tmp_path, bpe):
    text = pathlib.Path(__file__).read_text()
    line = json.dumps({"text": text}) + "\n"
    write_files(tmp_path / "in", {f"{i}.jsonl": line.encode() * 2000 for i in range(2)})
    out = tmp_path / "an out"
    arguments = [f"--path={tmp_path}/in", f"--tokenizer={bpe}", f"--out={out}", "--workers=2"]
    process = prepare_command("--source=text", *arguments)
    while len(list(out.glob("parts/*.partial"))) < 2:  # both workers are at it
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 144
    assert errors.splitlines() == [
        f"preparing text under {out}",
        "interrupted; the same command goes on from the last finished file",
    ]


@pytest.mark.slow
def test_beam_option_that_beam_does_not_know_is_refused():
    pytest.importorskip("apache_beam")
    with pytest.raises(ValueError, match="--beam_options: Beam knows no nonsense"):
        runners.beam("DirectRunner", ["--nonsense=1", "--direct_num_workers=1"])


@pytest.mark.slow
def test_beam_makes_the_same_bytes(tmp_path):
    pytest.importorskip("apache_beam")
    files = tmp_path / "in"
    for i, count in enumerate((300, 900, 0, 700, 500, 800)):
        lines = [json.dumps({"text": f"word {i} " * (k % 7 + 1)}) + "\n" for k in range(count)]
        write_files(files, {f"{i}.jsonl": "".join(lines).encode()})
    flags = [f"--path={files}", "--source=text", "--max_tokens=60000"]
    one = prepare_command(*flags, f"--out={tmp_path / 'beam'}", "--beam_runner=DirectRunner")
    _, errors = one.communicate(timeout=300)
    assert one.returncode == 0, errors
    made = prepare_files(tmp_path / "own", files, max_tokens=60_000)
    assert 2 < made["files_read"] < 6
    assert contents(tmp_path / "beam") == contents(tmp_path / "own")


def test_neither_tensorflow_nor_torch_is_imported(tmp_path):
    """Both can be imported here, so that even a guarded import shows."""
    write_files(tmp_path, {f"stubs/{name}/__init__.py": b"" for name in ("tensorflow", "torch")})
    write_files(tmp_path / "library", {f"m{i:02}.py": b"%d\n" % i * 99 for i in range(80)})
    code = f"""
import pathlib, sys, types
from deltares_jax.data import build, dataset, pipeline, sources, tokens
sources.sysconfig = types.SimpleNamespace(get_paths=lambda: {{"stdlib": "{tmp_path}/library"}})
folder = pathlib.Path("{tmp_path}/out")
build.prepare(sources.py_stdlib(), tokens.ByteTokenizer(), folder)
rows = dataset.Dataset(folder, 16).rows["train"]
order = pipeline.Order([len(rows)], [1], 0)
print(next(pipeline.train_batches([rows], order, 4, 0))["inputs"].shape)
print({{name.partition(".")[0] for name in sys.modules}} & {{"tensorflow", "torch"}})
"""
    path = os.pathsep.join([str(tmp_path / "stubs"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(4, 16)", "set()"]
