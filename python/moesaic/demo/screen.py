# SPDX-License-Identifier: Apache-2.0
"""The demo's last screen, from the files of the run. A line whose numbers are missing is left out.

results/before.json, after.json        moesaic eval --json:
    {"loss", "tokens", "documents": [{"loss", "tokens"}, ...]}
results/train.json                     moesaic train --json:
    {"steps", "seconds", "tokens", "tokens_per_s", "peak_gib", "planned_gib", "parameters", "lora_rank", "experts",
     "experts_without_gradient", "expert_tokens": {"22": [tokens of each expert], ...}}
results/answers-before.jsonl, -after   moesaic generate --json, a line per question:
    {"prompt", "text"}
out/trainer_log.jsonl                  a line per step {"step", "loss", "tokens", "tokens_per_s"},
                                       and per evaluation {"step", "eval_loss"}
"""

import json
import math
import os

from .paths import fixture

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WIDTH = 8


def _json(path):
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _json_lines(path):
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def read_log(path):
    """-> (step lines, evaluation lines)"""
    lines = _json_lines(path)
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]


def _cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def _sparkline(values, width=30):
    """Means of equal stretches of the values as bars."""
    width = min(width, len(values))
    means = [
        sum(part) / len(part)
        for part in (values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width))
    ]
    low, span = min(means), max(means) - min(means) or 1
    return "".join(BARS[round((m - low) / span * (len(BARS) - 1))] for m in means)


def _title(train, quick):
    name = "a 2.3 M parameter Qwen3-MoE" if quick else "SmolLM2-135M as an 8-expert MoE"
    parts = [f"{name} ({train['parameters'] / 1e6:.1f} M parameters)" if "parameters" in train and not quick else name]
    if "lora_rank" in train and "experts" in train:
        parts.append(f"LoRA r={train['lora_rank']} on {train['experts']} experts")
    if "steps" in train:
        parts.append(f"{train['steps']} steps")
    return [f"moesaic demo: {', '.join(parts)}      {_cpu()}", ""]


def _answers(before, after):
    lines = []
    for old, new in zip(before, after):
        lines += [
            f"  {new['prompt']}",
            f"    before  {_one_line(old['text'])}",
            f"    after   {_one_line(new['text'])}",
            "",
        ]
    return lines


def _one_line(text, limit=100):
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _held_out(before, after, steps, evaluations, quick):
    lines = []
    if "loss" in before and "loss" in after:
        pairs = list(zip(before.get("documents", []), after.get("documents", [])))
        lines.append("  Held-out dictionary entries" + (f" ({len(pairs)}, never trained on)" if pairs else ""))
        better = f"     {sum(b['loss'] > a['loss'] for b, a in pairs)} of {len(pairs)} entries better" if pairs else ""
        old, new = before["loss"], after["loss"]
        perplexity = f"perplexity {math.exp(old):.0f} -> {math.exp(new):.0f}"
        lines.append(f"    loss        {old:.2f} -> {new:.2f}     {perplexity}{better}")
        if not quick:
            lines.append(_reference_line(steps, evaluations))
    if steps:
        lines.append(f"    curve       {_sparkline([s['loss'] for s in steps])} step 1 ... {steps[-1]['step']}")
    return lines + [""] if lines else []


def _reference_line(steps, evaluations):
    reference = _json(fixture("demo_reference.json"))
    curve = dict(map(tuple, reference["curve"]))
    differences = [abs(s["loss"] - r) for s, r in zip(steps, reference["losses"])]
    differences += [abs(e["eval_loss"] - curve[e["step"]]) for e in evaluations if e["step"] in curve]
    largest = f"; largest difference along the curve {max(differences):.4f}" if differences else ""
    change = f"{reference['before_loss']:.2f} -> {reference['after_loss']:.2f}"
    return f"    reference   {change}     (transformers + PEFT, stored{largest})"


def _experts(train):
    counts = train.get("expert_tokens") or {}
    if not counts:
        return []
    layer = min(counts, key=int)
    tokens = counts[layer]
    bars = "  ".join("#" * max(1 if n else 0, round(WIDTH * n / max(max(tokens), 1))) or "-" for n in tokens)
    idle = sum(n == 0 for values in counts.values() for n in values)
    if "experts_without_gradient" not in train:
        gradient = ""
    elif train["experts_without_gradient"] == 0:
        gradient = f"; all {train['experts']} got gradients" if "experts" in train else "; all got gradients"
    else:
        gradient = f"; {train['experts_without_gradient']} got no gradient"
    return [f"  Experts     tokens per expert in layer {layer}: {bars}   {idle or 'none'} idle{gradient}"]


def _speed(train, quick):
    if "tokens_per_s" not in train:
        return []
    peer = "" if quick else "; transformers + PEFT on this machine: ./run demo --check"
    return [
        f"  Speed       {train['tokens_per_s']:.0f} tokens/s ({train['seconds']:.1f} s for {train['steps']} steps){peer}"
    ]


def _memory(train):
    if "peak_gib" not in train:
        return []
    planned = f" (planned {train['planned_gib']:.2f})" if "planned_gib" in train else ""
    return [f"  Memory      peak {train['peak_gib']:.2f} GiB{planned}"]


def _checked(before, after, evaluations):
    """The evaluation inside training and the one of a second process, which read the written files, must agree."""
    if not evaluations or "loss" not in before or "loss" not in after:
        return []
    agree = abs(evaluations[-1]["eval_loss"] - after["loss"]) < 2e-3
    verdict = "ok" if agree else f"DIFFERS from training's own {evaluations[-1]['eval_loss']:.3f}"
    return [
        f"  Checked     a second process read the files: base {before['loss']:.3f}, with adapter {after['loss']:.3f}  {verdict}"
    ]


def _files(out, model):
    path = os.path.join(out, "adapter_model.safetensors")
    size = f" ({os.path.getsize(path) / 1e6:.1f} MB, PEFT)" if os.path.isfile(path) else ""
    others = "   ".join(
        n for n in ("training_loss.svg", "trainer_log.jsonl", "run.yaml") if os.path.isfile(os.path.join(out, n))
    )
    return [
        "",
        f"  Files       {path}{size}   {others}",
        f'  Next        moesaic generate --model {model} --adapter {out} "What does foo mean?"',
        "              moesaic estimate --model /path/to/your/moe",
        "              moesaic train --model /path/to/your/moe --data your.jsonl --output-dir out",
    ]


def show(results, log, quick):
    before, after, train = (_json(os.path.join(results, name)) for name in ("before.json", "after.json", "train.json"))
    answers = [_json_lines(os.path.join(results, f"answers-{when}.jsonl")) for when in ("before", "after")]
    steps, evaluations = read_log(log)
    lines = _title(train, quick) + _answers(*answers) + _held_out(before, after, steps, evaluations, quick)
    lines += _experts(train) + _speed(train, quick) + _memory(train) + _checked(before, after, evaluations)
    lines += _files(os.path.dirname(log), "tests/fixtures/ckpt/qwen3moe" if quick else "demo/model")
    print("\n".join(lines))
