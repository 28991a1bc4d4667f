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

    def test_what_it_excludes(self):
        result = self.run_tool(*self.train_arguments("--weights", "int4", "--backward-weights", "resident"))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn('the experts are int4, with which "direct" is possible', result.stderr)


if __name__ == "__main__":
    unittest.main()
