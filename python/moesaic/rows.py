# SPDX-License-Identifier: Apache-2.0
"""Data files: reading json and jsonl, recognising the shape from the first row, turning rows into conversations."""

import json
import os

from .errors import UserError, is_file

SHAPES = ("alpaca", "sharegpt", "messages", "text", "tokens")
_EXPECTED = "alpaca (instruction, output), sharegpt (conversations), messages (messages), text (text) or tokens (input_ids, labels)"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
}
_MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Row:
    """A row of a file; place says where for error messages."""

    __slots__ = ("value", "place")

    def __init__(self, value, place):
        self.value, self.place = value, place

    def fail(self, text):
        raise UserError(f"{self.place}: {text}")


class Conversation:
    __slots__ = ("messages", "tools")

    def __init__(self, messages, tools=None):
        self.messages, self.tools = messages, tools


# ---- files ---------------------------------------------------------------------------------------


def read_rows(path, progress=lambda n: None):
    """Yields the rows of a .jsonl file (a row a line) or of a JSON array, one by one."""
    if not is_file(path):
        raise UserError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
    with open(path, "rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not head and os.path.getsize(path) <= 4096:
            raise UserError(f"{path}: the file is empty")
        file.seek(0)
        yield from _read_array(path, file, progress) if head.startswith(b"[") else _read_lines(path, file, progress)


def _decode(data, place):
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8: {error.reason} at byte {error.start}") from None


def _read_lines(path, file, progress):
    any_row = False
    for number, line in enumerate(file, 1):
        progress(len(line))
        if not line.strip():
            continue
        place = f"{path}:{number}"
        text = _decode(line, place)
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(
                f"{place}: not valid JSON: {_json_reason(error)} (one object a line, or one array in the file)"
            ) from None
        any_row = True
        yield _checked(value, place)
    if not any_row:
        raise UserError(f"{path}: the file is empty")


def _read_array(path, file, progress):
    data = file.read()
    try:
        values = json.loads(_decode(data, path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {_json_reason(error)}") from None
    if not values:
        raise UserError(f"{path}: the file holds an empty list")
    for number, value in enumerate(values, 1):
        progress(len(data) // len(values))
        yield _checked(value, f"{path}: row {number}")


def _json_reason(error):
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _checked(value, place):
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: half of a surrogate pair (\\u{ord(error.object[error.start]):04x}) is not text") from None
    if not isinstance(value, dict):
        raise UserError(f"{place}: a row must be a JSON object, this is {type(value).__name__}")
    return Row(value, place)


# ---- shapes --------------------------------------------------------------------------------------


def rename(row, columns):
    """columns: our name -> the file's name."""
    if columns:
        found = {ours: row.value[theirs] for ours, theirs in columns.items() if theirs in row.value}
        row.value = {k: v for k, v in row.value.items() if k not in columns.values()} | found
    return row


def recognise(row):
    """The shape of a file, from its first row."""
    value = row.value
    if "input_ids" in value:
        return "tokens"
    if isinstance(value.get("messages"), list):
        return "messages"
    if isinstance(value.get("conversations"), list):
        first = next(iter(value["conversations"]), None)
        return "messages" if isinstance(first, dict) and "role" in first and "from" not in first else "sharegpt"
    if "instruction" in value and "output" in value:
        return "alpaca"
    if "text" in value:
        return "text"
    keys = ", ".join(list(value)[:12]) or "no keys"
    row.fail(
        f"unknown shape: it has {keys}; expected {_EXPECTED}. Name columns with --columns OURS=THEIRS, as in --columns instruction=question"
    )


def conversation(row, shape):
    """A row of a chat shape as messages and tools."""
    return {"alpaca": _alpaca, "sharegpt": _sharegpt, "messages": _messages}[shape](row)


def without_system(talk):
    return Conversation([m for m in talk.messages if m["role"] not in ("system", "developer")], talk.tools)


def _string(row, key, default=None):
    value = row.value.get(key)
    if value is None:
        value = default
    if not isinstance(value, str):
        row.fail(f"'{key}' must be a string" + ("" if key in row.value else ", the row has none"))
    return value


def _list(row, key):
    value = row.value.get(key)
    if not isinstance(value, list) or not value:
        row.fail(
            f"'{key}' must be a list with at least one message" + ("" if key in row.value else ", the row has none")
        )
    return value


def _alpaca(row):
    messages = []
    system = _string(row, "system", "")
    if system:
        messages.append({"role": "system", "content": system})
    history = row.value.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
            row.fail("'history' must be a list of [question, answer] pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = _string(row, "instruction")
    extra = _string(row, "input", "")
    messages.append({"role": "user", "content": f"{question}\n{extra}" if extra else question})
    messages.append({"role": "assistant", "content": _string(row, "output")})
    return Conversation(messages)


def _tools(row):
    tools = row.value.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError as error:
            row.fail(f"'tools' is not valid JSON: {error}")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        row.fail("'tools' must be a list of objects")
    return [t if "function" in t or "type" in t else {"type": "function", "function": t} for t in tools]


def _sharegpt_call(row, text):
    """LLaMA-Factory's function_call turn: one {"name", "arguments"} object or a list of them, as JSON."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        row.fail(f"a function_call turn must hold JSON: {error}")
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        row.fail('a function_call turn must hold {"name": ..., "arguments": ...}')
    return [
        {"type": "function", "function": {"name": c["name"], "arguments": _arguments(c.get("arguments", {}))}}
        for c in calls
    ]


def _sharegpt(row):
    messages = []
    system = _string(row, "system", "")
    if system:
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(_list(row, "conversations"), 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            row.fail(f"conversations {number}: expected an object with 'from' and 'value' (strings)")
        role = _SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            row.fail(f"conversations {number}: unknown role '{turn.get('from')}'; known: {', '.join(_SHAREGPT_ROLES)}")
        if role == "call":
            messages.append({"role": "assistant", "content": "", "tool_calls": _sharegpt_call(row, turn["value"])})
        else:
            messages.append({"role": role, "content": turn["value"]})
    return Conversation(messages, _tools(row))


def _arguments(value):
    """Templates get an object where the arguments parse as one, whichever form the row has."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return value


def _tool_call(row, number, call):
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        row.fail(f"message {number}: a tool call needs a function with a name")
    rest = {k: v for k, v in call.items() if k in ("id", "type", "index")}
    return {
        **rest,
        "type": "function",
        "function": {**function, "arguments": _arguments(function.get("arguments", {}))},
    }


def _content(row, number, content):
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [
            p.get("text")
            if isinstance(p, dict) and p.get("type", "text") == "text"
            else p
            if isinstance(p, str)
            else None
            for p in content
        ]
        if any(not isinstance(t, str) for t in texts):
            row.fail(f"message {number}: only text content is trained, this has other parts (images, audio)")
        return "".join(texts)
    if not isinstance(content, str):
        row.fail(f"message {number}: 'content' must be a string")
    return content


def _messages(row):
    key = "messages" if "messages" in row.value else "conversations"
    messages = []
    system = row.value.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(_list(row, key), 1):
        if not isinstance(message, dict):
            row.fail(f"message {number}: expected an object with 'role' and 'content'")
        if message.get("role") not in _MESSAGE_ROLES:
            row.fail(f"message {number}: unknown role '{message.get('role')}'; known: {', '.join(_MESSAGE_ROLES)}")
        copy = {k: v for k, v in message.items() if v is not None}
        copy["content"] = _content(row, number, message.get("content"))
        for name in ("reasoning", "thinking"):
            if isinstance(copy.get(name), str) and "reasoning_content" not in copy:
                copy["reasoning_content"] = copy.pop(name)
        if copy.get("tool_calls"):
            if not isinstance(copy["tool_calls"], list):
                row.fail(f"message {number}: 'tool_calls' must be a list")
            copy["tool_calls"] = [_tool_call(row, number, c) for c in copy["tool_calls"]]
        messages.append(copy)
    return Conversation(messages, _tools(row))


def token_row(row, vocab_size=None):
    """-> (input_ids, labels) of a pre-tokenised row, checked."""
    ids, labels = row.value.get("input_ids"), row.value.get("labels", row.value.get("input_ids"))
    for name, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            row.fail(f"'{name}' must be a list of integers")
    if len(ids) != len(labels):
        row.fail(f"input_ids has {len(ids)} entries, labels has {len(labels)}")
    for i, (token, label) in enumerate(zip(ids, labels)):
        if token < 0 or (vocab_size and token >= vocab_size):
            row.fail(f"input_ids[{i}] = {token} is outside the vocabulary ({vocab_size or 'negative'})")
        if label not in (-100, token):
            row.fail(f"labels[{i}] = {label} is neither -100 nor input_ids[{i}] = {token}; labels are not shifted")
    return ids, labels
