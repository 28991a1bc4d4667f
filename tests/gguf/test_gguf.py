# SPDX-License-Identifier: Apache-2.0
"""Models written by the gguf package: what convert and the loader make of them, beside the package's dequantize."""

import array
import json
import os
import subprocess
import tempfile
import unittest

import numpy as np
from files import LAYERS, Q, VOCAB, Model, permute, unpermute
from support import TOOL, environment, read_tensors, save_tokens

DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "I32": np.int32, "I64": np.int64}
LOGITS = os.environ["MOESAIC_LOGITS"]


def numbers(entry):
    _, dtype, shape, data = entry
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def unpacked(tensors, name):
    """float32 of a compressed-tensors matrix: int8 by group, or int4 packed, with or without zero points."""
    stem = name[: -len(".weight")]
    scale = numbers(tensors[stem + ".weight_scale"]).astype(np.float32)
    if stem + ".weight_packed" not in tensors:
        codes = numbers(tensors[name]).astype(np.float32)
    else:
        words = numbers(tensors[stem + ".weight_packed"])
        codes = (words[..., None] >> (4 * np.arange(8)) & 15).reshape(words.shape[0], -1).astype(np.float32) - 8
    zeros = np.zeros_like(scale)
    if stem + ".weight_zero_point" in tensors:
        words = numbers(tensors[stem + ".weight_zero_point"])
        rows = (words[:, None] >> (4 * np.arange(8))[None, :, None] & 15).reshape(-1, words.shape[1])
        zeros = rows[: scale.shape[0]].astype(np.float32) - 8
    group = codes.shape[1] // scale.shape[1]
    return (codes - zeros.repeat(group, 1)) * scale.repeat(group, 1)


