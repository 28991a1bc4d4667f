# SPDX-License-Identifier: Apache-2.0
"""The memory plan: the peak of a run is what was planned; a limit chooses what fits or refuses, before anything is loaded."""

import array
import json
import os
import random
import re
import shutil
import struct
import unittest

from support import SANITIZED, Case, documents, save_tokens

WHOLE = os.environ.get("MOESAIC_TEST_FULL") == "1"
STEPS = 4 if WHOLE else 2  # two have everything in flight that there will be
TOKENS = 1024 if WHOLE else 512
# Reduced, the experts are as large together, but a token has half of the work.
SIZES = {"hidden": 640, "layers": 4, "experts": 8 if WHOLE else 16, "intermediate": 640 if WHOLE else 320, "vocab": 8192 if WHOLE else 4096}
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": SIZES["hidden"], "num_attention_heads": 10, "num_key_value_heads": 5,
    "head_dim": 64, "num_hidden_layers": SIZES["layers"], "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "vocab_size": SIZES["vocab"], "intermediate_size": 640,
    "moe_intermediate_size": SIZES["intermediate"], "num_experts": SIZES["experts"], "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


FORMATS = {"int8": 1, "int4": 0.5625, "fp8": 1.03125, "mxfp4": 0.53125}  # bytes a weight, docs/formats.md


