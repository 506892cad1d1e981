"""Eight simulated devices, one compile cache, and small configs for all tests."""

import os
import pathlib
import runpy
import signal
import subprocess
import sys

# A shell's background jobs ignore SIGINT, and so would all that is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "xla"

# Before jax is imported anywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling takes most of the time; the slow tests and the commands run with full optimisation.
optimisation = os.environ.get("TEST_XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {optimisation}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import pytest
from absl import flags
from ml_collections import ConfigDict

from deltares_jax import config as config_lib


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory):
    """Prepared data goes to a folder of this session, for this process and its children."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> pathlib.Path:
    """The folder of the interpreter's own standard library, prepared."""
    from deltares_jax.data import build, manifest, sources, tokens

    folder = manifest.folder_of(tmp_path_factory.mktemp("data"), "py_stdlib", "byte")
    build.prepare(sources.py_stdlib(), tokens.ByteTokenizer(), folder)
    return folder


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> pathlib.Path:
    """Three data sets: `long`, `short` of 20 rows, and `held` without a train split."""
    from data_helpers import prepare_files, write_files

    from deltares_jax.data import sources

    root = tmp_path_factory.mktemp("corpora")
    texts = {"long": 400, "short": 7, "held": 5}
    patch = pytest.MonkeyPatch()
    for name, count in texts.items():
        files = {f"{i:03}.txt": f"{name} {i} ".encode() * 6 for i in range(count)}
        write_files(root / "in" / name, files)
        splits = {"short": "train", "held": "validation"}
        if name in splits:
            patch.setattr(sources.Source, "split", lambda self, part, at, s=splits[name]: s)
        prepare_files(root / name, root / "in" / name)
        patch.undo()
    return root


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> pathlib.Path:
    """A folder with a small tokenizer.json: byte-level pieces of Python, ids up to 299."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([pathlib.Path(__file__).read_text()], trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tiny() -> ConfigDict:
    """2 layers, width 32, 4 heads, 2 KV heads, head_dim 16, batch 8 x 16, six steps."""
    return tiny_config()


def tiny_config() -> ConfigDict:
    config = config_lib.default()
    config.model.update(
        {
            "width": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "mlp_width": 64,
        }
    )
    config.data.seq_len = 16
    config.train.update({"steps": 6, "batch_size": 8})
    config.optim.warmup_steps = 2
    config.eval.update({"every": 0, "rows": 8, "batch_size": 8})
    config.checkpoint.update({"every": 0, "keep": 2})
    config.metrics.tensorboard = False
    return config


@pytest.fixture
def one_layer(tiny):
    """Makes `tiny` compile fast, for tests in which nothing depends on the model."""
    tiny.model.num_layers = 1
    tiny.model.residual.variant = "baseline"


def run_command(*arguments: str, env: dict[str, str] | None = None, **kwargs):
    """Runs `python -m deltares_jax.<first argument> …` as a user does, on one device."""
    environment = {**os.environ, "XLA_FLAGS": "", **(env or {})}
    command = [sys.executable, "-m", f"deltares_jax.{arguments[0]}", *arguments[1:]]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=kwargs.pop("cwd", ROOT),
        timeout=kwargs.pop("timeout", 240),
        **kwargs,
    )


@pytest.fixture
def command():
    return run_command


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Runs a command without a process of its own: exit code, and what it says on stderr."""

    def run(name: str, *arguments: str):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(f"deltares_jax.{name}", run_name="__main__")
        finally:
            # Its own alone: those of libraries that it was the first to import stay.
            for flag in list(flags.FLAGS.flags_by_module_dict().get(name, [])):
                delattr(flags.FLAGS, flag.name)
            flags.FLAGS.unparse_flags()
        return ended.value.code, capsys.readouterr().err

    return run
