# SPDX-License-Identifier: Apache-2.0
"""Help, unknown names, values out of range, flags that are not built yet."""

import json
import os
import re
import unittest

from support import MODEL, Case

COMMANDS = ["train", "data", "eval", "generate", "estimate", "doctor", "merge", "convert", "inspect", "trace", "bench"]
TRACES = ["check", "diff", "export", "import", "report", "summary", "whatif"]


class Flags(Case):
    def test_help_fits_a_screen(self):
        for arguments in (["--help"], *([c, "--help"] for c in COMMANDS), *(["trace", c, "--help"] for c in TRACES)):
            lines = self.good(*arguments).stdout.splitlines()
            self.assertLessEqual(len(lines), 40, arguments)
            self.assertLessEqual(max(map(len, lines)), 80, arguments)
        self.assertLessEqual(max(map(len, self.good("--help-all").stdout.splitlines())), 80)

    def test_help_names_every_command(self):
        named = re.findall(r"(?m)^  ([a-z]+) +\S", self.good("--help").stdout)
        self.assertEqual(sorted(named), sorted(COMMANDS))
        self.assertEqual(re.findall(r"(?m)^  ([a-z]+) +\S", self.good("trace", "--help").stdout), TRACES)

    def test_quiet_and_json_everywhere(self):
        """--quiet: errors and warnings, and what was asked for where that is all a command does; --json: an object on stdout."""
        tokens, trace, adapter = self.tokens(), self.path("t.mxt"), self.path("out")
        self.good(*self.train_arguments("--max-steps", 2, "--save-steps", 1, "--trace", trace))
        for n, (arguments, silent) in enumerate((
            (["eval", "--model", MODEL, "--data", tokens], False),
            (["estimate", "--model", MODEL], False), (["doctor"], False), (["inspect", adapter], False),
            (["inspect", os.path.join(adapter, "checkpoint-1")], False), (["inspect", trace], False), (["inspect", tokens], False), (["inspect", MODEL], False),
            (["merge", "--model", MODEL, "--adapter", adapter, "--output-dir", "NEW"], True),
            (["convert", adapter, "NEW", "--adapter-format", "kt"], True), (["convert", MODEL, "NEW", "--weights", "int8"], True),
            *((["trace", c, trace, "--json"], False) for c in ("summary", "check", "report", "whatif")), (["trace", "diff", trace, trace, "--json"], False),
            (["trace", "export", trace, "--to", "chrome"], True), (["trace", "report", trace], True), (["trace", "check", trace], True),
            (self.train_arguments("--max-steps", 1, "--overwrite"), True),
        )):  # fmt: skip
            with self.subTest(arguments):
                result = self.good(*[self.path(f"quiet{n}") if a == "NEW" else a for a in arguments if a != "--quiet"], "--quiet")
                self.assertEqual(result.stderr, "")
                self.assertEqual(not result.stdout, silent, result.stdout)
                flags = ["--json"] if "--json" not in arguments else []
                result = self.good(*[self.path(f"json{n}") if a == "NEW" else a for a in arguments], *flags)
                self.assertIsInstance(json.loads(result.stdout), dict)

    def test_help_all_has_every_flag_once(self):
        text = self.good("train", "--help-all").stdout
        flags = [line.split()[0] for line in text.split("\n") if line.startswith("  --")]
        self.assertEqual(len(flags), len(set(flags)))
        for flag in "--expert-lora-rank --share-a --rslora --on-nan --save-total-limit --trace --numa".split():
            self.assertIn(flag, flags)

    def test_version(self):
        self.assertRegex(self.good("--version").stdout, r"^moesaic \d+\.\d+\.\d+\n$")

    def test_no_command_is_usage(self):
        result = self.run_tool()
        self.assertEqual(result.returncode, 2)
        self.assertIn("usage: moesaic", result.stdout)

    def test_unknown_names_suggest(self):
        for arguments, near in (
            (["trian"], "'train'"),
            (["train", "--lora-rnak", "3"], "--lora-rank"),
            (["train", "--epoch", "3"], "--epochs"),
            (["generate", "--temprature", "1"], "--temperature"),
            (["data", "--cutof-len", "1"], "--cutoff-len"),
        ):
            self.assertIn(f"did you mean {near}?", self.bad(2, *arguments))

    def test_values(self):
        for flags, part in (
            (["--lora-rank", "0"], "--lora-rank 0: must be at least 1"),
            (["--lora-rank", "x"], "is not a whole number"),
            (["--lora-rank"], "needs a value"),
            (["--learning-rate", "0"], "must be above 0"),
            (["--learning-rate", "nan"], "is not a number"),
            (["--memory-limit", "12 parsecs"], "is not a size"),
            (["--shuffle", "maybe"], "expected on or off"),
            (["--train-on", "user"], "expected assistant|last|all"),
            (["--lr-scheduler-type", "cosin"], "expected cosine|"),
            (["--warmup-ratio", "1.5"], "must be at most 1"),
            (["stray"], "unexpected argument"),
            ([], "--model DIR is missing"),
        ):
            self.assertIn(part, self.bad(2, "train", *flags))

    def test_not_built_yet_is_refused(self):
        for flags in (
            ["--method", "freeze"],
        ):
            self.assertIn("not in this version yet", self.bad(2, "train", *flags))

    def test_defaults_of_unbuilt_flags_pass(self):
        flags = ["--method", "lora", "--lora-dropout", "0.0", "--weights", "keep"]
        self.assertIn("--output-dir DIR is missing", self.bad(2, *self.without_output(*flags)))

    def without_output(self, *flags):
        arguments = self.train_arguments(*flags)
        at = arguments.index("--output-dir")
        return arguments[:at] + arguments[at + 2 :]


if __name__ == "__main__":
    unittest.main()
