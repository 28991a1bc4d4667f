# SPDX-License-Identifier: Apache-2.0
"""moesaic merge: transformers on the merged model computes what PEFT computes; only adapted tensors differ, byte by byte."""

import os
import unittest

import torch
from safetensors.torch import load_file

from beside import Case, cli, load, peft_adapter, relative
from test_adapters import asked

ADAPTERS = ["all-linear", "list", "parameters", "gate and up", "one layer", "router's weight"]


def tensors(folder):
    """name -> (dtype, shape, bytes), and the file of each."""
    found = cli.read_tensors(folder)
    return {key: tensor[1:] for key, tensor in found.items()}, {key: tensor[0] for key, tensor in found.items()}


class Merge(Case):
    def merge(self, kind, name, dtype=torch.float32, fused=False, flags=()):
        model = self.model(kind, dtype=dtype, fused=fused)
        reference, _ = peft_adapter(model, self.fresh("adapter"), r=4, lora_alpha=6, **asked(name, kind))
        self.tool("merge", "--model", model, "--adapter", self.path("adapter"), "--output-dir", self.fresh("merged"),
                  "--quiet", *flags)  # fmt: skip
        return model, reference

    def expected(self, reference, base, fused):
        """The tensors that PEFT's own merge changes."""
        reference.merge_and_unload().save_pretrained(self.fresh("theirs"), save_original_format=not fused)
        theirs, _ = tensors(self.path("theirs"))
        return {k for k in base if base[k][2] != theirs[k][2]}

    def test_logits_and_bytes(self):
        for kind in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe"):
            for name in ADAPTERS:
                for fused in (False, True):
                    with self.subTest(f"{kind}: {name}, {'fused' if fused else 'per expert'}"):
                        model, reference = self.merge(kind, name, fused=fused)
                        merged = load(self.path("merged"))
                        self.assertLessEqual(relative(self.theirs(merged), self.theirs(reference)), 1e-5)
                        self.assertLessEqual(relative(self.ours(self.path("merged"))[0], self.theirs(reference)), 1e-5)
                        base, files = tensors(model)
                        after, new_files = tensors(self.path("merged"))
                        self.assertEqual(files, new_files)
                        self.assertEqual({k: v[:2] for k, v in base.items()}, {k: v[:2] for k, v in after.items()})
                        differ = {k for k in base if base[k][2] != after[k][2]}
                        self.assertEqual(differ, self.expected(reference, base, fused))
                        others = [n for n in os.listdir(model) if not n.endswith(".safetensors")]
                        for other in others:
                            with open(os.path.join(model, other), "rb") as a, open(self.path("merged", other), "rb") as b:
                                self.assertEqual(a.read(), b.read(), other)

    def test_bf16_is_rounded_once(self):
        model, reference = self.merge("qwen3_moe", "parameters", dtype=torch.bfloat16)
        merged = load_file(self.path("merged", "model.safetensors"))
        reference = reference.merge_and_unload()  # in f32, from the bf16 values
        state = reference.state_dict()
        worst = 0
        for key, value in merged.items():
            if ".experts." not in key:
                continue
            layer, expert, projection = key.split(".")[2], int(key.split(".")[5]), key.split(".")[6]
            prefix = f"model.layers.{layer}.mlp.experts."
            whole = state[prefix + ("down_proj" if projection == "down_proj" else "gate_up_proj")][expert]
            half = whole.shape[0] // 2
            want = whole if projection == "down_proj" else whole[:half] if projection == "gate_proj" else whole[half:]
            steps = (value.view(torch.int16).int() - want.bfloat16().view(torch.int16).int()).abs()
            self.assertLessEqual(int(steps.max()), 1)
            worst = max(worst, float((steps != 0).float().mean()))
        self.assertLess(worst, 0.01)  # ties that f32 sums in another order break otherwise

    def test_split(self):
        model, reference = self.merge("qwen2_moe", "all-linear", flags=["--max-shard-size", "200KB"])
        files = [n for n in os.listdir(self.path("merged")) if n.endswith(".safetensors")]
        self.assertGreater(len(files), 3)
        for name in files:
            self.assertLess(os.path.getsize(self.path("merged", name)), 240_000)
        self.assertLessEqual(relative(self.theirs(load(self.path("merged"))), self.theirs(reference)), 1e-5)


if __name__ == "__main__":
    unittest.main()
