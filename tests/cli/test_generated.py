# SPDX-License-Identifier: Apache-2.0
"""Completion scripts and the manual page, as shells and man read them."""

import os
import re
import shutil
import subprocess
import unittest

from support import TOOL, Case


class Generated(Case):
    def flags(self):
        return set(re.findall(r"(?m)^  (--[a-z0-9-]+)", self.good("--help-all").stdout))

    def complete(self, *words, program="moesaic"):
        script = self.write("moesaic.bash", self.good("--completion", "bash").stdout)
        command = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _moesaic; printf "%s\\n" "${{COMPREPLY[@]}}"'
        run = subprocess.run(["bash", "-c", command, "bash", program, *words], capture_output=True, text=True)
        self.assertEqual(run.stderr, "")
        return run.stdout.split()

    def test_bash(self):
        self.assertEqual(self.complete("tr"), ["train", "trace"])
        self.assertIn("--lora-rank", self.complete("train", "--lora-"))
        self.assertEqual(self.complete("train", "--on-nan", ""), ["stop", "skip"])
        self.assertEqual(self.complete("data", "--packing", "of"), ["off"])
        self.write("rows.jsonl", "")
        self.assertEqual(self.complete("data", "--data", self.path("row")), [self.path("rows.jsonl")])
        self.assertEqual(self.complete("train", "--model", self.path("row")), [])
        self.assertEqual(self.complete("re"), [])  # replay is not in this version

    def test_bash_asks_other_programs(self):
        words = [os.path.join(os.path.dirname(TOOL), "moesaic")]
        self.assertEqual(self.complete("trace", "s", program=words[0]), ["summary"])
        self.assertEqual(self.complete("trace", "report", "--s", program=words[0]), ["--step"])
        self.assertEqual(self.complete("bench", "la", program=words[0]), ["layer"])
        self.assertIn("--tokens", self.complete("bench", "layer", "--", program=words[0]))

    @unittest.skipUnless(shutil.which("zsh"), "no zsh")
    def test_zsh(self):
        script = self.write("_moesaic", self.good("--completion", "zsh").stdout)
        run = subprocess.run(["zsh", "-n", script], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        check = f"""
        _describe() {{ print -l -- ${{commands%%:*}} }}
        _arguments() {{ for spec in "$@"; do [[ $spec == -S || $spec == *--* ]] || print "odd $spec"; print -r -- "$spec"; done }}
        words=(moesaic train --); CURRENT=3; source {script}
        """
        run = subprocess.run(["zsh", "-f", "-c", check], capture_output=True, text=True)
        self.assertEqual(run.stderr, "")
        self.assertNotIn("odd", run.stdout)
        self.assertIn("--on-nan[at a non-finite loss or gradient]:stop|skip:(stop skip)", run.stdout)

    def test_other_shells(self):
        self.assertIn("bash or zsh", self.bad(2, "--completion", "tcsh"))
        self.assertIn("bash or zsh", self.bad(2, "--completion"))

    def test_man(self):
        page = self.good("--man").stdout
        self.assertTrue(self.flags())
        for flag in self.flags():
            self.assertIn("\n.BR \\-\\-" + flag[2:].replace("-", "\\-"), page)
        for name in re.findall(r"(?m)^  ([a-z]+) +\S", self.good("--help").stdout):
            self.assertIn(f'.SS "moesaic {name}', page)
        self.assertNotRegex(page, r"(?m)^[.'](?!TH|SH|SS|TP|PP|BR|BI|B|I|ad l)")
        if not shutil.which("groff"):
            return
        run = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True)
        self.assertEqual(run.stderr, "")


if __name__ == "__main__":
    unittest.main()
