# SPDX-License-Identifier: Apache-2.0
"""Which characters of a rendered conversation are trained.

The conversation is rendered once as it is: that text is tokenised. It is rendered a second time with private
characters (marks) around what each turn says (content, reasoning, tool names); without the marks the second text
must equal the first, so the marks' places are places in the first. Rules, for the assistant turns chosen by
--train-on:

- a template with {% generation %} blocks says itself what is trained: those spans, nothing else;
- otherwise a turn begins with its first marked part. When that is reasoning, a tool call, or follows a special
  token of the turn's own (gpt-oss' channel), it begins at the end of the generation prompt, because the model has
  to write what lies between by itself; an empty <think></think> that the template puts before is not trained;
- it ends behind the end-of-turn token: the special tokens that the template puts behind the turn when the
  conversation stops there;
- a template that changes the marked content cannot be compared: then each turn is found as the growth of the
  rendering from the messages before it to the messages up to it, which must be beginnings of the whole text; else
  the row is refused, naming the remedy.
"""

import json
import re

from .errors import UserError
from .template import GENERATION, Marks

_THINK = re.compile(r"(<think>|</think>)")
_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
_END_LIKE = re.compile(r"end|eot|eos|eom|return|call|</s>", re.IGNORECASE)


class _Part:
    def __init__(self, turn, kind):
        self.turn, self.kind = turn, kind
        self.begin = self.end = None


class _Marker:
    """Copies messages with marks in them; remembers which part belongs to which turn."""

    def __init__(self, marks):
        self.marks = marks
        self.parts = [None]  # pair 0 belongs to {% generation %}

    def _enclose(self, text, turn, kind):
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        begin, end = self.marks.pair(len(self.parts))
        self.parts.append(_Part(turn, kind))
        return text[:at] + begin + core + end + text[at + len(core) :]

    def _content(self, text, turn):
        """Inline reasoning is marked apart from the answer, because templates split it off."""
        if "</think>" not in text:
            return self._enclose(text, turn, "content")
        pieces = _THINK.split(text)
        last_close = len(pieces) - 1 - pieces[::-1].index("</think>")
        for i in range(0, len(pieces), 2):
            pieces[i] = self._enclose(pieces[i], turn, "content" if i > last_close else "reasoning")
        return "".join(pieces)

    def _call(self, call, turn):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return {**call, "function": {**function, "name": self._enclose(function["name"], turn, "call")}}
        return call

    def message(self, message, turn):
        if message["role"] != "assistant":
            return message
        copy = dict(message)
        if isinstance(copy.get("reasoning_content"), str):
            copy["reasoning_content"] = self._enclose(copy["reasoning_content"], turn, "reasoning")
        if isinstance(copy.get("content"), str):
            copy["content"] = self._content(copy["content"], turn)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [self._call(call, turn) for call in copy["tool_calls"]]
        return copy


def _arguments_as_text(messages):
    """The messages with every call's arguments as JSON text; None where nothing changes."""
    changed, result = False, []
    for message in messages:
        calls = message.get("tool_calls") or []
        if any(not isinstance(c["function"]["arguments"], str) for c in calls):
            changed = True
            calls = [
                {**c, "function": {**c["function"], "arguments": _as_text(c["function"]["arguments"])}} for c in calls
            ]
            message = {**message, "tool_calls": calls}
        result.append(message)
    return result if changed else None


