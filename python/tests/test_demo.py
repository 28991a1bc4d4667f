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
from moesaic.errors import UserError
from moesaic.template import Template

# Of the data of the adapter that PEFT wrote for the reference run (names sorted, each followed by its bytes).
INIT_SHA256 = "9c383358b3bdc14c2cd16c28b0983f928e019b53373c204f24dec90724b8130d"

WHEN = (("before", "before"), ("base", "before"), ("after", "after"))


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
    """The reference run's own numbers, printed as if they were ours."""

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = holder.name
        self.stored = reference()
        self.losses = {name: self.stored[f"{key}_loss"] for name, key in WHEN}
        self.train = {
            "steps": 60,
            "seconds": 30.0,
            "tokens_per_s": 245.0,
            "peak_gib": 0.9,
            "planned_gib": 1.0,
            "parameters": 208874304,
            "lora_rank": 8,
            "experts": 64,
            "experts_without_gradient": 0,
            "expert_tokens": {"22": [5, 1, 10], "23": [1, 1, 1]},
        }

    def write(self, name, *values):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(v) + "\n" for v in values)

    def show(self):
        """-> (exit code, text)"""
        stored = self.stored
        self.write(
            "trainer_log.jsonl",
            *({"step": s, "loss": loss} for s, loss in enumerate(stored["losses"], 1)),
            *({"step": s, "eval_loss": loss} for s, loss in stored["curve"]),
        )
        for name, key in WHEN:
            documents = [{"loss": loss, "tokens": n} for loss, n in stored[f"held_out_{key}"]]
            self.write(f"{name}.json", {"loss": self.losses[name], "documents": documents})
        for key in ("before", "after"):
            self.write(f"answers-{key}.jsonl", *({"prompt": q, "text": a} for q, a in stored[key].items()))
        self.write("train.json", self.train)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = screen.show(self.folder, self.folder, False)
        return code, out.getvalue()

    def test_a_good_run(self):
        code, text = self.show()
        self.assertEqual(code, 0, text)
        for part in (
            "208.9 M",
            "after   Hello! I am Moesa",
            "4.43 -> 4.07",
            "perplexity 84 -> 58",
            "16 of 16 entries better",
            "0.000000 in 60 steps, 0.000000 in 6 evaluations",
            "layer 22: ####  #  ########   (all 64 were chosen and got gradients)",
            "245 tokens/s (30.0 s for 60 steps, evaluations apart)",
            "peak 0.90 GiB (planned 1.00)",
            "base 4.4265, with adapter 4.0675: the same as in training",
        ):
            self.assertIn(part, text)
        self.assertNotIn("FAILED", text)

    def test_idle_experts(self):
        self.train.update(experts_without_gradient=3, expert_tokens={"22": [5, 0, 10], "23": [0, 1, 1]})
        self.assertIn(
            "layer 22: ####  -  ########   (61 of 64 got gradients; 2 never chosen; 1 chosen but", self.show()[1]
        )

    def assert_fails(self, part):
        code, text = self.show()
        self.assertEqual(code, 1, text)
        self.assertIn("FAILED: ", text)
        self.assertIn(part, " ".join(text.split()))

    def test_another_base_loss_in_the_second_process(self):
        self.losses["base"] += 2e-4
        self.assert_fails("base 4.42672 instead of 4.42652")

    def test_another_adapter_loss_in_the_second_process(self):
        self.losses["after"] -= 2e-4
        self.assert_fails("NOT THE SAME")

    def test_a_loss_outside_the_bars(self):
        self.losses.update(after=4.2)
        self.assert_fails("held-out loss after is 4.2000")

    def test_a_step_apart_from_the_reference(self):
        self.stored["losses"][7] += 3e-3
        self.assert_fails("step 8: loss 4.0931, the reference has 4.0901")

    def test_rounded_operands(self):
        self.stored["losses"][7] += 3e-3
        self.train["kernels"] = "avx2"
        self.assertEqual(self.show()[0], 0)
        self.stored["losses"][7] += 7e-2
        self.assert_fails("step 8: loss 4.1631")

    def test_an_evaluation_apart_from_the_reference(self):
        self.stored["curve"][2][1] += 3e-3
        self.assert_fails("held-out at step 30")

    def test_a_missing_step(self):
        self.stored["losses"].pop()
        self.assert_fails("59 steps in the log")

    def test_entries_that_got_worse(self):
        self.stored["held_out_after"][:3] = [[9.0, 10]] * 3
        self.assert_fails("only 13 of 16")

    def test_no_name_in_the_answer(self):
        self.stored["after"]["Hi, who are you?"] = "Hello there."
        self.assert_fails("should name Moesa")

    def test_no_run(self):
        with self.assertRaisesRegex(UserError, "./run demo makes it"):
            screen.show(self.folder, self.folder, False)


if __name__ == "__main__":
    unittest.main()
