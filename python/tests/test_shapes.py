# SPDX-License-Identifier: Apache-2.0
"""The shapes of data files, and the token file they become."""

import contextlib
import io
import json
import os
import tempfile
import unittest

import numpy as np

from moesaic.errors import UserError
from moesaic.options import columns as columns_of

from .support import CHATML, REASONING, DataTest, talk


class Shapes(DataTest):
    def setUp(self):
        super().setUp()
        self.template(CHATML)

    def whole(self, row, *flags):
        (document,) = self.documents(self.rows(row), *flags)
        return "".join(text for text, _ in document)

    def test_alpaca_joins_instruction_and_input_and_keeps_history(self):
        row = {"instruction": "ask", "input": "more", "output": "yes", "system": "be", "history": [["q", "a"]]}
        text = self.whole(row)
        self.assertEqual(
            text,
            "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
            "<|im_start|>user\nask\nmore<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n",
        )
        self.assertEqual(self.trained(row), ["a<|im_end|>", "yes<|im_end|>"])

    def test_sharegpt_equals_messages(self):
        share = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}
        self.assertEqual(self.whole(share), self.whole(talk(("system", "s"), ("user", "q"), ("assistant", "a"))))

    def test_sharegpt_calls_and_tools_equal_openai_ones(self):
        self.template(REASONING)
        tool = {"name": "add", "description": "adds", "parameters": {}}
        share = {
            "conversations": [
                {"from": "human", "value": "1+2"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "3"},
            ],
            "tools": json.dumps([tool]),
        }
        messages = {
            "messages": [
                {"role": "user", "content": "1+2"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": [{"type": "function", "function": tool}],
        }
        self.assertEqual(self.whole(share), self.whole(messages))

    def test_conversations_with_role_and_content_are_messages(self):
        row = {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
        self.assertEqual(self.trained(row), ["a<|im_end|>"])

    def test_text_is_trained_whole_but_for_its_first_token(self):
        (document,) = self.documents(self.rows({"text": "hello world"}))
        self.assertEqual(document, [("hello", False), (" world<|im_end|>", True)])

    def test_content_parts_are_joined(self):
        row = {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ]
        }
        self.assertEqual(self.trained(row), ["a<|im_end|>"])

    def test_token_rows_are_taken_as_they_are_without_a_tokenizer(self):
        os.unlink(os.path.join(self.model, "tokenizer.json"))
        self.write("model/config.json", '{"vocab_size": 10}')
        path = self.rows({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]})
        _, arrays, metadata = self.run_data(path, "--quiet")
        self.assertEqual(arrays["input_ids"].tolist(), [1, 2, 3, 4, 5])
        self.assertEqual(arrays["labels"].tolist(), [-100, 2, 3, 4, 5])
        self.assertEqual((metadata["tokenizer_vocab_size"], metadata["trained_tokens"]), ("10", "3"))

    def test_json_array_and_several_files(self):
        array = self.write("a.json", json.dumps([{"text": "one two"}]))
        lines = self.rows({"instruction": "q", "output": "a"})
        printed, arrays, _ = self.run_data(array, "--data", lines)
        self.assertIn("a.json: text", printed)
        self.assertIn("data.jsonl: alpaca", printed)
        self.assertEqual(len(arrays["doc_offsets"]), 3)

    def test_columns_rename(self):
        row = {"question": "q", "answer": "a"}
        self.assertEqual(self.trained(row, "--columns", "instruction=question", "output=answer"), ["a<|im_end|>"])
        row = {"instruction": "a", "output": "q"}
        self.assertEqual(self.trained(row, "--columns", "instruction=output", "output=instruction"), ["a<|im_end|>"])

    def test_columns_of_one_file(self):
        first = self.write("a.json", json.dumps([{"question": "q", "text": "not this"}, {"question": "q", "text": "a"}]))
        second = self.write("b.json", json.dumps([{"prompt": "q", "said": "a"}]))
        columns = [f"instruction=question@{first}", f"output=text@{first}", f"instruction=prompt@{second}", "output=said"]
        printed, arrays, _ = self.run_data(first, "--data", second, "--columns", *columns, f"instruction=question@{first}")
        self.assertIn("a.json: alpaca", printed)
        self.assertIn("b.json: alpaca", printed)
        self.assertEqual(len(arrays["doc_offsets"]), 4)
        with self.assertRaisesRegex(UserError, "a.json has instruction from question and from text: one of both"):
            columns_of([[f"instruction=question@{first}", f"instruction=text@{first}"]], [first])
        for item in ("text", "instruction=", "=question", f"instruction=@{first}"):
            with self.assertRaisesRegex(UserError, f"--columns {item}: expected NAME=VALUE"):
                columns_of([[item]], [first])


class TokenFile(DataTest):
    def setUp(self):
        super().setUp()
        self.template(CHATML)

    def test_types_and_metadata(self):
        _, arrays, metadata = self.run_data(self.rows(talk(("user", "q"), ("assistant", "a"))), "--quiet")
        kinds = {name: str(array.dtype) for name, array in arrays.items()}
        self.assertEqual(
            kinds, {"input_ids": "int32", "labels": "int32", "doc_offsets": "int64", "pack_offsets": "int64"}
        )
        for name in (
            "format",
            "hash",
            "tokenizer_vocab_size",
            "source",
            "template",
            "cutoff_len",
            "docs",
            "trained_tokens",
        ):
            self.assertIn(name, metadata)
        self.assertEqual(
            (metadata["format"], metadata["docs"], metadata["trained_tokens"]), ("moesaic-tokens-1", "1", "2")
        )

    def test_hash_follows_everything_that_matters_and_nothing_else(self):
        path = self.rows(talk(("user", "q"), ("assistant", "a")))
        hashes = []
        for flags in (
            [],
            [],
            ["--cutoff-len", "64"],
            ["--train-on", "all"],
            ["--packing", "off"],
            ["--template-vars", "x=1"],
        ):
            hashes.append(self.run_data(path, "--quiet", *flags)[2]["hash"])
        self.template(CHATML + " ")
        hashes.append(self.run_data(path, "--quiet")[2]["hash"])
        self.rows(talk(("user", "q"), ("assistant", "b")))
        hashes.append(self.run_data(path, "--quiet")[2]["hash"])
        self.assertEqual(hashes[0], hashes[1])
        self.assertEqual(len(set(hashes)), len(hashes) - 1)

    def test_packs_hold_whole_documents_first_fit(self):
        texts = ["x" * n for n in (5, 7, 4, 3, 9)]  # one token a letter, and the end token
        path = self.rows(*({"text": t} for t in texts))
        _, arrays, _ = self.run_data(path, "--quiet", "--cutoff-len", "10")
        lengths = np.diff(arrays["doc_offsets"]).tolist()
        packs = np.split(np.array(lengths), arrays["pack_offsets"][1:-1])
        self.assertEqual([p.tolist() for p in packs], [[6, 4], [8], [5], [10]])
        _, arrays, _ = self.run_data(path, "--quiet", "--cutoff-len", "10", "--packing", "off")
        self.assertEqual(np.diff(arrays["doc_offsets"]).tolist(), [6, 8, 5, 4, 10])
        self.assertEqual(arrays["pack_offsets"].tolist(), [0, 1, 2, 3, 4, 5])

    def test_packing_equals_the_plain_search(self):
        from moesaic.packing import first_fit

        generator = np.random.RandomState(3)
        lengths = generator.randint(1, 40, 500).tolist()
        packs, room = [], []
        for d, n in enumerate(lengths):
            at = next((i for i, r in enumerate(room) if r >= n), len(room))
            if at == len(room):
                packs.append([])
                room.append(50)
            packs[at].append(d)
            room[at] -= n
        self.assertEqual(first_fit(lengths, 50), packs)
        self.assertEqual(first_fit([], 5), [])

    def test_long_documents(self):
        path = self.rows({"text": "x" * 20}, {"text": "y" * 5})
        printed, arrays, _ = self.run_data(path, "--cutoff-len", "8")
        self.assertIn("1 truncated at 8", printed)
        self.assertEqual(np.diff(arrays["doc_offsets"]).tolist(), [8, 6])
        printed, arrays, _ = self.run_data(path, "--cutoff-len", "8", "--on-long", "drop")
        self.assertIn("1 too long", printed)
        self.assertEqual(len(arrays["doc_offsets"]), 2)

    def test_rows_without_a_trained_token_are_dropped_and_counted(self):
        path = self.rows(
            talk(("user", "q" * 40), ("assistant", "a")),
            talk(("user", "q"), ("assistant", "a")),
            talk(("user", "only")),
        )
        printed, arrays, _ = self.run_data(path, "--cutoff-len", "30", "--json")
        stats = json.loads(printed)
        self.assertEqual((stats["rows"], stats["docs"], stats["dropped_untrained"]), (3, 1, 2))

    def test_max_samples_and_seed(self):
        path = self.rows(*({"text": f"row {i}"} for i in range(9)))
        ids = [
            self.run_data(path, "--quiet", "--max-samples", "3", *seed)[1]["input_ids"].tolist()
            for seed in ([], ["--seed", "1"], ["--seed", "1"])
        ]
        self.assertEqual(ids[1], ids[2])
        self.assertNotEqual(ids[0], ids[1])

    def test_max_samples_is_of_each_file(self):
        paths = [self.rows(*({"text": f"{name} {i}"} for i in range(5)), name=f"{name}.jsonl") for name in "ab"]
        for seed in ([], ["--seed", "1"]):
            stats = json.loads(self.run_data(paths[0], "--data", paths[1], "--json", "--max-samples", "2", *seed)[0])
            self.assertEqual((stats["rows"], stats["docs"]), (4, 4))

    def test_variables_that_the_template_does_not_read_are_named(self):
        path = self.rows(talk(("user", "q"), ("assistant", "hello")))
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            self.run_data(path, "--template-vars", "enable_thinkin=false")
        self.assertIn("does not read enable_thinkin", errors.getvalue())

    def test_example_is_shown_with_its_trained_tokens_marked(self):
        printed, _, _ = self.run_data(self.rows(talk(("user", "q"), ("assistant", "hello"))))
        self.assertIn("\u27e6hello<|im_end|>\u27e7", printed)


class Refusals(DataTest):
    def setUp(self):
        super().setUp()
        self.template(CHATML)

    def test_files(self):
        self.assertIn("no such file", self.refuse("nowhere.jsonl"))
        self.assertIn("not a regular file", self.refuse("/dev/null"))
        self.assertIn("not a regular file", self.refuse("nowhere.jsonl", "--output", "/dev/full"))
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows:
            self.assertIn("the data itself", self.refuse(rows.name, "--output", rows.name))
        self.assertIn("empty", self.refuse(self.write("e.jsonl", "")))
        self.assertIn("empty", self.refuse(self.write("e.jsonl", "\n \n")))
        self.assertIn("e.jsonl:2: not valid JSON", self.refuse(self.write("e.jsonl", '{"text": "x"}\n{"text": \n')))
        self.assertIn("e.json:3: not valid JSON", self.refuse(self.write("e.json", '[{"text": "x"},\n{"text":\n]')))
        self.assertIn("must be a JSON object", self.refuse(self.write("e.jsonl", "5\n")))
        self.assertIn("e.jsonl:1: half of a surrogate", self.refuse(self.write("e.jsonl", '{"text": "\\ud800 hello"}\n')))

    def test_rows(self):
        self.assertIn("data.jsonl:1: unknown shape: it has foo", self.refuse(self.rows({"foo": 1})))
        self.assertIn(
            "data.jsonl:2: message 1: unknown role 'usr'",
            self.refuse(self.rows(talk(("user", "q"), ("assistant", "a")), talk(("usr", "q")))),
        )
        self.assertIn(
            "unknown role 'robot'", self.refuse(self.rows({"conversations": [{"from": "robot", "value": "x"}]}))
        )
        self.assertIn("no row has a trained token", self.refuse(self.rows(talk(("user", "q")))))
        self.assertIn("'output' must be a string", self.refuse(self.rows({"instruction": "q", "output": 5})))
        self.assertIn("outside the vocabulary", self.refuse(self.rows({"input_ids": [10**6], "labels": [-100]})))
        self.assertIn("labels are not shifted", self.refuse(self.rows({"input_ids": [1, 2], "labels": [2, 3]})))
        self.assertIn(
            "more than --cutoff-len 4",
            self.refuse(self.rows({"text": "xxxxxx"}), "--cutoff-len", "4", "--on-long", "error"),
        )

    def test_flags(self):
        path = self.rows({"text": "x y"})
        self.assertIn("--cutof-len", self.refuse(path, "--cutof-len", "5"))
        self.assertIn("not 1 or more", self.refuse(path, "--cutoff-len", "0"))
        self.assertIn("expected NAME=VALUE", self.refuse(path, "--template-vars", "x"))

    def test_no_template(self):
        os.unlink(os.path.join(self.model, "chat_template.jinja"))
        self.assertIn("--chat-template FILE", self.refuse(self.rows({"instruction": "q", "output": "a"})))

    def test_template_faults(self):
        self.template("{{ raise_exception('roles must alternate') }}")
        self.assertIn(
            "data.jsonl:1: the chat template refuses it: roles must alternate",
            self.refuse(self.rows(talk(("user", "q"), ("assistant", "a")))),
        )
        self.template("{% if %}")
        self.assertIn("chat template: line 1", self.refuse(self.rows(talk(("user", "q"), ("assistant", "a")))))


if __name__ == "__main__":
    unittest.main()
