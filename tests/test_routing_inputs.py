"""What the routing command refuses, what a stop leaves, and how tokens are shown."""

import pytest
from routing_helpers import small, write_run

from deltares_jax import config as config_lib
from deltares_jax.analysis import token_labels
from deltares_jax.inference import routes


@pytest.fixture(scope="module")
def folder(corpora, tmp_path_factory):
    """A folder with a run."""
    root = tmp_path_factory.mktemp("inputs")
    write_run(small(corpora / "long", "delta_attnres"), root / "known", known=True)
    return root


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--workdir="], "--workdir is missing"),
        (["--workdir=nowhere"], "--workdir=nowhere: nowhere is no run"),
        (["--compare=nowhere"], "--compare=nowhere: nowhere is no run"),
        (["--compare="], "--compare= is empty"),
        (["--compare=KNOWN"], "step 1 of this run is named twice"),
        (["--compare=LONGER"], "data.seq_len=32, but 16"),
        (["--compare=OTHER_TOKENS"], "only runs that read the same tokens are compared"),
        (["--step=7"], "no checkpoint of step 7"),
        (["--out="], "--out is missing"),
        (["--out=FULL"], "is there already"),
        (["--out=/proc/out"], "--out=/proc/out cannot be made"),
        (["--out=gs://bucket/x"], "must be a local folder"),
        (["--text="], "--text has 0 tokens; it must have 1 to 16"),
        (["--text=seventeen letters"], "--text has 17 tokens; it must have 1 to 16 (data.seq_len"),
        (["--readers=layers.0.mlp"], "give --text, too"),
        (["--text=a", "--readers=layer.1.mlp"], "did you mean layers.1.mlp?"),
        (["--text=a", "--readers=layers.0.attn"], "no reader with sources"),
        (["--data=a=text,b=text"], "give one set"),
        (["--data=a=/nowhere"], "--data: '/nowhere'"),
        (["--tokens=-1"], "--tokens=-1"),
        (["--mesh=fsdp=3"], "mesh"),
        (["--reader=x"], "unknown flag --reader"),
    ],
)
def test_bad_input_is_one_line(folder, corpora, bpe, tmp_path, in_process, flags, expected):
    names = {"KNOWN": folder / "known", "FULL": folder, "LONGER": "", "OTHER_TOKENS": ""}
    for name, values in (
        ("LONGER", {"data.seq_len": 32}),
        ("OTHER_TOKENS", {"data.tokenizer": str(bpe), "model.vocab_size": 300}),
    ):
        if any(name in flag for flag in flags):
            config = config_lib.from_dict(small(corpora / "long").to_dict())
            config.update_from_flattened_dict(values)
            names[name] = write_run(config_lib.resolve(config), tmp_path / name)
    for name, path in names.items():
        flags = [flag.replace(f"={name}", f"={path}") for flag in flags]
    given = [f"--workdir={folder / 'known'}", f"--out={tmp_path / 'out'}"]
    code, error = in_process("routing", *given, *flags)
    assert code == 2
    assert expected in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_what_stops_it_leaves_nothing(folder, tmp_path, in_process, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(routes, "follow", interrupted)
    (tmp_path / ".out.partial").mkdir()  # of one that was killed
    code, error = in_process(
        "routing", f"--workdir={folder / 'known'}", f"--out={tmp_path / 'out'}"
    )
    assert (code, error) == (144, "interrupted\n")
    assert not list(tmp_path.iterdir())


def test_tokens_are_shown_in_one_line(bpe):
    class Spelt:
        def decode(self, ids):
            return {0: " the", 1: "\n\t", 2: "中", 3: "\ufffd", 4: "", 5: "Δ$"}[ids[0]]

    labels = token_labels.labels(Spelt(), range(6))
    assert labels == ["␣the", "⏎⇥", "U+4E2D", "[3]", "[4]", r"Δ\$"]
