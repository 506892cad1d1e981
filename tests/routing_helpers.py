"""Models whose routing is known without running them."""

import jax
import jax.numpy as jnp
import numpy as np
from model_helpers import init, randomise

from deltares_jax import config as config_lib
from deltares_jax.models import readings
from deltares_jax.training import checkpoint

EMBEDDING_NORM = 3.0


def known_params(model, logits):
    """Parameters whose sources are one vector, and zero after it, so that weights are known.

    All tokens have the same embedding; sublayers put out zero, and so do their differences. The
    logit of the embedding is that which `logits` has for the reader, of all other sources 0.
    """
    params = jax.tree.map(np.array, init(model, jax.random.key(0)))
    D = model.width
    v_D = np.random.default_rng(0).normal(size=D).astype(np.float32)
    v_D *= EMBEDDING_NORM / np.linalg.norm(v_D)
    params["embedding"][:] = v_D
    layers = params["layers"]
    layers["attn"]["out"][:] = 0.0
    layers["mlp"]["down"][:] = 0.0
    normed_D = v_D / np.sqrt(np.mean(v_D**2) + model.norm_eps)
    for name, logit in logits.items():
        _, layer, kind = name.split(".")
        query = layers[f"{kind}_reader"]["routing"]["query"]
        query[int(layer)] = logit * normed_D / np.sum(normed_D**2)
    return jax.tree.map(jnp.asarray, params)


def write_params(config, folder, params, step=1):
    """A run's folder with a checkpoint of these parameters."""
    with checkpoint.Checkpointer(folder, keep=1) as writer:
        writer.save(step, {"params": params}, {"config": config.to_dict()})
    return folder


def small(source, variant="delta_attnres", layers=2, blocks=2, **residual):
    """A config of the tests' model on a prepared folder."""
    config = config_lib.default()
    config.model.update({"width": 32, "num_layers": layers, "num_heads": 4, "num_kv_heads": 2})
    config.model.update({"head_dim": 16, "mlp_width": 64})
    config.model.residual.update({"variant": variant, "num_blocks": blocks, **residual})
    config.data.update({"source": "text", "dir": str(source), "seq_len": 16})
    config.eval.update({"rows": 5, "batch_size": 8})
    return config_lib.resolve(config)


def logits_by_reader(model):
    """A logit of its own for each reader that has a choice."""
    names = [r.name for r in readings.readers(model) if len(r.sources) > 1]
    return {name: 0.5 + 0.4 * number for number, name in enumerate(names)}


def write_run(config, folder, known=False):
    """A run of random weights, or of known routing."""
    if known:
        params = known_params(config.model, logits_by_reader(config.model))
    else:
        params = randomise(init(config.model, jax.random.key(0)), scale=0.1)
    return write_params(config, folder, params)
