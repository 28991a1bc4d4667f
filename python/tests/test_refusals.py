# SPDX-License-Identifier: Apache-2.0
"""What the data step and the tokenizer refuse, one row each: where it is, and what is wrong with it."""

import io
import os
import sys
import unittest
from unittest import mock

from moesaic import data, tensors, tokenizer
from moesaic.errors import UserError

from .support import CHATML, REASONING, DataTest, talk

HIDING = """{% for m in messages %}{% set shown %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}
{{- shown | upper | replace('Q', 'x' if 'q' in shown else 'y') | length }}{% endfor %}"""
CALL = {"from": "human", "value": "q"}


def call(value):
    return {"conversations": [CALL, {"from": "function_call", "value": value}, {"from": "gpt", "value": "a"}]}


class Rows(DataTest):
    def test_rows(self):
        self.template(REASONING)
        answer = {"role": "assistant", "content": "a"}
        for row, part in (
            ({"instruction": "q", "output": "a", "history": [["q"]]}, "'history' must be a list of [question, answer]"),
            (call("{"), "a function_call turn must hold JSON"),
            (call('{"arguments": {}}'), 'a function_call turn must hold {"name"'),
            ({"messages": [{"role": "user", "content": "q"}, {**answer, "tool_calls": {"name": "f"}}]}, "must be a list"),
        ):
            with self.subTest(part):
                line = self.refuse(self.rows(row))
                self.assertIn("data.jsonl:1: ", line)
                self.assertIn(part, line)

    def test_characters_of_both_private_planes(self):
        self.template(CHATML)
        odd = chr(0xF0001) + chr(0x100001)
        self.assertIn("both private use planes", self.refuse(self.rows(talk(("user", odd), ("assistant", odd)))))

    def test_a_generation_block_that_is_changed_afterwards(self):
        self.template(HIDING)
        line = self.refuse(self.rows(talk(("user", "q"), ("assistant", "answer"))))
        self.assertIn("{% generation %}", line)

    def test_files_without_rows(self):
        for name in ("blank.jsonl", "long.jsonl"):
            text = "\n" if name == "blank.jsonl" else "\n" * 5000
            self.assertIn(f"{name}: the file is empty", self.refuse(self.write(name, text)))
        self.assertIn("e.jsonl: the file is empty", self.refuse(self.write("e.jsonl", "")))

    def test_no_model(self):
        row = self.rows(talk(("user", "q"), ("assistant", "a")))
        self.model = os.path.join(self.folder, "absent")
        self.assertIn("absent: no such folder", self.refuse(row))

    def test_tokenizer_files(self):
        row = self.rows(talk(("user", "q"), ("assistant", "a")))
        self.write("model/tokenizer_config.json", "{")
        self.assertIn("tokenizer_config.json: not valid JSON", self.refuse(row))
        self.write("model/tokenizer_config.json", "{}")
        self.write("model/tokenizer.json", '{"model": 3}')
        self.assertIn("cannot be read as a tokenizer", self.refuse(row))
        os.remove(os.path.join(self.model, "tokenizer.json"))
        self.assertIn("no tokenizer.json in it", self.refuse(row))
        self.model = self.write("model/x.gguf", "GGUF")
        self.assertIn("no tokenizer.json beside it", self.refuse(row))

    def test_no_tensors(self):
        for content in ("", "abc", "\x08" + "\0" * 7):
            with self.assertRaisesRegex(UserError, "x.safetensors: not a safetensors file"):
                tensors.load(self.write("x.safetensors", content))


class Tokenizer(DataTest):
    def refused(self, *arguments, stdin=b""):
        with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))), self.assertRaises(UserError) as caught:
            tokenizer.main([*arguments, "--model", self.model])
        return str(caught.exception)

    def test_flags_and_input(self):
        self.assertIn("--raw excludes", self.refused("encode", "--raw", "--system", "s"))
        self.assertIn("--no-system excludes", self.refused("encode", "--no-system", "--system", "s"))
        self.assertIn("not UTF-8 (byte 1)", self.refused("encode", stdin=b"a\xff"))
        self.assertIn("'x' is not a token id of 0 to", self.refused("decode", stdin=b"1 x"))

    def test_a_folder_that_is_not_there(self):
        with self.assertRaisesRegex(UserError, "absent: no such folder"):
            tokenizer.Chat(os.path.join(self.folder, "absent"))

    def test_the_data_step_checks_the_folder_first(self):
        with self.assertRaisesRegex(UserError, "--model /absent: no such folder"):
            data.main(["--model", "/absent", "--data", self.rows({"text": "x"})])


if __name__ == "__main__":
    unittest.main()
