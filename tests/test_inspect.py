"""The inspect command, against counts by other code."""

import re

import numpy as np
import pytest
from data_helpers import END, prepare_files, write_files

from deltares_jax.data import dataset, sources

T, BATCH = 32, 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sixty documents of 1 to 60 bytes, of which every fifth is held out."""
    write_files(tmp_path / "in", {f"{i:02}.txt": b"x" * i + b"y" for i in range(60)})
    held_out = staticmethod(lambda part, name: "validation" if name[1] in "05" else "train")
    monkeypatch.setattr(sources.Source, "split", held_out)
    prepare_files(tmp_path / "out", tmp_path / "in")
    return tmp_path / "out"


def test_inspect_counts_and_decodes(folder, command):
    result = command(
        "data.inspect",
        "--config=configs/debug.py",
        "--config.data.source=text",
        f"--config.data.dir={folder}",
        f"--config.data.seq_len={T}",
        f"--config.train.batch_size={BATCH}",
        "--config.train.steps=100",
        "--rows=2",
    )
    assert result.returncode == 0, result.stderr
    lengths = [i + 2 for i in range(60) if i % 5]  # a byte and an end more
    size, rows = sum(lengths), -(-(sum(lengths) - 1) // T)
    low, middle, high = np.percentile(lengths, [5, 50, 95])
    padding = (rows * T - size + 1) / (rows * T)
    for words in (
        f"mean {size / 48:,.1f}, median {middle:,.0f}, 5 % below {low:,.0f}, 5 % above {high:,.0f}",
        f"longest {max(lengths)}",
        f"epoch: {size:,} tokens, {rows:,} rows of {T}, {rows / BATCH:.1f} steps of {BATCH} rows",
        f"padding, {padding:.3%} of the targets; first tokens of documents, {47 / rows / T:.3%}",
        f"train.steps=100: {100 * BATCH / rows:.3f} epochs",
        "evaluation on text: ",
    ):
        assert words in result.stdout
    shown = re.split(r"row \d of the run:\n", result.stdout)[1:]
    assert len(shown) == 2
    data = dataset.Dataset(folder, T).rows["train"]
    texts = []
    for i in range(len(data)):
        row = data[i]
        real = row["inputs"][row["segments"] <= row["segments"][row["weights"] > 0].max()]
        texts.append(bytes(real[real != END].astype(np.uint8)).decode())
    for text in shown:
        assert "".join(re.findall(r"    \| (.*)", text)) in texts


def test_inspect_refuses_what_training_would(command):
    result = command("data.inspect", "--config=configs/600m_baseline.py")
    assert result.returncode == 2
    assert "is not prepared" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["data.prepare", "data.inspect"])
def test_data_commands_show_an_example(name, command):
    result = command(name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"python -m deltares_jax.{name} --" in result.stdout
    assert {"data.prepare": "--max_tokens", "data.inspect": "--rows"}[name] in result.stdout
