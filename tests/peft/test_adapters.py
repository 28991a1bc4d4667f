# SPDX-License-Identifier: Apache-2.0
"""Adapters written by PEFT and read here, and the reverse: same logits, same counts."""

import json
import unittest

from beside import Case, MODELS, open_with_peft, peft_adapter, relative

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS = {"mixtral": ["w1", "w2", "w3"]}
LISTED = ["gate_proj", "up_proj", "down_proj"]
# What PEFT is asked for; {experts} stands for the architecture's names.
ASKED = {
    "all-linear": {"target_modules": "all-linear"},
    "all-linear, rslora": {"target_modules": "all-linear", "use_rslora": True},
    "list": {"target_modules": ["q_proj", "v_proj", "{experts}"]},
    "list, rank pattern": {"target_modules": ["q_proj", "v_proj", "{experts}"], "rank_pattern": {"q_proj": 3, "down_proj": 2},
                           "alpha_pattern": {"q_proj": 5}},
    "parameters": {"target_modules": ["k_proj", "o_proj"], "target_parameters": FUSED},
    "parameters, rslora": {"target_modules": ["q_proj"], "target_parameters": FUSED, "use_rslora": True},
    "gate and up": {"target_modules": [], "target_parameters": FUSED[:1]},
    "down": {"target_modules": [], "target_parameters": FUSED[1:]},
    "router": {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    "router's weight": {"target_modules": ["q_proj", "{experts}"], "modules_to_save": ["mlp.gate"]},
    "expression": {"target_modules": r".*\.(q|v)_proj"},
    "one layer": {"target_modules": ["layers.1.self_attn.q_proj"], "target_parameters": ["layers.2.mlp.experts.down_proj"]},
    "attention of some layers": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 2]},
}  # fmt: skip


def asked(name, kind):
    config = dict(ASKED[name])
    if isinstance(config["target_modules"], list) and "{experts}" in config["target_modules"]:
        rest = [m for m in config["target_modules"] if m != "{experts}"]
        config["target_modules"] = rest + EXPERTS.get(kind, LISTED)
        if kind == "mixtral" and "rank_pattern" in config:
            config["rank_pattern"] = {"q_proj": 3}  # w2 is called down_proj in memory: no name for both
    return config


class FromPeft(Case):
    def check(self, kind, name):
        model, out = self.model(kind), self.fresh("peft")
        reference, count = peft_adapter(model, out, r=4, lora_alpha=6, **asked(name, kind))
        want = self.theirs(reference)
        got, counts = self.ours(model, out)
        self.assertLessEqual(relative(got, want), 1e-5)
        self.assertGreater(relative(got, self.ours(model)[0]), 1e-3, "the adapter does nothing")
        self.assertEqual(sum(counts.values()), count)
        for form in ("peft", "per-expert", "kt"):
            with self.subTest(form):
                self.tool("convert", out, self.fresh("converted"), "--adapter-format", form, "--model", model, "--quiet")
                self.assertLessEqual(relative(self.ours(model, self.path("converted"))[0], want), 1e-5)

    def test_all(self):
        for kind in MODELS:
            for name in ASKED:
                with self.subTest(f"{kind}: {name}"):
                    self.check(kind, name)


# Flags of train, and whether PEFT counts the same: an A each for gate and up is block-diagonal in its form.
TRAINED = {
    "default": ([], False),
    "shared A": (["--share-a"], True),
    "shared A, rslora": (["--share-a", "--rslora"], True),
    "rslora": (["--rslora"], False),
    "ranks differ": (["--expert-lora-rank", 2, "--lora-alpha", 5], False),
    "ranks differ, shared A": (["--expert-lora-rank", 2, "--share-a"], True),
    "list": (["--lora-target", "q_proj,gate_proj,up_proj,down_proj"], True),
    "experts": (["--lora-target", "experts"], False),
    "parameters": (["--lora-target", "mlp.experts.gate_up_proj,mlp.experts.down_proj"], True),
    "gate and up": (["--lora-target", "gate_proj,up_proj,o_proj"], True),
    "down": (["--lora-target", "down_proj"], True),
    "one layer": (["--lora-target", "layers.1.self_attn.q_proj,layers.2.mlp.experts.down_proj"], True),
    "expression": (["--lora-target", r".*layers\.[12]\.self_attn\.(k|v)_proj"], True),
    "attention": (["--lora-target", "q_proj,k_proj,v_proj,o_proj"], True),
    "router's weight": (["--lora-target", "q_proj,v_proj", "--train-router"], True),
    "experts and router's weight": (["--share-a", "--train-router"], True),
    "all-linear": (["--lora-target", "all-linear"], True),
    "all-linear, rslora": (["--lora-target", "all-linear", "--rslora"], True),
}


class ToPeft(Case):
    def check(self, kind, name, form):
        model = self.model(kind)
        flags, same_count = TRAINED[name]
        names = [f.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
                 if kind == "mixtral" and isinstance(f, str) and name in ("list", "gate and up", "down") else f
                 for f in flags]  # fmt: skip
        out = self.train(model, "--lora-rank", 4, "--adapter-format", form, *names)
        got, counts = self.ours(model, out)
        reference, count = open_with_peft(model, out)
        self.assertLessEqual(relative(got, self.theirs(reference)), 1e-5)
        self.assertGreater(relative(got, self.ours(model)[0]), 1e-3, "the adapter does nothing")
        if same_count and form == "peft":
            self.assertEqual(sum(counts.values()), count)

    def test_peft(self):
        for kind in MODELS:
            for name in TRAINED:
                with self.subTest(f"{kind}: {name}"):
                    self.check(kind, name, "peft")

    def test_per_expert(self):
        # "gate and up" and "down": PEFT names wrappers of per-expert files as if both were there.
        # Qwen2-MoE: PEFT 0.21 converts the tensors, but not the configuration.
        for kind in ("qwen3_moe", "mixtral", "olmoe"):
            for name in ("default", "shared A", "rslora", "ranks differ", "experts", "list"):
                with self.subTest(f"{kind}: {name}"):
                    self.check(kind, name, "per-expert")


class Continued(Case):
    """An adapter of PEFT's, trained on here, is still PEFT's."""

    def test_continue(self):
        model = self.model("qwen3_moe")
        for name in ("list", "parameters", "gate and up", "expression"):
            with self.subTest(name):
                start = self.fresh("start")
                _, count = peft_adapter(model, start, r=4, lora_alpha=6, **asked(name, "qwen3_moe"))
                before = self.ours(model, start)[0]
                out = self.train(model, "--adapter", start)
                got, counts = self.ours(model, out)
                reference, loaded = open_with_peft(model, out)
                self.assertEqual([sum(counts.values()), loaded], [count, count])
                self.assertLessEqual(relative(got, self.theirs(reference)), 1e-5)
                self.assertGreater(relative(got, before), 1e-3)
                with open(self.path("start", "adapter_config.json"), encoding="utf-8") as file:
                    self.assertEqual(json.load(file)["r"], 4)


if __name__ == "__main__":
    unittest.main()
