"""The table of residual variants: which sources exist, who reads them, what the stream does.

Pure data and integer arithmetic without jax: configuration checks and reports read the same table
that the model runs on. Sources: "Delta Attention Residuals" (arXiv 2605.18855), "Attention
Residuals" (arXiv 2603.15031).

Words: a *site* is a place where a sublayer reads: (block, layer in the block, sublayer), all from
0, sublayer 0 = attention, 1 = MLP. A *slot* is a place in the buffer of sources, oldest first.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

SUBLAYERS = ("attn", "mlp")
_FEW = 4


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table.

    routing: `add` puts the routed mix on top of the stream, `replace` reads the mix alone.
    grows: when a source is appended: after every sublayer, at every block end, or never.
    appends: what is appended, by the names in `residual.py`.
    seeded: the embedding is source 0.
    skips: the readers that see one source fewer: the model's first, or the first of each block.
    live: whether the running stream is read as the last source.
    stream: `accumulate` (h + y), `restart` (at each block), `discard` (none is kept).
    final_read: the final norm reads a routed mix of all sources, with its own query and gain.
    ragged: the last block may be shorter than the others.
    options: the options of `model.residual` that may be switched on.
    """

    routing: Literal["none", "add", "replace"] = "none"
    grows: Literal["never", "sublayer", "block"] = "never"
    appends: Literal["output", "stream", "delta", "sum", "change"] = "output"
    seeded: bool = False
    skips: Literal["none", "first", "block_first"] = "none"
    live: Literal["never", "always", "unless_empty"] = "never"
    stream: Literal["accumulate", "restart", "discard"] = "accumulate"
    final_read: bool = False
    ragged: bool = False
    options: frozenset[str] = frozenset()


_ADDITIVE = frozenset({"gate", "null_source", "centered"})

VARIANTS: dict[str, Variant] = {
    "baseline": Variant(),
    "delta_attnres": Variant("add", "sublayer", "output", True, "first", options=_ADDITIVE),
    "delta_block": Variant("add", "block", "delta", True, "first", options=_ADDITIVE),
    "attnres_block": Variant(
        "replace", "block", "sum", True, live="unless_empty", stream="restart", final_read=True
    ),
    "attnres_full": Variant(
        "replace", "sublayer", "output", True, stream="discard", final_read=True
    ),
    "attnres_cumulative": Variant("replace", "sublayer", "stream", True),
    "full_additive": Variant("add", "sublayer", "stream", options=_ADDITIVE),
    "delta_replace": Variant("replace", "sublayer", "output", live="always"),
    "delta_block_released": Variant(
        "add", "block", "change", True, "block_first", ragged=True, options=_ADDITIVE - {"centered"}
    ),
}


def layers_per_block(variant: str, num_layers: int, num_blocks: int) -> int:
    """Layers in a full block: L/N, rounded up where the variant lets the last one be shorter."""
    if VARIANTS[variant].grows != "block":
        return num_layers
    return -(-num_layers // num_blocks)


def written_out(remat: str, length: int) -> int:
    """How many steps of a loop over `length` layers the program writes out one after the other.

    All of a few: slices of stacked arrays cost more there than a longer program does. Where layers
    run again for the backward pass the loop also keeps the compiler from undoing that.
    """
    return length if remat == "none" and length <= _FEW else 1


def block_lengths(variant: str, num_layers: int, num_blocks: int) -> tuple[int, ...]:
    """Length in layers of each block that really exists, first to last."""
    full = layers_per_block(variant, num_layers, num_blocks)
    tail = num_layers % full
    return (full,) * (num_layers // full) + ((tail,) if tail else ())


def num_slots(variant: str, num_layers: int, num_blocks: int) -> int:
    """Slots in the source buffer: the embedding, where it is one, and all that is appended."""
    row = VARIANTS[variant]
    blocks = len(block_lengths(variant, num_layers, num_blocks))
    return row.seeded + {"never": 0, "sublayer": 2 * num_layers, "block": blocks}[row.grows]


def sublayer_index(block: Any, layer: Any, sublayer: int, per_block: int) -> Any:
    """Index from 0 of a sublayer in the whole model; the arguments may be traced."""
    return 2 * (block * per_block + layer) + sublayer


def visible_slots(row: Variant, block: Any, layer: Any, sublayer: int, per_block: int) -> Any:
    """How many slots, oldest first, the reader at a site sees; block and layer may be traced."""
    index = sublayer_index(block, layer, sublayer, per_block)
    seen = row.seeded + {"never": 0, "sublayer": index, "block": block}[row.grows]
    if row.skips == "first":
        return seen - (index == 0)
    if row.skips == "block_first":
        return seen - ((layer == 0) & (sublayer == 0))
    return seen


def sees_stream(row: Variant, layer: Any, sublayer: int) -> Any:
    """Whether the reader at a site has the running stream as its last source."""
    if row.live == "unless_empty":
        return (layer > 0) | (sublayer > 0)
    return row.live == "always"


def sites(variant: str, num_layers: int, num_blocks: int) -> Iterator[tuple[str, int, int, int]]:
    """Yields (reader name, block, layer in the block, sublayer) in the order of the depth."""
    number = 0
    for block, length in enumerate(block_lengths(variant, num_layers, num_blocks)):
        for layer in range(length):
            for sublayer, kind in enumerate(SUBLAYERS):
                yield f"layers.{number}.{kind}", block, layer, sublayer
            number += 1


def slot_names(variant: str, num_layers: int, num_blocks: int) -> list[str]:
    """What each slot holds, oldest first: `embedding`, `layers.3.mlp.out`, `blocks.0.delta`."""
    row = VARIANTS[variant]
    names = ["embedding"] if row.seeded else []
    if row.grows == "sublayer":
        kind = {"output": "out", "stream": "stream"}[row.appends]
        names += [f"{reader}.{kind}" for reader, *_ in sites(variant, num_layers, num_blocks)]
    if row.grows == "block":
        blocks = len(block_lengths(variant, num_layers, num_blocks))
        names += [f"blocks.{block}.{row.appends}" for block in range(blocks)]
    return names


def source_names(
    variant: str, num_layers: int, num_blocks: int, null_source: bool = False
) -> dict[str, list[str]]:
    """The sources of every reader that has any, in the order in which its weights are reported.

    Keys are `layers.<l>.attn`, `layers.<l>.mlp` (l from 0) and `final`; the null source comes
    first, then the slots oldest first, then the running stream.
    """
    row = VARIANTS[variant]
    slots = slot_names(variant, num_layers, num_blocks)
    per_block = layers_per_block(variant, num_layers, num_blocks)
    result = {}
    for reader, block, layer, sublayer in sites(variant, num_layers, num_blocks):
        names = ["null"] * null_source
        names += slots[: visible_slots(row, block, layer, sublayer, per_block)]
        names += ["stream"] * bool(sees_stream(row, layer, sublayer))
        result[reader] = names
    if row.final_read:
        result["final"] = slots
    return {reader: names for reader, names in result.items() if names and row.routing != "none"}