def tensors():
    """Names and shapes."""
    H, I, V = SIZES["hidden"], SIZES["intermediate"], SIZES["vocab"]
    yield "model.embed_tokens.weight", [V, H]
    yield "lm_head.weight", [V, H]
    yield "model.norm.weight", [H]
    for layer in range(SIZES["layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", [H]
        yield at + "post_attention_layernorm.weight", [H]
        for name, shape in (("q_proj", [640, H]), ("k_proj", [320, H]), ("v_proj", [320, H]), ("o_proj", [H, 640])):
            yield at + f"self_attn.{name}.weight", shape
        yield at + "self_attn.q_norm.weight", [64]
        yield at + "self_attn.k_norm.weight", [64]
        yield at + "mlp.gate.weight", [SIZES["experts"], H]
        for expert in range(SIZES["experts"]):
            for name, shape in (("gate_proj", [I, H]), ("up_proj", [I, H]), ("down_proj", [H, I])):
                yield at + f"mlp.experts.{expert}.{name}.weight", shape


def write_model(folder):
    """Random BF16: norms 1, the rest about 0.03, out of one block of values."""
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    source = random.Random(1)
    block = array.array("H", (0x3CC0 | source.randrange(2) << 15 | source.randrange(0x80) for _ in range(65536))).tobytes()
    header, at, parts = {}, 0, []
    for name, shape in tensors():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if len(shape) == 1:
            data = struct.pack("<H", 0x3F80) * count
        else:
            data = (block * (2 * count // len(block) + 1))[2 * at % 1000 : 2 * at % 1000 + 2 * count]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)


class Memory(Case):
    def setUp(self):
        super().setUp()
        self.model_folder = self.path("large")
        write_model(self.model_folder)
        self.data = self.path("long.safetensors")
        save_tokens(self.data, documents(48, 256, SIZES["vocab"]), tokenizer_vocab_size=str(SIZES["vocab"]), cutoff_len="256")

    def arguments(self, *more):
        return ["train", "--model", self.model_folder, "--data", self.data, "--output-dir", self.out, "--overwrite",
                "--threads", 2, "--quiet", "--max-steps", STEPS, *more]  # fmt: skip

    def values(self, *more):
        return json.loads(self.good(*self.arguments(*more, "--json")).stdout)

    def planned(self, values):
        if not SANITIZED:
            self.assertAlmostEqual(values["peak_gib"] / values["planned_gib"], 1, delta=0.05)

    def kept(self, values, limit):
        if not SANITIZED:
            self.assertLessEqual(values["peak_gib"] * 2**30, 1.05 * limit)

    def test_peak_is_what_was_planned(self):
        """Six configurations, within 5 %."""
        plain = ["--batch-tokens", TOKENS]
        for flags in (
            [*plain],
            [*plain, "--recompute", "always"],
            [*plain, "--lora-rank", 48],
            [*plain, "--weights", "int8"],
            ["--batch-tokens", 2 * TOKENS, "--recompute", "always"],
            [*plain, "--lora-target", "q_proj", "v_proj", "--gradient-accumulation-steps", 2],
        ):
            with self.subTest(flags=" ".join(map(str, flags))):
                values = self.values(*flags)
                planned, peak = values["planned_gib"], values["peak_gib"]
                print(f"  planned {planned:.3f} GiB, peak {peak:.3f}, {100 * (peak / planned - 1):+.1f} %: {flags}")
                self.planned(values)

    def test_full_fine_tuning_computed_again(self):
        """Whole weights: both peaks are the planned ones, so that computing again saves what the plan says, for the same loss."""
        flags = ["--method", "full", "--batch-tokens", 2 * TOKENS if WHOLE else TOKENS, "--max-steps", 2, "--gradient-accumulation-steps", 2]
        kept, again = (self.values(*flags, "--recompute", how) for how in ("never", "always"))
        for values in (kept, again):
            self.planned(values)
        planned, saved = (kept[key] - again[key] for key in ("planned_gib", "peak_gib"))
        print(f"  full: planned {kept['planned_gib']:.3f} and {again['planned_gib']:.3f} GiB, saved {saved:.3f} of {planned:.3f}")
        self.assertGreater(planned, 0.03)
        if not SANITIZED:
            self.assertGreater(saved, planned / 2)
        self.assertEqual(again["last_loss"], kept["last_loss"])

    def test_a_limit_chooses(self):
        """Two micro-batches in flight before one, then layers that recompute; the same losses, and the limit is kept."""
        flags = ["--batch-tokens", 1024, "--backward-weights", "direct"]  # so many that recomputing is a step of its own
        wide = self.values(*flags)
        always = self.values(*flags, "--recompute", "always")
        self.assertEqual((wide["micro_batches_in_flight"], wide["recomputed_layers"]), (2, 0))
        found = set()
        for part in (0.95, 0.8, 0.65, 0.5, 0.35):
            limit = int(part * wide["planned_gib"] * 2**30)
            result = self.run_tool(*self.arguments(*flags, "--json", "--memory-limit", limit))
            if result.returncode:
                self.assertEqual(result.returncode, 3)
                self.assertRegex(result.stderr, r"needs [\d.]+ [MG]iB at least: weights [\d.]+ [KMG]iB, .* are allowed\. .+ need less")
                found.add("refused")
                break
            values = json.loads(result.stdout)
            self.assertLessEqual(values["planned_gib"] * 2**30, limit)
            self.kept(values, limit)
            self.assertEqual(values["last_loss"], wide["last_loss"])
            found.add((values["micro_batches_in_flight"], values["recomputed_layers"] > 0))
        self.assertIn((1, False), found)
        self.assertIn((1, True), found)
        self.assertIn("refused", found)
        self.assertEqual(always["last_loss"], wide["last_loss"])

    def test_estimate_shows_the_same_choice(self):
        flags = ["--batch-tokens", TOKENS, "--cutoff-len", 256, "--threads", 2, "--backward-weights", "direct"]
        wide = json.loads(self.good("estimate", "--model", self.model_folder, *flags, "--json", "--memory-limit", "100GB").stdout)
        for part in (0.8, 0.6):
            limit = int(part * wide["total"])
            text = self.run_tool("estimate", "--model", self.model_folder, *flags, "--memory-limit", limit).stdout
            values = json.loads(
                self.run_tool("estimate", "--model", self.model_folder, *flags, "--memory-limit", limit, "--json").stdout
            )
            chosen = re.search(r"(\d) micro-batch(?:es)? in flight, activations of (\d) of 4 layers", text)
            self.assertEqual([int(chosen[1]), int(chosen[2])], [values["slots"], values["recomputed_layers"]])
            self.assertLess(values["total"], wide["total"])

    def test_plan_of_quantised_weights_that_are_trained(self):
        """Codes of experts, bf16 of the rest, masters, and 12 bytes a parameter, by every format and kind of master."""
        count = {"experts": 3 * SIZES["layers"] * SIZES["experts"] * SIZES["hidden"] * SIZES["intermediate"]}
        for weights, width in FORMATS.items():
            for masters in ("f32", "bf16"):
                with self.subTest(weights=weights, masters=masters):
                    flags = ["--batch-tokens", TOKENS, "--cutoff-len", 256, "--threads", 2, "--weights", weights]
                    text = self.good("estimate", "--model", self.model_folder, *flags, "--method", "full", "--masters", masters, "--json")
                    values = json.loads(text.stdout)
                    every = values["trainable"]
                    self.assertEqual(every, values["parameters"])
                    self.assertEqual(values["gradients"], 4 * every)
                    self.assertEqual(values["moments"], 8 * every)
                    own = 4 * every if masters == "f32" else 2 * count["experts"]  # the others are their own
                    want = width * count["experts"] + 2 * (every - count["experts"]) + own
                    self.assertAlmostEqual(values["weights"] / want, 1, delta=0.015)  # gaps between panels, rotary angles

    def test_limits_of_quantised_weights_that_are_trained(self):
        """Refused below the least it needs, with what would help; at it, it trains and stays below."""
        runs = [(w, m) for w in FORMATS for m in ("f32", "bf16")] if WHOLE else [("int4", "bf16"), ("fp8", "f32")]
        for weights, masters in runs:
            with self.subTest(weights=weights, masters=masters):
                flags = ["--method", "full", "--weights", weights, "--masters", masters, "--batch-tokens", TOKENS, "--max-steps", 2]
                line = self.bad(3, *self.arguments(*flags, "--memory-limit", "200MB"))
                least = re.search(r"needs ([\d.]+) ([MG])iB at least: weights [\d.]+ MiB, adapter, gradients, moments and masters", line)
                self.assertIsNotNone(least, line)
                self.assertIn("adapters (method lora)" if masters == "bf16" else "method lora, or masters bf16", line)
                self.assertFalse(os.path.exists(self.out))
                limit = int(float(least[1]) * 2 ** {"M": 20, "G": 30}[least[2]])
                line = self.bad(3, *self.arguments(*flags, "--memory-limit", int(0.97 * limit)))
                self.assertRegex(line, r"needs [\d.]+ [MG]iB at least")
                values = self.values(*flags, "--memory-limit", int(1.02 * limit))
                self.assertEqual((values["micro_batches_in_flight"], values["recomputed_layers"] > 0), (1, True))
                self.assertLessEqual(values["planned_gib"] * 2**30, 1.02 * limit)
                self.kept(values, limit)
                shutil.rmtree(self.out)

    def test_refused_before_anything_is_made(self):
        line = self.bad(3, *self.arguments("--memory-limit", "50MB"))
        self.assertIn("MiB are allowed", line)
        self.assertFalse(os.path.exists(self.out))


if __name__ == "__main__":
    unittest.main()
