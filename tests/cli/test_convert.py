# SPDX-License-Identifier: Apache-2.0
"""convert --weights: files of quantised weights, what a kill leaves and what goes on from there."""

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
import unittest

from support import MODEL, SANITIZED, TOOL, Case, distance, environment, read_tensors, sample_weights

FAULT = os.environ.get("MOESAIC_FAULT")


class Convert(Case):
    def convert(self, model, name, *more):
        return json.loads(self.good("convert", model, self.path(name), "--json", *more).stdout)

    def loss(self, model, *more):
        flags = ["--data", self.tokens("held.safetensors", 4), "--json", "--threads", 2, *more]
        return json.loads(self.good("eval", "--model", model, *flags).stdout)["loss"]

    def test_files_are_what_loading_makes(self):
        for weights in ("int8", "int4", "fp8", "mxfp4"):
            with self.subTest(weights):
                result = self.convert(MODEL, weights, "--weights", weights, "--layers", "experts")
                self.assertEqual([result["converted"], result["kept"], result["resumed"]], [96, 0, 0])
                self.assertLess(result["bytes"], result["bytes_in"])
                self.assertEqual(self.loss(self.path(weights)), self.loss(MODEL, "--weights", weights))

    def test_configs(self):
        for weights, method, layout, most in (
            ("int8", "compressed-tensors", "int-quantized", 0.01),
            ("int4", "compressed-tensors", "pack-quantized", 0.12),
            ("mxfp4", "compressed-tensors", "mxfp4-pack-quantized", 0.15),
            ("fp8", "fp8", None, 0.03),
            ("gptq", "gptq", None, 0.12),
            ("awq", "awq", None, 0.12),
        ):
            with self.subTest(weights):
                self.convert(MODEL, weights, "--weights", weights)
                with open(self.path(weights, "config.json"), encoding="utf-8") as file:
                    config = json.load(file)["quantization_config"]
                self.assertEqual([config["quant_method"], config.get("format")], [method, layout])
                plain = config.get("ignore") or config["modules_to_not_convert"]
                self.assertIn("lm_head", plain)
                self.assertIn("model.layers.3.mlp.gate", plain)
                self.assertEqual("model.layers.0.self_attn.q_proj" in plain, weights != "fp8")
                self.assertNotIn("model.layers.0.mlp.experts.0.up_proj", plain)
                back = self.convert(self.path(weights), f"{weights}-bf16", "--weights", "bf16")
                self.assertEqual(back["converted"], 112 if weights == "fp8" else 96)
                with open(self.path(f"{weights}-bf16", "config.json"), encoding="utf-8") as file:
                    self.assertNotIn("quantization_config", json.load(file))
                before, after = read_tensors(MODEL), read_tensors(self.path(f"{weights}-bf16"))
                self.assertEqual({k: v[1:3] for k, v in before.items()}, {k: v[1:3] for k, v in after.items()})
                for name in sample_weights():
                    if "experts" in name or weights == "fp8":
                        self.assertLess(distance(after[name], before[name]), most, name)
                    else:
                        self.assertEqual(after[name][3], before[name][3], name)
                self.loss(self.path(f"{weights}-bf16"))

    def test_sums_index_and_other_files(self):
        model = self.model()
        os.makedirs(os.path.join(model, "extra"))
        self.write("model/extra/notes.txt", "hello")
        result = self.convert(model, "out", "--weights", "int8", "--max-shard-size", "400KB")
        self.assertGreater(result["files"], 4)
        tensors = read_tensors(self.path("out"))
        with open(self.path("out", "model.safetensors.index.json"), encoding="utf-8") as file:
            index = json.load(file)
        self.assertEqual(index["weight_map"], {name: value[0] for name, value in tensors.items()})
        self.assertEqual(index["metadata"]["total_size"], sum(len(v[3]) for v in tensors.values()))
        for line in self.read("out", "SHA256SUMS").decode().splitlines():
            digest, name = line.split("  ")
            self.assertEqual(hashlib.sha256(self.read("out", name)).hexdigest(), digest)
        self.assertEqual(self.read("out", "extra", "notes.txt"), b"hello")
        self.assertEqual(self.read("out", "tokenizer.json"), self.read("model", "tokenizer.json"))
        self.assertEqual(self.loss(self.path("out")), self.loss(model, "--weights", "int8"))
        with open(self.path("out", tensors["model.norm.weight"][0]), "rb") as file:  # what torch can map: aligned
            size = struct.unpack("<Q", file.read(8))[0]
            self.assertEqual(size % 8, 0)

    def test_inspect(self):
        for weights, bits, least, most in (("int8", 8.25, 0.003, 0.01), ("int4", 4.5, 0.05, 0.12), ("fp8", 8.002, 0.01, 0.03),
                                           ("mxfp4", 4.25, 0.05, 0.15), ("awq", 4.15625, 0.05, 0.15)):  # fmt: skip
            with self.subTest(weights):
                made = self.convert(MODEL, weights, "--weights", weights)
                flags = ["--base", MODEL, "--json"]
                found = json.loads(self.good("inspect", self.path(weights), *flags).stdout)
                self.assertEqual(found["experts_stored"], "one by one")
                experts = {row["of"]: row for row in found["quantised"]}["experts"]
                self.assertEqual([experts["matrices"], experts["compared"], experts["not_finite"]], [96, 96, 0])
                self.assertEqual(experts["weights"], 96 * 128 * 128)
                self.assertAlmostEqual(experts["bits_per_weight"], bits, 3)
                self.assertTrue(least < experts["error"] <= experts["worst_error"] < most, experts)
                self.assertTrue(experts["least"] < 0 < experts["largest"] and experts["rms"] > 0, experts)
                self.assertTrue(0 < experts["least_scale"] <= experts["largest_scale"], experts)
                if weights != "fp8":  # which has two kinds
                    self.assertAlmostEqual(experts["error"], made["error"], 6)
                self.assertIn("quantised", self.good("inspect", self.path(weights)).stdout)
        self.assertNotIn("quantised", json.loads(self.good("inspect", MODEL, "--json").stdout))
        self.assertIn("it has no weights whose values", self.bad(2, "inspect", self.tokens(), "--values"))

    # ---- large ones

    def big_model(self, layers=6, experts=8, hidden=512, inner=512):
        """Random bits with small exponents; a file per layer."""
        with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config.update(num_hidden_layers=layers, num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner)
        os.makedirs(self.path("big"))
        self.write("big/config.json", json.dumps(config))
        row = random.Random(7).randbytes(4096)
        values = bytes(b for pair in zip(row, (0x3C + (b & 1) * 0x80 for b in row)) for b in pair) * (inner * hidden // 4096)
        for layer in range(layers):
            header, at, chunks = {}, 0, []
            for expert in range(experts):
                for name, shape in (("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])):
                    header[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = {
                        "dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(values)]}  # fmt: skip
                    at += len(values)
                    chunks.append(values)
            text = json.dumps(header).encode()
            with open(self.path("big", f"model-{layer + 1:05}-of-{layers:05}.safetensors"), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.writelines(chunks)
        names = {f"model.layers.{layer}.mlp.experts.{e}.{n}_proj.weight": f"model-{layer + 1:05}-of-{layers:05}.safetensors"
                 for layer in range(layers) for e in range(experts) for n in ("gate", "up", "down")}  # fmt: skip
        self.write("big/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": names}))
        return [TOOL, "convert", self.path("big"), self.path("made"), "--weights", "int4", "--json", "--threads", "2"]

    def folder(self, name):
        return {n: self.read(name, n) for n in sorted(os.listdir(self.path(name)))}

    def kill_when(self, command, done, send=signal.SIGKILL):
        """Waits until so many files are noted as done, then kills; False: it was done before."""
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            try:
                if len(json.loads(self.read("made.partial", "convert.json"))["done"]) >= done:
                    break
            except (OSError, ValueError):
                pass
            time.sleep(0.002)
        process.send_signal(send)
        self.error = process.communicate()[1]
        self.code = process.returncode
        return self.code != 0

    def test_killed_ones_go_on(self):
        command = self.big_model()
        self.good(*command[1:])
        want = self.folder("made")
        shutil.rmtree(self.path("made"))
        for done in (1, 3):
            if not self.kill_when(command, done):
                shutil.rmtree(self.path("made"))
                continue
            self.assertFalse(os.path.exists(self.path("made")))
        before = {n: os.stat(self.path("made.partial", n)).st_ino for n in os.listdir(self.path("made.partial"))
                  if n.endswith("safetensors")} if os.path.exists(self.path("made.partial")) else {}  # fmt: skip
        result = json.loads(self.good(*command[1:]).stdout)
        self.assertEqual(self.folder("made"), want)
        self.assertFalse(os.path.exists(self.path("made.partial")))
        self.assertGreaterEqual(result["resumed"], max(len(before) - 1, 0))
        kept = sum(os.stat(self.path("made", n)).st_ino == inode for n, inode in before.items())
        self.assertGreaterEqual(kept, result["resumed"])

    def interrupted(self):
        command = self.big_model()
        if not self.kill_when(command, 2, signal.SIGINT):
            self.skipTest("it was done before the signal came")
        self.assertEqual(self.code, 130, self.error)
        self.assertIn("interrupted: what is complete was kept", self.error)
        return command

    def test_one_file_with_an_index(self):
        """transformers looks for model.safetensors, or for an index that says what there is."""
        command = self.big_model(layers=1, experts=1)
        self.good(*command[1:])
        name = "model-00001-of-00001.safetensors"
        self.assertIn(name, os.listdir(self.path("made")))
        index = json.loads(self.read("made", "model.safetensors.index.json"))
        self.assertEqual(set(index["weight_map"].values()), {name})
        self.assertEqual(set(index["weight_map"]), set(read_tensors(self.path("made"))))

    def test_changed_files_are_made_again(self):
        command = self.interrupted()
        first = json.loads(self.read("made.partial", "convert.json"))["done"][0]["file"]
        with open(self.path("made.partial", first), "r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"\xff")
        result = self.good(*command[1:])
        self.assertIn(f"{first}: its checksum has changed", result.stderr)
        for line in self.read("made", "SHA256SUMS").decode().splitlines():
            digest, name = line.split("  ")
            self.assertEqual(hashlib.sha256(self.read("made", name)).hexdigest(), digest)

    def test_other_conversions_are_not_mixed(self):
        command = self.interrupted()
        line = self.bad(2, *command[1:], "--weights", "int8")
        self.assertIn("a conversion with other input or flags was begun there", line)
        os.utime(self.path("big", "model-00003-of-00006.safetensors"))
        self.assertIn("other input or flags", self.bad(2, *command[1:]))
        shutil.rmtree(self.path("made.partial"))
        os.makedirs(self.path("made.partial"))
        self.write("made.partial/mine", "")
        self.assertIn("no conversion made it", self.bad(2, *command[1:]))
        self.assertEqual(os.listdir(self.path("made.partial")), ["mine"])

    @unittest.skipIf(SANITIZED, "sanitizers keep freed memory for a while")
    def test_memory_is_bounded(self):
        command = self.big_model(layers=12, experts=16)
        process, most = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()), 0
        while process.poll() is None:  # ru_maxrss would count this process as well, which forked it
            with open(f"/proc/{process.pid}/status", encoding="utf-8") as file:
                most = max([most, *(int(line.split()[1]) for line in file if line.startswith("VmHWM"))])
            time.sleep(0.002)
        self.assertEqual(process.returncode, 0)
        self.assertGreater(most, 0)
        size = sum(os.path.getsize(self.path("big", n)) for n in os.listdir(self.path("big")))
        self.assertGreater(size, 280 << 20)
        self.assertLess(most, 30 * 1024 + (size >> 10) // 12)  # KiB: the program and a layer

    # ---- errors

    def test_errors(self):
        model = self.model()
        shard = os.path.join(model, "model-00001-of-00002.safetensors")
        with open(shard, "rb") as file:
            data = file.read()
        with open(shard, "r+b") as file:  # an expert's value becomes NaN
            size = struct.unpack("<Q", data[:8])[0]
            at = json.loads(data[8 : 8 + size])["model.layers.1.mlp.experts.2.up_proj.weight"]["data_offsets"][0]
            file.seek(8 + size + at + 2 * 130)
            file.write(b"\xc0\x7f")
        line = self.bad(2, "convert", model, self.out, "--weights", "int4")
        self.assertIn("model.layers.1.mlp.experts.2.up_proj.weight: row 1, column 2 is not finite", line)
        self.assertEqual([n for n in os.listdir(self.path()) if n.startswith("out")], [])
        self.convert(MODEL, "int8", "--weights", "int8")
        line = self.bad(2, "convert", self.path("int8"), self.out, "--weights", "bf16", "--adapter-format", "kt")
        self.assertIn("is a model", line)
        self.assertIn("nothing in it can become bf16", self.bad(2, "convert", MODEL, self.out, "--weights", "bf16"))
        with open(os.path.join(model, "config.json"), "r+", encoding="utf-8") as file:
            config = json.load(file)
            file.seek(0)
            json.dump({**config, "model_type": "gpt_oss"}, file)
            file.truncate()
        self.assertIn("gpt_oss keeps its experts transposed", self.bad(2, "convert", model, self.out, "--weights", "fp8"))

    @unittest.skipUnless(FAULT, "no MOESAIC_FAULT")
    def test_faults(self):
        """A write, open, rename or allocation that fails: one line, nothing under a final name; the next call ends the work."""
        command = ["convert", MODEL, self.out, "--weights", "int4", "--quiet", "--threads", "1", "--max-shard-size", "1MB"]
        self.good(*command)
        whole = self.folder("out")
        for kind in ("write", "rename", "alloc", "open"):
            for n in (1, 2, 3, 5, 8, 13, 21, 34, 89, 233):
                with self.subTest(f"{kind}:{n}"):
                    for name in ("out", "out.partial"):
                        shutil.rmtree(self.path(name), ignore_errors=True)
                    env = {**environment(), "FAULT": f"{kind}:{n}", "FAULT_REPORT": self.path("reached")}
                    result = subprocess.run([FAULT, *command], capture_output=True, text=True, env=env, timeout=120)
                    self.assertIn(result.returncode, (0, 2, 3), result.stderr)
                    if result.returncode:
                        self.assertEqual(len(result.stderr.strip().split("\n")), 1, result.stderr)
                        self.assertFalse(os.path.exists(self.out), result.stderr)
                        self.good(*command)
                    self.assertEqual(self.folder("out"), whole)


if __name__ == "__main__":
    unittest.main()
