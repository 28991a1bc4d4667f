# SPDX-License-Identifier: Apache-2.0
"""Runs the moesaic command on copies of the tiny checkpoint; writes token files without any package."""

import array
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
TOOL = os.environ["MOESAIC_TOOL"]
SANITIZED = "sanitize" in os.environ.get("MOESAIC_BUILD_KIND", "")  # of the programs under test; sanitizers have memory of their own
MODEL = os.path.join(ROOT, "tests", "fixtures", "ckpt", "qwen3moe")
VENV_PYTHON = os.path.join(ROOT, "build", "venv", "bin", "python")
QUICK_TEMPLATE = os.path.join(ROOT, "tests", "fixtures", "demo", "quick.jinja")


def environment():
    python = VENV_PYTHON if os.path.exists(VENV_PYTHON) else sys.executable
    more = {"MOESAIC_PYTHON": python, "PYTHONPATH": os.path.join(ROOT, "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {"MOESAIC_MACHINE": "", **os.environ, **more}


def save_tensors(path, arrays, metadata):
    """arrays: name -> (dtype name, shape, bytes)"""
    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in arrays.values():
            file.write(data)


def read_tensors(folder):
    """name -> (file, dtype, shape, bytes)"""
    found = {}
    for name in sorted(n for n in os.listdir(folder) if n.endswith(".safetensors")):
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        size = struct.unpack("<Q", data[:8])[0]
        for key, entry in json.loads(data[8 : 8 + size]).items():
            if key != "__metadata__":
                begin, end = (8 + size + at for at in entry["data_offsets"])
                found[key] = (name, entry["dtype"], entry["shape"], data[begin:end])
    return found


def floats(tensor):
    """Values of an F32 or BF16 entry of read_tensors."""
    _, dtype, _, data = tensor
    if dtype == "BF16":
        data = array.array("I", [half << 16 for half in array.array("H", data)]).tobytes()
    else:
        assert dtype == "F32", dtype
    return array.array("f", data)


def distance(got, want):
    """Relative L2 distance of two such entries: 0 of the same values, 1 of zeros, 1.4 of other values of the same size."""
    off = sum((a - b) ** 2 for a, b in zip(floats(got), floats(want), strict=True))
    return (off / sum(b * b for b in floats(want))) ** 0.5


def sample_weights():
    """Names of weights of MODEL whose values are worth comparing: in each layer a dense one and two experts' of both shapes."""
    return [f"model.layers.{layer}.{name}.weight" for layer in range(4)
            for name in ("self_attn.q_proj", "mlp.experts.0.gate_proj", "mlp.experts.7.down_proj")]  # fmt: skip


def save_tokens(path, documents, trained=True, packs=None, **more):
    """One document a row, or packs of that many; every token but the first is trained, or none. more: metadata."""
    ids = [token for document in documents for token in document]
    labels = [token if trained and i else -100 for document in documents for i, token in enumerate(document)]
    offsets = [0]
    for document in documents:
        offsets.append(offsets[-1] + len(document))
    rows = [0]
    for size in packs or [1] * len(documents):
        rows.append(rows[-1] + size)
    arrays = {
        "doc_offsets": ("I64", [len(offsets)], array.array("q", offsets).tobytes()),
        "pack_offsets": ("I64", [len(rows)], array.array("q", rows).tobytes()),
        "input_ids": ("I32", [len(ids)], array.array("i", ids).tobytes()),
        "labels": ("I32", [len(labels)], array.array("i", labels).tobytes()),
    }
    metadata = {"format": "moesaic-tokens-1", "tokenizer_vocab_size": "2048", "cutoff_len": "64", "hash": "0" * 64, **more}
    save_tensors(path, arrays, metadata)


def documents(count, length=24, vocab=2048):
    """Documents with a pattern that can be learned: counting in steps."""
    return [[(1 + 7 * d + (d % 5 + 1) * i) % vocab for i in range(length)] for d in range(count)]


class Case(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(prefix="moesaic-cli-")
        self.addCleanup(self._folder.cleanup)
        self.out = self.path("out")

    def path(self, *parts):
        return os.path.join(self._folder.name, *parts)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def tokens(self, name="train.safetensors", count=16, **options):
        save_tokens(self.path(name), documents(count), **options)
        return self.path(name)

    def model(self):
        """A copy that the test may spoil."""
        if not os.path.exists(self.path("model")):
            shutil.copytree(MODEL, self.path("model"))
        return self.path("model")

    def run_tool(self, *arguments, **options):
        """options in capitals are environment variables, the rest goes to subprocess.run."""
        env = {**environment(), **{name: value for name, value in options.items() if name.isupper()}}
        options = {name: value for name, value in options.items() if not name.isupper()}
        return subprocess.run(
            [TOOL, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300, **options
        )

    def good(self, *arguments, **options):
        result = self.run_tool(*arguments, **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def bad(self, code, *arguments, **options):
        """Exactly one line of error, no half-written output."""
        result = self.run_tool(*arguments, **options)
        self.assertEqual(result.returncode, code, result.stderr)
        lines = result.stderr.strip().split("\n")
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertRegex(lines[0], r"^moesaic( [a-z]+)?: .{8}")
        return lines[0]

    def train_arguments(self, *more, model=MODEL, data=None):
        data = data or self.tokens()
        flags = "--batch-size 2 --threads 2 --quiet --learning-rate 1e-3".split()
        if "full" not in more:
            flags += ["--lora-rank", "4"]
        return ["train", "--model", model, "--data", data, "--output-dir", self.out, *flags, *map(str, more)]

    def bad_training(self, code, *more, **options):
        line = self.bad(code, *self.train_arguments(*more, **options))
        self.assertFalse(os.path.exists(self.out), "the output folder was made")
        return line

    def read(self, *parts):
        with open(self.path(*parts), "rb") as file:
            return file.read()
