# SPDX-License-Identifier: Apache-2.0
"""estimate: from config.json alone, the limits of the task graph, --memory-limit."""

import json
import os
import unittest

from support import MODEL, ROOT, Case

QWEN3_30B = os.path.join(ROOT, "tests", "fixtures", "configs", "qwen3-30b-a3b")


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

    def test_errors(self):
        self.assertIn("absent", self.bad(2, "estimate", "--model", self.path("absent")))
        self.assertIn("w_proj", self.bad(2, "estimate", "--model", MODEL, "--lora-target", "w_proj"))


if __name__ == "__main__":
    unittest.main()
