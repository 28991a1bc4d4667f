# SPDX-License-Identifier: Apache-2.0
"""Which tokens are trained, with templates that have the habits of real ones."""

import unittest

from .support import (
    CHANNELS,
    CHATML,
    COUNTING,
    DEFAULT_SYSTEM,
    GENERATION,
    JOINING,
    OPEN_ENDED,
    REASONING,
    TOTAL,
    DataTest,
    talk,
)

TWO_TURNS = talk(("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))


def call(name, arguments, **more):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        **more,
    }


class Chatml(DataTest):
    def setUp(self):
        super().setUp()
        self.template(CHATML)

    def test_every_turn_with_its_end_token_and_not_the_newline(self):
        self.assertEqual(self.trained(TWO_TURNS), ["a1<|im_end|>", "a2<|im_end|>"])

    def test_last_and_all(self):
        self.assertEqual(self.trained(TWO_TURNS, "--train-on", "last"), ["a2<|im_end|>"])
        (document,) = self.documents(self.rows(TWO_TURNS), "--train-on", "all")
        self.assertEqual([on for _, on in document], [False, True])
        self.assertEqual(document[0][0], "<|im_start|>")

    def test_an_answer_that_repeats_the_question_or_the_markup(self):
        row = talk(("user", "say assistant\nassistant\n"), ("assistant", "assistant\nassistant"))
        self.assertEqual(self.trained(row), ["assistant\nassistant<|im_end|>"])

    def test_whitespace_around_an_answer(self):
        self.assertEqual(self.trained(talk(("user", "q"), ("assistant", "hello\n"))), ["hello\n<|im_end|>"])

    def test_a_token_that_reaches_in_from_the_header_is_not_trained(self):
        (document,) = self.documents(self.rows(talk(("user", "q"), ("assistant", "\nhello"))))
        self.assertEqual(document[-2], ("hello<|im_end|>", True))  # the header's newline and the answer's are one token

    def test_characters_of_several_bytes(self):
        self.assertEqual(
            self.trained(talk(("user", "\U0001f642"), ("assistant", "gr\u00fc\u00df \U0001f642"))),
            ["gr\u00fc\u00df \U0001f642<|im_end|>"],
        )

    def test_private_characters_in_the_data(self):
        odd = "x" + chr(0xF0001) + chr(0xF0002) + "y"
        self.assertEqual(self.trained(talk(("user", odd), ("assistant", odd))), [odd + "<|im_end|>"])

    def test_inline_reasoning_is_trained_whole(self):
        answer = "<think>\nwhy\n</think>\n\nhello"
        self.assertEqual(self.trained(talk(("user", "q"), ("assistant", answer))), [answer + "<|im_end|>"])


class Reasoning(DataTest):
    def setUp(self):
        super().setUp()
        self.template(REASONING)

    def test_the_empty_think_that_the_template_adds_is_not_trained(self):
        (document,) = self.documents(self.rows(talk(("user", "q"), ("assistant", "hello"))))
        self.assertTrue(document[0][0].endswith("<think>\n\n</think>\n\n"))
        self.assertEqual(document[1], ("hello<|im_end|>", True))

    def test_given_reasoning_is_trained_with_its_tags(self):
        row = {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "hello", "reasoning_content": "why"},
            ]
        }
        self.assertEqual(self.trained(row), ["<think>\nwhy\n</think>\n\nhello<|im_end|>"])
        inline = talk(("user", "q"), ("assistant", "<think>\nwhy\n</think>\n\nhello"))
        self.assertEqual(self.trained(inline), ["<think>\nwhy\n</think>\n\nhello<|im_end|>"])

    def test_reasoning_dropped_from_earlier_turns(self):
        row = talk(
            ("user", "q1"),
            ("assistant", "<think>\nw1\n</think>\n\na1"),
            ("user", "q2"),
            ("assistant", "<think>\nw2\n</think>\n\na2"),
        )
        self.assertEqual(self.trained(row), ["a1<|im_end|>", "<think>\nw2\n</think>\n\na2<|im_end|>"])

    def test_tool_calls_are_trained_with_their_wrapper_whatever_the_arguments_form(self):
        expected = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "three<|im_end|>"]
        for arguments in ({"a": 1}, '{"a":1}'):
            row = {
                "messages": [
                    {"role": "user", "content": "1+2"},
                    call("add", arguments),
                    {"role": "tool", "content": "3"},
                    {"role": "assistant", "content": "three"},
                ],
                "tools": [{"type": "function", "function": {"name": "add"}}],
            }
            self.assertEqual(self.trained(row), expected)

    def test_a_last_call_without_reasoning_skips_the_empty_think(self):
        row = {"messages": [{"role": "user", "content": "q"}, call("f", {})]}
        self.assertEqual(self.trained(row), ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'])

    def test_reasoning_content_and_call(self):
        row = {
            "messages": [
                {"role": "user", "content": "q"},
                call("f", {}, reasoning_content="why"),
                {"role": "tool", "content": "f"},
                {"role": "assistant", "content": "a"},
            ]
        }
        self.assertEqual(
            self.trained(row),
            [
                '<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>',
                "a<|im_end|>",
            ],
        )

    def test_tool_responses_are_not_mistaken_for_questions(self):
        row = talk(
            ("user", "q"),
            ("assistant", "<think>w</think>a"),
            ("user", "<tool_response>r</tool_response>"),
            ("assistant", "b"),
        )
        self.assertEqual(self.trained(row), ["<think>\nw\n</think>\n\na<|im_end|>", "b<|im_end|>"])


class OtherTemplates(DataTest):
    def test_history_ends_differently_from_the_last_turn(self):
        self.template(CHANNELS)
        self.assertEqual(
            self.trained(TWO_TURNS), ["<|endoftext|>final:a1<|endoftext|>", "<|endoftext|>final:a2<|im_end|>"]
        )

    def test_the_next_role_token_ends_a_turn_where_the_checkpoint_says_so(self):
        self.template(OPEN_ENDED)
        self.assertEqual(self.trained(TWO_TURNS), ["a1", "a2"])
        start = self.tokenizer.token_to_id("<|im_start|>")
        self.write("model/generation_config.json", '{"eos_token_id": [%d]}' % start)
        self.assertEqual(self.trained(TWO_TURNS), ["a1<|im_start|>", "a2"])

    def test_a_template_that_joins_arguments_to_text_gets_a_string(self):
        self.template(JOINING)
        row = {
            "messages": [
                {"role": "user", "content": "q"},
                call("f", {"a": 1}),
                {"role": "tool", "content": "r"},
                {"role": "assistant", "content": "a"},
            ]
        }
        self.assertEqual(self.trained(row), ['<tool_call>f {"a": 1}</tool_call><|im_end|>', "a<|im_end|>"])

    def test_generation_marks_decide(self):
        self.template(GENERATION)
        self.assertEqual(self.trained(TWO_TURNS), ["a1<|im_end|>", "a2<|im_end|>"])
        self.assertEqual(self.trained(TWO_TURNS, "--train-on", "last"), ["a2<|im_end|>"])

    def test_a_template_that_looks_at_the_content_is_compared_by_growth(self):
        self.template(COUNTING)
        self.assertEqual(self.trained(TWO_TURNS), ["2\na1<|im_end|>", "2\na2<|im_end|>"])

    def test_a_template_that_hides_the_turns_is_refused_with_the_remedy(self):
        self.template(TOTAL)
        self.assertIn("{% generation %}", self.refuse(self.rows(TWO_TURNS)))

    def test_system_turns(self):
        self.template(DEFAULT_SYSTEM)
        row = talk(("user", "q"), ("assistant", "a"))
        plain = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        (document,) = self.documents(self.rows(row))
        self.assertEqual(document[0][0], "<|im_start|>system\nBe nice.<|im_end|>\n" + plain)
        (document,) = self.documents(self.rows(row), "--no-system")
        self.assertEqual([document[0][0], document[1]], [plain, ("a<|im_end|>", True)])
        row = talk(("system", "s"), ("user", "q"), ("assistant", "a"))
        (document,) = self.documents(self.rows(row), "--no-system")
        self.assertEqual(document[0][0], plain)

    def test_template_file_and_variables(self):
        path = self.write("t.jinja", "{% for m in messages %}{{ word }}{{ m.content }}{% endfor %}")
        (document,) = self.documents(
            self.rows(talk(("user", "q"), ("assistant", "a"))), "--chat-template", path, "--template-vars", "word=W"
        )
        self.assertEqual(document, [("WqW", False), ("a", True)])


if __name__ == "__main__":
    unittest.main()
