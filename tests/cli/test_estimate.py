# SPDX-License-Identifier: Apache-2.0
"""estimate: from config.json alone, the limits of the task graph, --memory-limit."""

import json
import os
import re
import unittest

from support import MODEL, ROOT, Case

CONFIGS = os.path.join(ROOT, "tests", "fixtures", "configs")
QWEN3_30B = os.path.join(CONFIGS, "qwen3-30b-a3b")


class Estimate(Case):
    def values(self, *arguments):
        return json.loads(self.good("estimate", *arguments, "--json").stdout)

    def test_graph_of_qwen3_30b_on_eight_parts(self):
        flags = ["--model", QWEN3_30B, "--numa", 8, "--gradient-accumulation-steps", 4]
        values = self.values(*flags)
        self.assertLessEqual(values["handles"], 50_000)
        self.assertLessEqual(values["max_task_handles"], 64)
        self.assertAlmostEqual(values["parameters"] / 1e9, 30.5, delta=0.1)
        self.assertEqual(len(values["part"]), 8)
        self.assertEqual(sum(values["kinds"].values()), values["tasks"])
        text = self.good("estimate", *flags, "--graph").stdout
        self.assertRegex(text, r"submission +[\d.]+ s, [\d.]+ % of the step")
        self.assertIn(f"{values['handles']} handles", text)

    def test_ranks_and_targets_count(self):
        few = self.values("--model", MODEL, "--lora-rank", 2, "--lora-target", "q_proj")
        many = self.values("--model", MODEL, "--lora-rank", 4, "--lora-target", "q_proj")
        self.assertEqual(2 * few["trainable"], many["trainable"])

    def test_the_folder_and_its_config_are_the_same(self):
        flags = ["--memory-limit", "100GB"]
        whole = self.values("--model", MODEL, *flags)
        self.assertEqual(whole, self.values("--model", os.path.join(MODEL, "config.json"), *flags))

    def test_memory_limit(self):
        self.assertIn("1MB", self.bad(3, "estimate", "--model", MODEL, "--memory-limit", "1MB"))
        self.good("estimate", "--model", MODEL, "--memory-limit", "100GB")

    def test_every_known_config(self):
        """Bytes by purpose add up, nodes share them, the largest allocation is one of them."""
        for name in sorted(os.listdir(CONFIGS)):
            with self.subTest(name):
                values = self.values("--model", os.path.join(CONFIGS, name), "--numa", 2, "--threads", 64)
                purposes = "weights adapter gradients moments activations scratch runtime process staging".split()
                self.assertGreaterEqual(values["total"], sum(values[p] for p in purposes))
                self.assertLess(values["total"], 1.02 * sum(values[p] for p in purposes))
                self.assertLessEqual(sum(values["part"]), values["total"])
                self.assertGreater(min(values["part"]), 0.3 * max(values["part"]))
                self.assertLess(values["largest"], values["total"] / 10)
                self.assertAlmostEqual(values["weights"] / (2 * values["parameters"]), 1, delta=0.02)
                self.assertGreater(values["tokens_per_s"], 0)

    def test_what_cannot_be_trained_is_estimated_and_refused(self):
        for name, lacks in (("deepseek-v3", "latent attention"), ("gpt-oss-120b", "sinks"), ("glm-4.5-air", "sigmoid")):
            model = os.path.join(CONFIGS, name)
            self.assertRegex(self.good("estimate", "--model", model).stdout, f"(?m)^not trained yet: .*{lacks}")
            self.assertFalse(self.values("--model", model)["trainable_here"])
            line = self.bad_training(2, model=model)
            self.assertIn(lacks, line)
            self.assertIn("can be estimated", line)

    def test_more_workers_and_lower_rates(self):
        flags = ["--model", QWEN3_30B, "--batch-tokens", 4096]
        two, four = (self.values(*flags, "--threads", n) for n in (2, 4))
        self.assertAlmostEqual(two["step_s"] / four["step_s"], 2, delta=0.2)
        slow, fast = (self.values(*flags, "--threads", 4, "--gflops", g) for g in (10, 20))
        self.assertAlmostEqual(slow["step_s"] / fast["step_s"], 2, delta=0.01)
        self.assertFalse(two["calibrated"])

    def test_a_calibrated_machine(self):
        machine = self.path("machine.json")
        self.good("doctor", "--calibrate", "--quick", "--quiet", MOESAIC_MACHINE=machine)
        values = json.loads(self.good("estimate", "--model", MODEL, "--json", MOESAIC_MACHINE=machine).stdout)
        self.assertTrue(values["calibrated"])
        text = self.good("estimate", "--model", MODEL, MOESAIC_MACHINE=machine).stdout
        self.assertIn("measured here", text)

    def test_hours_for_the_data(self):
        tokens = self.tokens(count=50)
        values = self.values("--model", MODEL, "--data", tokens, "--epochs", 2)
        self.assertEqual(values["data_tokens"], 50 * 24)
        self.assertAlmostEqual(values["hours"], 2 * 50 * 24 / values["tokens_per_s"] / 3600)
        few = self.values("--model", MODEL, "--data", tokens, "--epochs", 20, "--batch-tokens", 100, "--max-steps", 3)
        self.assertAlmostEqual(few["hours"], 300 / few["tokens_per_s"] / 3600)
        self.assertAlmostEqual(few["epochs"], 0.25)
        self.assertIn("no token file", self.bad(2, "estimate", "--model", MODEL,
                                                "--data", self.write("x.safetensors", "")))  # fmt: skip

    def test_what_would_make_it_fit(self):
        never = ["--recompute", "never"]
        large, small = (self.values("--model", MODEL, "--batch-tokens", n, *never)["total"] for n in (8192, 512))
        limit = (large + 2 * small) // 3
        result = self.run_tool("estimate", "--model", MODEL, "--memory-limit", limit, *never)
        self.assertEqual(result.returncode, 3)
        found = re.search(r"would fit +--batch-tokens (\d+)( and as short a --cutoff-len)?: ", result.stdout)
        self.assertIn(f"it would fit with --batch-tokens {found[1]}", result.stderr)
        flags = ["--batch-tokens", found[1], "--cutoff-len", min(4096, int(found[1])), *never]
        self.good("estimate", "--model", MODEL, *flags, "--memory-limit", limit)
        result = self.run_tool("estimate", "--model", MODEL, "--memory-limit", 1000)
        self.assertRegex(result.stdout, r"would fit +only with more memory: [\d.]+ [MG]iB with --weights int4 --batch-tokens 256")
        result = self.run_tool("estimate", "--model", MODEL, "--memory-limit", 1000, "--weights", "bf16")  # these bits are wanted
        least = re.search(r"only with more memory: ([\d.]+) MiB with --batch-tokens 256", result.stdout)
        limit = int((float(least[1]) - 0.1) * 2**20)
        result = self.run_tool("estimate", "--model", MODEL, "--memory-limit", limit)
        found = re.search(r"would fit +--weights (int\d) --batch-tokens (\d+)", result.stdout)
        flags = ["--weights", found[1], "--batch-tokens", found[2], "--cutoff-len", found[2]]
        self.good("estimate", "--model", MODEL, *flags, "--memory-limit", limit)

    def test_errors(self):
        self.assertIn("absent", self.bad(2, "estimate", "--model", self.path("absent")))
        self.assertIn("w_proj", self.bad(2, "estimate", "--model", MODEL, "--lora-target", "w_proj"))


if __name__ == "__main__":
    unittest.main()
