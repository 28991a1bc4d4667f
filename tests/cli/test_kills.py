# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at instants of an injected clock (fault.c) over writes, syncs, renames, syncs of directories and between steps: the run
goes on and ends with the bits, the log and the files of one that was never interrupted. Disks that are full for a while."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
import unittest

from support import TOOL, Case, environment

FAULT = os.environ["MOESAIC_FAULT"]
FULL = bool(os.environ.get("MOESAIC_TEST_FULL"))
STEPS = 6
SEED = 7
# Figures that a clock or the machine decides.
TIMES = ("tokens_per_s", "rss_gib", "eta_s", "idle_share", "idle_cause", "idle_cause_share")
DROPOUT = ["--lora-dropout", "0.1"]


class Interrupted(Case):
    # one step in flight and two
    flags = ["--max-steps", STEPS, "--save-steps", 2, "--save-total-limit", 2, "--gradient-accumulation-steps", 2, "--eval-steps", 3,
             "--load-best", "--aux-loss", "0.01", "--weight-decay", "0.1"]  # fmt: skip

    uninterrupted = None

    def setUp(self):
        super().setUp()
        self.data = self.tokens(count=24)
        self.held_out = self.tokens("held.safetensors", 3)

    def arguments(self, *more):
        return self.train_arguments(*self.flags, *self.more, "--eval-data", self.held_out, *more, data=self.data)

    def run_with(self, fault, *arguments, ticks=None):
        env = {**environment(), "FAULT": fault, **({"FAULT_TICKS": ticks} if ticks else {})}
        return subprocess.run([FAULT, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300)

    def result(self):
        """What a run leaves, without times: file names, the adapter's bits, losses, the order of the data."""
        names = sorted(os.path.relpath(os.path.join(base, name), self.out) for base, _, files in os.walk(self.out) for name in files)
        weights = {}
        for name in names:
            if name.endswith(".safetensors") and "/" not in name:
                with open(os.path.join(self.out, name), "rb") as file:
                    weights[name] = file.read()
        with open(os.path.join(self.out, "trainer_log.jsonl")) as file:
            log = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in file]
        with open(os.path.join(self.out, "trainer_state.json")) as file:
            state = json.load(file)
        state["best_model_checkpoint"] = os.path.basename(state["best_model_checkpoint"] or "")
        with open(os.path.join(self.out, "README.md")) as file:
            card = file.read()
        return {"names": names, "weights": weights, "log": log, "state": state, "card": card}

    def whole(self):
        """The run that nothing interrupts, and its ticks; once for all tests."""
        if type(self).uninterrupted:
            return type(self).uninterrupted
        self.out = self.path("whole")
        result = self.run_with("kill:1000000000", *self.arguments(), ticks=self.path("ticks"))
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(self.path("ticks")) as file:
            type(self).uninterrupted = self.result(), file.read()
        return type(self).uninterrupted

    def kill(self, instant, *more):
        """Runs until that tick; whether it was killed."""
        result = self.run_with(f"kill:{instant}", *self.arguments(*more))
        self.assertIn(result.returncode, (0, -signal.SIGKILL), result.stderr)
        return result.returncode != 0

    def go_on(self, **options):
        """As a user does: resume, or begin anew where nothing was saved yet."""
        result = subprocess.run([TOOL, *map(str, self.arguments("--resume"))], capture_output=True, text=True, env=environment(),
                                timeout=300)  # fmt: skip
        if result.returncode == 2 and re.search("no (complete )?checkpoint", result.stderr):
            result = self.run_tool(*self.arguments("--overwrite"))
        self.assertEqual(result.returncode, 0, result.stderr)

    def instants(self, ticks, count):
        """Each kind of tick at least once, the rest anywhere."""
        rng = random.Random(SEED)
        kinds = {letter: [i + 1 for i, t in enumerate(ticks) if t == letter] for letter in "wfrds"}
        for letter, places in kinds.items():
            self.assertTrue(places, f"no tick '{letter}'")
        chosen = {rng.choice(places) for places in kinds.values()}
        while len(chosen) < min(count, len(ticks)):
            chosen.add(rng.randint(1, len(ticks)))
        return sorted(chosen)

    def check_kills(self, count):
        whole, ticks = self.whole()
        self.assertTrue(whole["weights"])
        self.assertEqual(whole["state"]["global_step"], STEPS)
        for instant in self.instants(ticks, count):
            with self.subTest(instant=instant, kind=ticks[instant - 1], of=len(ticks)):
                self.out = self.path(f"killed-{instant}")
                self.assertTrue(self.kill(instant))
                self.go_on()
                self.assertEqual(self.result(), whole)


