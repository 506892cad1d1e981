"""One timed train step after another of the released PyTorch code, for benchmarks/overhead.py.

    python benchmarks/released.py CHECKOUT '{"mode": "delta", "hidden_size": 128, …}'

Runs under a Python that has torch and transformers. Builds what the released train_scratch.py
builds, in float32 unless `dtype` says otherwise, with its AdamW and its clipping; `compile` is its
--compile_model. Then answers each line on stdin with the seconds of one step; the first answer
counts parameters instead, and comes after the steps that compile and warm up.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers


def build(checkout: str, given: dict[str, Any]) -> Any:
    """The released model, or transformers' Qwen3 for the baseline."""
    keys = ("mode", "dtype", "compile", "batch_size", "seq_len", "num_blocks")
    shape = {key: value for key, value in given.items() if key not in keys}
    if given["mode"] == "baseline":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    sys.path.insert(0, os.path.join(checkout, "Attention-Residuals"))
    import modeling_qwen3_attnres as released

    config = released.Qwen3AttnResConfig(
        attnres_mode=given["mode"], attnres_num_blocks=given["num_blocks"], **shape
    )
    return released.Qwen3AttnResForCausalLM(config)


def main() -> None:
    """Serves steps until stdin ends."""
    checkout, given = sys.argv[1], json.loads(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build(checkout, given).to(device=device, dtype=getattr(torch, given["dtype"]))
    parameters = sum(p.numel() for p in model.parameters())
    if given["compile"]:
        model = torch.compile(model)
    options = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    size = (given["batch_size"], given["seq_len"])
    ids = torch.randint(given["vocab_size"], size, device=device)
    model.train()

    def step() -> float:
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        return time.perf_counter() - began

    for _ in range(3):
        step()
    answer = {"parameters": parameters, "torch": torch.__version__, "device": device}
    print(json.dumps(answer | {"transformers": transformers.__version__}), flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)


if __name__ == "__main__":
    main()
