# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints whose weights cannot be trained themselves: refused before anything is made, in a line that names the file,
the tensor and what helps; and that helps."""

import json
import os
import random
import re
import shutil
import struct
import unittest

from support import Case, documents, save_tensors, save_tokens

CONFIG = {
    "model_type": "qwen3_moe", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 128, "rope_theta": 10000.0, "vocab_size": 256,
    "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
EXPERT = "model.layers.{}.mlp.experts.{}.{}"


class Writer:
    """A checkpoint of random weights in BF16, or FP8 with scales."""

    def __init__(self, hidden, intermediate):
        self.source, self.arrays = random.Random(3), {}
        self.hidden, self.intermediate = hidden, intermediate

    def plain(self, name, *shape):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if len(shape) == 1:
            data = struct.pack("<H", 0x3F80) * count
        else:
            data = b"".join(struct.pack("<H", 0x3D00 | self.source.randrange(2) << 15 | self.source.randrange(0x80)) for _ in range(count))
        self.arrays[name] = ("BF16", list(shape), data)

    def coded(self, name, scale, shape, scales):
        codes = bytes(self.source.randrange(0x50) | self.source.randrange(2) << 7 for _ in range(256))
        count, of = 1, 1
        for n in shape:
            count *= n
        for n in scales:
            of *= n
        self.arrays[name] = ("F8_E4M3", list(shape), (codes * (count // 256 + 1))[:count])
        self.arrays[scale] = ("F32", list(scales), struct.pack("<f", 0.02) * of)

    def expert(self, layer, expert, name, rows, columns):
        self.plain(EXPERT.format(layer, expert, name) + ".weight", rows, columns)

    def experts(self, layer):
        for expert in range(4):
            self.expert(layer, expert, "gate_proj", self.intermediate, self.hidden)
            self.expert(layer, expert, "up_proj", self.intermediate, self.hidden)
            self.expert(layer, expert, "down_proj", self.hidden, self.intermediate)

    def vocabulary(self):
        self.plain("model.embed_tokens.weight", 256, self.hidden)
        self.plain("lm_head.weight", 256, self.hidden)

    def write(self, folder):
        self.vocabulary()
        self.plain("model.norm.weight", self.hidden)
        for layer in range(2):
            at = f"model.layers.{layer}."
            self.plain(at + "input_layernorm.weight", self.hidden)
            self.plain(at + "post_attention_layernorm.weight", self.hidden)
            for name in "qkv":
                self.plain(f"{at}self_attn.{name}_proj.weight", 64, self.hidden)
            self.plain(at + "self_attn.o_proj.weight", self.hidden, 64)
            self.plain(at + "self_attn.q_norm.weight", 32)
            self.plain(at + "self_attn.k_norm.weight", 32)
            self.plain(at + "mlp.gate.weight", 4, self.hidden)
            self.experts(layer)
        os.makedirs(folder)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump({**CONFIG, "hidden_size": self.hidden, "moe_intermediate_size": self.intermediate}, file)
        save_tensors(os.path.join(folder, "model.safetensors"), self.arrays, {})


class OneScale(Writer):
    def expert(self, layer, expert, name, rows, columns):
        at = EXPERT.format(layer, expert, name)
        self.coded(at + ".weight", at + ".weight_scale", [rows, columns], [1])


class Fused(Writer):
    """Blocks of 128 rows over 2 x 96 rows."""

    def experts(self, layer):
        at = f"model.layers.{layer}.mlp.experts."
        H, I = self.hidden, self.intermediate
        for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            self.coded(at + name, f"{at}{name}_scale_inv", [4, rows, columns], [4, -(-rows // 128), -(-columns // 128)])


class Embedding(Writer):
    def vocabulary(self):
        super().vocabulary()
        self.coded("model.embed_tokens.weight", "model.embed_tokens.weight_scale", [256, self.hidden], [256, 1])


class Head(Writer):
    def vocabulary(self):
        super().vocabulary()
        self.coded("lm_head.weight", "lm_head.weight_scale", [256, self.hidden], [256, 1])


# the checkpoint; methods that are refused; the tensor; what is said of it; flags of the convert that helps
ROWS = [
    (OneScale(256, 192), ["full", "hybrid"], "model.layers.0.mlp.experts.0.gate_proj.weight", "one scale for 192 x 256 weights", ["fp8"]),
    (Fused(128, 96), ["full", "hybrid"], "model.layers.0.mlp.experts.gate_up_proj", "one for 128 rows", ["int8"]),
    (Embedding(128, 64), ["full"], "model.embed_tokens.weight", "a quantised embedding or head is not trained", ["bf16"]),
    (Head(128, 64), ["full"], "lm_head.weight", "a quantised embedding or head is not trained", ["bf16"]),
]


class Refused(Case):
    def setUp(self):
        super().setUp()
        self.data = self.path("train.safetensors")
        save_tokens(self.data, documents(8, 24, 256), tokenizer_vocab_size="256")

    def arguments(self, model, method, *more):
        return ["train", "--model", model, "--data", self.data, "--output-dir", self.out, "--overwrite", "--threads", 2,
                "--quiet", "--max-steps", 2, "--method", method, "--json", *more]  # fmt: skip

    def test_refused(self):
        for writer, refused, tensor, text, convert in ROWS:
            model = self.path(type(writer).__name__)
            writer.write(model)
            for method in refused:
                # a limit that the model is far above: what cannot be trained is said first
                for more in ([], ["--memory-limit", "1MB"]):
                    with self.subTest(model=type(writer).__name__, method=method, more=more):
                        line = self.bad(2, *self.arguments(model, method, *more))
                        self.assertRegex(line, f"{re.escape(f'{model}/model.safetensors: {tensor}')}[: ]")
                        self.assertIn(text, line)
                        self.assertRegex(line, "[Mm]ethod lora")
                        self.assertIn("moesaic convert", line)
                        self.assertFalse(os.path.exists(self.out))
            for method in {"lora", "full", "hybrid"} - set(refused):
                with self.subTest(model=type(writer).__name__, works=method):
                    self.good(*self.arguments(model, method))
                    shutil.rmtree(self.out)
            with self.subTest(model=type(writer).__name__, converted=convert):
                self.good("convert", model, model + "-new", "--weights", *convert, "--quiet")
                values = json.loads(self.good(*self.arguments(model + "-new", "full")).stdout)
                self.assertEqual(values["trainable"], values["parameters"])
                self.assertTrue(0 < values["last_loss"] < 10, values)
                shutil.rmtree(self.out)


if __name__ == "__main__":
    unittest.main()
