# SPDX-License-Identifier: Apache-2.0
"""A few AdamW steps from the same adapter, here and with PEFT: same losses, same model afterwards."""

import json
import os
import shutil
import unittest

import torch
from peft import PeftModel
from transformers import get_scheduler

from beside import Case, cli, load, open_with_peft, peft_adapter, relative
from test_adapters import asked

STEPS = 5
RATE = 2e-3
PLAIN = ["--max-grad-norm", 0, "--lr-scheduler-type", "constant"]


def router_logits(model):
    """A list that each forward fills: the routers' logits, layer by layer."""
    found = []
    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopKGate")):
            module.register_forward_hook(lambda m, inputs, _: found.append(
                torch.nn.functional.linear(inputs[0].reshape(-1, m.weight.shape[1]), m.weight)))  # fmt: skip
    return found


def balance(logits, per_token):
    """Switch Transformer's loss, mean over layers."""
    total = 0
    for layer in logits:
        p = layer.softmax(-1)
        count = torch.zeros(p.shape[1]).index_add_(0, p.topk(per_token).indices.flatten(), torch.ones(p.shape[0] * per_token))
        total = total + p.shape[1] * (count / p.shape[0] * p.mean(0)).sum()
    return total / len(logits)


def z_loss(logits):
    return sum(layer.logsumexp(-1).square().mean() for layer in logits) / len(logits)


class Training(Case):
    def documents(self):
        return cli.documents(8, 20, 256)

    def theirs_trained(self, model_path, adapter, decay=0, clip=None, schedule=None, router_loss=None):
        """schedule: (name, steps of warm-up); router_loss: from the routers' logits of all layers, a list."""
        model = PeftModel.from_pretrained(load(model_path), adapter, is_trainable=True)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
        scheduler = get_scheduler(schedule[0], optimizer, schedule[1], STEPS) if schedule else None
        logits = router_logits(model) if router_loss else []
        rows = torch.tensor(self.documents())
        losses = []
        for step in range(STEPS):
            batch = rows[step % 2 * 4 : step % 2 * 4 + 4]
            loss = model(input_ids=batch, labels=batch, output_router_logits=False).loss
            losses.append(float(loss.detach()))
            if router_loss:
                loss = loss + router_loss(logits)
                logits.clear()
            optimizer.zero_grad()
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            if scheduler:
                scheduler.step()
        return model.eval(), losses

    def check(self, kind, name, flags=(), **options):
        model, start = self.model(kind), self.fresh("start")
        peft_adapter(model, start, r=4, lora_alpha=6, **asked(name, kind))
        reference, losses = self.theirs_trained(model, start, **options)
        out = self.train(model, "--adapter", start, "--max-steps", STEPS, "--learning-rate", RATE, "--shuffle", "off",
                         *(flags or PLAIN))  # fmt: skip
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
            for name in ("all-linear", "router", "router's weight", "list", "parameters", "one layer"):
                with self.subTest(f"{kind}: {name}"):
                    self.check(kind, name)

    def test_schedule_decay_and_clipping(self):
        for kind, schedule in (("qwen3_moe", "linear"), ("mixtral", "cosine_with_restarts"), ("olmoe", "inverse_sqrt")):
            with self.subTest(f"{kind}: {schedule}"):
                flags = ["--weight-decay", 0.5, "--max-grad-norm", 0.2, "--lr-scheduler-type", schedule, "--warmup-steps", 2]
                self.check(kind, "list", flags, decay=0.5, clip=0.2, schedule=(schedule, 2))

    def test_losses_of_the_router(self):
        def both(logits):
            return 0.5 * balance(logits, 2) + 0.2 * z_loss(logits)

        for kind in ("qwen3_moe", "qwen2_moe"):
            with self.subTest(kind):
                self.check(kind, "list", [*PLAIN, "--aux-loss", 0.5, "--z-loss", 0.2], router_loss=both)
        for wrong in (["--aux-loss", 0.5], ["--z-loss", 0.2]):  # either is seen by the comparison
            with self.assertRaises(AssertionError):
                self.check("qwen3_moe", "list", [*PLAIN, *wrong], router_loss=both)

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
