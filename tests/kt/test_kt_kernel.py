# SPDX-License-Identifier: Apache-2.0
"""Weight folders that kt-kernel wrote, read here, beside the weights that it was given; and folders of ours, read by kt-kernel."""

import glob
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import unittest

import numpy as np
from files import EXPERTS, HIDDEN, INNER, LAYERS, Q, Model
from support import TOOL, environment, read_tensors

RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_experts.py")
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

    # ---- what we write

    def convert(self, weights, parts, *more):
        folder = self.path(f"{weights}-{parts}{''.join(more)}")
        self.tool("convert", self.path("plain"), folder, "--weights", weights, "--kt-parts", str(parts), *more, "--quiet")
        return folder

    def test_int8_files_are_those_of_kt_kernel(self):
        for parts in (1, 2):
            theirs, ours = self.write("AMXInt8_SFT_MOE", parts), self.convert("kt-int8", parts, "--kt-backward")
            names = {os.path.relpath(f, theirs) for f in glob.glob(os.path.join(theirs, "_layer_*", "_numa_*", "*.kt"))}
            self.assertEqual(names, {os.path.relpath(f, ours) for f in glob.glob(os.path.join(ours, "_layer_*", "_numa_*", "*"))})
            for name in names:
                a, b = (np.fromfile(os.path.join(f, name), np.int8) for f in (theirs, ours))
                if name.endswith("_scale_.kt"):
                    np.testing.assert_allclose(a.view(np.float32), b.view(np.float32), rtol=2e-7)
                else:  # a weight between two codes may become either
                    wrong = np.abs(a.astype(int) - b.astype(int))
                    self.assertLessEqual(wrong.max(), 1, name)
                    self.assertLess((wrong > 0).mean(), 2e-3, name)

    def run_kt(self, folder, bits, parts):
        out = folder + ".npz"
        sizes = map(str, (parts, EXPERTS, HIDDEN, INNER))
        done = subprocess.run([sys.executable, RUNNER, folder, f"AMXInt{bits}_SFT_MOE", *sizes, out], capture_output=True,
                              text=True, timeout=300)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return np.load(out), done.stdout + done.stderr

    def test_kt_kernel_trains_on_them(self):
        """Its forward and backward beside arithmetic on the weights of the folder, in double precision."""
        for bits, parts in ((8, 1), (8, 2), (4, 1), (4, 2)):
            folder = self.convert(f"kt-int{bits}", parts, "--kt-backward")
            got, said = self.run_kt(folder, bits, parts)
            self.assertIn("Loaded pre-quantized backward weights from disk", said)
            out, grad_x = self.expect(self.read(folder), got)
            for name, want, most in (("out", out, 0.03 if bits == 8 else 0.3), ("grad_x", grad_x, 0.03 if bits == 8 else 0.3)):
                error = np.linalg.norm(got[name] - want) / np.linalg.norm(want)
                self.assertLess(error, most, (bits, parts, name))

    def expect(self, weights, given):
        x, grad = given["x"].astype(float), given["grad"].astype(float)
        out, grad_x = np.zeros_like(x), np.zeros_like(x)
        for token, ids in enumerate(given["ids"]):
            for share, expert in zip(given["weights"][token].astype(float), ids):
                gate, up, down = (weights[f"model.layers.0.mlp.experts.{expert}.{w}_proj.weight"].astype(float) for w in
                                  ("gate", "up", "down"))  # fmt: skip
                g, u = gate @ x[token], up @ x[token]
                s = 1 / (1 + np.exp(-g))
                out[token] += share * (down @ (g * s * u))
                dh = share * (down.T @ grad[token])
                grad_x[token] += gate.T @ (dh * u * s * (1 + g * (1 - s))) + up.T @ (dh * g * s)
        return out, grad_x

    def test_manifest(self):
        """kt-kernel's own check of a folder of INT8 weights, checksums included."""
        package = types.ModuleType("kt_sft")  # its own __init__ wants packages that this needs nothing of
        package.__path__ = [os.path.join(os.path.dirname(importlib.util.find_spec("kt_kernel").origin), "sft")]
        sys.modules["kt_sft"] = package
        validate = importlib.import_module("kt_sft.weight_manifest").validate_persistent_int8_weights
        found = validate(self.convert("kt-int8", 2), layer_indices=range(LAYERS), numa_count=2, expert_num=EXPERTS,
                         hidden_size=HIDDEN, intermediate_size=INNER, verify_hashes=True)  # fmt: skip
        self.assertEqual((found.schema_version, found.file_count), (2, LAYERS * 2 * EXPERTS * 3 * 2))


if __name__ == "__main__":
    unittest.main()
