"""The state and the pure steps: nothing here knows a mesh, a disk or a clock.

B batch, T sequence, D width, A micro-batches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from ml_collections.config_dict.config_dict import FrozenConfigDict

from deltares_jax.models import transformer
from deltares_jax.training import losses, optim

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
NORMS = 32  # gradient norms whose median a spike is measured by


class TrainState(struct.PyTreeNode):
    """step: completed updates. params and opt_state: float32 (float64 with that compute dtype).

    norms: the latest gradient norms [NORMS], NaN where there were none; with `train.spike_factor`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    norms: Any = ()


def init_state(config: FrozenConfigDict) -> TrainState:
    """The state before the first update, a function of `train.seed` alone."""
    return fresh(config, transformer.init(config.model, jax.random.key(config.train.seed)))


def fresh(config: FrozenConfigDict, params: Any) -> TrainState:
    """The state before the first update of given parameters."""
    opt_state = optim.make_optimizer(config).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, no_norms(config))


def no_norms(config: FrozenConfigDict) -> Any:
    """`TrainState.norms` before the first update."""
    return jnp.full(NORMS, jnp.nan, jnp.float32) if config.train.spike_factor else ()


def loss_sums(config: FrozenConfigDict, params: Any, batch: Batch) -> losses.LossSums:
    """Loss sums of a batch of rows."""
    inputs = (batch["inputs"], batch["positions"], batch["segments"])
    output = transformer.apply(config.model, params, *inputs)
    return losses.cross_entropy_sums(
        output.hidden_BTD, transformer.head(params), batch["targets"], batch["weights"]
    )


def gradients(config: FrozenConfigDict, params: Any, batch: Batch) -> tuple[losses.LossSums, Any]:
    """Loss sums and the gradient of the mean loss over the valid targets of the whole batch.

    Micro-batches are weighed by their valid targets: each is divided by the count of all, so the
    result does not depend on `train.accumulation`.
    """
    parts = config.train.accumulation
    total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)

    def objective(params: Any, rows: Batch) -> tuple[jax.Array, losses.LossSums]:
        sums = loss_sums(config, params, rows)
        return (sums.loss + config.optim.z_loss * sums.z) / total.astype(sums.loss.dtype), sums

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    if parts == 1:
        (_, sums), grads = value_and_grad(params, batch)
        return sums, grads

    def body(carry: Any, rows: Batch) -> tuple[Any, None]:
        (_, sums), grads = value_and_grad(params, rows)
        return jax.tree.map(jnp.add, carry, (sums, grads)), None

    # Every A-th row, so that a device splits the rows that it holds.
    micro = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1), batch
    )
    shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], micro))
    (_, sums), grads = shapes
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (sums, grads))
    return lax.scan(body, zeros, micro)[0]


def train_step(
    config: FrozenConfigDict, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """One update, or none.

    With a loss or gradient that is not finite the state comes back unchanged. Under
    `train.nonfinite=skip`, and where the gradient norm exceeds `train.spike_factor` times the
    median of those before, parameters and moments do, but the step and the schedule move on.

    Metrics: `loss` (mean over the valid targets, without the z-loss), `grad_norm` (before
    clipping), `learning_rate` (the one used; `routing_learning_rate` where it has its own),
    `tokens` (valid targets), `finite`, `spike`.
    """
    sums, grads = gradients(config, state.params, batch)
    grads = optim.without_frozen(config, grads)
    loss = sums.loss / jnp.maximum(sums.weight, 1.0)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = optim.make_optimizer(config).update(grads, state.opt_state, state.params)
    updated = TrainState(
        state.step + 1, optax.apply_updates(state.params, updates), opt_state, state.norms
    )
    spike = jnp.zeros((), bool)
    if config.train.spike_factor:
        spike = finite & (grad_norm > config.train.spike_factor * jnp.median(state.norms))
        latest = jnp.append(state.norms[1:], grad_norm.astype(state.norms.dtype))
        updated = updated.replace(norms=jnp.where(finite, latest, state.norms))
    counts = finite | (config.train.nonfinite == "skip")
    new_state = _choose(finite & ~spike, counts, updated, state)
    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": optim.schedule(config)(state.step + 1),
        "tokens": sums.weight,
        "finite": finite,
        "spike": spike,
    }
    if config.optim.routing_learning_rate:
        scale = optim.routing_scale(config)
        metrics["routing_learning_rate"] = metrics["learning_rate"] * scale
    return new_state, metrics


def _choose(made: jax.Array, counts: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state where the update is made; where it only counts, its step and schedule."""

    def pick(which: jax.Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(which, a, b), new, old)

    def of_optimizer(new: Any, old: Any) -> Any:
        schedule = isinstance(new, optax.ScaleByScheduleState)
        return pick(counts if schedule else made, new, old)

    return TrainState(
        pick(counts, new.step, old.step),
        pick(made, new.params, old.params),
        jax.tree.map(
            of_optimizer,
            new.opt_state,
            old.opt_state,
            is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState),
        ),
        new.norms,
    )


def eval_step(config: FrozenConfigDict, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sum of the losses and count of the valid targets of a batch."""
    sums = loss_sums(config, params, batch)
    return sums.loss, sums.weight
