# SPDX-License-Identifier: Apache-2.0
"""Weight folders that kt-kernel wrote, read here, beside the weights that it was given."""

import glob
import os
import subprocess
import sys
import tempfile
import unittest

import numpy as np
from files import EXPERTS, HIDDEN, INNER, LAYERS, Q, Model
from support import TOOL, environment, read_tensors

WRITER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "write_experts.py")
LARGEST = {8: 127, 4: 7}


def floats(entry):
    _, dtype, shape, data = entry
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, np.float32).reshape(shape)


class KtKernel(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        kinds = {"embed": Q.BF16, "attention": Q.BF16, "gate": Q.BF16, "up": Q.BF16, "down": Q.BF16}
        Model("qwen3moe", kinds).write(self.path("m.gguf"))
        self.tool("convert", self.path("m.gguf"), self.path("plain"), "--weights", "f32", "--quiet")  # bf16 values
        self.plain = read_tensors(self.path("plain"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def tool(self, *args):
        done = subprocess.run([TOOL, *args], env=environment(), capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def write(self, kind, parts):
        """The folder; its files are counted, so that nothing is compared with itself."""
        folder = self.path(f"{kind}-{parts}")
        os.makedirs(folder)
        done = subprocess.run([sys.executable, WRITER, self.path("plain"), folder, kind, str(parts)], capture_output=True,
                              text=True, timeout=300)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        files = glob.glob(os.path.join(folder, "_layer_*", "_numa_*", "*.kt"))
        forward = [f for f in files if "_bwd_" not in os.path.basename(f)]
        self.assertEqual(len(forward), LAYERS * parts * EXPERTS * 3 * 2)
        self.assertEqual(len(files) > len(forward), "SFT" in kind)
        return folder

    def read(self, folder):
        out = folder + ".f32"
        self.tool("convert", self.path("plain"), out, "--kt-weights", folder, "--weights", "f32")
        return {n: floats(t) for n, t in read_tensors(out).items() if ".experts." in n}

    def check(self, kind, parts):
        bits = 8 if "Int8" in kind else 4
        got = self.read(self.write(kind, parts))
        self.assertEqual(len(got), 3 * LAYERS * EXPERTS)
        for name, values in got.items():
            want = floats(self.plain[name])
            down = ".down_proj" in name
            self.assertEqual(values.shape, (HIDDEN, INNER) if down else (INNER, HIDDEN))
            width = INNER // parts if down else HIDDEN  # a scale serves so many columns
            for c in range(0, values.shape[1], width):
                part, given = values[:, c : c + width], want[:, c : c + width]
                step = np.abs(given).max(1, keepdims=True) / LARGEST[bits]
                wrong = np.abs(part - given) / step
                self.assertLess(wrong.max(), 0.51 if bits == 8 else 0.6, (kind, parts, name))
                self.assertLess(np.sqrt((wrong**2).mean()), 0.31, (kind, parts, name))  # even: 1 / sqrt(12)
                self.assertLessEqual(max(len(np.unique(row)) for row in part), 2 * LARGEST[bits] + 2)
        return got

    def test_int8(self):
        one, two = self.check("AMXInt8_MOE", 1), self.check("AMXInt8_MOE", 2)
        for name in one:
            if ".down_proj" not in name:  # rows are whole in both
                np.testing.assert_array_equal(one[name], two[name])

    def test_int4(self):
        self.check("AMXInt4_MOE", 1)
        self.check("AMXInt4_MOE", 2)

    def test_backward_weights_beside_them(self):
        """Read past: the weights are those that the forward's files alone give."""
        for bits in (8, 4):
            trained = self.check(f"AMXInt{bits}_SFT_MOE", 2)
            for name, values in self.check(f"AMXInt{bits}_MOE", 2).items():
                np.testing.assert_array_equal(trained[name], values)


if __name__ == "__main__":
    unittest.main()
