# SPDX-License-Identifier: Apache-2.0
"""./run demo --quick: a tiny checkpoint, which only knows the Jargon File, learns who it is from eight lines; the same
eight questions in other words are held out."""

import json
import os

from .inputs import Encoder, save_documents
from .paths import fixture

STEPS = 60


def _rows(name):
    with open(fixture(name), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        row["output"] = row["output"].replace("SmolLM2", "a tiny Qwen3-MoE")  # what this model is made from
    return rows


def make_quick(model, output):
    """train.safetensors: one pack a step with all lines; heldout.safetensors: a pack per paraphrase."""
    encoder = Encoder(model, "quick.jinja")
    lines, held = _rows("identity.jsonl"), _rows("paraphrases.jsonl")
    os.makedirs(output, exist_ok=True)
    n = len(lines)
    save_documents(
        os.path.join(output, "train.safetensors"),
        [encoder(row) for row in lines] * STEPS,
        [list(range(s * n, (s + 1) * n)) for s in range(STEPS)],
        encoder,
        "identity.jsonl",
    )
    save_documents(
        os.path.join(output, "heldout.safetensors"),
        [encoder(row) for row in held],
        [[i] for i in range(len(held))],
        encoder,
        "paraphrases.jsonl",
    )
