# SPDX-License-Identifier: Apache-2.0
"""kt-kernel's own converter on our kt form gives our per-expert form, tensor by tensor. Skipped without build/peers-venv."""

import glob
import importlib.util
import os
import unittest

import torch
from safetensors.torch import load_file

from beside import ROOT, Case, peft_adapter

FOUND = glob.glob(os.path.join(ROOT, "build/peers-venv/lib/python*/site-packages/kt_kernel/sft/convert_kt_to_sglang_adapter.py"))


@unittest.skipUnless(FOUND, "no kt_kernel in build/peers-venv (bench/peers makes it)")
class Kt(Case):
    def test_converter(self):
        spec = importlib.util.spec_from_file_location("kt_converter", FOUND[0])
        converter = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(converter)
        start = self.fresh("start")
        peft_adapter(self.model("qwen3_moe"), start, r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"],
                     target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])  # fmt: skip
        for form in ("kt", "per-expert"):
            self.tool("convert", start, self.fresh(form), "--adapter-format", form, "--quiet")
        converter.convert_kt_to_sglang_adapter(self.path("kt"), self.fresh("theirs"), base_model_name_or_path="x")
        theirs = load_file(self.path("theirs", "adapter_model.safetensors"))
        ours = load_file(self.path("per-expert", "adapter_model.safetensors"))
        ours = {name.removeprefix("base_model.model."): value for name, value in ours.items()}
        self.assertEqual(theirs.keys(), ours.keys())
        for name, value in theirs.items():
            self.assertTrue(torch.equal(value, ours[name]), name)


if __name__ == "__main__":
    unittest.main()
