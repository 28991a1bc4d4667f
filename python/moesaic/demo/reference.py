# SPDX-License-Identifier: Apache-2.0
"""./run demo --check: the same 60 steps in transformers + PEFT, from the same files and the same initial adapter, beside
our run, and transformers in bfloat16, which shows what rounding alone does to a curve; then the programs' speed in turns,
as machines are shared and noisy: what counts is the ratio within a round.

Needs torch 2.13.0, transformers 5.24.0 and peft 0.21.2 (build/check-venv)."""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from .. import tensors
from .inputs import ALPHA, RANK
from .results import read_json, read_log, tolerance
from .screen import cpu

LEARNING_RATE = 1e-3
ROUNDS, ROUND_STEPS = 9, 8
INTERVAL = 1  # ratios left out at each end of the sorted ones: with 9 rounds the median lies between with 96 %
TOOL = "build/release/moesaic"


def _batches(path):
    """One batch per pack: [(ids, labels)] of its documents."""
    arrays, _ = tensors.load(path)
    ends, packs = arrays["doc_offsets"], arrays["pack_offsets"]
    documents = [
        (arrays["input_ids"][b:e].tolist(), arrays["labels"][b:e].tolist()) for b, e in zip(ends[:-1], ends[1:])
    ]
    return [documents[b:e] for b, e in zip(packs[:-1], packs[1:])]


def _collate(torch, documents):
    n = max(len(ids) for ids, _ in documents)
    return {
        "input_ids": torch.tensor([ids + [2] * (n - len(ids)) for ids, _ in documents]),
        "labels": torch.tensor([labels + [-100] * (n - len(labels)) for _, labels in documents]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (n - len(ids)) for ids, _ in documents]),
    }


def _say(text):
    """On a terminal, a line that the next one replaces."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)


class Reference:
    """The model with the demo's initial adapter, and its optimizer."""

    def __init__(self, torch, folder, init, dtype):
        import peft
        from transformers import AutoModelForCausalLM

        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=[],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        self.torch = torch
        self.model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), config)
        arrays, _ = tensors.load(os.path.join(init, "adapter_model.safetensors"))
        weights = {name: torch.from_numpy(a.copy()).to(dtype) for name, a in arrays.items()}
        peft.set_peft_model_state_dict(self.model, weights)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)

    def train(self, batches, name):
        """-> (losses, tokens of each step, seconds of each step)"""
        losses, tokens, seconds = [], [], []
        self.model.train()
        for step, documents in enumerate(batches, 1):
            start = time.perf_counter()
            batch = _collate(self.torch, documents)
            loss = self.model(**batch).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            tokens.append(int(batch["attention_mask"].sum()))
            seconds.append(time.perf_counter() - start)
            _say(f"{name}: step {step} of {len(batches)}, loss {losses[-1]:.3f}")
        _say("")
        return losses, tokens, seconds

    def evaluate(self, batches):
        total = count = 0
        self.model.eval()
        with self.torch.no_grad():
            for documents in batches:
                batch = _collate(self.torch, documents)
                n = int((batch["labels"][:, 1:] != -100).sum())
                total += float(self.model(**batch).loss) * n
                count += n
        return total / count


def _rate(tokens, seconds):
    """Tokens per second without the first step, which warms up."""
    return sum(tokens[1:]) / sum(seconds[1:])


def _our_rate(folder, data, init):
    """The same steps in a moesaic process of their own."""
    with tempfile.TemporaryDirectory() as out:
        command = (
            f"{TOOL} train --model {folder} --data {data}/train.safetensors --adapter {init} --output-dir {out}/run "
            f"--lora-rank {RANK} --lora-alpha {ALPHA} --lora-target experts --share-a --learning-rate {LEARNING_RATE} "
            "--lr-scheduler-type constant --warmup-ratio 0 --weight-decay 0 --max-grad-norm 0 --batch-size 1 "
            f"--shuffle off --max-steps {ROUND_STEPS} --logging-steps 1 --quiet"
        )
        subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
        steps, _ = read_log(os.path.join(out, "run", "trainer_log.jsonl"))
    return _rate([s["tokens"] for s in steps], [s["tokens"] / s["tokens_per_s"] for s in steps])


