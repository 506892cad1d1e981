"""Checkpoints of other programs: Qwen3 and the code released with Delta Attention Residuals."""
