# SPDX-License-Identifier: Apache-2.0
"""Faults that others had in training whole models (docs/spec-coverage.md): none here."""

import json
import os
import unittest

from support import Case, documents, save_tokens

NAME = "adapter_model.safetensors"


class Past(Case):
    def log(self):
        with open(os.path.join(self.out, "trainer_log.jsonl")) as file:
            return [json.loads(line) for line in file]

    def train(self, *more, out="out", **environment):
        self.out = self.path(out)
        data = self.path("data.safetensors")
        if not os.path.exists(data):
            save_tokens(data, [d[: 10 + 3 * (i % 5)] for i, d in enumerate(documents(16))])
        self.good(*self.train_arguments("--max-steps", 3, "--overwrite", "--warmup-ratio", 0, *more, data=data), **environment)
        with open(os.path.join(self.out, NAME), "rb") as file:
            return file.read()

    def test_gradients_are_means_however_a_step_is_cut(self):
        """19: a missing factor. One micro-batch of eight rows, four of two, eight of one: rows of unequal length."""
        found = []
        for size, accumulation in ((8, 1), (2, 4), (1, 8)):
            self.train("--shuffle", "off", "--batch-size", size, "--gradient-accumulation-steps", accumulation, MOESAIC_ISA="ref")
            found.append(self.log())
        for other in found[1:]:
            for a, b in zip(found[0], other):
                self.assertEqual(a["trained_tokens"], b["trained_tokens"])
                for key in ("loss", "grad_norm", "grad_norm_experts"):
                    self.assertAlmostEqual(a[key], b[key], delta=1e-4 * a[key], msg=key)

    def test_one_thread_for_others(self):
        """23: OMP_NUM_THREADS=1, which launchers set, leaves the workers as they are."""
        trace = self.path("t.mxt")
        plain = self.train()
        narrow = self.train("--trace", trace, out="narrow", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        self.assertEqual(plain, narrow)
        about = json.loads(self.good("trace", "summary", trace, "--json").stdout)["about"]
        self.assertEqual(about["workers"], 2)

    def test_a_state_is_whole_or_refused(self):
        """22: nothing is left out in silence where a state does not fit, lacks an array, or is cut off."""
        self.train("--save-steps", 2)
        state = os.path.join(self.out, "checkpoint-2")
        arguments = lambda *more: self.train_arguments("--max-steps", 3, "--warmup-ratio", 0, "--resume", state, *more,  # noqa: E731
                                                       data=self.path("data.safetensors"))  # fmt: skip
        self.assertIn("other targets", self.bad(2, *arguments("--lora-target", "q_proj")))
        self.assertIn("shape", self.bad(2, *arguments("--lora-rank", 2)))
        path = os.path.join(state, "state.safetensors")
        with open(path, "rb") as file:
            whole = file.read()
        for spoil in (whole[: len(whole) // 2], whole.replace(b"layers.0.q_proj.lora_a.exp_avg_sq", b"layers.9.q_proj.lora_a.exp_avg_sq")):
            self.assertNotEqual(spoil, whole)
            with open(path, "wb") as file:
                file.write(spoil)
            self.assertIn("checkpoint-2", self.bad(2, *arguments()))
        with open(path, "wb") as file:
            file.write(whole)
        self.good(*arguments())

    def test_parts_give_the_same(self):
        """26: one owner of each replicated array. Trained in two and three parts: the losses of one."""
        found = []
        for parts in (1, 2, 3):
            self.train("--numa", parts, "--threads", 3, MOESAIC_ISA="ref")
            found.append(self.log())
        for other in found[1:]:
            for a, b in zip(found[0], other):
                for key in ("loss", "grad_norm"):
                    self.assertAlmostEqual(a[key], b[key], delta=1e-4 * a[key], msg=key)


if __name__ == "__main__":
    unittest.main()
