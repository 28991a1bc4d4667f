# SPDX-License-Identifier: Apache-2.0
"""Token files: packing changes nothing that a document sees, and what does not fit is refused."""

import hashlib
import json
import os

import unittest

from support import MODEL, Case, documents, save_tokens


class TokenFiles(Case):
    def losses(self, name, batch, **options):
        rows = [d[: 7 + 5 * (i % 4)] for i, d in enumerate(documents(12))]
        save_tokens(self.path(name), rows, **options)
        result = self.good("eval", "--model", MODEL, "--data", self.path(name), "--json", "--threads", 2,
                           "--batch-tokens", batch, MOESAIC_ISA="ref")  # fmt: skip
        return [document["loss"] for document in json.loads(result.stdout)["documents"]]

    def test_packed_and_unpacked_give_the_same_losses(self):
        alone = self.losses("alone.safetensors", 64)
        self.assertEqual(len(alone), 12)
        self.assertGreater(max(alone) - min(alone), 0.01)
        for packs, batch in (([3, 4, 5], 256), ([6, 6], 128), ([12], 512)):
            packed = self.losses("packed.safetensors", batch, packs=packs)
            for a, b in zip(alone, packed):
                self.assertAlmostEqual(a, b, delta=1e-6)

    def test_another_tokenizer(self):
        with open(os.path.join(MODEL, "tokenizer.json"), "rb") as file:
            own = hashlib.sha256(file.read()).hexdigest()
        save_tokens(self.path("own.safetensors"), documents(4), tokenizer=own)
        self.good("eval", "--model", MODEL, "--data", self.path("own.safetensors"), "--threads", 2)
        save_tokens(self.path("foreign.safetensors"), documents(4), tokenizer="0" * 64)
        line = self.bad_training(2, data=self.path("foreign.safetensors"))
        self.assertIn("foreign.safetensors was made with another tokenizer.json", line)
        self.assertIn(f"run moesaic data --model {MODEL} again", line)
        self.assertIn("another tokenizer", self.bad(2, "eval", "--model", MODEL, "--data",
                                                    self.path("foreign.safetensors")))  # fmt: skip

    def test_another_template(self):
        own = "{{ messages }} \u732b"
        self.model()
        self.write("model/chat_template.jinja", own)
        digest = hashlib.sha256(own.encode()).hexdigest()
        for name, values, fits in (
            ("same", {"template": digest, "template_from": "model"}, True),
            ("other", {"template": "1" * 64, "template_from": "model"}, False),
            ("given", {"template": "1" * 64, "template_from": "my.jinja"}, True),
        ):
            save_tokens(self.path(name + ".safetensors"), documents(4), **values)
            arguments = ["eval", "--model", self.model(), "--data", self.path(name + ".safetensors"), "--threads", 2]
            if fits:
                self.good(*arguments)
            else:
                self.assertIn("another chat template", self.bad(2, *arguments))

    def test_other_settings(self):
        made = {"cutoff_len": "64", "packing": "on", "train_on": "assistant"}
        save_tokens(self.path("t.safetensors"), documents(4), **made)
        flags = ["eval", "--model", MODEL, "--data", self.path("t.safetensors"), "--threads", "2", "--config"]
        for text, part in (
            ("cutoff_len: 32", "cutoff_len 64, 32 is asked for"),
            ("packing: false", "packing on, off is asked for"),
            ("train_on: last", "train_on assistant, last is asked for"),
        ):
            self.assertIn(part, self.bad(2, *flags, self.write("a.yaml", text)))
        self.good(*flags, self.write("a.yaml", "cutoff_len: 4096\npacking: true\ntrain_on: assistant"))

    def test_hashes_of_all_lengths(self):
        """The program's SHA-256 agrees with Python's where the padding changes."""
        self.model()
        for length in (1, 55, 56, 63, 64, 65, 119, 120, 1000):
            text = "x" * length
            self.write("model/chat_template.jinja", text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            save_tokens(self.path("t.safetensors"), documents(4), template=digest, template_from="model")
            self.good("eval", "--model", self.model(), "--data", self.path("t.safetensors"), "--threads", 2)


if __name__ == "__main__":
    unittest.main()
