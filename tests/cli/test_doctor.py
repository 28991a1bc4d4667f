# SPDX-License-Identifier: Apache-2.0
"""doctor: the report, what to type about problems, calibration and its file."""

import json
import os
import unittest

from support import TOOL, Case, environment, subprocess


class Doctor(Case):
    def doctor(self, *arguments, code=0, **variables):
        variables.setdefault("MOESAIC_MACHINE", self.path("machine.json"))
        env = {**environment(), "HOME": self.path(), **variables}
        env = {name: value for name, value in env.items() if value is not None}
        result = subprocess.run([TOOL, "doctor", *arguments], capture_output=True, text=True, env=env, timeout=600)
        self.assertEqual(result.returncode, code, result.stderr)
        return result

    def values(self, *arguments, **options):
        return json.loads(self.doctor(*arguments, "--json", **options).stdout)

    def calibrate(self):
        return self.doctor("--calibrate", "--quick")

    def test_the_report(self):
        text = self.doctor(MOESAIC_MACHINE="").stdout
        for word in "CPU topology StarPU kernels memory limits rates DRAM".split():
            self.assertRegex(text, rf"(?m)^ *{word}")
        self.assertRegex(text, r"ref +(chosen|possible)")
        self.assertIn("type: moesaic doctor --calibrate", text)

    def test_nothing_but_the_report(self):
        self.assertEqual(self.doctor(MOESAIC_MACHINE="").stderr, "")

    def test_json(self):
        values = self.values(MOESAIC_MACHINE="", MOESAIC_ISA="ref")
        self.assertGreaterEqual(values["cores"], 1)
        self.assertGreaterEqual(values["workers"], 1)
        self.assertTrue(values["isa"]["ref"]["chosen"])
        self.assertEqual([len(t["forward_gflops"]) for t in values["isa"].values()], [9] * len(values["isa"]))
        self.assertEqual(values["machine_file_state"], "none")
        for problem in values["problems"]:
            self.assertTrue(problem["text"] and problem["type"])

    def problems(self, level, **variables):
        code = 1 if level == "error" else 0
        return [p["text"] for p in self.values(code=code, **variables)["problems"] if p["level"] == level]

    def test_what_prevents_running(self):
        self.assertIn("sse9", self.problems("error", MOESAIC_MACHINE="", MOESAIC_ISA="sse9")[0])
        self.write("machine.json", '{"format": "moesaic-machine-1"}')
        text = self.problems("error")[0]
        self.assertIn("machine.json", text)
        self.assertIn("cpu is missing", text)
        result = self.doctor(code=1)
        self.assertRegex(result.stderr, r"^moesaic doctor: 1 problem of this machine .+\n$")

    def test_a_bad_file_of_the_cache_is_a_warning(self):
        os.makedirs(self.path("cache", "moesaic"))
        self.write("cache/moesaic/machine.json", "{")
        variables = {"MOESAIC_MACHINE": None, "XDG_CACHE_HOME": self.path("cache")}
        self.assertTrue(any("machine.json" in text for text in self.problems("warning", **variables)))

    def test_a_large_machine(self):
        texts = self.problems("warning", MOESAIC_MACHINE="", HWLOC_SYNTHETIC="package:2 numa:4 core:40 pu:1")
        self.assertTrue(any("stay idle" in text for text in texts))

    def test_python(self):
        self.assertTrue(any("tokenizers" in text for text in self.problems("warning", MOESAIC_MACHINE="",
                                                                           MOESAIC_PYTHON="/bin/false")))  # fmt: skip
        values = self.values(MOESAIC_MACHINE="", MOESAIC_PYTHON="/absent/python")
        self.assertEqual((values["python"], values["python_ready"]), ("/absent/python", False))
        self.assertTrue(self.values(MOESAIC_MACHINE="", MOESAIC_PYTHON="/bin/true")["python_ready"])

    def test_limits(self):
        values = self.values(MOESAIC_MACHINE="")
        for key in ("starpu_max_workers", "starpu_max_nodes", "starpu_max_buffers", "ulimit_n"):
            self.assertGreaterEqual(values[key], 1, key)
        text = self.doctor(MOESAIC_MACHINE="").stdout
        self.assertRegex(text, r"built for \d+ workers, \d+ NUMA nodes, \d+ buffers; starts \d+ in \d+ part")

    def test_calibration(self):
        result = self.calibrate()
        self.assertIn("s left", result.stderr)
        self.assertRegex(result.stdout, r"ref forward +[\d.]+ ")
        self.assertEqual(os.listdir(self.path()).count("machine.json"), 1)
        with open(self.path("machine.json"), encoding="utf-8") as file:
            saved = json.load(file)
        values = self.values()
        self.assertEqual(values["calibrated"], saved["date"])
        self.assertEqual(values["machine_file_state"], "used")
        self.assertTrue(values["isa"]["ref"]["measured"])
        saved["cpu"] = "Z80"
        self.write("machine.json", json.dumps(saved))
        values = self.values()
        self.assertEqual(values["machine_file_state"], "other")
        self.assertEqual(values["calibrated"], "")
        self.assertTrue(any("Z80" in problem["text"] for problem in values["problems"]))

    def test_where_nothing_can_be_written(self):
        self.write("plain", "")
        result = self.doctor("--calibrate", "--quick", "--quiet", code=2, MOESAIC_MACHINE=self.path("plain", "m.json"))
        self.assertIn("plain", result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1)

    def test_quick_alone(self):
        self.assertIn("--calibrate", self.doctor("--quick", code=2).stderr)


if __name__ == "__main__":
    unittest.main()
