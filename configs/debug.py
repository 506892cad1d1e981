"""Delta Block at debug size: one look at everything, on a laptop CPU, without downloads.

    python -m deltares_jax.train --config=configs/debug.py

Hardware: 2 CPU cores, about 35 seconds.
Tokens: 300 updates of 8 x 128, 307 k in all, of the interpreter's own standard library, as bytes.
Expected: held-out loss 1.65 nats on CPython 3.11.7, where an add-one bigram table has 2.21.
"""

from deltares_jax.config import ConfigDict, default


def get_config() -> ConfigDict:
    return default()
