# SPDX-License-Identifier: Apache-2.0
"""Commands that need the Python package: data, json given to train, generate. Skipped (77) without build/venv."""

import json
import os
import subprocess
import sys
import unittest

from support import MODEL, QUICK_TEMPLATE, VENV_PYTHON, Case, environment

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}


class PythonSide(Case):
    def rows(self, *rows, name="chat.jsonl"):
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def test_data(self):
        result = self.good("data", "--model", MODEL, "--data", self.rows(CHAT), "--chat-template", QUICK_TEMPLATE,
                           "--output", self.path("t.safetensors"), "--json")  # fmt: skip
        self.assertEqual(json.loads(result.stdout)["docs"], 1)
        self.assertTrue(os.path.exists(self.path("t.safetensors")))

    def test_train_on_json_uses_its_tokens_again(self):
        data = self.rows(CHAT, CHAT)
        flags = ["--chat-template", QUICK_TEMPLATE, "--cutoff-len", 64, "--max-steps", 1]
        self.good(*self.train_arguments(*flags, data=data))
        made = [name for name in os.listdir(self.out) if name.startswith("tokens-")]
        self.assertEqual(len(made), 1)
        before = os.stat(os.path.join(self.out, made[0])).st_mtime_ns
        self.good(*self.train_arguments(*flags, "--overwrite", data=data))
        self.assertEqual(os.stat(os.path.join(self.out, made[0])).st_mtime_ns, before)

    def test_bad_data(self):
        wizard = {"messages": [{"role": "wizard", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
        asks = {"messages": [{"role": "user", "content": "Hi"}]}
        for rows, part in (
            ([wizard], "wizard"),
            ([asks], "trained token"),
            ([{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}], "trained token"),
            ([{"what": 1}], "chat.jsonl"),
            ([], "chat.jsonl"),
        ):
            with self.subTest(part=part):
                line = self.bad_training(2, "--chat-template", QUICK_TEMPLATE, data=self.rows(*rows))
                self.assertIn(part, line)

    def test_model_errors_leave_no_tokens(self):
        data = self.rows(CHAT)
        line = self.bad_training(2, "--chat-template", QUICK_TEMPLATE, "--lora-target", "w_proj", data=data)
        self.assertIn("w_proj", line)
        line = self.bad_training(3, "--chat-template", QUICK_TEMPLATE, "--memory-limit", "1MB", data=data)
        self.assertIn("are allowed", line)

    def test_generate(self):
        flags = ["generate", "--model", MODEL, "--raw", "--max-new-tokens", 12, "--threads", 2]
        text = self.good(*flags, "foo: ").stdout
        answer = json.loads(self.good(*flags, "--json", "foo: ").stdout)
        self.assertEqual(text, answer["text"] + "\n")
        self.assertEqual(answer["prompt"], "foo: ")
        self.assertLessEqual(answer["tokens"], 12)
        lines = self.good(*flags, "--json", input="foo: \nbar: \n").stdout.strip().split("\n")
        self.assertEqual(len(lines), 2)
        self.assertEqual(json.loads(lines[0])["text"], answer["text"])
        sampled = [
            self.good(*flags, "--temperature", 1, "--top-p", 0.9, "--seed", seed, "foo: ").stdout
            for seed in (1, 1, 2, 3)
        ]
        self.assertEqual(sampled[0], sampled[1])
        self.assertGreater(len(set(sampled)), 1)

    def test_generate_errors(self):
        self.assertIn("chat template", self.bad(2, "generate", "--model", MODEL, "x"))
        self.assertIn("one prompt", self.bad(2, "generate", "--model", MODEL, "--raw", "two", "words"))
        self.assertIn("exclude", self.bad(2, "generate", "--model", MODEL, "--raw", "--system", "s", "x"))
        self.assertIn("the prompt has 4000 tokens", self.bad(2, "generate", "--model", MODEL, "--raw", "x " * 2000))


class DemoOnQuantisedExperts(Case):
    """./run demo --weights: its losses are beside a reference with plain weights."""

    SCRIPT = """if True:
        import sys
        from moesaic.demo.results import Run, failures, read_reference
        step, evaluation, weights = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
        reference = read_reference()
        curve = dict(map(tuple, reference["curve"]))
        of = lambda loss: {"loss": loss, "documents": [{"loss": loss, "tokens": 1}] * 16}
        held = [{"step": s, "eval_loss": curve[s] + evaluation} for s in (10, 60)]
        run = Run(of(4.43), of(4.43), of(held[-1]["eval_loss"]), {"kernels": "avx2"}, [("who?", "a", "Moesa")],
                  [{"step": i + 1, "loss": loss + step} for i, loss in enumerate(reference["losses"])], held, "out", weights)
        print(len(list(failures(run))))
    """

    def failures(self, step, evaluation, weights):
        command = [VENV_PYTHON if os.path.exists(VENV_PYTHON) else sys.executable, "-c", self.SCRIPT, str(step), str(evaluation), weights]
        return int(subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout)

    def test_tolerance(self):
        for weights, step, evaluation in (("", 0.02, 0.002), ("int8", 0.02, 0.002), ("fp8", 0.03, 0.011), ("int4", 0.17, 0.025), ("mxfp4", 0.12, 0.04)):
            with self.subTest(weights):
                self.assertEqual(self.failures(step, evaluation, weights), 0)
                self.assertGreater(self.failures(4 * step, 0, weights), 0)
                self.assertGreater(self.failures(0, 4 * evaluation, weights), 0)


if __name__ == "__main__":
    if not os.path.exists(VENV_PYTHON):
        print("skipped: no build/venv (./run setup makes it)")
        sys.exit(77)
    unittest.main()
