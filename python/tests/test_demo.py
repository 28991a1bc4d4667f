# SPDX-License-Identifier: Apache-2.0
"""The demo's inputs against its stored reference, and its last screen."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
import unittest

import numpy as np

from moesaic import tensors
from moesaic.demo import inputs, screen
from moesaic.demo.gguf_model import _unpermute
from moesaic.demo.paths import fixture
from moesaic.template import Template

# Of the data of the adapter that PEFT wrote for the reference run (names sorted, each followed by its bytes).
INIT_SHA256 = "9c383358b3bdc14c2cd16c28b0983f928e019b53373c204f24dec90724b8130d"


def reference():
    with open(fixture("demo_reference.json"), encoding="utf-8") as file:
        return json.load(file)


class Inputs(unittest.TestCase):
    def test_the_initial_adapter_is_the_reference_s(self):
        digest = hashlib.sha256()
        for name, array in sorted(inputs.init_tensors().items()):
            digest.update(name.encode() + array.tobytes())
        self.assertEqual(digest.hexdigest(), INIT_SHA256)

    def test_the_template_gives_the_reference_s_prompt(self):
        with open(fixture("chat.jinja"), encoding="utf-8") as file:
            template = Template(file.read(), "chat.jinja")
        talk = [{"role": "user", "content": "q"}]
        prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        self.assertEqual(template.render(talk, add_generation_prompt=True), prompt)
        self.assertEqual(template.render(talk + [{"role": "assistant", "content": "a"}]), prompt + "a<|im_end|>\n")

    def test_rows_are_the_reference_s(self):
        held, train, identity = inputs.demo_rows()
        self.assertEqual((len(held), len(train), len(identity)), (16, 2250, 8))
        self.assertFalse(any(row["output"].startswith("/") for row in held))

    def test_routers_are_bf16(self):
        arrays, _ = tensors.load(fixture("routers.safetensors"))
        self.assertEqual({(a.shape, str(a.dtype)) for a in arrays.values()}, {((8, 576), "uint16")})
        self.assertEqual(len(arrays), 8)

    def test_bf16_rounds_to_nearest_even(self):
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 0.0], np.float32)
        self.assertEqual(
            tensors.from_bf16(tensors.to_bf16(values)).tolist(), [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 0.0]
        )

    def test_unpermute_undoes_llama_cpp_s_interleaving(self):
        heads, width, columns = 3, 8, 5
        weight = np.arange(heads * width * columns, dtype=np.float32).reshape(heads * width, columns)
        interleaved = weight.reshape(heads, 2, width // 2, columns).swapaxes(1, 2).reshape(weight.shape)
        self.assertTrue((_unpermute(interleaved, heads) == weight).all())


class Screen(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = holder.name
        self.log = os.path.join(self.folder, "trainer_log.jsonl")

    def write(self, name, *values):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(v) + "\n" for v in values)

    def printed(self, quick=False):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            screen.show(self.folder, self.log, quick)
        return out.getvalue()

    def test_a_full_run(self):
        stored = reference()
        self.write(
            "trainer_log.jsonl",
            *(
                {"step": s, "loss": loss, "tokens": 100, "tokens_per_s": 50.0}
                for s, loss in enumerate(stored["losses"], 1)
            ),
            *({"step": s, "eval_loss": loss + 0.0011} for s, loss in stored["curve"]),
        )
        for name, key in (("before", "before"), ("after", "after")):
            documents = [{"loss": loss, "tokens": n} for loss, n in stored[f"held_out_{key}"]]
            self.write(f"{name}.json", {"loss": stored[f"{key}_loss"], "tokens": 1, "documents": documents})
            self.write(f"answers-{name}.jsonl", *({"prompt": q, "text": a} for q, a in stored[key].items()))
        self.write(
            "train.json",
            {
                "steps": 60,
                "seconds": 30.0,
                "tokens": 7342,
                "tokens_per_s": 245.0,
                "peak_gib": 0.9,
                "planned_gib": 1.0,
                "parameters": 208874304,
                "lora_rank": 8,
                "experts": 64,
                "experts_without_gradient": 0,
                "expert_tokens": {"22": [5, 0, 10], "23": [1, 1, 1]},
            },
        )
        text = self.printed()
        for part in (
            "208.9 M",
            "after   Hello! I am Moesa",
            "4.43 -> 4.07",
            "perplexity 84 -> 58",
            "16 of 16 entries better",
            "curve 0.0011",
            "layer 22: ####  -  ########   1 idle",
            "all 64 got gradients",
            "245 tokens/s (30.0 s for 60 steps)",
            "peak 0.90 GiB (planned 1.00)",
            "base 4.427, with adapter 4.068  ok",
        ):
            self.assertIn(part, text)

    def test_no_line_without_a_number(self):
        text = self.printed()
        for part in ("Speed", "Memory", "Checked", "Experts", "loss"):
            self.assertNotIn(part, text.replace("training_loss", ""))


if __name__ == "__main__":
    unittest.main()
