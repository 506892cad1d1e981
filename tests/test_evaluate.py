"""Held-out loss: equal whatever the batch and the mesh, and what the command says and writes."""

import json

import numpy as np
import pytest
from inference_helpers import bare_command, log_softmax, open_run, two_processes, write_run

from deltares_jax import load
from deltares_jax.data import dataset
from deltares_jax.data.rows import Rows
from deltares_jax.inference import held_out, scorer, trained

T, END = 16, 256


@pytest.fixture(scope="module")
def run(corpora, tmp_path_factory):
    """A model of random weights with eight KV heads, of a run on eight devices."""
    from deltares_jax import config as config_lib

    config = config_lib.default()
    config.model.update({"width": 32, "num_layers": 2, "num_heads": 4, "head_dim": 16})
    config.model.update({"mlp_width": 64})
    config.data.update({"source": "text", "dir": str(corpora / "long"), "seq_len": T})
    config.eval.update({"rows": 9, "batch_size": 8})
    folder = tmp_path_factory.mktemp("evaluate") / "r 1"
    return write_run(config, folder, (1, 2, 4), losses={1: 5.0, 2: 4.0, 3: 1.0, 4: 4.5})


def rows_of(model):
    return dataset.open_eval_sets(model.config)["text"]


@pytest.fixture(scope="module")
def single(run):
    """On one device: a function of rows, batch size and tokens, and what it gives for a batch."""
    model = open_run(run)
    scores = scorer.Scorer(model)

    def evaluate(rows, batch_size, tokens=9 * T):
        return held_out.evaluate(model, scores, rows, tokens, batch_size)

    return evaluate, rows_of(model), evaluate(rows_of(model), 4)


def test_loss_is_that_of_each_document_for_itself(run, single):
    """By the logits of `load`, in numpy: in total, by position and by document."""
    _, rows, result = single
    model = load(run)
    stream = rows._stream[0 : 9 * T + 1].astype(np.int64)
    by_position, by_document, document, start = {}, {}, 0, 0
    for at in range(9 * T):
        if at % T == 0 or stream[at - 1] == END:
            start = at
        document += stream[at] == END
        if stream[at] == END:
            continue  # the next token is of another document
        logits = model.logits(np.pad(stream[start : at + 1], (0, T - 1 - at + start))[None])
        loss = -log_softmax(logits[0, at - start])[stream[at + 1]]
        by_position.setdefault(at - start, []).append(loss)
        by_document.setdefault(document, []).append(loss)
    total = sum(map(sum, by_position.values()))
    count = sum(map(len, by_position.values()))
    assert result.tokens == count < result.asked == 9 * T
    np.testing.assert_allclose(result.mean, total / count, rtol=1e-6)
    for sums, counts, expected in (
        (result.position_loss_T, result.position_tokens_T, by_position),
        (result.document_loss, result.document_tokens, by_document),
    ):
        assert {i: n for i, n in enumerate(counts) if n} == {i: len(x) for i, x in expected.items()}
        for i, losses in expected.items():
            np.testing.assert_allclose(sums[i], sum(losses), rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "devices", "batch_size"),
    [
        ("", 8, 8),
        ("data=8", 8, 8),
        ("data=2,fsdp=2,tensor=2", 8, 4),
    ],
)
def test_every_mesh_gives_the_same(run, single, mesh, devices, batch_size):
    model, (_, rows, expected) = open_run(run, mesh, devices), single
    result = held_out.evaluate(model, scorer.Scorer(model), rows, 9 * T, batch_size)
    same(result, expected)


@pytest.mark.parametrize("batch_size", [1, 7, 2**16])
def test_every_batch_gives_the_same(single, batch_size):
    evaluate, rows, expected = single
    same(evaluate(rows, batch_size), expected)


def same(result, expected):
    assert result.tokens == expected.tokens
    np.testing.assert_allclose(result.mean, expected.mean, rtol=1e-6)
    np.testing.assert_array_equal(result.document_tokens, expected.document_tokens)
    np.testing.assert_allclose(result.position_loss_T, expected.position_loss_T, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, T - 1, T, 3 * T + 5, 10**9, 0])
def test_budget_is_met_to_the_token(single, tokens):
    evaluate, rows, _ = single
    there = len(rows._stream) - 1
    asked = min(tokens or there, there)
    result = evaluate(rows, 8, tokens)
    stream = rows._stream[0:asked]
    assert result.asked == asked
    assert result.tokens == asked - np.count_nonzero(stream[: min(asked, there)] == END)


