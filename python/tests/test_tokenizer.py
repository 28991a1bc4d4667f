# SPDX-License-Identifier: Apache-2.0
"""Prompts and streamed answers, as the C program asks for them."""

import io
import json
import os
import subprocess
import sys
import unittest

from moesaic.errors import UserError
from moesaic.tokenizer import Chat, Server, Stream

from .support import CHATML, DEFAULT_SYSTEM, DataTest

PYTHON = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))


class Prompts(DataTest):
    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def test_chat_adds_the_generation_prompt(self):
        self.template(DEFAULT_SYSTEM)
        self.assertEqual(
            self.text(Chat(self.model).user("hi")),
            "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        )
        self.assertEqual(
            self.text(Chat(self.model, no_system=True).user("hi")),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        )
        self.assertEqual(
            self.text(Chat(self.model).user("hi", "s")),
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        )

    def test_no_template(self):
        chat = Chat(self.model)
        self.assertEqual(self.text(chat.raw("hello")), "hello")
        with self.assertRaises(UserError):
            chat.user("hi")

    def test_a_stream_never_cuts_a_character_and_equals_the_whole(self):
        text = "hello \U0001f642 gr\u00fc\u00df " * 40
        stream = Stream(Chat(self.model).checkpoint)
        pieces = [stream.token(i) for i in self.tokenizer.encode(text).ids]
        self.assertFalse(any("\ufffd" in p for p in pieces))
        self.assertEqual("".join(pieces) + stream.finish(), text)

    def test_a_stream_cut_inside_a_character_gives_the_rest_at_the_end(self):
        ids = self.tokenizer.encode("a\U0001f642").ids[:-1]
        stream = Stream(Chat(self.model).checkpoint)
        self.assertEqual([stream.token(i) for i in ids], ["a", "", "", ""])
        self.assertEqual(stream.finish(), "\ufffd")

    def test_server_answers_in_order_and_survives_bad_requests(self):
        self.template(CHATML)
        requests = [
            "zzz",
            '{"op": "nothing"}',
            '{"op": "token"}',
            '{"op": "encode", "text": "hello"}',
            '{"op": "start"}',
            "[]",
        ]
        target = io.StringIO()
        Server(Chat(self.model)).run(io.StringIO("\n".join(requests) + "\n"), target)
        answers = [json.loads(line) for line in target.getvalue().splitlines()]
        self.assertEqual(len(answers), len(requests) + 1)
        self.assertEqual((answers[0]["ready"], answers[0]["chat"]), (True, True))
        self.assertEqual([("error" in a) for a in answers[1:]], [True, True, True, False, False, True])
        self.assertEqual(self.text(answers[4]["ids"]), "hello")


class CommandLine(DataTest):
    def call(self, module, *arguments, text=""):
        return subprocess.run(
            [sys.executable, "-m", f"moesaic.{module}", *arguments],
            input=text.encode(),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": PYTHON},
            timeout=60,
        )

    def test_encode_and_decode(self):
        encoded = self.call("tokenizer", "encode", "--model", self.model, text="hello gr\u00fc\u00df")
        self.assertEqual(encoded.returncode, 0, encoded.stderr)
        decoded = self.call("tokenizer", "decode", "--model", self.model, text=encoded.stdout.decode())
        self.assertEqual(decoded.stdout.decode(), "hello gr\u00fc\u00df")

    def test_errors_are_one_line_and_exit_2(self):
        for module, arguments, text in (
            ("tokenizer", ["encode", "--model", "/nowhere"], ""),
            ("tokenizer", ["decode", "--model", self.model], "1 x"),
            ("data", ["--model", self.model, "--data", "/nowhere"], ""),
            ("data", ["--model", self.model, "--data", self.folder], ""),
            ("data", ["--bad"], ""),
            ("data", ["--model", self.model, "--data", self.rows({"text": "a b"}), "--output", "/proc/no/file"], ""),
        ):
            result = self.call(module, *arguments, text=text)
            self.assertEqual(result.returncode, 2, result)
            self.assertEqual(result.stderr.decode().count("\n"), 1, result.stderr)
            self.assertEqual(result.stdout, b"")

    def test_json_prints_nothing_else(self):
        result = self.call("data", "--model", self.model, "--data", self.rows({"text": "a b"}), "--json")
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertEqual(json.loads(result.stdout)["docs"], 1)


if __name__ == "__main__":
    unittest.main()
