# SPDX-License-Identifier: Apache-2.0
"""Every bad input: its exit code, one clear line, nothing left in the output folder. No Python package is needed."""

import json
import os
import struct
import unittest

from support import MODEL, Case, save_tokens

SHARD = "model-00002-of-00002.safetensors"


class BadInput(Case):
    def spoil_config(self, **changes):
        path = os.path.join(self.model(), "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        config.update(changes)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)

    def shard(self):
        return os.path.join(self.model(), SHARD)

    def test_missing_shard(self):
        os.remove(self.shard())
        self.assertIn(SHARD, self.bad_training(2, model=self.model()))

    def test_truncated_shard(self):
        with open(self.shard(), "r+b") as file:
            file.truncate(100_000)
        self.assertIn(SHARD, self.bad_training(2, model=self.model()))

    def test_hostile_headers(self):
        with open(self.shard(), "rb") as file:
            data = file.read()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        name = next(n for n in header if n != "__metadata__")
        cases = [b"", b"abc", struct.pack("<Q", 1 << 63) + data[8:], struct.pack("<Q", len(data)) + data[8:]]
        changes = [{"data_offsets": [0, 1 << 62]}, {"shape": [1 << 40, 1 << 40]}, {"dtype": "F9"}, {"shape": [-1, 4]}, {"shape": [1] * 65}]
        for change in changes:
            text = json.dumps({**header, name: {**header[name], **change}}).encode()
            cases.append(struct.pack("<Q", len(text)) + text + data[8 + size :])
        for number, content in enumerate(cases):
            with self.subTest(number):
                with open(self.shard(), "wb") as file:
                    file.write(content)
                self.assertRegex(self.bad_training(2, model=self.model()), f"{SHARD}|dtype 'F9'")

    def test_wrong_shapes(self):
        self.spoil_config(moe_intermediate_size=96)
        self.assertIn("experts", self.bad_training(2, model=self.model()))

    def test_unknown_architecture(self):
        self.spoil_config(model_type="llama9", architectures=["Llama9ForCausalLM"])
        self.assertIn("llama9", self.bad_training(2, model=self.model()))

    def test_broken_config(self):
        with open(os.path.join(self.model(), "config.json"), "w", encoding="utf-8") as file:
            file.write('{"model_type": "qwen3_moe",')
        self.assertIn("config.json", self.bad_training(2, model=self.model()))

    def test_no_model(self):
        self.assertIn("no such folder", self.bad_training(2, model=self.path("absent")))
        os.mkdir(self.path("empty"))
        self.assertIn("no config.json", self.bad_training(2, model=self.path("empty")))

    def test_no_target_matched(self):
        self.assertIn("w_proj", self.bad_training(2, "--lora-target", "w_proj"))
        self.assertIn("name both", self.bad_training(2, "--lora-target", "up_proj"))
        self.assertIn("regular expression", self.bad_training(2, "--lora-target", "(?=q).*"))

    def test_no_trained_tokens(self):
        line = self.bad_training(2, data=self.tokens("none.safetensors", trained=False))
        self.assertIn("no token is trained", line)

    def test_empty_and_absent_data(self):
        for name in ("empty.safetensors",):
            self.assertIn(name, self.bad_training(2, data=self.write(name, "")))
        self.assertIn("absent.jsonl", self.bad_training(2, data=self.path("absent.jsonl")))

    def test_data_flags_with_a_token_file(self):
        self.assertIn("--train-on has no effect", self.bad_training(2, "--train-on", "all"))

    def test_ids_beyond_the_vocabulary(self):
        path = self.path("train.safetensors")
        save_tokens(path, [[1, 2, 3, 9000]], tokenizer_vocab_size="9999")
        self.assertIn("input_ids[3] is 9000, the vocabulary has 2048", self.bad_training(2, data=path))

    def test_too_little_memory(self):
        line = self.bad_training(3, "--memory-limit", "1MB")
        self.assertIn("MiB", line)

    def test_unwritable_output(self):
        self.write("file", "")
        for folder in (self.path("file"), self.path("file", "out"), "/proc/moesaic"):
            self.out = folder
            line = self.bad(2, *self.train_arguments())
            self.assertIn(folder.removesuffix("/out"), line)

    def test_output_with_results(self):
        os.mkdir(self.out)
        for name in ("adapter_config.json", "mine.txt"):
            self.write(os.path.join("out", name), "{}")
        self.assertIn("--overwrite", self.bad(2, *self.train_arguments()))
        self.assertEqual(sorted(os.listdir(self.out)), ["adapter_config.json", "mine.txt"])

    def test_unknown_policy(self):
        line = self.bad_training(2, "--policy", "lwss")
        self.assertIn("lwss", line)
        self.assertIn("lws ", line)

    def test_more_workers_than_starpu_has(self):
        self.assertIn("60000", self.bad_training(2, "--threads", "60000"))

    def test_numa(self):
        self.assertIn("--numa x", self.bad_training(2, "--numa", "x"))

    def test_adapter(self):
        self.assertIn("no such folder", self.bad_training(2, "--adapter", self.path("absent")))
        os.mkdir(self.path("adapter"))
        self.write("adapter/adapter_config.json", "{")
        self.assertIn("adapter", self.bad_training(2, "--adapter", self.path("adapter")))

    def test_resume_without_checkpoint(self):
        self.assertIn("has no checkpoint to go on from", self.bad_training(2, "--resume"))
        self.assertIn("absent: it has no state.json", self.bad_training(2, "--resume", self.path("absent")))

    def test_eval(self):
        line = self.bad(2, "eval", "--model", MODEL, "--data", self.write("empty.safetensors", ""))
        self.assertIn("empty.safetensors: 0 bytes are too few", line)
        line = self.bad(2, "eval", "--model", self.path("absent"), "--data", self.tokens())
        self.assertIn("absent: no such folder", line)


if __name__ == "__main__":
    unittest.main()
