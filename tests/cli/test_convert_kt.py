# SPDX-License-Identifier: Apache-2.0
"""kt-kernel's files of experts: written by convert (--weights kt-int8, kt-int4), read by --kt-weights; its AWQ tensors."""

import hashlib
import json
import os
import shutil
import subprocess
import unittest

from support import MODEL, Case, environment, read_tensors, save_tensors

FAULT = os.environ.get("MOESAIC_FAULT")
LAYERS, EXPERTS, SIZE = 4, 8, 128
AWQ_SHIFT = (0, 16, 4, 20, 8, 24, 12, 28)


class Kt(Case):
    def loss(self, model, *more):
        flags = ["--data", self.tokens("held.safetensors", 4), "--json", "--threads", 2, *more]
        return json.loads(self.good("eval", "--model", model, *flags).stdout)["loss"]

    def convert(self, name, *more):
        return json.loads(self.good("convert", MODEL, self.path(name), "--json", *more).stdout)

    def files(self, name):
        return sorted(os.path.relpath(os.path.join(at, f), self.path(name)) for at, _, found in os.walk(self.path(name))
                      for f in found)  # fmt: skip

    def test_weights_are_those_of_int8(self):
        result = self.convert("kt", "--weights", "kt-int8")
        self.assertEqual([result["converted"], result["files"], result["resumed"]], [96, LAYERS, 0])
        self.assertEqual(self.loss(MODEL, "--kt-weights", self.path("kt")), self.loss(MODEL, "--weights", "int8"))
        self.assertEqual(self.good("inspect", self.path("kt")).returncode, 0)

    def test_backward_weights(self):
        self.convert("two", "--weights", "kt-int8", "--kt-parts", 2)
        self.convert("more", "--weights", "kt-int8", "--kt-parts", 2, "--kt-backward")
        forward = [f for f in self.files("two") if f.endswith(".kt")]
        self.assertEqual(len(forward), LAYERS * EXPERTS * 3 * 2 * 2)
        more = [f for f in self.files("more") if f.endswith(".kt")]
        self.assertEqual([f for f in more if "_bwd_" not in f], forward)
        self.assertEqual(len(more), 2 * len(forward))
        for name in forward:
            self.assertEqual(self.read("two", name), self.read("more", name))
        for name, files in (("two", forward), ("more", more)):
            self.assertEqual(self.files(name), sorted([*files, "kt-weight-manifest.json" if name == "two" else "SHA256SUMS"]))
        for line in self.read("more", "SHA256SUMS").decode().splitlines():
            digest, name = line.split("  ")
            self.assertEqual(hashlib.sha256(self.read("more", name)).hexdigest(), digest)
            more.remove(name)
        self.assertEqual(more, [])
        self.assertEqual(self.loss(MODEL, "--kt-weights", self.path("two")), self.loss(MODEL, "--kt-weights", self.path("more")))
        shown = json.loads(self.good("inspect", self.path("more"), "--values", "--json").stdout)["quantised"]
        kinds = {row["names"]: row["matrices"] for row in shown}
        self.assertEqual(kinds.keys(), {"kt INT8", "kt INT8, backward"})
        self.assertEqual(sum(row["matrices"] for row in shown), 2 * 96)
        self.assertEqual({row["not_finite"] for row in shown}, {0})
        gone = os.path.join("_layer_1", "_numa_1", f"INT8_down_bwd_3_{SIZE // 2 * 4}Byte_scale_.kt")
        os.remove(self.path("more", gone))
        for command in (["inspect", self.path("more")], ["eval", "--model", MODEL, "--kt-weights", self.path("more"), "--data",
                        self.tokens("held.safetensors", 4)]):  # fmt: skip
            line = self.bad(2, *command)
            self.assertIn(gone + ": is missing", line)
            self.assertIn("prepared backward weights (write them again, or remove them", line)

    def test_manifest(self):
        result = self.convert("kt", "--weights", "kt-int8", "--kt-parts", 2)
        manifest = json.loads(self.read("kt", "kt-weight-manifest.json"))
        self.assertEqual([manifest[k] for k in ("schema_version", "threadpool_count", "expert_num", "hidden_size",
                          "intermediate_size", "bytes")], [2, 2, EXPERTS, SIZE, SIZE, result["bytes"]])  # fmt: skip
        listed = [file for layer in manifest["layers"] for file in layer["files"]]
        self.assertEqual(sorted(f["path"] for f in listed), [f for f in self.files("kt") if f.endswith(".kt")])
        for file in listed:
            data = self.read("kt", file["path"])
            self.assertEqual([len(data), hashlib.sha256(data).hexdigest()], [file["size_bytes"], file["sha256"]])

    def test_refused(self):
        for more, text in (
            (["--weights", "kt-int4", "--kt-parts", 2], "a part of down would be [128, 64]"),
            (["--weights", "kt-int8", "--kt-parts", 5], "128 rows of gate cannot be cut into 5 parts"),
            (["--weights", "kt-int8", "--kt-parts", 65], "--kt-parts 65"),
            (["--weights", "int8", "--kt-parts", 2], "kt_parts and kt_backward are for"),
            (["--weights", "int8", "--kt-backward"], "kt_parts and kt_backward are for"),
            (["--weights", "kt-int8", "--layers", "linear"], "are experts"),
        ):
            with self.subTest(more):
                self.assertIn(text, self.bad(2, "convert", MODEL, self.out, *more))
                self.assertEqual([n for n in os.listdir(self.path()) if n.startswith("out")], [])

    @unittest.skipUnless(FAULT, "no MOESAIC_FAULT")
    def test_what_a_fault_leaves(self):
        """Layers that are complete are kept, and verified; the end is the same to the byte."""
        command = ["convert", MODEL, self.out, "--weights", "kt-int8", "--kt-backward", "--threads", "1", "--json"]
        self.good(*command)
        whole = {name: self.read("out", name) for name in self.files("out")}
        resumed = set()
        for kind, places in (("write", (5, 400, 1200)), ("open", (40, 600, 1000)), ("rename", (1, 2, 4)), ("alloc", (50, 3000))):
            for n in places:
                with self.subTest(f"{kind}:{n}"):
                    for name in ("out", "out.partial"):
                        shutil.rmtree(self.path(name), ignore_errors=True)
                    env = {**environment(), "FAULT": f"{kind}:{n}", "FAULT_REPORT": self.path("reached")}
                    done = subprocess.run([FAULT, *command], capture_output=True, text=True,
                                          env=env, timeout=120)  # fmt: skip
                    self.assertIn(done.returncode, (0, 2, 3), done.stderr)
                    if done.returncode:
                        self.assertEqual(len(done.stderr.strip().split("\n")), 1, done.stderr)
                        self.assertFalse(os.path.exists(self.out), done.stderr)
                        resumed.add(json.loads(self.good(*command).stdout)["resumed"])
                    self.assertEqual({name: self.read("out", name) for name in self.files("out")}, whole)
        self.assertGreater(max(resumed), 1)

    # ---- AWQ, as kt-kernel's converter leaves it: codes [n, k / 8], scales by group, zeros [groups, n / 8], all plainly packed

    def awq(self):
        """A merged folder; its values are those of self.path("awq"), our own AWQ checkpoint."""
        self.convert("awq", "--weights", "awq")
        tensors, arrays = read_tensors(self.path("awq")), {}
        for name, (_, dtype, shape, data) in tensors.items():
            if ".experts." not in name:
                arrays[name.replace("model.layers.", "blk.").replace("model.", "")] = (dtype, shape, data)
            elif name.endswith(".qweight"):
                at = name.split(".")
                stem = f"blk.{at[2]}.ffn_{at[6][:-5]}_exps.{at[5]}."
                k, n = shape[0], shape[1] * 8
                words = memoryview(data).cast("I")
                packed = bytearray(n * k // 2)
                for column in range(k):
                    for row in range(n):
                        code = words[column * (n // 8) + row // 8] >> AWQ_SHIFT[row % 8] & 15
                        packed[row * k // 2 + column // 2] |= code << column % 2 * 4
                scales, zeros = (tensors[name[:-7] + kind] for kind in ("scales", "qzeros"))
                plain = bytearray(len(zeros[3]))
                for i, word in enumerate(memoryview(zeros[3]).cast("I")):
                    for row in range(8):
                        at = i * 8 + row
                        plain[at // 2] |= (word >> AWQ_SHIFT[row] & 15) << at % 2 * 4
                arrays[stem + "weight"] = ("I32", [n, k // 8], bytes(packed))
                arrays[stem + "scale"] = (scales[1], [len(scales[3]) // 2], scales[3])
                arrays[stem + "qzeros"] = (zeros[1], zeros[2], bytes(plain))
        shutil.copytree(MODEL, self.path("merged"), ignore=shutil.ignore_patterns("*.safetensors*"))
        return arrays

    def merged(self, arrays):
        save_tensors(self.path("merged", "model.safetensors"), arrays, {"format": "pt"})
        return self.path("merged")

    def test_awq(self):
        folder = self.merged(self.awq())
        want = self.loss(self.path("awq"))
        self.assertEqual(self.loss(folder), want)
        self.assertEqual(self.loss(MODEL, "--kt-weights", folder), want)
        shown = json.loads(self.good("inspect", folder, "--values", "--json").stdout)["quantised"]
        self.assertEqual([(row["names"], row["matrices"], row["zero_points"]) for row in shown], [("kt AWQ", 96, True)])
        result = json.loads(self.good("convert", folder, self.path("back"), "--weights", "nearest", "--json").stdout)
        self.assertEqual([result["kept"], result["error"]], [96, 0])
        self.assertEqual(self.loss(self.path("back")), want)

    def test_awq_refused(self):
        arrays = self.awq()
        name = "blk.2.ffn_up_exps.5."
        dtype, shape, data = arrays[name + "scale"]
        for change, text in (
            ({name + "qzeros": None}, f"tensor '{name}qzeros' is missing"),
            ({name + "weight": None}, f"tensor '{name}weight' is missing"),
            ({name + "scale": ("BF16", shape, data)}, f"tensor '{name}scale' is BF16"),
            ({name + "scale": (dtype, [shape[0] - 1], data[2:])}, f"tensor '{name}scale' has {shape[0] - 1} values"),
            ({name + "scale": (dtype, shape, b"\x00\x7c" + data[2:])}, "kt AWQ|scale"),
            ({name + "weight": ("I32", [SIZE, SIZE // 16], arrays[name + "weight"][2][: SIZE * SIZE // 4])}, f"tensor '{name}weight' has"),
            ({name + "qzeros": ("I32", [1, SIZE // 16], arrays[name + "qzeros"][2][: SIZE // 4])}, f"tensor '{name}qzeros' has"),
        ):  # fmt: skip
            with self.subTest(text):
                folder = self.merged({k: v for k, v in {**arrays, **change}.items() if v})
                line = self.bad(2, "eval", "--model", folder, "--data", self.tokens("held.safetensors", 4))
                self.assertRegex(line, text) if "|" in text else self.assertIn(text, line)


if __name__ == "__main__":
    unittest.main()
