"""Continues prompts by a checkpoint, token by token, on one device.

    python -m deltares_jax.sample --workdir=runs/debug --prompt="import os" --max_tokens=200
    python -m deltares_jax.sample --workdir=runs/debug --prompts=prompts.txt --num_samples=2

A single text appears as it is drawn; of several each appears when its batch is done. A text ends at
its end-of-text token.
"""

import pathlib
from typing import Any

from absl import flags

from deltares_jax import command, printing
from deltares_jax.training import signals

_WORKDIR = flags.DEFINE_string("workdir", "", "Run, or RUN/checkpoints/STEP.")
_STEP = flags.DEFINE_string("step", "", "Step of the run: a number, last or best; last by default.")
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue; may be empty.")
_PROMPTS = flags.DEFINE_string("prompts", "", "File with a prompt a line.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 100, "Tokens to add at most.", lower_bound=1, upper_bound=2**17
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Divides the logits; 0 takes the likeliest token.", lower_bound=0.0
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    1.0,
    "Draws from the fewest likeliest tokens of this probability.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Draws from so many of the likeliest tokens; 0: from all.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.", lower_bound=0, upper_bound=2**32 - 1)
_NUM_SAMPLES = flags.DEFINE_integer(
    "num_samples", 1, "Texts a prompt.", lower_bound=1, upper_bound=2**16
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "Texts at a time.", lower_bound=1, upper_bound=2**16
)


def _prompts() -> list[str]:
    """The prompts that the flags give."""
    if (_PROMPT.value is None) == (not _PROMPTS.value):
        raise ValueError('give either --prompt="…" or --prompts=FILE')
    if _PROMPT.value is not None:
        try:
            _PROMPT.value.encode()
        except UnicodeEncodeError:
            raise ValueError("--prompt is not UTF-8") from None
        return [_PROMPT.value]
    try:
        text = pathlib.Path(_PROMPTS.value).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"--prompts={_PROMPTS.value}: {why}") from None
    if not text:
        raise ValueError(f"--prompts={_PROMPTS.value}: the file holds no line")
    return text.removesuffix("\n").split("\n")


def _stream(tokens: Any, tokenizer: Any, prompt: str) -> None:
    """Prints a text as its tokens come."""
    printing.put(prompt, end="")
    ids, shown = [], ""
    for (token,) in tokens:
        if token == tokenizer.end_of_text:
            break
        ids.append(int(token))
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the first bytes of a character
            printing.put(text[len(shown) :], end="")
            shown = text
    printing.put(tokenizer.decode(ids)[len(shown) :])


def _collect(tokens: Any, count: int, end_of_text: int) -> list[list[int]]:
    """The ids of each text of a batch, up to its end-of-text."""
    texts: list[list[int]] = [[] for _ in range(count)]
    going = set(range(count))
    for drawn in tokens:
        for row in sorted(going):
            if drawn[row] == end_of_text:
                going.remove(row)
            else:
                texts[row].append(int(drawn[row]))
        if not going:
            break
    return texts


def main() -> int:
    """Prints the prompts and what follows."""
    signals.interrupt_on_request()
    prompts = _prompts()
    printing.need_stdout()
    from deltares_jax.inference import generate, trained  # brings in jax
    from deltares_jax.parallel import mesh

    try:
        sampling = generate.Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    folder, step = trained.find(_WORKDIR.value, _STEP.value)
    config = trained.saved_config(folder, step)
    tokenizer = trained.tokenizer(config)
    model = trained.load(folder, step, config, "", mesh.find_devices(config)[:1])
    # An empty text is continued from the end of another.
    ids = [
        encoded.tolist() or [tokenizer.end_of_text]
        for encoded in tokenizer.encode_batch([prompt.encode() for prompt in prompts])
    ]
    longest = max(map(len, ids)) + _MAX_TOKENS.value
    if longest > config.data.seq_len:
        printing.note(
            f"{longest} tokens with the prompt are more than data.seq_len={config.data.seq_len}: "
            "the model was not trained on positions beyond"
        )
    generator = generate.Generator(model, tokenizer.vocab_size)
    texts = [(p, s) for p in range(len(prompts)) for s in range(_NUM_SAMPLES.value)]
    for first in range(0, len(texts), _BATCH_SIZE.value):
        part = texts[first : first + _BATCH_SIZE.value]
        streams = range(first, first + len(part))
        tokens = generator([ids[p] for p, _ in part], _MAX_TOKENS.value, sampling, streams, longest)
        if len(texts) == 1:
            _stream(tokens, tokenizer, prompts[0])
            continue
        collected = _collect(tokens, len(part), tokenizer.end_of_text)
        for (p, s), drawn in zip(part, collected, strict=True):
            printing.put(f"--- prompt {p + 1}, sample {s + 1}")
            printing.put(prompts[p] + tokenizer.decode(drawn))
    return 0


if __name__ == "__main__":
    command.run(main, __doc__)
