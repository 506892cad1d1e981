"""Pretraining of Qwen3-style language models with Delta Attention Residuals."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

if TYPE_CHECKING:
    from deltares_jax.loading import load


def __getattr__(name: str) -> Any:
    # `load` brings in jax; commands that check their input first must not wait for it.
    if name == "load":
        from deltares_jax.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
