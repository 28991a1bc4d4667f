# SPDX-License-Identifier: Apache-2.0
"""moesaic trace: what train --trace writes is good, and each subcommand answers."""

import json
import os
import re
import shutil
import subprocess
import unittest

from support import TOOL, Case, environment

TRACE_TOOL = os.environ["MOESAIC_TRACE_TOOL"]
MAKE = os.environ["MOESAIC_TRACE_MAKE"]
SMALL = "--layers 3 --groups 4 --experts 16 --workers 4 --steps 6 --tokens 64".split()


class Trace(Case):
    def made(self, name, *more):
        subprocess.run([MAKE, self.path(name), *SMALL, *map(str, more)], check=True, capture_output=True)
        return self.path(name)

    def trace(self, *arguments, code=0):
        result = self.run_tool("trace", *arguments)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result.stdout

    def bad(self, *arguments):
        """Exactly one line of error, status 2."""
        result = self.run_tool("trace", *arguments)
        self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
        lines = result.stderr.strip().split("\n")
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("moesaic-trace"), lines[0])
        return lines[0]

    def test_training_in_every_mode_is_good(self):
        modes = (
            [],
            ["--backward-weights", "shared:1", "--numa", 2],
            ["--backward-weights", "resident", "--gradient-accumulation-steps", 2],
            ["--numa", 3, "--threads", 3, "--policy", "eager", "--pipeline", "sequential"],
        )
        for i, mode in enumerate(modes):
            self.out = self.path(f"out-{i}")
            path = self.path(f"{i}.mxt")
            self.good(*self.train_arguments("--max-steps", 5, "--trace", path, *mode))
            self.assertRegex(self.trace("check", path), r"^good: \d+ tasks, \d+ dependencies, \d+ routings\n$")
            summary = json.loads(self.trace("summary", "--json", path))
            self.assertEqual(summary["about"]["steps"], 5)
            idle, rates = summary["idle"], summary["rates"]
            causes = sum(idle[f"{c}_ns"] for c in "submission dependency placement data runtime".split())
            self.assertEqual(causes, idle["idle_ns"])
            self.assertEqual(idle["busy_ns"] + causes, idle["worker_ns"])
            self.assertGreater(rates["tokens_per_s"]["median"], 0)
            self.assertLessEqual(summary["bounds"]["critical_path_ns"], rates["makespan_ns"])
            self.assertEqual(len(summary["experts"]["rows"]), 4 * 4 * 2)
            repacked = summary["overlap"]["repack"]["time_ns"]
            self.assertEqual(repacked > 0, "shared:1" in mode)

    def test_summary_is_what_the_trace_says(self):
        path = self.made("a.mxt", "--skew", 1)
        text = self.trace("summary", path)
        self.assertLessEqual(max(map(len, text.split("\n"))), 100)
        for word in ("makespan", "tokens/s", "bounds:", "efficiency", "idle:", "experts:", "NUMA", "outliers:"):
            self.assertIn(word, text)
        values = json.loads(self.trace("summary", "--json", "--step", 3, path))
        self.assertEqual((values["about"]["first_step"], values["about"]["last_step"]), (3, 3))
        self.assertEqual(values["rates"]["tokens"], 64)
        # two of 3 layers are repacked beside a step; every group's task is there once
        self.assertEqual(values["times"]["kinds"]["gate_up"]["tasks"], 3 * 4 * 2)
        self.assertGreater(values["experts"]["forward"]["tokens_ratio"][0], 2)
        self.assertGreaterEqual(values["experts"]["replay_ns"], values["experts"]["equal_experts_ns"])

    def test_check_finds_damage(self):
        path = self.made("a.mxt", "--tasks", 20000)  # several chunks
        self.assertIn("good", self.trace("check", path))
        with open(path, "rb") as file:
            data = file.read()
        with open(path, "wb") as file:
            file.write(data[:-200])
        text = self.trace("check", path, code=1)
        self.assertIn("cut off", text)
        self.assertRegex(text, r"\d+ findings\n$")
        middle = len(data) // 2
        with open(path, "wb") as file:
            file.write(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        self.assertIn("damaged", self.trace("check", path, code=1))
        self.assertIn("tasks", self.trace("summary", path))

    def test_diff_gates(self):
        a, same, worse = self.made("a.mxt"), self.made("b.mxt"), self.made("c.mxt", "--tokens", 128)
        text = self.trace("diff", a, same, "--max-regress", "3%")
        self.assertRegex(text, r"step +\S+ ms +\S+ ms +\+0\.0 %")
        values = json.loads(self.trace("diff", "--json", a, worse))
        self.assertEqual(values["unit"], "ns/token")
        rows = {row["name"]: row for row in values["rows"]}
        self.assertGreater(rows["gate_up"]["before"], rows["gate_up"]["after"])
        self.assertGreater(rows["idle.dependency"]["before"], 0)
        text = self.trace("diff", worse, a, "--max-regress", ".03", code=1)
        self.assertRegex(text, r"regression: step \+\d+\.\d %, more than \+3\.0 %\n$")
        self.trace("diff", worse, a, "--max-regress", "300%")
        self.trace("diff", worse, a, "--max-regress", "3%", "--gate", "layer.1", code=1)
        self.assertIn("nothing", self.bad("diff", a, same, "--gate", "nothing"))

    def test_whatif(self):
        path = self.made("a.mxt")
        base = json.loads(self.trace("whatif", path, "--json"))
        self.assertEqual(base["changed_ns"], base["replay_ns"])
        self.assertLess(abs(base["replay_error"]), 0.05)
        half = json.loads(self.trace("whatif", path, "--json", "--scale", "gate_up=.5", "--scale", "down_bwd=50%"))
        self.assertLess(half["changed_ns"], base["replay_ns"])
        one = json.loads(self.trace("whatif", path, "--json", "--workers", 1))
        self.assertGreater(one["changed_ns"], 1.5 * base["replay_ns"])
        self.assertAlmostEqual(one["changed_busy"], 1, places=2)
        text = self.trace("whatif", path, "--equalise-experts", "--step", "2:4")
        self.assertRegex(text, r"(?s)^steps 2 to 4\nrecorded .*replayed .*error .*changed .*gain ")

    def test_one_line_of_error(self):
        path = self.made("a.mxt")
        for arguments, words in (
            (["summary"], "missing"),
            (["summary", "/nowhere.mxt"], "/nowhere.mxt: No such file"),
            (["summary", TOOL], "not a trace"),
            (["summary", path, "--step", "9"], "1 to 6"),
            (["summary", path, "--step", "b"], "--step"),
            (["summary", path, "--what"], "--what"),
            (["summary", path, path], "too many"),
            (["whatif", path, "--scale", "gate_up"], "KIND=FACTOR"),
            (["whatif", path, "--scale", "nokind=1"], "no kind 'nokind'"),
            (["whatif", path, "--scale", "down=-1"], "negative"),
            (["whatif", path, "--workers", "0"], "--workers"),
            (["diff", path], "missing"),
            (["diff", path, path, "--max-regress", "x"], "no number"),
            (["check", path, "--most", "-1"], "--most"),
            (["nothing"], "unknown subcommand"),
        ):
            self.assertIn(words, self.bad(*arguments))
        help_text = self.trace("--help")
        for name in ("summary", "check", "diff", "whatif"):
            self.assertIn(name, help_text)
            self.assertIn("usage: moesaic trace " + name, self.trace(name, "--help"))

    def test_found_beside_the_command_or_in_path(self):
        shutil.copy(TOOL, self.path("moesaic"))
        os.mkdir(self.path("bin"))
        run = [self.path("moesaic"), "trace", "--help"]
        options = {"capture_output": True, "text": True}
        result = subprocess.run(run, env={**environment(), "PATH": self.path("bin")}, **options)
        self.assertEqual(result.returncode, 2)
        self.assertIn("moesaic-trace", result.stderr)
        os.symlink(TRACE_TOOL, self.path("bin", "moesaic-trace"))
        result = subprocess.run(run, env={**environment(), "PATH": self.path("bin")}, **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(re.search("usage: moesaic trace", result.stdout))


if __name__ == "__main__":
    unittest.main()
