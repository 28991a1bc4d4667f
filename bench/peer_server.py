# SPDX-License-Identifier: Apache-2.0
"""One MoE layer of a peer library, set up once and then stepped on demand, as bench_layer --serve does it.

Runs in build/peers-venv; bench/peers starts it. Lines on stdin: `go NAME N` runs N steps that are not timed, then one that is, and
prints its times; `quit` ends. NAME is one of the ready line's "implementations".
"""

import argparse
import gc
import json
import os
import sys
import time

import numpy as np
import peer_weights
import torch
from peer_formats import FORMATS

SHAPES = {  # experts, experts per token, hidden, intermediate
    "small": (8, 2, 512, 256),
    "qwen3": (128, 8, 2048, 768),
    "qwen3e16": (16, 8, 2048, 768),
    "dsv3": (16, 4, 7168, 2048),
}
LORA = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
ALL_DISTINCT_BELOW = 1 << 24  # elements; larger weights have four random experts and rotated copies
DISTINCT = 4
BF16 = torch.bfloat16


# ---- the same routing as bench/layer/layer_data.c ----


def random_bits(counter):
    """splitmix64 of an array of counters."""
    with np.errstate(over="ignore"):
        z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def routing(tokens, experts, top, skew):
    counter = np.uint64(1 << 40) | np.arange(tokens * experts, dtype=np.uint64)
    score = (random_bits(counter) >> np.uint64(40)).astype(np.float64).reshape(tokens, experts) * 2.0**-24
    score += skew * (experts - 1 - np.arange(experts)) / experts
    ids = np.argsort(-score, axis=1, kind="stable")[:, :top]
    weights = np.exp(np.take_along_axis(score, ids, 1))
    return ids, weights / weights.sum(1, keepdims=True)


def hash_of(ids):
    """FNV-1a over 32-bit values."""
    value = 2166136261
    for i in ids.reshape(-1).tolist():
        value = (value ^ i) * 16777619 & 0xFFFFFFFF
    return value


# ---- data ----


