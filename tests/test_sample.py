"""Generation: greedy text, draws by temperature, top_k and top_p, seeds, and the command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference_helpers import open_run, write_run

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.inference import generate

VOCAB = 257
PROMPTS = [[1, 2, 3], [250], [7] * 20]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Its vocabulary is larger than the tokenizer's."""
    config = config_lib.default()
    config.model.update({"width": 32, "num_layers": 2, "num_heads": 4, "head_dim": 16})
    config.model.update({"mlp_width": 64, "vocab_size": 300})
    config.data.seq_len = 16
    return write_run(config, tmp_path_factory.mktemp("sample") / "run")


@pytest.fixture(scope="module")
def generator(run):
    return generate.Generator(open_run(run), VOCAB)


def drawn(generator, prompts=PROMPTS, count=6, streams=None, **sampling):
    streams = range(len(prompts)) if streams is None else streams
    tokens = generator(prompts, count, generate.Sampling(**sampling), streams, 32)
    return np.stack(list(tokens), axis=1)


def test_greedy_text_is_that_of_whole_rows(run, generator):
    found = drawn(generator, temperature=0.0)
    model = load(run)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        for token in tokens:
            row = np.pad(ids, (0, 32 - len(ids)))[None]
            assert token == model.logits(row)[0, len(ids) - 1, :VOCAB].argmax()
            ids.append(int(token))


def test_draws_depend_on_seed_stream_and_text_alone(generator):
    first = drawn(generator, seed=3)
    np.testing.assert_array_equal(first, drawn(generator, seed=3))
    assert (first != drawn(generator, seed=4)).any(axis=1).all()
    assert (first < VOCAB).all()
    np.testing.assert_array_equal(first, drawn(generator, seed=3, top_k=2**40))
    turned = drawn(generator, PROMPTS[::-1], streams=[2, 1, 0], seed=3)
    np.testing.assert_array_equal(turned[::-1], first)
    same = drawn(generator, [PROMPTS[0]] * 3, streams=[0, 5, 6], seed=3)
    np.testing.assert_array_equal(same[0], first[0])
    assert (same[1] != same[0]).any()


def test_mesh_gives_the_same_text(run, generator):
    sharded = generate.Generator(open_run(run, "data=2,fsdp=2,tensor=2", 8), VOCAB)
    np.testing.assert_array_equal(
        drawn(sharded, temperature=0.0), drawn(generator, temperature=0.0)
    )


LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15]))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 0, 1.0, [0.05, 0.4, 0.1, 0.3, 0.15]),
        (1.0, 2, 1.0, [0, 4 / 7, 0, 3 / 7, 0]),
        (1.0, 0, 0.69, [0, 4 / 7, 0, 3 / 7, 0]),
        (1.0, 0, 0.71, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        (1.0, 3, 0.8, [0, 4 / 7, 0, 3 / 7, 0]),  # of 0.85, the first two have 0.82
        (1.0, 0, 0.0, [0, 1, 0, 0, 0]),
        (1.0, 99, 1.0, [0.05, 0.4, 0.1, 0.3, 0.15]),
        (0.5, 0, 1.0, np.array([0.0025, 0.16, 0.01, 0.09, 0.0225]) / 0.285),
    ],
)
def test_draws_have_the_asked_for_distribution(temperature, top_k, top_p, expected):
    count = 4000
    keys = jax.random.split(jax.random.key(0), count)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (count, 5))
    numbers = (np.float32(temperature), np.int32(top_k), np.float32(top_p))
    tokens = jax.jit(generate.draw)(logits, keys, *numbers)
    found = np.bincount(tokens, minlength=5) / count
    np.testing.assert_allclose(found, expected, atol=0.035)
    assert (found[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    ("content", "why"), [(b"", "the file holds no line"), (b"a\n\xff\n", "it is not UTF-8")]
)
def test_prompts_that_cannot_be_read_are_refused(tmp_path, content, why, in_process):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    assert in_process("sample", f"--prompts={path}") == (2, f"error: --prompts={path}: {why}\n")


@pytest.mark.slow
def test_command_streams_one_text_and_lists_several(run, command, tmp_path):
    alone = command("sample", f"--workdir={run}", "--prompt=ab", "--max_tokens=5", "--top_k=5")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("ab")
    again = command(
        "sample", f"--workdir={run}", "--prompt=ab", "--max_tokens=5", "--top_k=5",
        "--num_samples=2",
    )  # fmt: skip
    first, second = again.stdout.split("--- prompt 1, sample ")[1:]
    assert first == f"1\n{alone.stdout}"
    assert second.startswith("2\nab")
    (tmp_path / "prompts.txt").write_text("\nhere is more text than a row\n")
    many = command(
        "sample", f"--workdir={run}", f"--prompts={tmp_path / 'prompts.txt'}", "--max_tokens=2"
    )
    assert many.returncode == 0, many.stderr
    assert "--- prompt 2, sample 1\nhere is more text than a row" in many.stdout
    assert "30 tokens with the prompt are more than data.seq_len=16" in many.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], 'give either --prompt="…" or --prompts=FILE'),
        (["--prompt=a", "--prompts=b"], "give either --prompt"),
        (["--prompts=nowhere"], "--prompts=nowhere: No such file"),
        (["--prompt=a"], "--workdir is missing"),
        (["--prompt=a", "--workdir=nowhere"], "nowhere is no run"),
        (["--prompt=\udcff"], "--prompt is not UTF-8"),
        (["--prompt=a", "--temperature=-1"], "--temperature=-1"),
        (["--prompt=a", "--temperature=nan"], "--temperature=nan must be 0, or from 0.001 to 1000"),
        (["--prompt=a", "--temperature=1e-9"], "--temperature=1e-09 must be 0, or from 0.001"),
        (["--prompt=a", "--top_p=1.5"], "--top_p=1.5"),
        (["--prompt=a", "--top_p=nan"], "--top_p=nan must be from 0 to 1"),
        (["--prompt=a", "--top_k=-1"], "--top_k=-1"),
        (["--prompt=a", "--num_samples=0"], "--num_samples=0"),
        (["--prompt=a", "--max_tokens=0"], "--max_tokens=0"),
    ],
)
def test_bad_input_is_one_line(flags, message, in_process):
    code, error = in_process("sample", *flags)
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
