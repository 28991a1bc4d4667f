# SPDX-License-Identifier: Apache-2.0
"""Full and hybrid fine-tuning: what is left in the output folder, and that it is a model."""

import json
import os
import shutil
import struct
import subprocess
import unittest

from support import MODEL, Case, environment


def header(path):
    with open(path, "rb") as f:
        return json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))


def layout(folder):
    """Name, dtype, shape and place of every tensor, by file."""
    files = sorted(f for f in os.listdir(folder) if f.startswith("model") and f.endswith(".safetensors"))
    return {f: header(os.path.join(folder, f)) for f in files}


def content(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


class Full(Case):
    def run_full(self, *more, steps=6):
        held = self.tokens("held.safetensors", 4)
        flags = ["--max-steps", steps, "--eval-data", held, "--json", "--learning-rate", "1e-3", *more]
        return held, json.loads(self.good(*self.train_arguments(*flags)).stdout)

    def evaluate(self, held, *more):
        return json.loads(self.good("eval", *more, "--data", held, "--json", "--threads", 2).stdout)["loss"]

    def test_full_leaves_a_model(self):
        held, values = self.run_full("--method", "full")
        self.assertEqual(values["trainable"], values["parameters"])
        self.assertLess(values["last_loss"], values["first_loss"])
        self.assertEqual(layout(self.out), layout(MODEL))
        for name in os.listdir(MODEL):
            if not name.endswith(".safetensors") and name != "README.md":
                self.assertEqual(content(self.out, name), content(MODEL, name), name)
        for name in layout(MODEL):
            self.assertNotEqual(content(self.out, name), content(MODEL, name), name)
        self.assertFalse(os.path.exists(os.path.join(self.out, "adapter_config.json")))
        self.assertEqual([n for n in os.listdir(self.out) if n.startswith(".")], [])
        # routers are rounded to the checkpoint's dtype, everything else was computed with as it was written
        self.assertAlmostEqual(self.evaluate(held, "--model", self.out), values["eval_loss"], delta=0.03)
        self.assertGreater(abs(self.evaluate(held, "--model", MODEL) - values["eval_loss"]), 0.1)
        with open(os.path.join(self.out, "run.yaml")) as f:
            self.assertIn('method: "full"', f.read())

    def test_full_resumes_with_the_same_bits(self):
        flags = ["--method", "full", "--save-steps", 3]
        for masters in ("f32", "bf16"):
            self.run_full(*flags, "--masters", masters, "--overwrite")
            whole = {n: content(self.out, n) for n in layout(self.out)}
            os.remove(os.path.join(self.out, "config.json"))
            shutil.rmtree(os.path.join(self.out, "checkpoint-6"))
            self.run_full(*flags, "--masters", masters, "--resume", "--threads", 1)
            self.assertEqual({n: content(self.out, n) for n in layout(self.out)}, whole)
            self.assertTrue(os.path.exists(os.path.join(self.out, "config.json")))
        line = self.bad(2, *self.train_arguments(*flags, "--masters", "f32", "--max-steps", 9, "--resume"))
        self.assertIn("masters", line)

    def test_hybrid_leaves_both(self):
        held, values = self.run_full("--method", "hybrid", "--lora-rank", 4, "--save-steps", 6)
        base, out = layout(MODEL), layout(self.out)
        self.assertEqual(out, base)
        changed = {n for f in base for n in base[f] if n != "__metadata__" and self.tensor(MODEL, f, n) != self.tensor(self.out, f, n)}
        self.assertTrue(changed)
        self.assertTrue(all(".mlp.experts." in n for n in changed), changed)
        self.assertTrue(os.path.exists(os.path.join(self.out, "adapter_config.json")))
        config = json.loads(content(self.out, "adapter_config.json"))
        self.assertEqual(config["base_model_name_or_path"], self.out)  # not the one that training began with
        card = content(self.out, "README.md").decode()
        self.assertIn(f"base_model: {self.out}\n", card)
        self.assertIn("The adapter belongs to the model in this folder", card)
        # between steps the experts are in the state only: no adapter without them
        self.assertEqual(sorted(os.listdir(os.path.join(self.out, "checkpoint-6"))), ["state.json", "state.safetensors", "trainer_state.json"])
        loss = self.evaluate(held, "--model", self.out, "--adapter", self.out)
        self.assertAlmostEqual(loss, values["eval_loss"], places=3)

    def tensor(self, folder, file, name):
        whole = content(folder, file)
        size = struct.unpack("<Q", whole[:8])[0]
        begin, end = layout(folder)[file][name]["data_offsets"]
        return whole[8 + size + begin : 8 + size + end]

    def test_quantised_base(self):
        """Its tensors in its formats; the same bytes from a resumed run; what was evaluated is what loads."""
        for weights, method, masters in (("fp8", "full", "bf16"), ("int4", "full", "f32"), ("gptq", "hybrid", "bf16"),
                                         ("awq", "full", "bf16"), ("mxfp4", "full", "f32")):  # fmt: skip
            with self.subTest(weights=weights):
                base = self.path("base-" + weights)
                self.good("convert", MODEL, base, "--weights", weights)
                held = self.tokens("held.safetensors", 4)
                flags = ["--method", method, "--masters", masters, "--save-steps", 3, "--overwrite", "--max-steps", 6,
                         "--eval-data", held, "--json", "--learning-rate", "1e-3"]  # fmt: skip
                values = json.loads(self.good(*self.train_arguments(*flags, model=base)).stdout)
                self.assertLess(values["last_loss"], values["first_loss"])
                self.assertEqual(layout(self.out), layout(base))
                whole = {n: content(self.out, n) for n in layout(self.out)}
                self.assertNotEqual(whole, {n: content(base, n) for n in layout(base)})
                adapter = ["--adapter", self.out] if method == "hybrid" else []
                before, after = self.evaluate(held, "--model", base), self.evaluate(held, "--model", self.out, *adapter)
                self.assertLess(abs(after - values["eval_loss"]), 0.1 * (before - values["eval_loss"]))
                shutil.rmtree(os.path.join(self.out, "checkpoint-6"))
                self.good(*self.train_arguments(*flags[:-2], "--learning-rate", "1e-3", "--resume", "--threads", 1, model=base))
                self.assertEqual({n: content(self.out, n) for n in layout(self.out)}, whole)

    def test_quantised_at_load(self):
        """--weights on a plain base: the checkpoint is plain, and quantising it again gives what was trained."""
        held = self.tokens("held.safetensors", 4)
        for weights in ("int8", "mxfp4"):
            _, values = self.run_full("--method", "full", "--weights", weights, "--overwrite")
            self.assertLess(values["last_loss"], values["first_loss"])
            self.assertEqual(layout(self.out), layout(MODEL))
            loss = self.evaluate(held, "--model", self.out, "--weights", weights)
            before = self.evaluate(held, "--model", MODEL, "--weights", weights)
            self.assertLess(abs(loss - values["eval_loss"]), 0.1 * (before - values["eval_loss"]))

    def test_refusals(self):
        full = ["--method", "full"]
        self.assertIn("masters bf16", self.bad(3, *self.train_arguments(*full, "--memory-limit", "20MB")))
        self.good(*self.train_arguments("--max-steps", 1))
        line = self.bad(2, *self.train_arguments(*full, "--overwrite", "--adapter", self.out))
        self.assertIn("method full has no adapter", line)

    def test_faults_while_it_is_written(self):
        """The n-th rename, write or sync fails: the folder has the whole model, or it is none."""
        flags = ["--method", "full", "--max-steps", 1, "--overwrite"]
        self.good(*self.train_arguments(*flags))
        whole = {name: content(self.out, name) for name in layout(self.out)}
        report, reached = self.path("reached"), 0
        for kind in ("rename", "write", "fsync"):
            n = 1
            while True:
                if os.path.exists(report):
                    os.remove(report)
                env = {**environment(), "FAULT": f"{kind}:{n}", "FAULT_REPORT": report}
                result = subprocess.run(
                    [os.environ["MOESAIC_FAULT"], *map(str, self.train_arguments(*flags))],
                    capture_output=True, text=True, env=env, timeout=300,
                )  # fmt: skip
                complete = os.path.exists(os.path.join(self.out, "config.json"))
                if complete:
                    self.assertEqual({name: content(self.out, name) for name in layout(self.out)}, whole, (kind, n))
                self.assertTrue(complete or result.returncode in (2, 3), (kind, n, result.stderr))
                self.assertEqual([name for name in os.listdir(self.out) if name.startswith(".")], [], (kind, n))
                if not os.path.exists(report):
                    break
                reached += 1
                n = n + 1 if n < 24 else int(n * 1.7)
        self.assertGreater(reached, 20)

    def test_estimate(self):
        def of(*more):
            return json.loads(self.good("estimate", "--model", MODEL, "--batch-tokens", 256, "--json", *more).stdout)

        lora, full, bf16 = of(), of("--method", "full"), of("--method", "full", "--masters", "bf16")
        self.assertEqual(full["trainable"], full["parameters"])
        self.assertGreater(full["moments"], lora["moments"])
        self.assertAlmostEqual(full["moments"] / full["gradients"], 2, places=1)
        self.assertLess(bf16["weights"], full["weights"])


if __name__ == "__main__":
    unittest.main()
