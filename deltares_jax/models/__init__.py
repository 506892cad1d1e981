"""The Qwen3-style decoder, its residual variants and its depth loop."""