class Adapter(Interrupted):
    more = DROPOUT

    def test_killed_at_any_instant(self):
        self.check_kills(30 if FULL else 5)

    def test_killed_again_and_again(self):
        whole, ticks = self.whole()
        rng = random.Random(SEED + 1)
        self.out = self.path("again")
        self.kill(len(ticks) // 3)
        kills = 1
        for _ in range(12 if FULL else 2):
            saved = any(name.startswith("checkpoint-") and "." not in name for name in os.listdir(self.out))
            kills += self.kill(rng.randint(len(ticks) // 3, len(ticks)), "--resume" if saved else "--overwrite")
        self.assertGreater(kills, 1)
        self.go_on()
        self.assertEqual(self.result(), whole)

    def test_signal_then_resume(self):
        whole, _ = self.whole()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            self.out = self.path(f"signal-{number}")
            flags = [a for a in self.arguments() if a != "--quiet"]
            process = subprocess.Popen([TOOL, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                       env=environment())  # fmt: skip
            for line in process.stdout:
                if line.startswith("step 1/"):
                    process.send_signal(number)
                    process.send_signal(number)  # as `timeout` does, to the process and to its group: one wish
                    break
            _, error = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 130, error)
            self.assertFalse(os.path.exists(os.path.join(self.out, "adapter_model.safetensors")))
            self.go_on()
            # a checkpoint of the step where it stopped may be among those that are kept
            found = self.result()
            for key in ("weights", "log", "card"):
                self.assertEqual(found[key], whole[key], key)

    def interrupted_run(self, call):
        """A run that waits four seconds before that call between steps, once it does."""
        flags = [a for a in self.arguments() if a != "--quiet"]
        report = self.path(f"waits-{call}")
        env = {**environment(), "FAULT": f"slow:{call}", "FAULT_REPORT": report}
        process = subprocess.Popen([FAULT, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        while not os.path.exists(report) and process.poll() is None:
            time.sleep(0.02)
        return process

    def test_a_signal_ends_no_later_than_the_steps_in_flight(self):
        whole, _ = self.whole()
        self.out = self.path("bounded")
        process = self.interrupted_run(3)  # step 3 is submitted
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, error)
        self.assertRegex(error, r"stopping: finishing step 3, at most 4, of 6.*, then saving")
        self.assertIn("stopped after step 3 of 6", error)
        self.go_on()
        self.assertEqual(self.result()["weights"], whole["weights"])

    def test_a_second_signal_ends_at_once(self):
        whole, _ = self.whole()
        self.out = self.path("twice")
        process = self.interrupted_run(5)
        process.send_signal(signal.SIGINT)
        time.sleep(2.2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        self.assertEqual(process.returncode, -signal.SIGINT, error)
        self.assertIn("--resume then goes on from checkpoint-4", error)
        self.assertIn("checkpoint-4", os.listdir(self.out))
        self.assertNotIn("checkpoint-5", os.listdir(self.out))
        self.go_on()
        self.assertEqual(self.result(), whole)

    def test_no_room(self):
        """Before training, before a checkpoint, before the results: numbers, and what was trained is not lost."""
        whole, _ = self.whole()
        for method in (self.more, ["--method", "full", "--learning-rate", "1e-4"], ["--method", "hybrid"]):
            run = lambda fault, *more: self.run_with(fault, *self.train_arguments("--max-steps", 4, *method, *more, data=self.data))
            self.out = self.path("-".join(["room", *method[:2]]))
            result = run("room:1", "--save-steps", 2)
            self.assertEqual(result.returncode, 3, result.stderr)
            self.assertRegex(result.stderr, r"has \d+\.\d+ KiB left, this run needs [\d.]+ MiB: .*2 checkpoints of [\d.]+ MiB")
            self.assertFalse(os.path.exists(os.path.join(self.out, "trainer_log.jsonl")))
            result = run("room:3", "--save-steps", 2)
            self.assertEqual(result.returncode, 3, result.stderr)
            self.assertIn("checkpoint-4 takes", result.stderr)
            self.assertIn("checkpoint-2", os.listdir(self.out))
            result = run("room:3", "--save-steps", 2, "--overwrite", "--on-save-error", "continue")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("the checkpoint was not saved, training goes on", result.stderr)
            expected = self.result()["weights"]
            result = run("room:2", "--overwrite")
            self.assertEqual(result.returncode, 3, result.stderr)
            self.assertRegex(result.stderr, r"(model|adapter) takes .*checkpoint-4: make room, .* --resume writes the results")
            before = self.read(self.out, "trainer_log.jsonl")
            result = run("kill:1000000000", "--resume")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(self.result()["weights"], expected)
            self.assertEqual(self.read(self.out, "trainer_log.jsonl"), before)

    def test_damaged_checkpoints(self):
        """The newest one that is whole is gone on from, whatever of the later ones is damaged; the end has the same bits."""
        whole, _ = self.whole()
        source = self.out = self.path("source")
        self.good(*self.arguments())
        for file, damage in (("state.safetensors", "flip"), ("state.safetensors", "cut"), ("adapter_model.safetensors", "flip"),
                             ("state.json", "flip")):  # fmt: skip
            self.out = self.path(f"damaged-{file}-{damage}")
            shutil.copytree(source, self.out)
            newest = max((n for n in os.listdir(self.out) if n.startswith("checkpoint-")), key=lambda n: int(n.split("-")[1]))
            path = os.path.join(self.out, newest, file)
            size = os.path.getsize(path)
            with open(path, "r+b") as f:
                if damage == "cut":
                    f.truncate(size - 5)
                else:
                    f.seek(size // 2 if file != "state.json" else size - 30)
                    byte = f.read(1)
                    f.seek(-1, os.SEEK_CUR)
                    f.write(bytes([byte[0] ^ 4]))
            result = self.run_tool(*self.arguments("--resume"))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"{newest} is passed over", result.stderr)
            self.assertIn(file, result.stderr)
            self.assertEqual(self.result(), whole, (file, damage))
            with open(path, "r+b") as f:
                f.truncate(10)
            line = self.bad(2, *self.arguments("--resume", os.path.join(self.out, newest)))
            self.assertIn(file, line)
            self.assertIn("without a folder", line)

    def test_out_of_time(self):
        whole, _ = self.whole()
        self.out = self.path("hours")
        line = self.bad(130, *self.arguments("--max-hours", "1e-9"))
        self.assertIn("out of time", line)
        self.assertIn("checkpoint-1", line)
        self.go_on()
        self.assertEqual(self.result()["weights"], whole["weights"])

    def test_full_disk_for_a_while(self):
        whole, ticks = self.whole()
        writes = ticks.count("w")
        warned = 0
        for n in range(3, writes, writes // (25 if FULL else 4)):
            self.out = self.path(f"stop-{n}")
            result = self.run_with(f"full:{n}", *self.arguments())
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("No space left", result.stderr)
            # what was saved before is whole
            complete = [name for name in os.listdir(self.out) if name.startswith("checkpoint-")]
            self.assertFalse([name for name in complete if "tmp" in name], complete)
            if complete:
                self.go_on()
                self.assertEqual(self.result()["weights"], whole["weights"])
            self.out = self.path(f"continue-{n}")
            result = self.run_with(f"full:{n}", *self.arguments("--on-save-error", "continue"))
            if result.returncode == 0:
                self.assertEqual(self.result()["weights"], whole["weights"], n)
                warned += "training goes on" in result.stderr
            else:  # the results themselves had no room
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertFalse(os.path.exists(os.path.join(self.out, "trainer_state.json.tmp")))
        self.assertGreater(warned, 0)


class WholeModel(Interrupted):
    more = ["--method", "full", "--learning-rate", "1e-4"]

    def test_killed_at_any_instant(self):
        self.check_kills(30 if FULL else 5)


if __name__ == "__main__":
    unittest.main()
