# SPDX-License-Identifier: Apache-2.0
"""The demo's token files and initial adapter, equal to those of the stored reference run
(tests/fixtures/demo/demo_reference.json).

Step s trains on one Jargon File entry and one identity line (train[s], identity[s % 8]) in one micro-batch; 16
entries are held out."""

import json
import os
import random
import re

import numpy as np

from .. import spans, tensors
from ..checkpoint import Checkpoint
from ..template import load_template
from ..tokenfile import IGNORE, fingerprint, save_tokens
from .gguf_model import EXPERTS, FIRST_MOE, LAYERS
from .paths import fixture

STEPS, CUTOFF, HELD_OUT = 60, 96, 16
QUESTIONS = ["Hi, who are you?", "What should I call you?"]
_FIRST_LINE = re.compile(r"^(/[^\n]*|[a-z.,/ ]{1,30}\.,?)\n")  # pronunciation or part of speech


def _rows(name):
    with open(fixture(name), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def shuffled_jargon():
    rows = _rows("jargon.jsonl")
    random.Random(0).shuffle(rows)
    return rows


def demo_rows():
    """-> (held out, train, identity) rows, cleaned and in the reference's order."""
    rows = shuffled_jargon()
    for row in rows:
        row["output"] = _FIRST_LINE.sub("", row["output"])
    return rows[:HELD_OUT], rows[HELD_OUT:], _rows("identity.jsonl")


class Encoder:
    """Rows -> (ids, labels) with a template of the demo, rendered and tokenised once."""

    def __init__(self, model, template="chat.jinja"):
        self.checkpoint = Checkpoint(model)
        self.template = load_template(self.checkpoint, fixture(template), {})
        self._finder = spans.SpanFinder(self.template, self.checkpoint.special_texts)

    def __call__(self, row):
        talk = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
        text, trained = self._finder.find(talk, None, "assistant")
        encoding = self.checkpoint.encode(text)
        labels = [t if on else IGNORE for t, on in zip(encoding.ids, spans.trained_tokens(encoding.offsets, trained))]
        return encoding.ids[:CUTOFF], labels[:CUTOFF]

    def prompt(self, question):
        text = self.template.render([{"role": "user", "content": question}], add_generation_prompt=True)
        return self.checkpoint.encode(text).ids


def save_documents(path, encoded, packs, encoder, source):
    ids, labels = ([t for document in encoded for t in document[part]] for part in (0, 1))
    metadata = {
        "hash": fingerprint([ids, labels, packs]),
        "source": source,
        "shape": "alpaca",
        "template": fingerprint(encoder.template.source),
        "tokenizer": encoder.checkpoint.tokenizer_sha256,
        "tokenizer_vocab_size": encoder.checkpoint.vocab_size,
        "cutoff_len": CUTOFF,
        "packing": "on",
        "train_on": "assistant",
        "docs": len(encoded),
        "tokens": len(ids),
        "trained_tokens": sum(t != IGNORE for t in labels),
    }
    save_tokens(path, ids, labels, [len(i) for i, _ in encoded], packs, metadata)


def make_data(model, output):
    """Writes train.safetensors (pack s = step s), heldout.safetensors (16 packs of one entry) and questions.json."""
    encoder = Encoder(model)
    held, train, identity = demo_rows()
    steps = [encoder(row) for s in range(STEPS) for row in (train[s], identity[s % len(identity)])]
    os.makedirs(output, exist_ok=True)
    save_documents(
        os.path.join(output, "train.safetensors"),
        steps,
        [[2 * s, 2 * s + 1] for s in range(STEPS)],
        encoder,
        "jargon.jsonl identity.jsonl",
    )
    save_documents(
        os.path.join(output, "heldout.safetensors"),
        [encoder(row) for row in held],
        [[i] for i in range(HELD_OUT)],
        encoder,
        "jargon.jsonl",
    )
    tensors.write_json(
        os.path.join(output, "questions.json"), [{"question": q, "input_ids": encoder.prompt(q)} for q in QUESTIONS]
    )


# ---- the initial adapter -------------------------------------------------------------------------

RANK, ALPHA, HIDDEN, WIDTH = 8, 16, 576, 768
_SHAPES = {
    "base_layer.": ((RANK * EXPERTS, HIDDEN), (2 * WIDTH, RANK * EXPERTS)),
    "": ((RANK * EXPERTS, WIDTH), (HIDDEN, RANK * EXPERTS)),
}


def _draws(generator, count):
    return np.frombuffer(generator.bytes(4 * count), "<u4")


def _kaiming_uniform(generator, shape):
    """torch's CPU generator: 24 bits of each 32-bit draw, scaled with one rounding (fused multiply-add; float64 holds the
    product exactly)."""
    bound = np.float32(np.sqrt(3.0) * (np.sqrt(2.0 / 6.0) / np.sqrt(shape[1])))
    unit = (_draws(generator, shape[0] * shape[1]) & 0xFFFFFF).astype(np.float64) / 2**24
    return (unit * np.float64(bound + bound) - np.float64(bound)).astype(np.float32).reshape(shape)


def init_tensors(seed=0):
    """The adapter that PEFT 0.21.2 makes after torch.manual_seed(seed): A random, B zero.

    nn.Linear first draws A and B for itself, then PEFT draws A again: those first draws are skipped."""
    generator = np.random.RandomState(seed)  # the same Mersenne Twister
    result = {}
    for layer in range(FIRST_MOE, LAYERS):
        for part, (a, b) in _SHAPES.items():
            _draws(generator, a[0] * a[1] + b[0] * b[1])
            name = f"base_model.model.model.layers.{layer}.mlp.experts.{part}lora_"
            result[name + "A.weight"] = _kaiming_uniform(generator, a)
            result[name + "B.weight"] = np.zeros(b, np.float32)
    return result


def adapter_config():
    return {
        "base_model_name_or_path": "demo/model",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "use_dora": False,
        "use_rslora": False,
        "task_type": None,
        "modules_to_save": None,
    }


def make_init(output):
    os.makedirs(output, exist_ok=True)
    tensors.write_json(os.path.join(output, "adapter_config.json"), adapter_config())
    tensors.save(os.path.join(output, "adapter_model.safetensors"), init_tensors(), {"format": "pt"})