def _as_text(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _everything(messages, tools):
    return "".join(str(value) for message in messages for value in message.values()) + str(tools or "")


def _generation_prompt(template, messages, tools):
    """What add_generation_prompt appends behind the messages ('' where the template knows none)."""
    try:
        without = template.render(messages, tools)
        with_prompt = template.render(messages, tools, add_generation_prompt=True)
    except UserError:
        return ""
    return with_prompt[len(without) :] if with_prompt.startswith(without) else ""


class SpanFinder:
    """Finds trained character spans for one template and tokenizer."""

    def __init__(self, template, special_texts, eos_texts=()):
        self.template = template
        specials = sorted(set(special_texts) | set(eos_texts), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        self._eos_texts = tuple(eos_texts)

    def find(self, messages, tools, train_on):
        """-> (text, [(begin, end)]) for train_on assistant, last or all."""
        try:
            text = self.template.render(messages, tools)
        except UserError:  # some templates join a call's arguments to text, so they want a string
            texts = _arguments_as_text(messages)
            if texts is None:
                raise
            messages, text = texts, self.template.render(texts, tools)
        if train_on == "all":
            return text, [(0, len(text))]
        chosen = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if train_on == "last":
            chosen = chosen[-1:]
        marks = Marks(_everything(messages, tools) + self.template.source)
        if self.template.has_generation:
            return text, self._generation_spans(text, messages, tools, marks, train_on)
        spans = self._marked_spans(text, messages, tools, marks, chosen)
        if spans is None:
            spans = self._grown_spans(text, messages, tools, chosen)
        return text, spans

    # -- {% generation %} --------------------------------------------------------------------------

    def _generation_spans(self, text, messages, tools, marks, train_on):
        clean, found = marks.cut(self.template.render(messages, tools, marks=marks))
        if clean != text:
            raise UserError(
                "the chat template changes what its {% generation %} blocks rendered; put them around the final text"
            )
        places = [place for part, _, place in found if part == GENERATION]
        spans = [(b, e) for b, e in zip(places[::2], places[1::2]) if e > b]
        return spans[-1:] if train_on == "last" else spans

    # -- marks around what each turn says ----------------------------------------------------------

    def _marked_spans(self, text, messages, tools, marks, chosen):
        """Spans of the chosen turns, or None where the marks changed the text."""
        marker = _Marker(marks)
        marked = [marker.message(message, turn) for turn, message in enumerate(messages)]
        try:
            clean, found = marks.cut(self.template.render(marked, tools))
        except UserError:
            return None
        if clean != text:
            return None
        for part, is_end, place in found:
            _note(marker.parts[part], is_end, place)
        spans, limit = [], 0
        for turn in sorted({p.turn for p in marker.parts[1:]}):
            parts = [p for p in marker.parts[1:] if p.turn == turn and (p.begin is not None or p.end is not None)]
            if not parts:
                continue  # the template leaves the turn out
            if any(p.begin is None or p.end is None for p in parts):
                return None
            begin = self._turn_begin(text, messages, tools, turn, parts, limit)
            limit = self._turn_end(text, messages, tools, turn, parts)
            if turn in chosen:
                spans.append((begin, limit))
        return spans

    def _turn_begin(self, text, messages, tools, turn, parts, limit):
        first = min(parts, key=lambda p: p.begin)
        prompt = _generation_prompt(self.template, messages[:turn], tools)
        at = text.rfind(prompt, limit, first.begin) if prompt else -1
        if at < 0:  # the history's header may differ from the prompt in its tail, as an added <think> does
            prompt = prompt.rstrip().removesuffix("<think>").removesuffix("</think>")
            at = text.rfind(prompt, limit, first.begin) if prompt else -1
        if at < 0:
            return first.begin
        begin = at + len(prompt)
        if first.kind == "reasoning":
            return begin
        empty = _EMPTY_THINK.match(text, begin, first.begin)
        begin = empty.end() if empty else begin
        own_structure = first.kind == "call" or (self._special and self._special.search(text, begin, first.begin))
        return begin if own_structure else first.begin

    def _turn_end(self, text, messages, tools, turn, parts):
        """Behind the special tokens that close the turn; the part's own end where there are none."""
        at = max(p.end for p in parts)
        closing = self._closing(messages, tools, turn, text, at)
        if closing is None:
            return at
        plain, specials = closing
        if not specials:
            end = at + _common_length(text[at:], plain.rstrip())
            return next((end + len(t) for t in self._eos_texts if text.startswith(t, end)), end)
        for i, special in enumerate(specials):
            match = self._special.search(text, at)
            last = i == len(specials) - 1
            if not match or (match.group() != special and not (last and _END_LIKE.search(match.group()))):
                break
            at = match.end()
        return at

    def _closing(self, messages, tools, turn, text, at):
        """-> (what the template puts behind the turn when the conversation stops there, its special tokens)."""
        if turn == len(messages) - 1:
            tail = text[at:]
        else:
            marks = Marks(_everything(messages, tools) + self.template.source)
            marker = _Marker(marks)
            cut = [marker.message(m, i) for i, m in enumerate(messages[: turn + 1])]
            try:
                clean, found = marks.cut(self.template.render(cut, tools))
            except UserError:
                return None
            ends = [place for part, is_end, place in found if is_end and part and marker.parts[part].turn == turn]
            if not ends:
                return None
            tail = clean[max(ends) :]
        return tail, self._special.findall(tail) if self._special else []

    # -- growth of the rendering -------------------------------------------------------------------

    def _grown_spans(self, text, messages, tools, chosen):
        spans = []
        for turn in chosen:
            before = self.template.render(messages[:turn], tools, add_generation_prompt=True)
            upto = self.template.render(messages[: turn + 1], tools)
            end = _common_length(text, upto)
            if not text.startswith(before) or end <= len(before):
                raise UserError(
                    f"message {turn + 1}: its text cannot be found in what the chat template renders; enclose the assistant's text in the "
                    "template in {% generation %}...{% endgeneration %} and pass it with --chat-template"
                )
            closing = list(self._special.finditer(text, len(before), end)) if self._special else []
            spans.append((len(before), closing[-1].end() if closing else end))
        return spans


def _note(part, is_end, place):
    """The first occurrence counts: tool messages may repeat a call's name."""
    if part is None:
        return
    if is_end and part.end is None:
        part.end = place
    elif not is_end and part.begin is None:
        part.begin = place


def _common_length(a, b):
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


def trained_tokens(offsets, spans):
    """-> one bool per token: it begins inside a trained span (a token that reaches in from before is not trained)."""
    result = [False] * len(offsets)
    at = 0
    for i, (begin, _) in enumerate(offsets):
        while at < len(spans) and begin >= spans[at][1]:
            at += 1
        result[i] = at < len(spans) and begin >= spans[at][0]
    return result
