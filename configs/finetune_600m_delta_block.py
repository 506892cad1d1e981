r"""Fine-tuning of Qwen3-0.6B with Delta Block, 4 blocks.

    python -m deltares_jax.data.prepare --source=fineweb_edu/sample-10BT \
        --tokenizer=Qwen/Qwen3-0.6B --max_tokens=1400000000
    python -m deltares_jax.convert import --hf=Qwen/Qwen3-0.6B \
        --variant=delta_block --num_blocks=4 --out=runs/qwen3_600m_delta_block
    python -m deltares_jax.train --config=configs/finetune_600m_delta_block.py

Hardware: one host of 8 accelerators.
Tokens: 20 000 updates of 32 x 2048 = 66 k, 1.31 B in all,
    of FineWeb-Edu (sample-10BT) by the Qwen3 tokenizer.
Expected: mean of 8 zero-shot tasks 55.6 %, as published in arXiv 2605.18855 with
    zero queries that are not centred.
"""

from deltares_jax.config import ConfigDict
from deltares_jax.recipes import finetune


def get_config() -> ConfigDict:
    return finetune("delta_block", num_blocks=4)
