"""Random tiny Qwen3 models by transformers, as references for conversion.

    python tests/golden/qwen3.py make tests/golden      # needs torch and transformers, 4 or 5
    python tests/golden/qwen3.py logits FOLDER OUT.npz  # of what AutoModelForCausalLM loads

`make` writes a folder for each case, `qwen3_v4_tied` and so on by the version of transformers that
runs: the checkpoint as `save_pretrained` leaves it, and `reference.npz` with the versions (JSON, in
`meta`), `ids` [1, T] and `logits` [1, T, V] in float32. Weights are multiples of 1/64, exact in
every type that they are saved in.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

MAJOR = int(transformers.__version__.split(".")[0])
VOCAB, T = 97, 120
CASES = {
    # name: tied, theta, type, largest file
    "tied": (True, 1e6, torch.bfloat16, "1GB"),
    "untied": (False, 5e5, torch.float16 if MAJOR == 4 else torch.float32, "50KB"),
}


def make_config(tied: bool, theta: float):
    rope = {"rope_theta": theta}
    if MAJOR >= 5:
        rope = {"rope_parameters": {"rope_type": "default", **rope}}
    return transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=tied,
        eos_token_id=96,
        **rope,
    )


def randomise(model, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        values = generator.normal(0, 0.2, shape) + (len(shape) == 1)  # gains lie around 1
        values = np.round(np.clip(values, -1.9, 1.9) * 64) / 64
        parameter.data.copy_(torch.tensor(values, dtype=parameter.dtype))


def ids() -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCAB, (1, T))


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(ids())).logits.numpy()


def make(target: pathlib.Path) -> None:
    for seed, (name, (tied, theta, dtype, largest)) in enumerate(CASES.items()):
        model = transformers.Qwen3ForCausalLM._from_config(
            make_config(tied, theta), attn_implementation="eager"
        )
        randomise(model, seed)
        reference = logits(model)
        folder = target / f"qwen3_v{MAJOR}_{name}"
        model.to(dtype).save_pretrained(folder, max_shard_size=largest)
        meta = {"transformers": transformers.__version__, "torch": torch.__version__}
        np.savez_compressed(
            folder / "reference.npz", meta=json.dumps(meta), ids=ids(), logits=reference
        )


def main() -> None:
    verb, *paths = sys.argv[1:]
    if verb == "make":
        make(pathlib.Path(paths[0]))
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            paths[0], attn_implementation="eager"
        )
        np.savez(paths[1], logits=logits(model), dtype=str(model.dtype), kind=type(model).__name__)


if __name__ == "__main__":
    main()
