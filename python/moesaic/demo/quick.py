# SPDX-License-Identifier: Apache-2.0
"""./run demo --quick: the tiny checkpoint, which was trained on most of the Jargon File, learns entries that it never
saw."""

import os

from .inputs import Encoder, save_documents, shuffled_jargon

UNSEEN, HELD_OUT, STEPS, ROWS = 100, 16, 30, 4  # make_ckpt.py kept the first 100 of the same order apart


def make_quick(model, output):
    """train.safetensors: one pack a step with ROWS entries; heldout.safetensors: 16 packs of one entry."""
    encoder = Encoder(model, "quick.jinja")
    rows = shuffled_jargon()[:UNSEEN]
    held, train = rows[:HELD_OUT], rows[HELD_OUT:]
    os.makedirs(output, exist_ok=True)
    documents = [encoder(train[i % len(train)]) for i in range(STEPS * ROWS)]
    packs = [list(range(s * ROWS, (s + 1) * ROWS)) for s in range(STEPS)]
    save_documents(os.path.join(output, "train.safetensors"), documents, packs, encoder, "jargon.jsonl")
    save_documents(
        os.path.join(output, "heldout.safetensors"),
        [encoder(r) for r in held],
        [[i] for i in range(HELD_OUT)],
        encoder,
        "jargon.jsonl",
    )
