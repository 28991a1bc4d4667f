# SPDX-License-Identifier: Apache-2.0
"""Models, adapters and logits on both sides: transformers + PEFT in float32, and moesaic with the exact kernels."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
TOOL = os.environ["MOESAIC_TOOL"]
LOGITS = os.environ["MOESAIC_MODEL_LOGITS"]
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
# Small models of every architecture, made here: random weights.
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 4, "head_dim": 16,
                  "mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen2_moe": {"moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 4,
                  "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], "norm_topk_prob": False},
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4, "head_dim": 16},
    "olmoe": {"intermediate_size": 48, "num_experts": 4, "num_key_value_heads": 4},
}  # fmt: skip

torch.set_num_threads(1)
sys.path.append(os.path.join(ROOT, "tests", "cli"))
os.environ.setdefault("MOESAIC_MACHINE", "")
import support as cli  # noqa: E402  (tests/cli/support.py)


def environment():
    return {**cli.environment(), "MOESAIC_ISA": "ref"}


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()


def make_model(kind, path, dtype=torch.float32, fused=False):
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.to(dtype).save_pretrained(path, save_original_format=not fused)
    return path


def relative(a, b):
    return float(numpy.linalg.norm(a - b) / numpy.linalg.norm(b))


class Case(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="moesaic-peft-")
        cls.ids = numpy.random.default_rng(3).integers(0, 256, 40).astype(numpy.int32)
        cls.ids.tofile(os.path.join(cls.folder, "ids"))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def fresh(self, name):
        shutil.rmtree(self.path(name), ignore_errors=True)
        return self.path(name)

    @classmethod
    def model(cls, kind, **options):
        path = os.path.join(cls.folder, "-".join([kind, *(f"{k}={v}" for k, v in options.items())]))
        if not os.path.exists(path):
            make_model(kind, path, **options)
        return path

    def tool(self, *arguments):
        result = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, env=environment())
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def ours(self, model, adapter=None):
        """Logits, and counts of the adapter's values."""
        out = self.path("logits")
        command = [LOGITS, model, self.path("ids"), out, *([adapter] if adapter else [])]
        result = subprocess.run(command, capture_output=True, text=True, env=environment())
        self.assertEqual(result.returncode, 0, result.stderr)
        return numpy.fromfile(out, numpy.float32).reshape(len(self.ids), -1), json.loads(result.stdout.split("\n")[-2])

    def theirs(self, model):
        with torch.no_grad():
            return model(input_ids=torch.tensor(self.ids[None].astype(numpy.int64))).logits[0].float().numpy()

    def train(self, model, *flags):
        """An adapter of ours after a few large steps."""
        data = self.path("train.safetensors")
        cli.save_tokens(data, cli.documents(8, 20, 256), tokenizer_vocab_size="256")
        out = self.fresh("trained")
        self.tool("train", "--model", model, "--data", data, "--output-dir", out, "--max-steps", 3, "--batch-size", 4,
                  "--warmup-ratio", 0, "--learning-rate", 2e-2, "--threads", 2, "--quiet", *flags)  # fmt: skip
        return out


def randomise(model, scale=0.1):
    """Values as after training: PEFT starts with B = 0."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def peft_adapter(model_path, path, **config):
    """What PEFT writes; the model, and the number of its trainable values."""
    model = get_peft_model(load(model_path), LoraConfig(task_type="CAUSAL_LM", **config))
    randomise(model)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.save_pretrained(path)
    return model.eval(), count


def open_with_peft(model_path, adapter):
    model = PeftModel.from_pretrained(load(model_path), adapter).eval()
    return model, sum(p.numel() for n, p in model.named_parameters() if "lora_" in n or "modules_to_save" in n)
