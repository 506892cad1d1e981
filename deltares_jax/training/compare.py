"""A model that starts from given weights beside the same model without its routing, on one batch.

B batch, T sequence, D width.
"""

import contextlib
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax import config as config_lib
from deltares_jax.data import dataset, pipeline
from deltares_jax.models import transformer, variants
from deltares_jax.parallel import sharding
from deltares_jax.training import losses, step
from deltares_jax.training import programs as programs_lib


def without_routing(config: FrozenConfigDict, params: Any) -> tuple[FrozenConfigDict, Any]:
    """The baseline of the same shape: its config, and the parameters that are no reader's."""
    values = config.to_dict()
    values["model"]["residual"] = config_lib.default().model.residual.to_dict()
    values["model"]["residual"]["variant"] = "baseline"

    def rest(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: leaf for name, leaf in tree.items() if not name.endswith("_reader")}

    return FrozenConfigDict(values), rest(params) | {"layers": rest(params["layers"])}


def compare(config: FrozenConfigDict, params: Any, batch: step.Batch) -> dict[str, jax.Array]:
    """Mean `loss`, that without routing (`plain`), and the largest `difference` of two logits."""
    inputs = (batch["inputs"], batch["positions"], batch["segments"])
    head_VD = transformer.head(params)

    def run(cfg: FrozenConfigDict, params: Any) -> tuple[jax.Array, jax.Array]:
        hidden_BTD = transformer.apply(cfg.model, params, *inputs).hidden_BTD
        sums = losses.cross_entropy_sums(hidden_BTD, head_VD, batch["targets"], batch["weights"])
        return hidden_BTD, sums.loss / sums.weight

    hidden_BTD, loss = run(config, params)
    plain_BTD, plain = run(*without_routing(config, params))
    difference = losses.largest_logit_difference(hidden_BTD, plain_BTD, head_VD)
    return {"loss": loss, "plain": plain, "difference": difference}


def line(
    config: FrozenConfigDict,
    mesh: Mesh,
    programs: programs_lib.Programs,
    params: Any,
    data: dataset.Data,
) -> str:
    """What routing changes before the first update, on the first rows that the run will see."""
    if variants.VARIANTS[config.model.residual.variant].routing == "none":
        return "baseline: nothing is changed by routing"
    rows = config.train.batch_size // config.train.accumulation
    batches = pipeline.train_batches(data.rows, data.order, rows, 0, *programs.place)
    with contextlib.closing(batches):
        batch = programs.put(next(batches))
    config = programs_lib.for_platform(config, mesh.devices.flat[0].platform, mesh.shape["tensor"])
    with sharding.activate(mesh):
        function = jax.jit(
            functools.partial(compare, config), out_shardings=NamedSharding(mesh, PartitionSpec())
        )
        compiled = programs_lib.compile_for(function.lower(params, batch), mesh)
        numbers = jax.device_get(compiled(params, batch))
    return (
        f"before the first update, on {rows} rows: loss {numbers['loss']:.4f}, without routing "
        f"{numbers['plain']:.4f}; largest difference of a logit {numbers['difference']:.3g}"
    )