def _speed(peers, train, folder, data, init):
    """-> {program: a rate of each round}, in turns"""
    rates = {"moesaic": [], **{name: [] for name in peers}}
    for turn in range(ROUNDS):
        _say(f"speed of moesaic, round {turn + 1} of {ROUNDS}")
        rates["moesaic"].append(_our_rate(folder, data, init))
        for name, peer in peers.items():
            rates[name].append(
                _rate(*peer.train(train[:ROUND_STEPS], f"speed of {name}, round {turn + 1} of {ROUNDS}")[1:])
            )
    _say("")
    return rates


def check(folder, data, init, results, out, output):
    """Prints curves and rates. -> exit code: 1 where a step's losses differ by more than results.tolerance allows."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ours = read_json(os.path.join(results, "train.json"))
    before, after = (read_json(os.path.join(results, f"{when}.json"))["loss"] for when in ("base", "after"))
    steps, _ = read_log(os.path.join(out, "trainer_log.jsonl"))
    train, held = (_batches(os.path.join(data, f"{name}.safetensors")) for name in ("train", "heldout"))
    result, peers = {}, {}
    for name in ("float32", "bfloat16"):
        peer = peers[name] = Reference(torch, folder, init, getattr(torch, name))
        result[name] = {"held_out_before": peer.evaluate(held)}
        losses, _, _ = peer.train(train, f"transformers + PEFT, {name}")
        result[name].update(
            losses=losses,
            held_out_after=peer.evaluate(held),
            peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        )
    result["tokens_per_s"] = _speed(peers, train, folder, data, init)
    tensors.write_json(output, result)
    exact, rounded = result["float32"], result["bfloat16"]
    kernels = ours.get("kernels", "ref")
    good = _print_losses(exact["losses"], rounded["losses"], [s["loss"] for s in steps], kernels)
    for when, loss in (("before", before), ("after", after)):
        key = f"held_out_{when}"
        print(f"held-out, {when:6s}    {loss:9.4f} {exact[key]:21.4f} {rounded[key]:10.4f}")
    print(f"peak memory, GiB    {ours['peak_gib']:9.2f} {exact['peak_gib']:21.2f}              (the whole process)")
    _print_speed(result["tokens_per_s"])
    return 0 if good and len(steps) == len(exact["losses"]) else 1


def _print_losses(exact, rounded, ours, kernels):
    print(f"step                  moesaic   transformers + PEFT              differences to float32 (kernels: {kernels};")
    print("                                  float32   bfloat16              same initial adapter)")
    for i, (a, b, c) in enumerate(zip(ours, exact, rounded)):
        if i % 5 == 4 or i == 0:
            print(f"{i + 1:4d}                {a:9.4f} {b:13.4f} {c:10.4f} {a - b:12.5f} {c - b:10.5f}")
    largest, theirs = (max(abs(a - b) for a, b in zip(losses, exact)) for losses in (ours, rounded))
    allowed = tolerance(kernels).step
    verdict = "ok" if largest <= allowed else f"FAILED: more than {allowed}"
    print(f"largest difference over {len(exact)} steps {largest:.6f}: {verdict} (transformers in bfloat16: {theirs:.6f})")
    return largest <= allowed


def _print_speed(rates):
    load = os.getloadavg()[0]
    print(f"tokens/s on {cpu()}, load {load:.1f}; {ROUNDS} rounds in turns, {ROUND_STEPS - 1} steps each: median (all)")
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        label = name if name == "moesaic" else f"transformers + PEFT, {name}"
        print(f"    {label:30s} {median[name]:6.0f}   ({', '.join(f'{v:.0f}' for v in values)})")
    peers = [values for name, values in rates.items() if name != "moesaic"]
    better = max((name for name in median if name != "moesaic"), key=median.get)
    ratios = sorted(a / max(others) for a, *others in zip(rates["moesaic"], *peers))
    print(
        f"    moesaic is at {statistics.median(ratios):.2f} x of the better one ({better}); "
        f"round by round between {ratios[INTERVAL]:.2f} and {ratios[-1 - INTERVAL]:.2f} (96 % interval of the median)"
    )
