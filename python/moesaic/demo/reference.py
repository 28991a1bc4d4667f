# SPDX-License-Identifier: Apache-2.0
"""./run demo --check: the same 60 steps in transformers + PEFT, from the same files and the same initial adapter, beside
our run; then both programs' speed in turns, as machines are shared and noisy.

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
from .results import STEP_TOLERANCE, read_json, read_log
from .screen import cpu

LEARNING_RATE = 1e-3
ROUNDS, ROUND_STEPS = 5, 8
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


def _speed(torch, reference, train, folder, data, init):
    """-> {program: a rate of each round}, in turns"""
    peers = {"float32": reference, "bfloat16": Reference(torch, folder, init, torch.bfloat16)}
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
    """Prints both curves and rates. -> exit code: 1 where a step's losses differ by more than STEP_TOLERANCE."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ours = read_json(os.path.join(results, "train.json"))
    before, after = (read_json(os.path.join(results, f"{when}.json"))["loss"] for when in ("base", "after"))
    steps, _ = read_log(os.path.join(out, "trainer_log.jsonl"))
    train, held = (_batches(os.path.join(data, f"{name}.safetensors")) for name in ("train", "heldout"))
    reference = Reference(torch, folder, init, torch.float32)
    result = {"held_out_before": reference.evaluate(held)}
    losses, _, _ = reference.train(train, "transformers + PEFT, float32")
    result.update(
        losses=losses,
        held_out_after=reference.evaluate(held),
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    result["tokens_per_s"] = _speed(torch, reference, train, folder, data, init)
    tensors.write_json(output, result)
    largest = _print_losses(losses, [s["loss"] for s in steps])
    print(f"held-out, before    {before:9.4f} {result['held_out_before']:21.4f}")
    print(f"held-out, after     {after:9.4f} {result['held_out_after']:21.4f}")
    print(f"peak memory, GiB    {ours['peak_gib']:9.2f} {result['peak_gib']:21.2f}   (the whole process)")
    _print_speed(result["tokens_per_s"])
    return 0 if len(steps) == len(losses) and largest <= STEP_TOLERANCE else 1


def _print_losses(reference, ours):
    print("step                  moesaic   transformers + PEFT   difference   (float32, same initial adapter)")
    for i, (a, b) in enumerate(zip(ours, reference)):
        if i % 5 == 4 or i == 0:
            print(f"{i + 1:4d}                {a:9.4f} {b:21.4f} {a - b:12.5f}")
    largest = max(abs(a - b) for a, b in zip(ours, reference))
    verdict = "ok" if largest <= STEP_TOLERANCE else f"FAILED: more than {STEP_TOLERANCE}"
    print(f"largest difference over {len(reference)} steps {largest:.6f}: {verdict}")
    return largest


def _print_speed(rates):
    load = os.getloadavg()[0]
    print(f"tokens/s on {cpu()}, load {load:.1f}; {ROUNDS} rounds in turns, {ROUND_STEPS - 1} steps each: median (all)")
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        label = name if name == "moesaic" else f"transformers + PEFT, {name}"
        print(f"    {label:30s} {median[name]:6.0f}   ({', '.join(f'{v:.0f}' for v in values)})")
    better = max((name for name in median if name != "moesaic"), key=median.get)
    print(f"    moesaic is at {median['moesaic'] / median[better]:.2f} x of the better one ({better})")
