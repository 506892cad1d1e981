"""Counts of parameters and floating-point operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from ml_collections import FrozenConfigDict
from model_helpers import init, inputs, make

from deltares_jax.models import sizes, transformer


@pytest.mark.parametrize("size", sizes.SIZES)
@pytest.mark.parametrize("name", ["baseline", "delta_block", "attnres_full"])
@pytest.mark.parametrize("tied", [True, False])
def test_counted_parameters_are_those_of_the_tree(tiny, size, name, tied):
    num_layers = sizes.SIZES[size]["num_layers"]
    config = make(tiny, name, num_layers, tied=tied)
    options = {"null_source": True, "gate": "scalar"} if name == "delta_block" else {}
    model = {**config.to_dict(), **sizes.SIZES[size], "vocab_size": 151936}
    model["residual"].update(options)
    config = FrozenConfigDict(model)
    shapes = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    assert sum(sizes.parameter_counts(config).values()) == sum(
        p.size for p in jax.tree.leaves(shapes)
    )


def test_sizes_are_the_published_ones(tiny):
    published = {"220m": 220.5, "533m": 533.1, "600m": 596.0, "1b": 1043.8, "7b": 7568.0}
    for size, millions in published.items():
        model = {**make(tiny, "baseline").to_dict(), **sizes.SIZES[size], "vocab_size": 151936}
        total = sum(sizes.parameter_counts(FrozenConfigDict(model)).values()) / 1e6
        assert abs(total - millions) < 0.5e-3 * millions, size


def test_flops_are_those_of_the_matmuls(tiny):
    """Against XLA's own count of a forward pass without attention's masked half."""
    config = make(tiny, "baseline")
    params = init(config, jax.random.key(0))
    B, T = 2, 12

    def forward(params):
        hidden_BTD = transformer.apply(config, params, *inputs(B, T)).hidden_BTD
        return jnp.einsum("btd,vd->btv", hidden_BTD, transformer.head(params))

    def count(jaxpr):
        flops = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                left = equation.invars[0].aval.shape
                inner = int(np.prod([left[i] for i in contracted]))
                flops += 2 * inner * equation.outvars[0].aval.size
            for inner in jaxprs_in_params(equation.params):
                flops += equation.params.get("length", 1) * count(inner)
        return flops

    flops = count(jax.make_jaxpr(forward)(params).jaxpr)
    counted = sizes.flops_per_token(config, T)["model"] / 3 * B * T
    other_half = 2 * config.num_layers * config.num_heads * config.head_dim * T * B * T
    assert counted + other_half == flops
