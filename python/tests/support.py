# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint made in a temporary folder, templates with the habits of real ones, and a way to call the data
step."""

import contextlib
import io
import json
import os
import tempfile
import unittest

from moesaic import data, tensors
from moesaic.errors import UserError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

DEFAULT_SYSTEM = (
    """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe nice.<|im_end|>\\n' }}{% endif %}""" + CHATML
)

# Drops reasoning from turns before the last question, adds an empty <think> to a last turn that has none, knows tools: as Qwen3's.
REASONING = """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set reasoning = m.reasoning_content or '' %}{% set content = m.content %}
    {%- if '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{ '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\\n' if content or not loop.first else '' }}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The last turn ends in another token than earlier ones, and each begins with a channel: as gpt-oss'.
CHANNELS = """{%- for m in messages %}{{ '<|im_start|>' + m.role }}
{%- if m.role == 'assistant' %}{{ '<|endoftext|>final' }}{% endif %}{{ ':' + m.content | trim }}
{%- if m.role == 'assistant' and loop.last %}{{ '<|im_end|>' }}{% else %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""

# No end-of-turn token: the next turn's role token ends a turn: as GLM's.
OPEN_ENDED = """{%- for m in messages %}{{ ('<|im_start|>' if m.role == 'user' else '<|im_end|>') + '\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_end|>\\n' }}{% endif %}"""

GENERATION = """{%- for m in messages %}{% if m.role == 'assistant' %}{{ 'A: ' }}{% generation %}{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ 'U: ' + m.content + '\\n' }}{% endif %}{% endfor %}"""

# Joins a call's arguments to other text, so they must be a string: as DeepSeek's.
JOINING = """{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' if messages[loop.index0 - 1].role == 'user' else '' }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + ' ' + c.function.arguments + '</tool_call>' }}{% endfor %}{{ m.content + '<|im_end|>' }}
{%- else %}{{ 'U' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|im_start|>' }}{% endif %}"""

# What it renders depends on the content's length: marks inside the content change it.
COUNTING = """{%- for m in messages %}{{ '<|im_start|>' + m.role + ' ' + (m.content | length) | string + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"""

TOTAL = """{{- messages | map(attribute='content') | map('length') | sum }}{% for m in messages %}{{ m.content }}{% endfor %}"""


def _tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "hello"), ("\u010a", "\u010a")]
    vocab = {t: i for i, t in enumerate(alphabet + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    return tokenizer


class DataTest(unittest.TestCase):
    """Each test has a folder with a checkpoint 'model' and runs the data step in it."""

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = holder.name
        self.model = os.path.join(self.folder, "model")
        os.mkdir(self.model)
        self.tokenizer = _tokenizer()
        self.tokenizer.save(os.path.join(self.model, "tokenizer.json"))
        self.write("model/tokenizer_config.json", json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
        self.output = os.path.join(self.folder, "tokens.safetensors")

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def template(self, source):
        self.write("model/chat_template.jinja", source)

    def rows(self, *values, name="data.jsonl"):
        return self.write(name, "".join(json.dumps(v) + "\n" for v in values))

    def run_data(self, path, *flags):
        """-> (what it printed, arrays, metadata)"""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            data.main(["--model", self.model, "--data", path, "--output", self.output, *flags])
        arrays, metadata = tensors.load(self.output)
        return printed.getvalue(), arrays, metadata

    def documents(self, path, *flags):
        """-> per document [(text, trained)] stretches, in the file's order"""
        _, arrays, _ = self.run_data(path, "--quiet", *flags)
        offsets = arrays["doc_offsets"]
        return [
            self.stretches(arrays["input_ids"][b:e], arrays["labels"][b:e]) for b, e in zip(offsets[:-1], offsets[1:])
        ]

    def stretches(self, ids, labels):
        result, at = [], 0
        while at < len(ids):
            stop = at
            while stop < len(ids) and (labels[stop] == -100) == (labels[at] == -100):
                self.assertIn(labels[stop], (-100, ids[stop]))
                stop += 1
            result.append(
                (
                    self.tokenizer.decode(list(map(int, ids[at:stop])), skip_special_tokens=False),
                    bool(labels[at] != -100),
                )
            )
            at = stop
        return result

    def trained(self, *rows_and_flags):
        """The trained stretches of one row."""
        row, *flags = rows_and_flags
        (document,) = self.documents(self.rows(row), *flags)
        return [text for text, on in document if on]

    def refuse(self, path, *flags):
        """The error's text; nothing may have been written."""
        with self.assertRaises(UserError) as caught:
            self.run_data(path, *flags)
        self.assertFalse([n for n in os.listdir(self.folder) if "tokens" in n], "something was written")
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)


def talk(*pairs, **more):
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **more}
