"""Delta Block at debug size: one look at everything, on a laptop CPU, without downloads.

    python -m deltares_jax.train --config=configs/debug.py

Hardware: 2 CPU cores. Text: the interpreter's own standard library, as bytes.
"""

from deltares_jax.config import ConfigDict, default


def get_config() -> ConfigDict:
    return default()
