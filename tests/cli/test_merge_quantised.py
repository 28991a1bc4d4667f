# SPDX-License-Identifier: Apache-2.0
"""merge where weights are or become quantised, and adapters on quantised bases."""

import json
import os
import unittest

from support import MODEL, Case, distance, read_tensors, sample_weights


class MergeQuantised(Case):
    def setUp(self):
        super().setUp()
        self.adapter = self.path("out")
        self.good(*self.train_arguments("--max-steps", 8, "--warmup-ratio", 0, "--learning-rate", 3e-2))

    def loss(self, model, *more):
        flags = ["--data", self.path("train.safetensors"), "--json", "--threads", 2, *more]
        return json.loads(self.good("eval", "--model", model, *flags).stdout)["loss"]

    def merge(self, model, name, *more):
        flags = ["--adapter", self.adapter, "--output-dir", self.path(name), "--json", *more]
        return json.loads(self.good("merge", "--model", model, *flags).stdout)

    def check_loss(self, base, merged, share):
        """The adapter's effect on the loss, but for what quantising does to it."""
        want, before, got = self.loss(base, "--adapter", self.adapter), self.loss(base), self.loss(merged)
        self.assertGreater(before - want, 0.5)
        self.assertLess(abs(got - want), share * (before - want))

    def check_values(self, weights, error):
        """The files hold what was merged, but for quantising: as another reader dequantises them, beside an exact merge."""
        self.merge(self.path(weights), f"{weights}-exact", "--weights", "f32")
        self.good("convert", self.path(f"{weights}-merged"), self.path(f"{weights}-read"), "--weights", "f32", "--quiet")
        exact, read = read_tensors(self.path(f"{weights}-exact")), read_tensors(self.path(f"{weights}-read"))
        for name in sample_weights():
            self.assertLess(distance(read[name], exact[name]), error, name)

    def test_keep(self):
        for weights, error, share in (("fp8", 0.04, 0.1), ("int8", 0.02, 0.1), ("int4", 0.15, 0.4), ("mxfp4", 0.2, 0.4),
                                      ("gptq", 0.15, 0.4), ("awq", 0.15, 0.4)):  # fmt: skip
            with self.subTest(weights):
                self.good("convert", MODEL, self.path(weights), "--weights", weights, "--quiet")
                result = self.merge(self.path(weights), f"{weights}-merged")
                self.assertEqual(result["merged"], 112)
                self.assertGreater(result["error"], 0)
                self.assertLess(result["worst_error"], error)
                before, after = read_tensors(self.path(weights)), read_tensors(self.path(f"{weights}-merged"))
                self.assertEqual({k: v[:3] for k, v in before.items()}, {k: v[:3] for k, v in after.items()})
                same = {k for k in before if before[k][3] == after[k][3]}
                self.assertIn("model.layers.1.mlp.gate.weight", same)
                self.assertIn("model.embed_tokens.weight", same)
                self.assertNotIn("model.layers.1.self_attn.q_proj.weight", same)
                for name in ("config.json", "tokenizer.json"):
                    self.assertEqual(self.read(weights, name).split(), self.read(f"{weights}-merged", name).split())
                self.check_loss(self.path(weights), self.path(f"{weights}-merged"), share)
                self.check_values(weights, error)

    def test_other_formats(self):
        self.good("convert", MODEL, self.path("int4"), "--weights", "int4", "--quiet")
        result = self.merge(self.path("int4"), "bf16", "--weights", "bf16")
        self.assertLess(result["worst_error"], 0.004)  # one rounding
        self.check_loss(self.path("int4"), self.path("bf16"), 0.05)
        self.assertNotIn(b"quantization_config", self.read("bf16", "config.json"))
        self.merge(MODEL, "int8", "--weights", "int8")
        self.check_loss(MODEL, self.path("int8"), 0.1)
        self.assertIn(b"int-quantized", self.read("int8", "config.json"))

    def test_training_goes_on_from_files(self):
        """A quantised checkpoint trains as its plain one with --weights does: the same codes, the same losses."""
        for weights in ("int8", "int4", "mxfp4", "fp8"):
            with self.subTest(weights):
                self.good("convert", MODEL, self.path(weights), "--weights", weights, "--layers", "experts", "--quiet")
                losses = []
                for model, more in ((MODEL, ["--weights", weights]), (self.path(weights), [])):
                    self.out = self.path(f"trained-{weights}-{len(losses)}")
                    result = self.good(*self.train_arguments("--max-steps", 3, "--json", *more, model=model))
                    losses.append(json.loads(result.stdout)["last_loss"])
                self.assertEqual(losses[0], losses[1])

    def test_errors(self):
        model = self.path("fp8")
        self.good("convert", MODEL, model, "--weights", "fp8", "--quiet")
        name = sorted(n for n in os.listdir(model) if n.endswith("safetensors"))[0]
        data = self.read("fp8", name)
        scale = b"model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
        with open(os.path.join(model, name), "wb") as file:
            file.write(data.replace(scale, scale[:-1] + b"w"))
        os.remove(os.path.join(model, "model.safetensors.index.json"))
        line = self.bad(2, "merge", "--model", model, "--adapter", self.adapter, "--output-dir", self.path("new"))
        self.assertIn("safetensors", line)
        with open(os.path.join(model, name), "wb") as file:
            file.write(data)
        self.good("convert", MODEL, self.path("fresh"), "--weights", "fp8", "--quiet", "--max-shard-size", "1GB")
        index = json.loads(self.read("fresh", "model.safetensors.index.json"))
        index["weight_map"].pop(scale.decode(), None)
        broken = self.read("fresh", name).replace(scale, scale[:-1] + b"w")
        with open(self.path("fresh", name), "wb") as file:
            file.write(broken)
        self.write("fresh/model.safetensors.index.json", json.dumps(index))
        line = self.bad(2, "merge", "--model", self.path("fresh"), "--adapter", self.adapter, "--output-dir", self.path("new"))
        self.assertIn("model.layers.1.mlp.experts.3.up_proj.weight holds quantised codes, but its scales are missing", line)
        self.assertFalse(os.path.exists(self.path("new")))


if __name__ == "__main__":
    unittest.main()
