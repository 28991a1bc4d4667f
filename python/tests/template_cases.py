# SPDX-License-Identifier: Apache-2.0
"""The conversations of tests/fixtures/templates, and the checkpoint folder that their tokens are made with. Needs no
package but tokenizers, so that transformers' environment can use it."""

import json
import os

FIXTURES = os.path.join(os.path.dirname(__file__), "..", "..", "tests", "fixtures")
TEMPLATES = os.path.join(FIXTURES, "templates")
SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <|start|> <|channel|> <|message|> <|end|> <|return|>".split()
MARKUP = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>".split()
MARKS = "\u27e6\u27e7"


def cases():
    with open(os.path.join(TEMPLATES, "cases.json"), encoding="utf-8") as file:
        return json.load(file)


def save_cases(values):
    lines = ",\n".join(json.dumps(value, ensure_ascii=False) for value in values)
    with open(os.path.join(TEMPLATES, "cases.json"), "w", encoding="utf-8") as file:
        file.write(f"[\n{lines}\n]\n")


def template(case):
    with open(os.path.join(TEMPLATES, case["template"] + ".jinja"), encoding="utf-8") as file:
        return file.read()


def stretches(marked):
    """-> [(text, trained)] of a text with marks."""
    result, trained = [], False
    for piece in marked.replace(MARKS[0], "\0").replace(MARKS[1], "\0").split("\0"):
        if piece:
            result.append((piece, trained))
        trained = not trained
    return result


def make_model(folder, source):
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(FIXTURES, "ckpt", "qwen3moe", "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
        file.write(source)
