# SPDX-License-Identifier: Apache-2.0
"""A few AdamW steps from the same adapter, here and with PEFT: same losses, same model afterwards."""

import json
import os
import shutil
import unittest

import torch
from peft import PeftModel

from beside import Case, cli, load, open_with_peft, peft_adapter, relative
from test_adapters import asked

STEPS = 5
RATE = 2e-3


class Training(Case):
    def documents(self):
        return cli.documents(8, 20, 256)

    def theirs_trained(self, model_path, adapter):
        model = PeftModel.from_pretrained(load(model_path), adapter, is_trainable=True)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
        rows = torch.tensor(self.documents())
        losses = []
        for step in range(STEPS):
            batch = rows[step % 2 * 4 : step % 2 * 4 + 4]
            loss = model(input_ids=batch, labels=batch, output_router_logits=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return model.eval(), losses

    def check(self, kind, name):
        model, start = self.model(kind), self.fresh("start")
        peft_adapter(model, start, r=4, lora_alpha=6, **asked(name, kind))
        reference, losses = self.theirs_trained(model, start)
        out = self.train(model, "--adapter", start, "--max-steps", STEPS, "--learning-rate", RATE, "--max-grad-norm", 0,
                         "--lr-scheduler-type", "constant", "--shuffle", "off")  # fmt: skip
        with open(os.path.join(out, "trainer_log.jsonl"), encoding="utf-8") as file:
            ours = [row["loss"] for row in map(json.loads, file) if "loss" in row]
        self.assertEqual(len(ours), STEPS)
        for mine, other in zip(ours, losses):
            self.assertLessEqual(abs(mine - other), 1e-4 * other)
        want = self.theirs(reference)
        self.assertLessEqual(relative(self.ours(model, out)[0], want), 1e-3)
        self.assertGreater(relative(self.ours(model, start)[0], want), 5e-3, "training changed nothing")

    def test_same_course(self):
        for kind in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe"):
            for name in ("all-linear", "router", "list", "parameters", "one layer"):
                with self.subTest(f"{kind}: {name}"):
                    self.check(kind, name)

    def test_a_new_adapter(self):
        """all-linear from nothing: PEFT opens it, counts the same, and resuming has the same bits."""
        for kind in ("qwen3_moe", "qwen2_moe"):
            with self.subTest(kind):
                self.check_new(kind)

    def check_new(self, kind):
        model = self.model(kind)
        whole = self.train(model, "--lora-target", "all-linear", "--lora-rank", 4, "--save-steps", 2, "--max-steps", 4)
        got, counts = self.ours(model, whole)
        self.assertGreater(counts["gates"], 0)
        reference, count = open_with_peft(model, whole)
        self.assertEqual(sum(counts.values()), count)
        self.assertLessEqual(relative(got, self.theirs(reference)), 1e-5)
        with open(os.path.join(whole, "adapter_model.safetensors"), "rb") as file:
            bits = file.read()
        shutil.rmtree(os.path.join(whole, "checkpoint-4"))
        self.tool("train", "--config", os.path.join(whole, "run.yaml"), "--resume", os.path.join(whole, "checkpoint-2"), "--quiet")
        with open(os.path.join(whole, "adapter_model.safetensors"), "rb") as file:
            self.assertEqual(file.read(), bits)


if __name__ == "__main__":
    unittest.main()
