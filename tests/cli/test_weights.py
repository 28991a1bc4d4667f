# SPDX-License-Identifier: Apache-2.0
"""--weights: training on quantised experts."""

import json
import unittest

from support import MODEL, Case


class Weights(Case):
    def train(self, weights, *more):
        arguments = self.train_arguments("--max-steps", 12, "--weights", weights, "--overwrite", "--json", *more)
        return json.loads(self.good(*arguments).stdout)

    def test_losses_are_close_to_plain(self):
        plain = self.train("keep")
        for weights, limit in (("int8", 0.03), ("fp8", 0.03), ("int4", 0.10), ("mxfp4", 0.15)):
            with self.subTest(weights=weights):
                values = self.train(weights)
                self.assertLess(values["last_loss"], values["first_loss"])
                self.assertLess(abs(values["last_loss"] - plain["last_loss"]), limit)
                self.assertNotEqual(values["last_loss"], plain["last_loss"])

    def test_evaluation_sees_them(self):
        held_out = self.tokens("held.safetensors", 4)
        loss = {}
        for weights in ("keep", "int4"):
            flags = ["--data", held_out, "--json", "--threads", 2, "--weights", weights]
            loss[weights] = json.loads(self.good("eval", "--model", MODEL, *flags).stdout)["loss"]
        self.assertNotEqual(loss["keep"], loss["int4"])
        self.assertLess(abs(loss["keep"] - loss["int4"]), 0.1)

    def test_quantised_experts_are_expanded(self):
        """bf16: the same bits as of a checkpoint that was converted before; a plain one stays what it is."""
        for weights in ("int8", "fp8", "awq"):
            coded, plain = self.path(weights), self.path(f"{weights}-bf16")
            self.good("convert", MODEL, coded, "--weights", weights)
            self.good("convert", coded, plain, "--weights", "bf16")
            for parts in ("1", "3"):
                run = lambda model, flag: json.loads(
                    self.good(*self.train_arguments("--max-steps", 3, "--weights", flag, "--overwrite", "--json", "--numa", parts,
                                                    "--lora-target", "experts", model=model)).stdout)["last_loss"]  # fmt: skip
                if weights != "fp8":  # whose attention is quantised too, and stays so
                    self.assertEqual(run(coded, "bf16"), run(plain, "keep"), weights)
                same = run(coded, "keep") == run(coded, "bf16")
                self.assertEqual(same, weights == "fp8")  # which is multiplied as bf16 in any case (docs/formats.md)
        self.assertEqual(self.train("bf16")["last_loss"], self.train("keep")["last_loss"])
        line = self.bad(2, *self.train_arguments("--weights", "int4", "--overwrite", model=self.path("int8")))
        self.assertIn('"bf16" expands them', line)

    def test_what_it_excludes(self):
        result = self.run_tool(*self.train_arguments("--weights", "int4", "--backward-weights", "resident"))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn('the experts are int4, with which "direct" is possible', result.stderr)


if __name__ == "__main__":
    unittest.main()
