# SPDX-License-Identifier: Apache-2.0
"""Training a quantised checkpoint takes little more memory than its tensors: docs/memory.md, "Quantised weights"."""

import json
import os
import random
import re
import struct
import unittest

from support import SANITIZED, Case, documents, save_tokens

FULL = os.environ.get("MOESAIC_TEST_FULL") == "1"
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, VOCAB = 8, 64, 1024, 1024, 2048  # 1.6 x 10^9 parameters: weights dominate in 4 bits too
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 512,
    "rope_theta": 10000.0, "vocab_size": VOCAB, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
# name of config.json; codes: suffix, dtype, elements a byte; scales: suffix, dtype, bytes of one, rows and columns of one
FORMATS = {
    "int8": ("compressed-tensors", (".weight", "I8", 1), (".weight_scale", "F32", struct.pack("<f", 0.0008), 1, None)),
    "int4": ("compressed-tensors", (".weight_packed", "I32", 2), (".weight_scale", "BF16", struct.pack("<H", 0x3C20), 1, 32)),
    "fp8": ("fp8", (".weight", "F8_E4M3", 1), (".weight_scale_inv", "F32", struct.pack("<f", 0.02), 128, 128)),
    "mxfp4": ("compressed-tensors", (".weight_packed", "U8", 2), (".weight_scale", "U8", b"\x79", 1, 32)),
}
COMPRESSED = {"int8": "int-quantized", "int4": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


def plain_tensors():
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", [HIDDEN]
        yield at + "post_attention_layernorm.weight", [HIDDEN]
        for name, shape in (("q", [512, HIDDEN]), ("k", [128, HIDDEN]), ("v", [128, HIDDEN]), ("o", [HIDDEN, 512])):
            yield f"{at}self_attn.{name}_proj.weight", shape
        yield at + "self_attn.q_norm.weight", [64]
        yield at + "self_attn.k_norm.weight", [64]
        yield at + "mlp.gate.weight", [EXPERTS, HIDDEN]


def matrices():
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name in ("gate", "up", "down"):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj", HIDDEN, INTERMEDIATE


def write_model(folder, kind):
    """Random codes of experts, out of one block of values, and BF16 of the rest; returns the bytes of all tensors."""
    method, (codes, dtype, each), (scale, scale_dtype, one, rows, columns) = FORMATS[kind]
    source = random.Random(5)
    bf16 = b"".join(struct.pack("<H", 0x3CC0 | source.randrange(2) << 15 | source.randrange(0x80)) for _ in range(65536))
    block = bytes(source.randrange(0x60) | source.randrange(2) << 7 for _ in range(65536))
    header, pieces, at = {}, [], 0

    def put(name, dtype, shape, data, size):
        nonlocal at
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
        pieces.append((data, size))

    for name, shape in plain_tensors():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        put(name, "BF16", shape, bf16 if len(shape) > 1 else struct.pack("<H", 0x3F80) * 4096, 2 * count)
    for name, n, k in matrices():
        width = {"I32": 4}.get(dtype, 1)
        put(name + codes, dtype, [n, k // each // width], block, n * k // each)
        groups = [-(-n // rows), -(-k // columns) if columns else 1]
        put(name + scale, scale_dtype, groups, one * 4096, groups[0] * groups[1] * len(one))
    os.makedirs(folder)
    quantised = {"quant_method": method, "format": COMPRESSED.get(kind, ""), "fmt": "e4m3", "weight_block_size": [128, 128]}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**CONFIG, "quantization_config": quantised}, file)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data, size in pieces:
            file.writelines(data[: min(len(data), size - i)] for i in range(0, size, len(data)))
    return at


@unittest.skipIf(SANITIZED, "sanitizers have memory of their own")
class MemoryOfFormats(Case):
    def test_peak(self):
        """The whole process from start to end, loading included: at most a tenth more than the checkpoint's tensors."""
        data = self.path("train.safetensors")
        save_tokens(data, documents(8, 64, VOCAB), tokenizer_vocab_size=str(VOCAB), cutoff_len="64")
        for kind in FORMATS if FULL else ("mxfp4", "fp8"):
            with self.subTest(kind=kind):
                model = self.path(kind)
                size = write_model(model, kind)
                result = self.good("train", "--model", model, "--data", data, "--output-dir", self.out, "--overwrite", "--threads", 2,
                                   "--max-steps", 3, "--batch-tokens", 64, "--lora-target", "q_proj", "v_proj", "--json")  # fmt: skip
                os.remove(os.path.join(model, "model.safetensors"))
                self.assertIn(f"experts in {kind}, frozen", result.stderr)
                found = re.search(r"memory +weights ([\d.]+) ([MG])iB", result.stderr)
                weights = float(found[1]) * 2 ** {"M": 20, "G": 30}[found[2]]
                values = json.loads(result.stdout)
                peak = values["peak_gib"] * 2**30
                print(f"  {kind}: tensors {size / 2**20:.1f} MiB, weights {100 * (weights / size - 1):+.1f} %, "
                      f"peak {peak / 2**20:.1f} MiB, {100 * (peak / size - 1):+.1f} %")  # fmt: skip
                self.assertLessEqual(peak, 1.10 * size)
                self.assertLessEqual(peak, 1.02 * values["planned_gib"] * 2**30)
                # in memory each row of an FP8 block has its scale: 4 bytes for 128 columns
                self.assertLess(weights / size, 1.04 if kind == "fp8" else 1.01)
                self.assertGreater(peak, weights)


if __name__ == "__main__":
    unittest.main()
