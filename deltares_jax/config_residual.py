"""The rules of `model.residual`, and of what goes with a variant. Free of jax."""

from typing import Any

from deltares_jax.models import variants


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def check(flat: dict[str, Any]) -> None:
    """Refuses options that a variant does not take, and blocks that do not divide the layers."""
    name, blocks = flat["model.residual.variant"], flat["model.residual.num_blocks"]
    row, layers = variants.VARIANTS[name], flat["model.num_layers"]
    if row.grows == "block" and row.ragged and blocks > layers:
        raise ValueError(
            f"model.residual.num_blocks={blocks} must not exceed model.num_layers={layers}"
        )
    if row.grows == "block" and not row.ragged and layers % blocks:
        near = sorted(_divisors(layers), key=lambda n: (abs(n - blocks), n))[:2]
        raise ValueError(
            f"model.residual.num_blocks={blocks} must divide model.num_layers={layers}; "
            f"nearest valid: {' or '.join(map(str, sorted(near)))}"
        )
    gate, centered = flat["model.residual.gate"], flat["model.residual.centered"]
    null_source = flat["model.residual.null_source"]
    switched = {"gate": gate != "none", "null_source": null_source, "centered": centered}
    for option, on in switched.items():
        if on and option not in row.options:
            takers = ", ".join(n for n, r in variants.VARIANTS.items() if option in r.options)
            raise ValueError(
                f"model.residual.{option}={flat[f'model.residual.{option}']} is not defined for "
                f"{name}; it goes with {takers}"
            )
    if centered and gate == "alpha":
        raise ValueError(
            "model.residual.centered=True with model.residual.gate=alpha never trains: the "
            "gradients of both are 0 at the start; use gate=none or gate=scalar"
        )
    kernel, grows = flat["model.residual.kernel"], {"batched": {"block", "sublayer"}}
    grows["pallas"] = {"sublayer"}
    if row.grows not in grows.get(kernel, {row.grows}):
        takers = ", ".join(n for n, r in variants.VARIANTS.items() if r.grows in grows[kernel])
        raise ValueError(
            f"model.residual.kernel={kernel} is not defined for {name}; it goes with {takers}"
        )
    if row.grows == "sublayer" and flat["model.remat"] == "offload":
        raise ValueError(
            f"model.remat=offload moves the inputs of layers; {name} keeps sources instead, and "
            "reads them in every layer; use model.remat=full"
        )
    if flat["model.scan"] == "boundaries" and flat["model.remat"] != "full":
        raise ValueError(
            "model.scan=boundaries keeps nothing inside a block, so it goes with model.remat=full, "
            f"not with model.remat={flat['model.remat']}"
        )
    if null_source and flat["model.norm_eps"] == 0:
        raise ValueError(
            "model.norm_eps=0 cannot normalise model.residual.null_source=True, which starts at 0"
        )