def test_steps_by_name(run):
    assert trained.find(str(run), "") == (run, 4)
    assert trained.find(str(run), "last") == (run, 4)
    assert trained.find(str(run), "best") == (run, 2)  # of step 3 no checkpoint is left
    assert trained.find(str(run), "1") == (run, 1)
    assert trained.find(str(run / "checkpoints" / "1"), "") == (run, 1)
    assert trained.find(str(run / "checkpoints" / "1"), "best") == (run, 2)


def test_runs_are_found_by_every_way_to_write_a_path(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    monkeypatch.chdir(run.parent)
    for path in ("r 1", "./r 1", "r 1/", "~/r 1", "~/r 1/checkpoints/4", str(run)):
        assert trained.find(path, "") == (run, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=nowhere"], "--workdir=nowhere: nowhere is no run: it has no checkpoints/"),
        (["--workdir={run}", "--step=3"], "has no checkpoint of step 3; it has [1, 2, 4]"),
        (["--workdir={run}/metrics.jsonl"], "metrics.jsonl is no run: it has no checkpoints/"),
        (["--workdir={run}", "--step=newest"], "--step='newest' must be a number, last or best"),
        (["--workdir={run}", "--mesh=fdsp=2"], "--mesh='fdsp=2': 'fdsp=2' must have the form"),
        (["--workdir={run}", "--mesh=data=3"], "mesh.data=3"),
        (["--workdir={run}", "--mesh=data=-1,fsdp=-1"], "one axis at most may be -1"),
        (["--workdir={run}", "--data=web"], "--data='web': 'web' must have the form NAME="),
        (["--workdir={run}", "--data=web=nowhere"], "--data: 'nowhere', but data.dir="),
        (["--workdir={run}", "--tokens=-1"], "--tokens=-1 must be a non-negative integer"),
        (["--workdir={run}", "--batch_size=0"], "--batch_size=0 must be"),
    ],
)
def test_bad_input_is_one_line(run, flags, message, in_process):
    code, error = in_process("evaluate", *(flag.format(run=run) for flag in flags))
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list((run / "evaluation").glob("*"))


def test_results_that_cannot_be_written_are_not_computed(run, in_process):
    place = run / "evaluation"
    if place.exists():
        place.rmdir()
    place.touch()
    code, error = in_process("evaluate", f"--workdir={run}")
    place.unlink()
    assert (code, error) == (2, f"error: {place} cannot be written: File exists\n")


def test_command_prints_and_writes(run, single, corpora, tmp_path):
    done = bare_command(
        tmp_path,
        "evaluate",
        f"--workdir={run}",
        "--by_position",
        "--by_document",
        f"--data=long={corpora / 'long'},train={corpora / 'short'}:train",
        "--batch_size=5",
    )
    assert done.returncode == 0, done.stderr
    path = run / "evaluation" / "step_4.json"
    written = json.loads(path.read_text())
    assert written["step"] == 4
    assert set(written["sets"]) == {"long", "train"}
    row, expected = written["sets"]["long"], single[2]
    assert row["tokens"] == expected.tokens
    np.testing.assert_allclose(row["loss"], expected.mean, rtol=1e-6)
    np.testing.assert_allclose(row["perplexity"], np.exp(expected.mean), rtol=1e-5)
    np.testing.assert_allclose(row["documents"]["loss_sum"], expected.document_loss, rtol=1e-5)
    assert f"long: loss {expected.mean:.4f}, perplexity " in done.stdout
    assert "position" in done.stdout
    assert "documents, loss of one" in done.stdout
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize("length", [1, 3, 9])
def test_sets_smaller_than_a_batch(single, length):
    """As many rows as asked for, and no division by what filled the batch up."""
    text = np.random.default_rng(length).integers(0, 256, length * T + 1)
    rows, evaluate = Rows(text, T, END), single[0]
    result = evaluate(rows, 8, 0)
    assert result.tokens == length * T
    np.testing.assert_allclose(result.mean, evaluate(rows, 1, 0).mean, rtol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_text_without_targets_is_refused(single, length):
    asked = max(0, length - 1)
    with pytest.raises(ValueError, match=f"none of the first {asked} tokens has a next one"):
        single[0](Rows(np.full(length, END), T, END), 8, 0)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(run, single):
    first, second = two_processes("evaluate", f"--workdir={run}")
    assert "on 2 cpu (fsdp 2)" in first
    assert "loss" not in second
    path = run / "evaluation" / "step_4.json"
    row = json.loads(path.read_text())["sets"]["text"]
    assert row["tokens"] == single[2].tokens
    np.testing.assert_allclose(row["loss"], single[2].mean, rtol=1e-6)
    path.unlink()
    path.parent.rmdir()
