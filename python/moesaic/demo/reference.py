# SPDX-License-Identifier: Apache-2.0
"""./run demo --check: the same 60 steps in transformers + PEFT, from the same files and the same initial adapter,
beside our run.

Needs torch 2.13.0, transformers 5.24.0 and peft 0.21.2 (build/check-venv)."""

import os
import time

from .. import tensors
from ..errors import UserError
from .inputs import ALPHA, RANK
from .screen import read_log

LEARNING_RATE = 1e-3
SPEED_STEPS = 15


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


def _model(torch, folder, init, dtype):
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), config)
    arrays, _ = tensors.load(os.path.join(init, "adapter_model.safetensors"))
    peft.set_peft_model_state_dict(model, {name: torch.from_numpy(a.copy()).to(dtype) for name, a in arrays.items()})
    return model


def _train(torch, model, batches):
    """-> (losses, tokens of each step, seconds of each step)"""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0
    )
    losses, tokens, seconds = [], [], []
    model.train()
    for step, documents in enumerate(batches, 1):
        start = time.perf_counter()
        batch = _collate(torch, documents)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tokens.append(int(batch["attention_mask"].sum()))
        seconds.append(time.perf_counter() - start)
        print(f"\rreference: step {step} of {len(batches)}, loss {losses[-1]:.3f} ", end="", flush=True)
    print("\r\x1b[K", end="")
    return losses, tokens, seconds


def _rate(tokens, seconds):
    """Tokens per second without the first step, which warms up."""
    return sum(tokens[1:]) / sum(seconds[1:])


def _evaluate(torch, model, batches):
    total = count = 0
    model.eval()
    with torch.no_grad():
        for documents in batches:
            batch = _collate(torch, documents)
            n = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * n
            count += n
    return total / count


def check(folder, data, init, log, output, steps):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    train, held = (
        _batches(os.path.join(data, "train.safetensors"))[:steps],
        _batches(os.path.join(data, "heldout.safetensors")),
    )
    model = _model(torch, folder, init, torch.float32)
    before = _evaluate(torch, model, held)
    losses, tokens, seconds = _train(torch, model, train)
    result = {"held_out_before": before, "held_out_after": _evaluate(torch, model, held), "losses": losses}
    result["tokens_per_s"] = {"float32": _rate(tokens, seconds)}
    bfloat16 = _model(torch, folder, init, torch.bfloat16)
    result["tokens_per_s"]["bfloat16"] = _rate(*_train(torch, bfloat16, train[:SPEED_STEPS])[1:])
    tensors.write_json(output, result)
    if not os.path.isfile(log):
        raise UserError(f"{log}: not there; ./run demo makes it")
    steps, evaluations = read_log(log)
    _print_losses(result, [s["loss"] for s in steps], evaluations)
    _print_speed(result["tokens_per_s"], steps)


def _print_losses(result, ours, evaluations):
    print("step     moesaic   transformers + PEFT   difference")
    for i, loss in enumerate(result["losses"]):
        if i < len(ours) and (i % 10 == 9 or i == 0):
            print(f"{i + 1:4d} {ours[i]:11.4f} {loss:21.4f} {ours[i] - loss:12.4f}")
    common = list(zip(ours, result["losses"]))
    print(f"largest difference over {len(common)} steps: {max(abs(a - b) for a, b in common):.4f}")
    after = f"{evaluations[-1]['eval_loss']:.4f}" if evaluations else "-"
    print(f"held-out loss before {result['held_out_before']:.4f}, after: ", end="")
    print(f"moesaic {after}, reference {result['held_out_after']:.4f}")


def _print_speed(reference, steps):
    ours = _rate([s["tokens"] for s in steps], [s["tokens"] / s["tokens_per_s"] for s in steps])
    better = max(reference, key=reference.get)
    print(f"tokens/s: moesaic {ours:.0f}, reference ", end="")
    print(", ".join(f"{rate:.0f} ({dtype})" for dtype, rate in reference.items()), end="")
    print(f": {ours / reference[better]:.2f} x the reference in {better}")
