# SPDX-License-Identifier: Apache-2.0
"""Converted checkpoints in transformers, which dequantises them on a CPU: the logits of our own dequantised copy."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
import unittest

import torch
from transformers import AutoModelForCausalLM

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
MODEL = os.path.join(ROOT, "tests", "fixtures", "ckpt", "qwen3moe")
TOOL = os.environ["MOESAIC_TOOL"]


def has(*modules):
    return all(importlib.util.find_spec(name) for name in modules)


class Quantised(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="moesaic-quantised-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def convert(self, source, name, weights):
        out = os.path.join(self.folder, name)
        subprocess.run([TOOL, "convert", source, out, "--weights", weights, "--quiet"], check=True)
        return out

    def logits(self, path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        ids = torch.tensor([[(i * 37 + 11) % 2000 for i in range(40)]])
        with torch.no_grad():
            return model(ids).logits.float()

    def check(self, weights, limit):
        made = self.convert(MODEL, weights, weights)
        got, want = self.logits(made), self.logits(self.convert(made, f"{weights}-f32", "f32"))
        plain = self.logits(MODEL)
        self.assertLessEqual(((got - want).norm() / want.norm()).item(), limit)
        self.assertGreater(((got - plain).norm() / plain.norm()).item(), 0.01)

    @unittest.skipUnless(has("accelerate"), "no accelerate")
    def test_fp8(self):
        self.check("fp8", 0)

    @unittest.skipUnless(has("compressed_tensors", "accelerate"), "no compressed-tensors")
    def test_compressed_tensors(self):
        for weights in ("int4", "mxfp4"):
            with self.subTest(weights):
                self.check(weights, 3e-3)


if __name__ == "__main__":
    unittest.main()
