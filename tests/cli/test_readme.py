# SPDX-License-Identifier: Apache-2.0
"""README.md's commands on the tests' model, as they stand there, but for /tmp."""

import json
import os
import re
import subprocess
import unittest

from support import ROOT, TOOL, VENV_PYTHON, Case, environment


def commands():
    """The block's lines without the remarks behind them."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        block = re.search(r"^    PATH=.*; cd tests/fixtures\n((?:    moesaic .*\n)+)", file.read(), re.MULTILINE)[1]
    return [line.strip() for line in block.splitlines()]


class Readme(Case):
    def setUp(self):
        super().setUp()
        self.env = {**environment(), "PATH": os.path.dirname(TOOL) + ":" + os.environ["PATH"]}

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
    def test_the_block_as_typed(self):
        lines = commands()
        self.assertEqual([line.split()[1] for line in lines], "data train train eval generate merge trace".split())
        printed = {}
        for number, line in enumerate(lines):
            with self.subTest(line):
                line = line.replace("/tmp/", self.path() + "/")
                result = subprocess.run(["sh", "-c", line], cwd=os.path.join(ROOT, "tests", "fixtures"), env=self.env,
                                        capture_output=True, text=True, timeout=300)  # fmt: skip
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertNotIn("warning", result.stderr)
                printed[number] = result.stdout
        self.assertIn("8 read, 8 used", printed[0])
        self.assertIn("step 30/30", printed[2])
        self.assertIn("8 documents", printed[3])
        self.assertTrue(printed[4].strip())
        self.assertGreater(os.path.getsize(self.path("run.html")), 10000)
        self.assertTrue(os.path.exists(self.path("merged", "config.json")))
        with open(self.path("out", "trainer_state.json"), encoding="utf-8") as file:
            losses = [entry["loss"] for entry in json.load(file)["log_history"] if "loss" in entry]
        self.assertEqual(len(losses), 30)
        self.assertLess(losses[-1], 0.5 * losses[0])


if __name__ == "__main__":
    unittest.main()
