# SPDX-License-Identifier: Apache-2.0
"""Whole runs: results, interruption, kill -9, resuming, NaN."""

import json
import os
import re
import signal
import subprocess
import time
import unittest

from support import MODEL, TOOL, Case, environment

LONG = ["--max-steps", 100000, "--lr-scheduler-type", "constant", "--warmup-ratio", 0]


class Run(Case):
    def start(self, *more):
        arguments = [a for a in self.train_arguments(*more) if a != "--quiet"]
        process = subprocess.Popen(
            [TOOL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, process, start, count=1):
        """Reads its lines until `count` of them begin with start."""
        for line in process.stdout:
            count -= line.startswith(start)
            if not count:
                return line
        self.fail(f"ended without '{start}': {process.stderr.read()}")

    def checkpoints(self):
        """Steps of the complete ones."""
        return sorted(int(name[11:]) for name in os.listdir(self.out) if re.fullmatch(r"checkpoint-\d+", name))

    def test_results(self):
        held_out = self.tokens("held.safetensors", 4)
        result = self.good(*self.train_arguments("--max-steps", 12, "--eval-data", held_out, "--json"))
        values = json.loads(result.stdout)
        self.assertEqual(values["steps"], 12)
        self.assertEqual(values["lora_rank"], 4)
        self.assertEqual(values["experts"], 32)
        self.assertEqual(len(values["expert_tokens"]["0"]), 8)
        self.assertLess(values["last_loss"], values["first_loss"])
        for key in ("seconds", "tokens", "tokens_per_s", "peak_gib", "planned_gib", "parameters"):
            self.assertGreater(values[key], 0, key)
        for name in ("adapter_config.json", "adapter_model.safetensors", "run.yaml", "trainer_log.jsonl",
                     "trainer_state.json", "training_loss.svg"):  # fmt: skip
            self.assertTrue(os.path.exists(os.path.join(self.out, name)), name)
        after = self.good("eval", "--model", MODEL, "--adapter", self.out, "--data", held_out, "--json", "--threads", 2)
        after = json.loads(after.stdout)
        self.assertAlmostEqual(after["loss"], values["eval_loss"], places=3)
        self.assertEqual(len(after["documents"]), 4)
        mean = sum(d["loss"] * d["tokens"] for d in after["documents"]) / after["tokens"]
        self.assertAlmostEqual(mean, after["loss"], places=6)

    def test_dropout(self):
        """run.yaml keeps it; the adapter has it where PEFT can load that."""
        for targets, written in ((["experts", "q_proj"], 0), (["q_proj", "o_proj"], 0.1)):
            flags = ["--max-steps", 3, "--lora-dropout", 0.1, "--lora-target", *targets, "--overwrite"]
            first = json.loads(self.good(*self.train_arguments(*flags, "--json")).stdout)
            config = json.loads(self.read("out", "adapter_config.json"))
            self.assertEqual(config["lora_dropout"], written)
            self.assertIn(b"lora_dropout: 0.1", self.read("out", "run.yaml"))
            again = json.loads(self.good(*self.train_arguments(*flags, "--recompute", "always", "--json")).stdout)
            self.assertEqual(first["last_loss"], again["last_loss"])
            other = json.loads(self.good(*self.train_arguments(*flags, "--lora-dropout", 0, "--json")).stdout)
            self.assertNotEqual(first["last_loss"], other["last_loss"])
        line = self.bad(2, *self.train_arguments("--lora-dropout", 1, "--overwrite"))
        self.assertIn("lora_dropout is 1", line)

    def test_start_screen(self):
        process = self.start("--max-steps", 1)
        self.assertRegex(
            self.wait_for(process, "trainable params:"),
            r"^trainable params: [\d,]+ \|\| all params: [\d,]+ \|\| trainable%: \d+\.\d{4}$",
        )
        self.wait_for(process, "step 1/1")
        self.assertEqual(process.wait(60), 0)

    def test_signals_save_and_exit_130(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.out = self.path(f"out-{number}")
            process = self.start(*LONG)
            self.wait_for(process, "step 2/")
            process.send_signal(number)
            output, error = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 130, error)
            self.assertEqual(len(self.checkpoints()), 1)
            self.assertIn("saved ", output)
            self.assertFalse(os.path.exists(os.path.join(self.out, "adapter_model.safetensors")))

    def test_a_second_signal_kills(self):
        process = self.start(*LONG)
        self.wait_for(process, "step 2/")
        process.send_signal(signal.SIGSTOP)  # both arrive before the step ends
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=120)
        self.assertIn(process.returncode, (-signal.SIGINT, -signal.SIGTERM, 130))

    def test_resuming_gives_the_same_bits(self):
        flags = ["--lr-scheduler-type", "constant", "--warmup-ratio", 0]
        self.good(*self.train_arguments("--max-steps", 12, *flags))
        whole = self.read("out", "adapter_model.safetensors")
        self.out = self.path("parts")
        self.good(*self.train_arguments("--max-steps", 8, "--save-steps", 5, *flags))
        self.assertIn(5, self.checkpoints())
        self.good(*self.train_arguments("--resume", self.path("parts", "checkpoint-5"), "--max-steps", 12, *flags))
        self.assertEqual(self.read("parts", "adapter_model.safetensors"), whole)

    def test_kill_9_leaves_the_last_checkpoint(self):
        process = self.start(*LONG, "--save-steps", 3, "--save-total-limit", 2)
        self.wait_for(process, "saved ", 3)
        time.sleep(0.05)
        process.kill()
        process.wait()
        kept = self.checkpoints()
        self.assertGreaterEqual(len(kept), 1)
        last = kept[-1]
        result = self.good(*self.train_arguments("--resume", "--max-steps", last + 2, "--json", *LONG[2:]))
        self.assertEqual(json.loads(result.stdout)["steps"], last + 2)
        left = [name for name in os.listdir(self.out) if name.startswith("checkpoint-")]
        self.assertEqual(len(left), len(self.checkpoints()), left)

    def test_nan_in_weights_warns_and_stops(self):
        path = os.path.join(self.model(), "model-00001-of-00002.safetensors")
        with open(path, "rb") as file:
            data = file.read()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        name = "model.layers.0.self_attn.q_proj.weight"
        self.assertEqual(header[name]["dtype"], "BF16")
        at = 8 + size + header[name]["data_offsets"][0]
        with open(path, "wb") as file:
            file.write(data[:at] + b"\xc0\x7f" * 3 + data[at + 6 :])
        result = self.run_tool(*self.train_arguments("--max-steps", 2, model=self.model()))
        self.assertEqual(result.returncode, 4, result.stderr)
        warning = [line for line in result.stderr.split("\n") if "warning" in line and name in line]
        self.assertEqual(len(warning), 1, result.stderr)
        self.assertIn("3", warning[0].replace(name, ""))
        self.assertFalse(os.path.exists(os.path.join(self.out, "adapter_model.safetensors")))

    def test_trace(self):
        path = self.path("t.mxt")
        process = self.start("--max-steps", 3, "--trace", path)
        line = self.wait_for(process, "step 3/3")
        self.assertRegex(line, r"idle \d+ %( \((submission|dependency|runtime)\))?$")
        line = self.wait_for(process, "trace of ")
        self.assertEqual(process.wait(60), 0)
        data = self.read("t.mxt")
        self.assertEqual(data[:8], b"\x89MXT\r\n\x1a\n")
        self.assertIn(b"\nconfig.lora-rank=4\n", data)
        self.assertGreater(int(line.split()[2]), 100)
        with open(os.path.join(self.out, "trainer_log.jsonl"), encoding="utf-8") as file:
            steps = [json.loads(text) for text in file]
        for step in steps:
            self.assertIn(step["idle_cause"], ("submission", "dependency", "runtime"))
            self.assertLessEqual(step["idle_cause_share"], max(step["idle_share"], 0) + 1e-9)

    def test_trace_that_cannot_be_written(self):
        self.assertIn("No such file", self.bad_training(2, "--trace", self.path("none/t.mxt")))
        self.assertIn("No space left", self.bad_training(2, "--trace", "/dev/full"))

    def test_trace_of_a_killed_run(self):
        path = self.path("t.mxt")
        process = self.start(*LONG, "--trace", path)
        while not os.path.exists(path) or os.path.getsize(path) < 50000:
            time.sleep(0.05)
            self.assertIsNone(process.poll())
        process.kill()
        process.wait()
        self.assertEqual(self.read("t.mxt")[:8], b"\x89MXT\r\n\x1a\n")  # suite_trace_ends reads such a file

    def test_quiet_says_nothing(self):
        result = self.good(*self.train_arguments("--max-steps", 1))
        self.assertEqual(result.stdout + result.stderr, "")


if __name__ == "__main__":
    unittest.main()