class Case(unittest.TestCase):
    def setUp(self):
        self.temp = tempfile.TemporaryDirectory()
        self.addCleanup(self.temp.cleanup)

    def path(self, name):
        return os.path.join(self.temp.name, name)

    def run_tool(self, *args, code=0):
        done = subprocess.run([TOOL, *args], capture_output=True, text=True, env=environment(), check=False)
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        return done.stdout if code == 0 else done.stderr

    def convert(self, path, out, *args):
        return json.loads(self.run_tool("convert", path, self.path(out), "--json", *args))

    def logits(self, model, tokens=24):
        rng = np.random.default_rng(5)
        with open(self.path("ids"), "wb") as file:
            array.array("i", rng.integers(0, VOCAB, tokens).tolist()).tofile(file)
        out = self.path("logits")
        done = subprocess.run([LOGITS, model, self.path("ids"), out], capture_output=True, text=True, env=environment(),
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return np.fromfile(out, np.float32).reshape(tokens, VOCAB)


class Decode(Case):
    def check(self, arch, kinds):
        model = Model(arch, kinds)
        model.write(self.path("m.gguf"))
        self.convert(self.path("m.gguf"), "plain", "--weights", "f32")
        got, want = read_tensors(self.path("plain")), model.checkpoint()
        self.assertEqual(sorted(got), sorted(want))
        for name, values in want.items():
            self.assertEqual(numbers(got[name]).shape, values.shape, name)
            self.assertEqual(numbers(got[name]).astype(np.float32).tobytes(), values.astype(np.float32).tobytes(), name)
        return model

    def test_every_type_as_the_package_reads_it(self):
        """F32 of every weight has the bits of gguf.dequantize."""
        self.check("qwen3moe", {"embed": Q.Q6_K, "attention": Q.Q4_K, "gate": Q.Q4_K, "up": Q.Q4_1, "down": Q.Q6_K})
        self.check_again("qwen2moe", {"embed": Q.F16, "attention": Q.BF16, "gate": Q.Q4_0, "up": Q.Q8_0, "down": Q.F16})

    def check_again(self, arch, kinds):
        self.temp.cleanup()
        os.mkdir(self.temp.name)
        self.check(arch, kinds)

    def test_rows_of_q_and_k_of_llama(self):
        rows = np.arange(256 * 3.0).reshape(256, 3)
        self.assertTrue((unpermute(permute(rows, 4), 4) == rows).all())
        self.check("llama", {"attention": Q.Q8_0, "gate": Q.Q4_K, "up": Q.Q4_K, "down": Q.Q6_K})

    def test_split_files(self):
        model = Model("qwen3moe", {"gate": Q.Q8_0, "up": Q.Q8_0, "down": Q.Q8_0})
        model.write(self.path("s.gguf"), split=7)
        files = sorted(n for n in os.listdir(self.temp.name) if n.endswith(".gguf"))
        self.assertGreater(len(files), 3)
        for given in (files[0], files[-1]):
            out = "out-" + given
            self.convert(self.path(given), out, "--weights", "f32")
            got = read_tensors(self.path(out))
            for name, values in model.checkpoint().items():
                self.assertEqual(numbers(got[name]).tobytes(), values.tobytes(), name)
        os.remove(self.path(files[1]))
        self.assertIn(files[1] + ": is missing", self.run_tool("inspect", self.path(files[0]), code=2))


class Nearest(Case):
    def error(self, kind):
        """(relative error of the experts, of a weight, what convert says, its tensors)"""
        model = Model("qwen3moe", {"gate": kind, "up": kind, "down": kind})
        model.write(self.path("m.gguf"))
        said = self.convert(self.path("m.gguf"), "near")
        got, want = read_tensors(self.path("near")), model.checkpoint()
        wrong = total = largest = 0
        for name, values in want.items():
            if ".experts." not in name:
                continue
            back = unpacked(got, name)
            wrong += float(((back - values).astype(np.float64) ** 2).sum())
            total += float((values.astype(np.float64) ** 2).sum())
            largest = max(largest, float(np.abs(back - values).max()))
        return (wrong / total) ** 0.5, largest, said, got

    def test_exact_ones(self):
        for kind in (Q.Q8_0, Q.Q4_0, Q.Q6_K):
            error, largest, said, _ = self.error(kind)
            self.assertEqual((error, largest), (0, 0), kind)
            self.assertEqual(said["kept"], said["converted"] - 2, kind)
            self.assertIn(said["worst"], ("model.embed_tokens.weight", "lm_head.weight"), kind)  # bf16
            self.assertLess(said["worst_error"], 0.003, kind)
            self.setUp()

    def test_near_ones_say_how_near(self):
        for kind in (Q.Q4_1, Q.Q4_K):
            error, largest, said, got = self.error(kind)
            self.assertGreater(error, 0.01)
            self.assertLess(error, 0.12, kind)  # a constant shift of half a step at most in each group
            self.assertAlmostEqual(said["largest_error"], largest, delta=largest * 1e-6)
            shown = json.loads(self.run_tool("inspect", self.path("m.gguf"), "--values", "--json"))
            rows = [r for r in shown["quantised"] if r["of"] == "experts"]
            self.assertEqual([r["names"] for r in rows], [kind.name])
            self.assertAlmostEqual(rows[0]["reading_error"], error, delta=error * 1e-3)
            self.assertAlmostEqual(rows[0]["largest_reading_error"], largest, delta=largest * 1e-6)
            with open(self.path("near/config.json"), encoding="utf-8") as file:
                groups = json.load(file)["quantization_config"]["config_groups"]
            self.assertEqual(sorted(g["weights"]["num_bits"] for g in groups.values()), [4, 8])
            self.assertTrue(any(n.endswith(".weight_zero_point") for n in got))
            self.setUp()

    def test_eight_bits_are_nearer(self):
        model = Model("qwen3moe", {"gate": Q.Q4_K, "up": Q.Q4_K, "down": Q.Q4_K})
        model.write(self.path("m.gguf"))
        self.assertLess(self.convert(self.path("m.gguf"), "int8", "--weights", "int8")["worst_error"], 0.03)


class Load(Case):
    def check(self, arch, kinds, most, tied=False):
        """most: how far the codes of an expert are from bf16 of what the file means. Logits say little of that: a token that goes to
        another expert moves them by more than all codes."""
        model = Model(arch, kinds, tied=tied)
        model.write(self.path("m.gguf"))
        self.convert(self.path("m.gguf"), "near")
        here, there = self.logits(self.path("m.gguf")), self.logits(self.path("near"))
        self.assertEqual(here.tobytes(), there.tobytes())
        self.convert(self.path("m.gguf"), "plain", "--weights", "bf16")
        self.assertGreater(float(np.abs(here).max()), 0.01)
        near, plain = read_tensors(self.path("near")), read_tensors(self.path("plain"))
        for name in plain:
            if ".experts." in name:
                want = numbers(plain[name])
                self.assertLess(float(np.linalg.norm(unpacked(near, name) - want) / np.linalg.norm(want)), most, name)
        plain = self.logits(self.path("plain"))
        return float(np.linalg.norm(here - plain) / np.linalg.norm(plain))

    def test_directly_and_converted_are_the_same_bits(self):
        kinds = {"gate": Q.Q8_0, "up": Q.Q8_0, "down": Q.Q6_K}
        self.assertLess(self.check("qwen3moe", kinds, 0.003), 0.01)
        self.setUp()
        self.assertLess(self.check("llama", {**kinds, "gate": Q.Q4_0, "up": Q.Q4_0}, 0.003, tied=True), 0.01)
        self.setUp()
        self.check("qwen2moe", {"gate": Q.Q4_K, "up": Q.Q4_K, "down": Q.Q6_K, "attention": Q.F16}, 0.06)

    def test_expanded_is_what_the_file_means(self):
        from support import save_tokens

        Model("qwen3moe", {"gate": Q.Q4_K, "up": Q.Q4_1, "down": Q.Q6_K, "attention": Q.BF16}).write(self.path("m.gguf"))
        save_tokens(self.path("t.safetensors"), [list(range(40))], tokenizer_vocab_size=str(VOCAB))
        self.convert(self.path("m.gguf"), "plain", "--weights", "bf16")
        losses = [self.run_tool("eval", "--model", self.path(model), "--data", self.path("t.safetensors"), "--json", *more)
                  for model, *more in (("m.gguf", "--weights", "bf16"), ("plain",))]  # fmt: skip
        self.assertEqual(*(json.loads(loss)["loss"] for loss in losses))

    def test_training_begins_from_the_file(self):
        from support import save_tokens

        Model("qwen3moe", {"gate": Q.Q4_K, "up": Q.Q4_K, "down": Q.Q6_K}).write(self.path("m.gguf"))
        save_tokens(self.path("t.safetensors"), [[i % VOCAB for i in range(s, s + 40)] for s in range(4)],
                    tokenizer_vocab_size=str(VOCAB))
        self.run_tool("train", "--model", self.path("m.gguf"), "--data", self.path("t.safetensors"), "--output-dir",
                      self.path("out"), "--max-steps", "3", "--quiet")
        self.assertTrue(os.path.exists(self.path("out/adapter_model.safetensors")))


class Refused(Case):
    KINDS = {"gate": Q.Q8_0, "up": Q.Q8_0, "down": Q.Q8_0}

    def refuse(self, text, **more):
        arch = more.pop("arch", "qwen3moe")
        Model(arch, self.KINDS).write(self.path("m.gguf"), **more)
        said = self.run_tool("convert", self.path("m.gguf"), self.path("out"), code=2)
        self.assertIn("m.gguf", said)
        self.assertIn(text, said)
        self.assertFalse(os.path.exists(self.path("out")) or os.path.exists(self.path("out.partial")))

    def test_what_is_missing(self):
        self.refuse("'blk.1.ffn_up_exps.weight' is missing", without=["blk.1.ffn_up_exps.weight"])
        self.refuse("'blk.0.attn_k.weight' is missing", without=["blk.0.attn_k.weight"])
        self.refuse("'token_embd.weight' is missing", without=["token_embd.weight"])
        self.refuse("'output_norm.weight' is missing", without=["output_norm.weight"])

    def test_what_is_not_known(self):
        self.refuse("'qwen3moe.rope.scaling.type'", more=[("qwen3moe.rope.scaling.type", "x" * 100)])
        self.refuse("is missing", arch="olmoe", without=[f"blk.{i}.attn_q.weight" for i in range(LAYERS)])

    def test_layers_without_experts(self):
        names = [f"blk.1.ffn_{name}_exps.weight" for name in ("gate", "up", "down")]
        self.refuse("some layers have no experts; in 'llama' all have", arch="llama", without=names)

    def test_other_architectures(self):
        model = Model("qwen3moe", self.KINDS)
        model.arch = "deepseek2"
        model.write(self.path("m.gguf"))
        for args in (("convert", self.path("m.gguf"), self.path("out")), ("inspect", self.path("m.gguf"))):
            said = self.run_tool(*args, code=2)
            self.assertIn("m.gguf: architecture 'deepseek2' cannot be trained", said)

    def test_methods(self):
        Model("qwen3moe", self.KINDS).write(self.path("m.gguf"))
        save_tokens(self.path("t.safetensors"), [[1, 2, 3]], tokenizer_vocab_size=str(VOCAB))
        said = self.run_tool("train", "--model", self.path("m.gguf"), "--data", self.path("t.safetensors"), "--output-dir", self.path("out"),
                             "--method", "full", code=2)  # fmt: skip
        self.assertIn("m.gguf: a GGUF file's weights stay as they are: method lora", said)
        self.assertIn("moesaic convert", said)

    def test_what_needs_a_folder(self):
        """Merging writes a checkpoint: what to type is said."""
        Model("qwen3moe", self.KINDS).write(self.path("m.gguf"))
        said = self.run_tool("merge", "--model", self.path("m.gguf"), "--adapter", self.temp.name, "--output-dir",
                             self.path("out"), code=2)
        self.assertIn("moesaic convert", said)


if __name__ == "__main__":
    unittest.main()