class Layer:
    def __init__(self, options):
        self.E, self.k, self.H, self.I = SHAPES[options.shape]
        self.T, self.r, self.scale = options.tokens, options.rank, 2.0
        self._generator = torch.Generator().manual_seed(1)
        ids, weights = routing(self.T, self.E, self.k, options.skew)
        self.ids_hash = hash_of(ids)
        self.ids = torch.from_numpy(ids.astype(np.int64)).contiguous()
        self.weights = torch.from_numpy(weights.astype(np.float32)).contiguous()
        self.x, self.grad_out = self._normal(self.T, self.H), self._normal(self.T, self.H)
        self.base = {
            "gate": self._experts(self.I, self.H),
            "up": self._experts(self.I, self.H),
            "down": self._experts(self.H, self.I),
        }
        self.lora = {name: self._lora(name) for name in LORA}

    def _normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self._generator) * scale).to(BF16)

    def _experts(self, rows, columns):
        w = torch.empty(self.E, rows, columns, dtype=BF16)
        distinct = self.E if w.numel() < ALL_DISTINCT_BELOW else DISTINCT
        for e in range(self.E):
            w[e] = self._normal(rows, columns, scale=columns**-0.5) if e < distinct else w[e % distinct].roll(e // distinct, 1)
        return w

    def _lora(self, name):
        wide = self.I if name in ("gate_lora_b", "up_lora_b", "down_lora_a") else self.H
        if name.endswith("_b"):
            return self._normal(self.E, wide, self.r, scale=0.1 * self.r**-0.5)
        return self._normal(self.E, self.r, wide, scale=wide**-0.5)


# ---- kt-kernel ----


def pool_cpu():
    """CPU seconds of kt's pool threads; the thread that feeds them spins, so its time says nothing."""
    total = 0.0
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().startswith("numa_"):
                    total += time.clock_gettime((~int(thread) << 3) | 6)  # the kernel's clock id of a thread
        except OSError:
            pass
    return total


class Kt:
    """resident: a second copy of the weights serves the backward. default: what its Python layer does unless told otherwise: the
    forward runs again before the backward, whose weights are repacked in every step."""

    cpu = staticmethod(pool_cpu)

    def __init__(self, layer, threads, default, weights):
        import kt_kernel

        extension = kt_kernel.kt_kernel_ext
        self.version = f"kt-kernel {kt_kernel.__version__} ({os.path.basename(extension.__file__).split('.')[0].lstrip('_')})"
        self.layer, self.default, self._format = layer, default, FORMATS[weights]
        self.names = ("kt_default",) if default else ("kt",)
        self._engine = self._start(extension, threads)
        config = self._config(extension)
        kept = peer_weights.configure(config, weights, layer.base)
        self._moe = getattr(extension.moe, self._format.kt_class)(config)
        self._run(self._moe.load_weights_task())
        del kept
        self._length = torch.tensor([layer.T], dtype=torch.int32)
        self._out = torch.zeros(layer.T, layer.H, dtype=BF16)
        self._grad_x = torch.zeros_like(self._out)
        self._grad_weights = torch.zeros(layer.T, layer.k)
        self._grads = [torch.zeros_like(layer.lora[name]) for name in LORA]

    @staticmethod
    def _start(extension, threads):
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        return extension.CPUInfer(pool)

    def _config(self, extension):
        layer = self.layer
        config = extension.moe.MOESFTConfig(layer.E, layer.k, layer.H, layer.I)
        self._map = torch.arange(layer.E, dtype=torch.int64)
        values = {
            "max_len": -(-layer.T // 32) * 32,
            "max_cache_depth": 1,
            "layer_idx": 0,
            "lora_rank": layer.r,
            "lora_alpha": layer.scale * layer.r,
            "lora_dropout": 0.0,
            "full_weight_grad": False,
            "authoritative_optimizer_grads": True,
            "share_backward_bb": self.default or not self._format.resident,
            "share_cache_pool": self.default,
            "physical_to_logical_map": self._map.data_ptr(),
            "pool": self._engine.backend_,
            "swiglu_limit": self._format.clamp,
            **{name: w.data_ptr() for name, w in layer.lora.items()},
        }
        for name, value in values.items():
            setattr(config, name, value)
        return config

    def _run(self, task):
        self._engine.submit(task)
        self._engine.sync()

    def _forward(self, save):
        layer = self.layer
        pointers = (layer.ids, layer.weights, layer.x, self._out)
        task = self._moe.forward_sft_task(self._length.data_ptr(), layer.k, *(t.data_ptr() for t in pointers), save)
        self._run(task)

    def _repack(self):
        self._moe.submit_backward_repack()
        self._moe.wait_backward_repack()

    def _backward(self):
        grads = [g.data_ptr() for g in self._grads]
        first, last = (self.layer.grad_out.data_ptr(), self._grad_x.data_ptr()), self._grad_weights.data_ptr()
        self._run(self._moe.backward_task(*first, *grads, last, 0, 0, 0, False, 1.0))

    def phases(self, name):
        if not self.default:
            return [("forward", lambda: self._forward(True)), ("backward", self._backward)]
        return [
            ("forward", lambda: self._forward(False)),
            ("recompute", lambda: self._forward(True)),
            ("repack", self._repack),
            ("backward", self._backward),
        ]

    def results(self, name):
        return {"out": self._out, "grad_x": self._grad_x, **dict(zip(LORA, self._grads))}


# ---- PyTorch ----


class Torch:
    """Rows sorted by expert once; then either a loop over the experts, or grouped_mm over all of them."""

    cpu = staticmethod(time.process_time)
    names = ("torch_loop", "torch_grouped")

    def __init__(self, layer, threads):
        torch.set_num_threads(threads)
        self.version = f"PyTorch {torch.__version__}"
        self.layer = layer
        self._x = layer.x.clone().requires_grad_()
        self._w = layer.weights.to(BF16).requires_grad_()
        self._grouped = {name: layer.lora[name].clone().requires_grad_() for name in LORA}
        self._single = {name: [w.clone().requires_grad_() for w in layer.lora[name]] for name in LORA}
        self._active = torch.unique(layer.ids).tolist()
        self._out = self._grads = None

    def _sorted(self):
        flat = self.layer.ids.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // self.layer.k
        return order, token, torch.bincount(flat, minlength=self.layer.E), self._x.index_select(0, token)

    def _combine(self, rows, order, token):
        weighted = rows * self._w.reshape(-1).index_select(0, order).unsqueeze(1)
        return torch.zeros(self.layer.T, self.layer.H, dtype=BF16).index_add(0, token, weighted)

    def _expert(self, e, rows):
        linear = torch.nn.functional.linear

        def projection(name, value):
            thin = linear(value, self._single[f"{name}_lora_a"][e])
            return linear(value, self.layer.base[name][e]) + linear(thin, self._single[f"{name}_lora_b"][e]) * self.layer.scale

        return projection("down", torch.nn.functional.silu(projection("gate", rows)) * projection("up", rows))

    def _loop(self):
        order, token, counts, rows = self._sorted()
        pieces = rows.split([n for n in counts.tolist() if n])
        self._out = self._combine(torch.cat([self._expert(e, p) for e, p in zip(self._active, pieces)]), order, token)

    def _all_experts(self):
        order, token, counts, rows = self._sorted()
        ends = counts.cumsum(0).to(torch.int32)

        def product(value, weight):
            return torch.nn.functional.grouped_mm(value, weight.transpose(1, 2), offs=ends)

        def projection(name, value):
            thin = product(value, self._grouped[f"{name}_lora_a"])
            return product(value, self.layer.base[name]) + product(thin, self._grouped[f"{name}_lora_b"]) * self.layer.scale

        hidden = torch.nn.functional.silu(projection("gate", rows)) * projection("up", rows)
        self._out = self._combine(projection("down", hidden), order, token)

    def _backward(self, leaves):
        out, self._out = self._out, self._out.detach()
        self._grads = torch.autograd.grad(out, [self._x, self._w, *leaves], self.layer.grad_out)

    def phases(self, name):
        if name == "torch_grouped":
            return [("forward", self._all_experts), ("backward", lambda: self._backward(list(self._grouped.values())))]
        leaves = [self._single[n][e] for n in LORA for e in self._active]
        return [("forward", self._loop), ("backward", lambda: self._backward(leaves))]

    def results(self, name):
        grads = dict(zip(LORA, self._grads[2:])) if name == "torch_grouped" else {}
        return {"out": self._out, "grad_x": self._grads[0], **grads}


# ---- serving ----


def step(library, name):
    """{phase_ms: wall, phase_cpu_ms: CPU time of what computes}"""
    times, cpu_times = {}, {}
    for phase, run in library.phases(name):
        cpu, wall = library.cpu(), time.perf_counter()
        run()
        times[f"{phase}_ms"] = (time.perf_counter() - wall) * 1e3
        cpu_times[f"{phase}_cpu_ms"] = (library.cpu() - cpu) * 1e3
    return {**times, "step_ms": sum(times.values()), **cpu_times}


def checksums(library, name):
    """Norms of the last step's results: two libraries cannot be far apart on like data, and none may be NaN."""
    return {key: float(value.float().norm()) for key, value in library.results(name).items()}


def serve(library, answer):
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            return
        command, name, count = words
        if command != "go" or name not in library.names:
            raise ValueError(f"unknown line {line!r}")
        for _ in range(int(count)):
            step(library, name)
        gc.collect()
        answer(step(library, name))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("kt", "kt_default", "torch"))
    parser.add_argument("--shape", choices=SHAPES, required=True)
    for name, default in (("--tokens", 512), ("--workers", 1), ("--rank", 16)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--weights", choices=FORMATS, default="bf16", help="of kt")
    options = parser.parse_args()

    stream = os.fdopen(os.dup(1), "w")  # the libraries' own prints go to stderr
    os.dup2(2, 1)

    def answer(values):
        print(json.dumps(values), file=stream, flush=True)

    gc.disable()  # collected between the timed steps
    torch.set_num_threads(options.workers)
    started = time.perf_counter()
    layer = Layer(options)
    if options.library == "torch":
        library = Torch(layer, options.workers)
    else:
        library = Kt(layer, options.workers, options.library == "kt_default", options.weights)
    setup = time.perf_counter() - started
    norms = {}
    for name in library.names:
        for _ in range(2):
            step(library, name)
        norms[name] = checksums(library, name)
    answer(
        {
            "ready": True,
            "implementations": library.names,
            "version": library.version,
            "ids_hash": layer.ids_hash,
            "setup_s": setup,
            "norms": norms,
        }
    )
    serve(library, answer)


if __name__ == "__main__":
    main()
