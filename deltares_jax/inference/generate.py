"""Generation with cached keys and values, a batch at a time.

B batch, P tokens of the longest prompt, S cached positions, D width, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from deltares_jax.inference.trained import Trained
from deltares_jax.models import decode, transformer
from deltares_jax.parallel import sharding

_SHORTEST = 16  # lengths that programs are made for double from here on
_TEMPERATURES = (1e-3, 1e3)  # beyond, quotients of logits are no numbers, or all the same


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draws from so many of the likeliest; 0 from all.
      top_p: then from the fewest likeliest that have at least this probability together.
      seed: of the draws, below 2**32.

    Raises:
      ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        coldest, hottest = _TEMPERATURES
        if self.temperature != 0 and not coldest <= self.temperature <= hottest:
            raise ValueError(
                f"temperature={self.temperature} must be 0, or from {coldest} to {hottest}"
            )
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be from 0 to 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0")


def rounded(length: int) -> int:
    """The next length that programs are made for: few lengths, few programs."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def draw(
    logits_BV: jax.Array, keys_B: jax.Array, temperature: Any, top_k: Any, top_p: Any
) -> jax.Array:
    """Next tokens [B]; see `Sampling`, with a temperature above 0."""
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1) / temperature
    rank_1V = jnp.arange(logits_BV.shape[-1])[None]
    kept_BV = rank_1V < jnp.where(top_k > 0, top_k, sorted_BV.size)
    sorted_BV = jnp.where(kept_BV, sorted_BV, -jnp.inf)
    weights_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(weights_BV, axis=-1) - weights_BV
    sorted_BV = jnp.where((before_BV < top_p) | (rank_1V == 0), sorted_BV, -jnp.inf)
    rank_B = jax.vmap(jax.random.categorical)(keys_B, sorted_BV)
    return jnp.take_along_axis(order_BV, rank_B[:, None], axis=-1)[:, 0]


class Generator:
    """Continues prompts by a model.

    Args:
      trained: the model and its devices.
      vocab_size: ids from here on are never drawn: the model may have more than the tokenizer.
    """

    def __init__(self, trained: Trained, vocab_size: int):
        self._trained, self._vocab_size = trained, vocab_size
        everywhere = NamedSharding(trained.mesh, PartitionSpec())
        # The tokens go to the host, the cache stays as it lies.
        out = (everywhere, None)
        self._begin = jax.jit(self._prefill, static_argnames=("S", "greedy"), out_shardings=out)
        self._go_on = jax.jit(
            self._step, static_argnames="greedy", donate_argnames="cache", out_shardings=out
        )

    def _prefill(
        self,
        params: Any,
        tokens_BP: jax.Array,
        lengths_B: jax.Array,
        streams_B: jax.Array,
        numbers: Any,
        S: int,
        greedy: bool,
    ) -> tuple[jax.Array, Any]:
        model, (B, P) = self._trained.config.model, tokens_BP.shape
        cache = decode.empty_cache(model, B, S)
        positions_BP = jnp.broadcast_to(jnp.arange(P)[None], (B, P))
        hidden_BPD, cache = decode.apply(model, params, cache, tokens_BP, positions_BP)
        last_B11 = (lengths_B - 1)[:, None, None]
        hidden_BD = jnp.take_along_axis(hidden_BPD, last_B11, axis=1)[:, 0]
        return self._next(params, hidden_BD, lengths_B, streams_B, numbers, greedy), cache

    def _step(
        self,
        params: Any,
        cache: Any,
        tokens_B: jax.Array,
        positions_B: jax.Array,
        streams_B: jax.Array,
        numbers: Any,
        greedy: bool,
    ) -> tuple[jax.Array, Any]:
        model = self._trained.config.model
        inputs = (tokens_B[:, None], positions_B[:, None])
        hidden_B1D, cache = decode.apply(model, params, cache, *inputs)
        after_B = positions_B + 1
        return self._next(params, hidden_B1D[:, 0], after_B, streams_B, numbers, greedy), cache

    def _next(
        self,
        params: Any,
        hidden_BD: jax.Array,
        positions_B: jax.Array,
        streams_B: jax.Array,
        numbers: Any,
        greedy: bool,
    ) -> jax.Array:
        head_VD = transformer.head(params).astype(hidden_BD.dtype)
        logits_BV = jnp.einsum("bd,vd->bv", hidden_BD, head_VD, preferred_element_type=jnp.float32)
        unknown_V = jnp.arange(logits_BV.shape[-1]) >= self._vocab_size
        logits_BV = jnp.where(unknown_V[None], -jnp.inf, logits_BV)
        if greedy:
            return jnp.argmax(logits_BV, axis=-1)
        temperature, top_k, top_p, seed = numbers

        def key(stream: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), position)

        keys_B = jax.vmap(key)(streams_B, positions_B)
        return draw(logits_BV, keys_B, temperature, top_k, top_p)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        streams: Sequence[int],
        length: int = 0,
    ) -> Iterator[np.ndarray]:
        """Yields the next token of each prompt, [B], `max_tokens` times; the reader may stop.

        Args:
          prompts: token ids, one at least of each.
          max_tokens: how many are drawn.
          sampling: how.
          streams: of random numbers, one a prompt: what is drawn depends on the seed, the stream,
            and the text so far, not on the rest of the batch.
          length: positions to make room for, so that batches share programs; at least the longest
            prompt and `max_tokens`.
        """
        count, put = len(prompts), self._trained.put
        B = self._trained.batch_size(count)
        P = rounded(max(map(len, prompts)))
        S = max(P, rounded(max(length, max(map(len, prompts)) + max_tokens)))
        filled_BP = np.zeros((B, P), np.int32)
        positions_B = np.ones(B, np.int32)
        for row, prompt in enumerate(prompts):
            filled_BP[row, : len(prompt)] = prompt
            positions_B[row] = len(prompt)
        streams_B = put(np.resize(np.asarray(streams, np.int32), B))
        numbers = (
            np.float32(sampling.temperature),
            np.int32(min(sampling.top_k, self._vocab_size)),
            np.float32(sampling.top_p),
            np.uint32(sampling.seed),
        )
        greedy, params = sampling.temperature == 0, self._trained.params
        with sharding.activate(self._trained.mesh):
            tokens_B, cache = self._begin(
                params, put(filled_BP), put(positions_B), streams_B, numbers, S=S, greedy=greedy
            )
        for number in range(max_tokens):
            following = tokens_B
            if number + 1 < max_tokens:  # the device goes on while the host reads
                with sharding.activate(self._trained.mesh):
                    following, cache = self._go_on(
                        params,
                        cache=cache,
                        tokens_B=tokens_B,
                        positions_B=put(positions_B + number),
                        streams_B=streams_B,
                        numbers=numbers,
                        greedy=greedy,
                    )
            yield np.asarray(jax.device_get(tokens_B))[:count]
            tokens_B = following
