r"""AttnRes block (Kimi), 1.04B parameters, 4 blocks.

    python -m deltares_jax.data.prepare --source=fineweb_edu/sample-10BT \
        --tokenizer=Qwen/Qwen3-0.6B --max_tokens=700000000
    python -m deltares_jax.train --config=configs/1b_attnres_block.py

Hardware: 16 accelerators.
Tokens: 10 000 updates of 32 x 2048 = 66 k, 655 M in all,
    of FineWeb-Edu (sample-10BT) by the Qwen3 tokenizer.
Expected: validation perplexity 31.76, as published in arXiv 2605.18855.
"""

from deltares_jax.config import ConfigDict, paper


def get_config() -> ConfigDict:
    return paper("1b", "attnres_block", num_blocks=4)
