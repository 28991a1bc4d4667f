# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of kt-kernel on a folder of its files: run_experts.py FOLDER CLASS PARTS EXPERTS HIDDEN INNER OUT.npz

Nothing but the folder gives weights. A process of its own: kt-kernel prints, and its threads end with it."""

import os
import sys

import kt_kernel
import numpy as np
import torch

TOKENS, PER_TOKEN, RANK = 32, 2, 8


def main():
    folder, kind, out = sys.argv[1], sys.argv[2], sys.argv[7]
    parts, experts, hidden, inner = map(int, sys.argv[3:7])
    extension = kt_kernel.kt_kernel_ext
    pool = extension.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = parts, [0] * parts, [1] * parts
    engine = extension.CPUInfer(pool)

    def run(task):
        engine.submit(task)
        engine.sync()

    torch.manual_seed(3)
    bf16 = torch.bfloat16
    x = (torch.randn(TOKENS, hidden) * 0.5).to(bf16)
    grad = (torch.randn(TOKENS, hidden) * 0.5).to(bf16)
    ids = torch.stack([torch.randperm(experts)[:PER_TOKEN] for _ in range(TOKENS)]).contiguous()
    weights = torch.rand(TOKENS, PER_TOKEN)
    shapes = {"gate_lora_a": (RANK, hidden), "gate_lora_b": (inner, RANK), "up_lora_a": (RANK, hidden),
              "up_lora_b": (inner, RANK), "down_lora_a": (RANK, inner), "down_lora_b": (hidden, RANK)}  # fmt: skip
    lora = {n: torch.zeros(experts, *s, dtype=bf16) for n, s in shapes.items()}  # B of zeros: the base weights alone
    order = torch.arange(experts, dtype=torch.int64)
    config = extension.moe.MOESFTConfig(experts, PER_TOKEN, hidden, inner)
    values = {"max_len": TOKENS, "max_cache_depth": 1, "layer_idx": 0, "lora_rank": RANK, "lora_alpha": float(RANK),
              "lora_dropout": 0.0, "full_weight_grad": False, "authoritative_optimizer_grads": True, "share_backward_bb": False,
              "share_cache_pool": False, "physical_to_logical_map": order.data_ptr(), "pool": engine.backend_, "load": True,
              "save": False, "path": folder, **{n: t.data_ptr() for n, t in lora.items()}}  # fmt: skip
    for name, value in values.items():
        setattr(config, name, value)
    moe = getattr(extension.moe, kind)(config)
    run(moe.load_weights_task())
    length = torch.tensor([TOKENS], dtype=torch.int32)
    result, grad_x = torch.zeros(TOKENS, hidden, dtype=bf16), torch.zeros(TOKENS, hidden, dtype=bf16)
    grad_weights = torch.zeros(TOKENS, PER_TOKEN)
    grads = [torch.zeros_like(t) for t in lora.values()]
    pointers = [t.data_ptr() for t in (ids, weights, x, result)]
    run(moe.forward_sft_task(length.data_ptr(), PER_TOKEN, *pointers, True))
    first, last = (grad.data_ptr(), grad_x.data_ptr()), grad_weights.data_ptr()
    run(moe.backward_task(*first, *(g.data_ptr() for g in grads), last, 0, 0, 0, False, 1.0))
    np.savez(out, x=x.float(), grad=grad.float(), ids=ids, weights=weights, out=result.float(), grad_x=grad_x.float())


if __name__ == "__main__":
    main()
