# SPDX-License-Identifier: Apache-2.0
"""Faults in all commands: the n-th allocation, read, write, open or rename fails (fault.c). Nothing crashes, one line says what
happened, no half-written file has a final name, and what is no error changes no result."""

import os
import resource
import shutil
import subprocess
import unittest

from support import MODEL, VENV_PYTHON, Case, environment

FAULT = os.environ["MOESAIC_FAULT"]
FINAL = ("adapter_model.safetensors", "adapter_config.json", "trainer_state.json")


def instants(dense, growth, limit):
    """1, 2, ... dense, then ever wider apart."""
    n = 1
    while n <= limit:
        yield n
        n = n + 1 if n < dense else int(n * growth) + 1


class Faults(Case):
    def run_with(self, fault, *arguments):
        report = self.path("reached")
        if os.path.exists(report):
            os.remove(report)
        env = {**environment(), "FAULT": fault, "FAULT_REPORT": report, "MOESAIC_MACHINE": ""}
        result = subprocess.run([FAULT, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300)
        return result, os.path.exists(report)

    def check_failure(self, fault, result, codes):
        """An error: a code of ours and its line, and nothing that looks like a crash."""
        text = f"{fault}: {result.returncode}: {result.stderr}"
        self.assertIn(result.returncode, codes, text)
        lines = [line for line in result.stderr.strip().split("\n") if not line.startswith("moesaic: warning: ")]
        self.assertEqual(len(lines), 1, text)
        self.assertRegex(lines[0], r"^moesaic( [a-z]+)?: .{8}", text)

    def each(self, kind, arguments, check, dense=60, growth=1.5, limit=100000):
        """Runs with the fault at ever later calls until it is not reached any more; how many were."""
        reached = 0
        for n in instants(dense, growth, limit):
            result, hit = self.run_with(f"{kind}:{n}", *arguments())
            if not hit:
                self.assertEqual(result.returncode, 0, f"{kind}:{n}: {result.stderr}")
                return reached
            reached += 1
            check(f"{kind}:{n}", result)
        self.fail(f"{kind}: still reached after {limit} calls")

    def training(self):
        """Each run has an output folder of its own."""
        self.runs = getattr(self, "runs", 0) + 1
        self.out = self.path(f"out-{self.runs}")
        return self.train_arguments("--max-steps", 2, "--save-steps", 1, data=self.data)

    def check_training(self, fault, result):
        """A run that reports failure leaves no adapter, or a whole one where only what follows it failed."""
        if result.returncode:
            self.check_failure(fault, result, (2, 3))
        found = [name for name in FINAL if os.path.exists(os.path.join(self.out, name))]
        if "adapter_model.safetensors" in found:
            self.assertEqual(self.weights(self.out), self.whole, fault)
        if result.returncode == 0:
            self.assertEqual(len(found), len(FINAL), f"{fault}: success without {set(FINAL) - set(found)}")

    def weights(self, folder):
        with open(os.path.join(folder, "adapter_model.safetensors"), "rb") as file:
            return file.read()

    def setUp(self):
        super().setUp()
        self.data = self.tokens()
        result, _ = self.run_with("alloc:1000000000", *self.training())
        self.assertEqual(result.returncode, 0, result.stderr)
        self.whole = self.weights(self.out)

    def test_disk_full_while_training(self):
        self.assertGreater(self.each("write", self.training, self.check_training, dense=25), 10)

    def test_read_only_while_training(self):
        self.assertGreater(self.each("open", self.training, self.check_training, dense=25), 5)

    def test_sync_and_rename_fail_while_training(self):
        self.assertGreater(self.each("sync", self.training, self.check_training, dense=25), 5)

    def test_halves_are_no_errors(self):
        def check(fault, result):
            self.assertEqual(result.returncode, 0, f"{fault}: {result.stderr}")
            self.assertEqual(self.weights(self.out), self.whole, fault)

        self.each("half", self.training, check, dense=10, growth=1.6)
        self.each("short", self.training, check, dense=10, growth=1.6)

    def test_reading_fails(self):
        self.each("read", self.training, self.check_training, dense=25)
        for arguments in (["eval", "--model", MODEL, "--data", self.data, "--threads", "2"],
                          ["estimate", "--model", MODEL]):  # fmt: skip
            self.each("read", lambda: arguments, lambda f, r: r.returncode and self.check_failure(f, r, (2, 3)))

    def test_merge_and_convert(self):
        """The result is whole or is not there under its name."""
        adapter = self.out

        def files(folder):
            result = {}
            for base, _, names in os.walk(folder):
                for name in names:
                    with open(os.path.join(base, name), "rb") as file:
                        result[os.path.relpath(os.path.join(base, name), folder)] = file.read()
            return result

        for make in (lambda to: ["merge", "--model", MODEL, "--adapter", adapter, "--output-dir", to],
                     lambda to: ["convert", adapter, to, "--adapter-format", "per-expert"]):  # fmt: skip
            result, _ = self.run_with("alloc:1000000000", *make(self.path("whole")))
            self.assertEqual(result.returncode, 0, result.stderr)
            whole = files(self.path("whole"))
            shutil.rmtree(self.path("whole"))

            def arguments():
                self.targets = getattr(self, "targets", 0) + 1
                return make(self.path(f"to-{self.targets}"))

            def check(fault, result):
                found = files(self.path(f"to-{self.targets}"))
                shutil.rmtree(self.path(f"to-{self.targets}"), ignore_errors=True)
                if result.returncode:
                    self.check_failure(fault, result, (2, 3))
                else:
                    self.assertEqual(found, whole, fault)

            for kind in ("write", "open", "sync", "read", "half", "short"):
                self.each(kind, arguments, check, dense=12)
            for n in instants(20, 1.5, 10**7):
                result, _ = self.run_with(f"alloc:{n}", *arguments())
                check(f"alloc:{n}", result)
                if result.returncode == 0:
                    break

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
    def test_data_and_generate(self):
        rows = self.write("rows.jsonl", '{"text": "a hack is a quick job"}\n')
        output = self.path("t.safetensors")
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # noqa: E731
        result = subprocess.run([FAULT, "data", "--model", MODEL, "--data", rows, "--output", output, "--quiet"],
                                capture_output=True, text=True, env=environment(), preexec_fn=limit)  # fmt: skip
        self.check_failure("data, file size", result, (2,))
        self.assertIn("t.safetensors", result.stderr)
        self.assertEqual([name for name in os.listdir(self.path()) if "safetensors" in name and name != "train.safetensors"], [])
        line = self.bad(2, "data", "--model", MODEL, "--data", rows, "--output", "/proc/t.safetensors", "--quiet")
        self.assertIn("/proc/", line)
        self.assertIn(rows, self.bad(2, "data", "--model", MODEL, "--data", rows + "/x"))
        flags = ["generate", "--model", MODEL, "--raw", "--max-new-tokens", 2, "--threads", 2, "a hack"]
        for kind in ("read", "open", "write"):
            self.each(kind, lambda: flags, lambda f, r: r.returncode and self.check_failure(f, r, (2, 3)), dense=3, growth=4)
        for n in instants(3, 6, 10**7):
            result, _ = self.run_with(f"alloc:{n}", *flags)
            if result.returncode == 0:
                return
            self.check_failure(f"generate alloc:{n}", result, (3,))

    def test_no_memory(self):
        for arguments in (self.train_arguments("--max-steps", 1, data=self.data),
                          ["eval", "--model", MODEL, "--data", self.data, "--threads", "2"],
                          ["estimate", "--model", MODEL]):  # fmt: skip
            failures = 0
            for n in instants(30, 1.35, 10**7):
                self.out = arguments[arguments.index("--output-dir") + 1] if arguments[0] == "train" else self.out
                result, _ = self.run_with(f"alloc:{n}", *arguments, *(["--overwrite"] if arguments[0] == "train" else []))
                if result.returncode == 0:
                    break
                failures += 1
                self.check_failure(f"{arguments[0]} alloc:{n}", result, (3,))
            self.assertGreater(failures, 10, arguments[0])


if __name__ == "__main__":
    unittest.main()
