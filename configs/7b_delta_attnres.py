r"""Delta AttnRes, 7.6B parameters.

    python -m deltares_jax.data.prepare --source=fineweb_edu/sample-10BT \
        --tokenizer=Qwen/Qwen3-0.6B --max_tokens=1400000000
    python -m deltares_jax.train --config=configs/7b_delta_attnres.py

Hardware: 64 accelerators (the batch is 64 sequences, so 64 data-parallel devices at most).
Tokens: 10 000 updates of 64 x 2048 = 131 k, 1.31 B in all,
    of FineWeb-Edu (sample-10BT) by the Qwen3 tokenizer.
Expected: not published; Delta Block reached 16.00 with this recipe (arXiv 2605.18855).
"""

from deltares_jax.config import ConfigDict, paper


def get_config() -> ConfigDict:
    return paper("7b", "delta_attnres")
