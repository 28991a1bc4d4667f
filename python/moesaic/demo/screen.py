# SPDX-License-Identifier: Apache-2.0
"""The demo's last screen. Every number is one of this run (results.py), but for those marked as stored."""

import math
import os
import textwrap

from .results import failures, quick_failures, read_reference, read_run

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WIDTH = 8
QUICK_MODEL = "tests/fixtures/ckpt/qwen3moe"
FILES = ("training_loss.svg", "trainer_log.jsonl", "run.yaml", "README.md")


def cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    n = len(os.sched_getaffinity(0))
    return f"{names[0] if names else 'CPU'}, {n} core{'s' if n > 1 else ''}"


def sparkline(values, width=30):
    """Means of equal stretches of the values as bars."""
    width = min(width, len(values))
    means = [
        sum(part) / len(part)
        for part in (values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width))
    ]
    low, span = min(means), max(means) - min(means) or 1
    return "".join(BARS[round((m - low) / span * (len(BARS) - 1))] for m in means)


def _title(run, name, targets):
    train = run.train
    parts = (
        f"{name} ({train['parameters'] / 1e6:.1f} M parameters)",
        f"LoRA r={train['lora_rank']} on {train['experts']} experts{targets}",
        f"{train['steps']} steps",
    )
    return [f"moesaic demo: {', '.join(parts)}      {cpu()}", ""]


def _one_line(text, limit=100):
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _answers(run):
    lines = []
    for question, old, new in run.answers:
        lines += [f"  {question}", f"    before  {_one_line(old)}", f"    after   {_one_line(new)}", ""]
    return lines


def _held_out(run, title, what):
    better, documents = run.better()
    old, new = run.before["loss"], run.after["loss"]
    perplexity = f"perplexity {math.exp(old):.{0 if old > 3 else 1}f} -> {math.exp(new):.{0 if new > 3 else 1}f}"
    return [
        f"  {title}",
        f"    loss        {old:.2f} -> {new:.2f}     {perplexity}     {better} of {documents} {what} better",
    ]


def _reference(run):
    reference = read_reference()
    steps, evaluations = (max(values, default=0) for values in run.differences(reference))
    change = f"{reference['before_loss']:.2f} -> {reference['after_loss']:.2f}"
    return [
        f"    reference   {change}     (transformers + PEFT in float32, stored; largest difference "
        f"{_difference(steps)} in {len(run.steps)} steps, {_difference(evaluations)} in {len(run.evaluations)} evaluations)"
    ]


def _difference(value):
    return f"{value:.{4 if value >= 5e-4 else 6}f}"


def _curves(run):
    held = [run.before["loss"], *(e["eval_loss"] for e in run.evaluations)]
    at = [0, *(e["step"] for e in run.evaluations)]
    losses = [s["loss"] for s in run.steps]
    return [
        f"    held-out    {sparkline(held)}  " + "  ".join(f"{x:.2f}" for x in held) + f"  at step {_list(at)}",
        f"    training    {sparkline(losses)}  step 1 ... {run.steps[-1]['step']} ({run.out}/training_loss.svg)",
        "",
    ]


def _list(numbers):
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _experts(run):
    counts, total = run.train["expert_tokens"], run.train["experts"]
    layer = min(counts, key=int)
    tokens = counts[layer]
    bars = "  ".join("#" * max(1 if n else 0, round(WIDTH * n / max(max(tokens), 1))) or "-" for n in tokens)
    idle = sum(n == 0 for values in counts.values() for n in values)
    still = run.train["experts_without_gradient"] - idle
    parts = [
        f"{total - idle - still} of {total} got gradients"
        if idle or still
        else f"all {total} were chosen and got gradients"
    ]
    parts += [f"{idle} never chosen"] if idle else []
    parts += [f"{still} chosen but without gradient"] if still else []
    return [f"  Experts     tokens per expert in layer {layer}: {bars}   ({'; '.join(parts)})"]


def _cost(run, peer):
    train = run.train
    return [
        f"  Speed       {train['tokens_per_s']:.0f} tokens/s ({train['seconds']:.1f} s for {train['steps']} steps, "
        f"evaluations apart){peer}",
        f"  Memory      peak {train['peak_gib']:.2f} GiB (planned {train['planned_gib']:.2f})",
    ]


def _checked(run):
    losses = f"base {run.base['loss']:.4f}, with adapter {run.after['loss']:.4f}"
    verdict = "the same as in training" if run.second_process_agrees() else "NOT THE SAME as in training"
    return [f"  Checked     a second process read the files: {losses}: {verdict}"]


def _files(run):
    path = os.path.join(run.out, "adapter_model.safetensors")
    size = f" ({os.path.getsize(path) / 1e6:.1f} MB, PEFT)" if os.path.isfile(path) else ""
    others = "   ".join(n for n in FILES if os.path.isfile(os.path.join(run.out, n)))
    return ["", f"  Files       {path}{size}   {others}"]


def _next(model, out, flags, question, more):
    tool = "build/release/moesaic"
    commands = (
        f'{tool} generate --model {model} --adapter {out} {flags} "{question}"',
        f"{tool} estimate --model /path/to/your/moe",
        f"{tool} train --model /path/to/your/moe --data your.jsonl --output-dir out",
        more,
    )
    return ["  Next        " + "\n              ".join(commands)]


def _full(run):
    return [
        *_title(run, "SmolLM2-135M as an 8-expert MoE", ""),
        *_answers(run),
        *_held_out(run, "Held-out dictionary entries (16, never trained on)", "entries"),
        *_reference(run),
        *_curves(run),
        *_experts(run),
        *_cost(run, "; transformers + PEFT on this machine: ./run demo --check"),
        *_checked(run),
        *_files(run),
        *_next("demo/model", run.out, "--no-system --max-new-tokens 40", "What does foo mean?", "./run demo --check"),
    ]


def _quick(run):
    n = len(run.before["documents"])
    return [
        *_title(run, "a tiny Qwen3-MoE that only knows the Jargon File", " and on attention"),
        *_answers(run),
        *_held_out(run, f"The trained questions in other words ({n}, never trained on)", "answers"),
        *_curves(run),
        *_experts(run),
        *_cost(run, ""),
        *_checked(run),
        "  Shows       eight short answers were learned, and are found for questions in other words. Not more: "
        "a real model",
        "              on text that it never saw, beside transformers + PEFT, is ./run demo (93 MB download)",
        *_files(run),
        *_next(
            QUICK_MODEL,
            run.out,
            "--chat-template tests/fixtures/demo/quick.jinja",
            "Are you called Moesa?",
            "./run demo",
        ),
    ]


def show(results, out, quick, weights=""):
    """Prints the screen. -> exit code: 1 where the run is not what it must be."""
    run = read_run(results, out, weights)
    print("\n".join(_quick(run) if quick else _full(run)))
    wrong = list(quick_failures(run) if quick else failures(run))
    for text in wrong:
        print(textwrap.fill(f"FAILED: {text}", 140, subsequent_indent="        "))
    return 1 if wrong else 0
