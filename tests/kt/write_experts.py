# SPDX-License-Identifier: Apache-2.0
"""Experts of a checkpoint as kt-kernel's own classes write them: write_experts.py CHECKPOINT FOLDER CLASS PARTS

A process of its own: kt-kernel prints, and its threads end with it."""

import os
import sys

import kt_kernel
import torch
from safetensors.torch import load_file

NAMES = ("gate", "up", "down")


def main():
    checkpoint, folder, kind, parts = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    tensors = load_file(os.path.join(checkpoint, "model.safetensors"))
    extension = kt_kernel.kt_kernel_ext
    pool = extension.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = parts, [0] * parts, [1] * parts
    engine = extension.CPUInfer(pool)
    for layer in sorted({int(n.split(".")[2]) for n in tensors if ".experts." in n}):
        experts = 1 + max(int(n.split(".")[5]) for n in tensors if n.startswith(f"model.layers.{layer}.mlp.experts."))
        weights = {
            w: torch.stack([tensors[f"model.layers.{layer}.mlp.experts.{e}.{w}_proj.weight"] for e in range(experts)])
            .to(torch.bfloat16)
            .contiguous()
            for w in NAMES
        }
        rows, columns = weights["gate"].shape[1:]
        trained = "SFT" in kind
        config = (extension.moe.MOESFTConfig if trained else extension.moe.MOEConfig)(experts, 2, columns, rows)
        order = torch.arange(experts, dtype=torch.int64)
        values = {"max_len": 64, "layer_idx": layer, "pool": engine.backend_, "path": folder, "save": True, "load": False,
                  "physical_to_logical_map": order.data_ptr()}  # fmt: skip
        if trained:  # a second copy of the weights for the backward is written too
            values |= {"max_cache_depth": 1, "lora_rank": 0, "share_backward_bb": False}
        for name, value in values.items():
            setattr(config, name, value)
        for name in NAMES:
            setattr(config, f"{name}_proj", weights[name].data_ptr())
        moe = getattr(extension.moe, kind)(config)
        engine.submit(moe.load_weights_task() if trained else moe.load_weights_task(order.data_ptr()))
        engine.sync()


if __name__ == "__main__":
    main()
