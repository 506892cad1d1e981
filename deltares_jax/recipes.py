"""What several recipes under configs/ share, beside `config.paper`. Free of jax."""

from deltares_jax.config import ConfigDict, paper
from deltares_jax.models import variants


def finetune(variant: str, num_blocks: int = 4) -> ConfigDict:
    """The fine-tuning of Qwen3-0.6B in "Delta Attention Residuals" (arXiv 2605.18855).

    Rates and steps are published, blocks and warm-up are defaults of the released script. It adds
    a plain zero query; here routing is centred where it can be, as conversion does by default.

    Args:
      variant: a name in `variants.VARIANTS`.
      num_blocks: blocks, for the variants that have them.
    """
    config = paper("600m", variant, num_blocks)
    config.init_from = f"runs/qwen3_600m_{variant}"
    config.model.rope_theta = 1e6
    config.model.residual.centered = "centered" in variants.VARIANTS[variant].options
    config.train.steps = 20_000
    config.optim.update(
        {
            "learning_rate": 5e-5,
            "final_learning_rate": 5e-6,
            "routing_learning_rate": 5e-3,
            "warmup_steps": 500,
        }
    )
    return config
