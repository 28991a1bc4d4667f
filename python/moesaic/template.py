# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the jinja environment of transformers, and {% generation %} marks as character spans."""

import datetime
import json
import os

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import UserError

# Marks are single characters of the supplementary private use planes, one pair per marked part; they are cut out after rendering.
_PLANES = (0xF0000, 0x100000)
_PLANE_SIZE = 0xFFFD
GENERATION = 0  # the pair of a {% generation %} block; parts of messages take the pairs from 1


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: encloses what it renders in a pair of marks while marking is on."""

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(generation_marks=None, generation_seen=False)

    def parse(self, parser):
        line = next(parser.stream).lineno
        self.environment.generation_seen = True
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        text = caller()
        marks = self.environment.generation_marks
        return marks[0] + text + marks[1] if marks else text


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern):
    return datetime.datetime.now().strftime(pattern)


def _environment():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Marks:
    """Private characters that occur nowhere in a conversation: pair(i) encloses part i."""

    def __init__(self, text):
        for base in _PLANES:
            if not any(base <= ord(c) <= base + _PLANE_SIZE for c in text if ord(c) >= _PLANES[0]):
                self.base = base
                return
        raise UserError("the row holds characters of both private use planes, which the mask needs")

    def pair(self, part):
        if 2 * part + 1 > _PLANE_SIZE:
            raise UserError("the conversation has too many parts")
        return chr(self.base + 2 * part), chr(self.base + 2 * part + 1)

    def cut(self, text):
        """-> (text without marks, [(part, is_end, position)] in order)."""
        kept, found = [], []
        for character in text:
            code = ord(character) - self.base
            if 0 <= code <= _PLANE_SIZE:
                found.append((code // 2, code % 2 == 1, len(kept)))
            else:
                kept.append(character)
        return "".join(kept), found


class Template:
    """One compiled chat template with its variables."""

    def __init__(self, source, name, special_tokens=None, variables=None):
        self.source = source
        self.name = name
        self.variables = {**(special_tokens or {}), **(variables or {})}
        self._environment = _environment()
        try:
            self._compiled = self._environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise UserError(f"{name}: line {line}: {error}" if line else f"{name}: {error}") from None
        self.has_generation = self._environment.generation_seen

    def unused(self, names):
        """Those that the template never reads: misspelt, or of another template."""
        read = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return [name for name in names if name not in read]

    def render(self, messages, tools=None, add_generation_prompt=False, marks=None):
        """The text; with marks, {% generation %} blocks come enclosed in marks.pair(GENERATION)."""
        self._environment.generation_marks = marks.pair(GENERATION) if marks else None
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except jinja2.exceptions.TemplateError as error:
            raise UserError(f"the chat template refuses it: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"the chat template fails on it: {error}") from None
        finally:
            self._environment.generation_marks = None


def load_template(checkpoint, path, variables):
    """--chat-template FILE, else the checkpoint's own; an error where there is neither."""
    if path:
        with open(path, encoding="utf-8") as file:
            return Template(file.read(), path, checkpoint.special_tokens, variables)
    source = checkpoint.template()
    if not source:
        raise UserError(
            f"{checkpoint.folder} has no chat template (no chat_template.jinja, none in tokenizer_config.json): "
            "give one with --chat-template FILE, or use rows with 'text' or with 'input_ids' and 'labels'"
        )
    return Template(source, os.path.join(checkpoint.folder, "chat template"), checkpoint.special_tokens, variables)


class NoSystem:
    """A template without the system turn that it adds where a conversation has none."""

    def __init__(self, template):
        self._template = template
        self.source, self.name = template.source, template.name
        self.has_generation, self.variables = template.has_generation, template.variables
        self._bos, self._default = self._find_default()

    def _find_default(self):
        """-> (bos, system block). A later user turn shows the header of user turns; what stands before the first user's
        header is the block."""
        first, second, answer = (
            {"role": role, "content": chr(0xFDD0 + i)} for i, role in enumerate(("user", "user", "assistant"))
        )
        for talk in ([first, second], [first, answer, second]):
            try:
                text = self._template.render(talk)
            except UserError:
                continue  # some templates want the roles to alternate
            before, _, rest = text.partition(first["content"])
            between, _, after = rest.partition(second["content"])
            between = between.rpartition(answer["content"])[2]
            header = between.removeprefix(after)
            while not before.endswith(header):
                header = header[1:]
            block = before[: len(before) - len(header)] if header else ""
            bos = self.variables.get("bos_token") or ""
            if bos and block.startswith(bos) and not header.startswith(bos):
                return bos, block[len(bos) :]
            return "", block
        return "", ""

    def render(self, *arguments, **named):
        text = self._template.render(*arguments, **named)
        start = self._bos + self._default
        return self._bos + text[len(start) :] if self._default and text.startswith(start) else text
