"""Sizes by name, parameter and FLOP counts. Free of jax: configuration and reports use it.

The shapes are those of "Delta Attention Residuals" (arXiv 2605.18855); 600m is Qwen3-0.6B.
"""

from typing import Any

from deltares_jax.models import variants

_COLUMNS = ("width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width")

SIZES: dict[str, dict[str, int]] = {
    name: dict(zip(_COLUMNS, row, strict=True))
    for name, row in {
        "220m": (768, 12, 12, 4, 64, 3072),
        "533m": (1024, 24, 16, 8, 64, 4096),
        "600m": (1024, 28, 16, 8, 128, 3072),
        "1b": (1280, 36, 20, 4, 64, 5120),
        "7b": (4096, 36, 32, 8, 128, 12288),
    }.items()
}


def parameter_counts(model: Any) -> dict[str, int]:
    """Parameters by part: `embedding`, `layers`, `routing`, `head` and the final norm's `norm`."""
    D, L, V, d = model.width, model.num_layers, model.vocab_size, model.head_dim
    H, K, F = model.num_heads, model.num_kv_heads, model.mlp_width
    matrices = D * d * (2 * H + 2 * K) + 3 * D * F
    row = variants.VARIANTS[model.residual.variant]
    routing = 0
    if row.routing != "none":
        reader = 2 * D + D * model.residual.null_source + (model.residual.gate != "none")
        routing = 2 * L * reader + 2 * D * row.final_read
    return {
        "embedding": V * D,
        "layers": L * (matrices + 2 * D + 2 * d),
        "routing": routing,
        "norm": D,
        "head": 0 if model.tied else V * D,
    }


def flops_per_token(model: Any, seq_len: int) -> dict[str, float]:
    """Training FLOPs of one token, forward and backward.

    `model`: 6 · (matmul weights, head included, lookup not) + 6 · L·H·d·T, the causal half of the
    attention; `routing`: 6 · 2 multiply-adds per element of every source that is read (logit and
    mix), reported apart since utilisation is counted on the model alone.
    """
    D, L, V, d = model.width, model.num_layers, model.vocab_size, model.head_dim
    H, K, F = model.num_heads, model.num_kv_heads, model.mlp_width
    weights = L * (D * d * (2 * H + 2 * K) + 3 * D * F) + V * D
    residual = model.residual
    sources = variants.source_names(residual.variant, L, residual.num_blocks, residual.null_source)
    reads = sum(len(names) for names in sources.values())
    return {"model": 6.0 * weights + 6.0 * L * H * d * seq_len, "routing": 12.0 * reads * D}
