# SPDX-License-Identifier: Apache-2.0
"""The tokenizer for the C program's `generate`: encode, decode, and serve (JSON lines on stdin and stdout).

encode: a prompt on stdin -> ids separated by spaces
decode: ids on stdin -> text
serve:  a request a line, an answer a line, in order. First answer: {"ready": true, "vocab_size": n, "eos_ids": [...], "chat": bool}.
  {"op": "encode", "text": "...", "chat": true, "system": null}   -> {"ids": [...]}
  {"op": "encode", "messages": [...], "tools": [...]}             -> {"ids": [...]}   (generation prompt added)
  {"op": "decode", "ids": [...], "skip_special": true}            -> {"text": "..."}
  {"op": "start"}                                                 -> {}               (a new streamed answer)
  {"op": "token", "id": 5}                                        -> {"text": "..."}  (what became certain; characters are never cut)
  {"op": "finish"}                                                -> {"text": "..."}  (the rest)
  anything wrong                                                  -> {"error": "..."} (and the server goes on)
"""

import json
import sys

from .checkpoint import Checkpoint
from .errors import UserError, run_main
from .options import Parser, pairs
from .template import NoSystem, load_template


class Chat:
    """Prompts for one checkpoint: with its template where it has one, or raw."""

    def __init__(self, model, template_file=None, variables=None, no_system=False):
        self.checkpoint = Checkpoint(model)
        self._template = None
        if template_file or self.checkpoint.template():
            self._template = load_template(self.checkpoint, template_file, variables or {})
            if no_system:
                self._template = NoSystem(self._template)

    @property
    def has_template(self):
        return self._template is not None

    def raw(self, text):
        """As the tokenizer itself does it, a beginning-of-text token included where it adds one."""
        return self.checkpoint.tokenizer.encode(text).ids

    def messages(self, messages, tools=None):
        if not self.has_template:
            raise UserError(
                f"{self.checkpoint.folder} has no chat template: use --raw, or give one with --chat-template FILE"
            )
        return self.checkpoint.encode(self._template.render(messages, tools, add_generation_prompt=True)).ids

    def user(self, text, system=None):
        turns = [{"role": "system", "content": system}] if system else []
        return self.messages(turns + [{"role": "user", "content": text}])


class Stream:
    """Decodes a growing list of ids; a character cut in two (U+FFFD at the end) waits for its rest."""

    def __init__(self, checkpoint, skip_special=True):
        self._checkpoint, self._skip = checkpoint, skip_special
        self._ids, self._prefix, self._sent = [], 0, ""

    def _decode(self):
        return self._checkpoint.decode(self._ids[self._prefix :], self._skip)

    def token(self, token):
        self._ids.append(token)
        text = self._decode()
        if text.endswith("\ufffd"):
            return ""
        fresh = text[len(self._sent) :]
        self._sent = text
        if len(self._ids) - self._prefix > 64:  # some decoders look at the token before: keep a few
            self._prefix = len(self._ids) - 8
            self._sent = self._decode()
        return fresh

    def finish(self):
        text = self._decode()[len(self._sent) :]
        self._ids, self._prefix, self._sent = [], 0, ""
        return text


class Server:
    def __init__(self, chat):
        self.chat = chat
        self.stream = Stream(chat.checkpoint)

    def _encode(self, request):
        if "messages" in request:
            return {"ids": self.chat.messages(request["messages"], request.get("tools"))}
        if request.get("chat"):
            return {"ids": self.chat.user(request["text"], request.get("system"))}
        return {"ids": self.chat.raw(request["text"])}

    def _decode(self, request):
        return {"text": self.chat.checkpoint.decode(request["ids"], request.get("skip_special", False))}

    def _start(self, request):
        self.stream = Stream(self.chat.checkpoint, request.get("skip_special", True))
        return {}

    def answer(self, request):
        if not isinstance(request, dict):
            raise UserError("a request must be an object")
        operations = {
            "encode": self._encode,
            "decode": self._decode,
            "start": self._start,
            "token": lambda r: {"text": self.stream.token(r["id"])},
            "finish": lambda r: {"text": self.stream.finish()},
        }
        operation = operations.get(request.get("op"))
        if operation is None:
            raise UserError(f"unknown op {request.get('op')!r}; known: {', '.join(operations)}")
        return operation(request)

    def run(self, source, target):
        checkpoint = self.chat.checkpoint
        self._send(
            target,
            {
                "ready": True,
                "vocab_size": checkpoint.vocab_size,
                "eos_ids": checkpoint.eos_ids,
                "chat": self.chat.has_template,
            },
        )
        for line in source:
            try:
                line.encode()
                result = self.answer(json.loads(line))
            except UnicodeEncodeError:  # of what reading let through
                result = {"error": "the text is not UTF-8"}
            except UserError as error:
                result = {"error": str(error)}
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                result = {"error": f"bad request: {error}"}
            self._send(target, result)

    @staticmethod
    def _send(target, value):
        target.write(json.dumps(value) + "\n")
        target.flush()


def _stdin_text():
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not UTF-8 (byte {error.start})") from None


def _stdin_ids(vocab_size):
    ids = []
    for word in _stdin_text().split():
        if not word.isascii() or not word.isdigit() or int(word) >= vocab_size:
            raise UserError(f"'{word}' is not a token id of 0 to {vocab_size - 1}")
        ids.append(int(word))
    return ids


def parser():
    p = Parser(prog="moesaic tokenizer", description="Encodes prompts and decodes ids.", allow_abbrev=False)
    p.add_argument("command", choices=["encode", "decode", "serve"])
    p.add_argument("--model", required=True, metavar="DIR")
    p.add_argument(
        "--chat", action="store_true", help="encode: a user message in the chat template, generation prompt added"
    )
    p.add_argument("--raw", action="store_true", help="encode: no template (the default without --chat)")
    p.add_argument("--system", metavar="TEXT", help="system message (implies --chat)")
    p.add_argument("--no-system", action="store_true", help="without the template's own system message")
    p.add_argument("--chat-template", metavar="FILE")
    p.add_argument("--template-vars", nargs="+", action="append", metavar="K=V")
    p.add_argument("--skip-special", action="store_true", help="decode: leave special tokens out")
    return p


def main(arguments=None):
    options = parser().parse_args(arguments)
    if options.raw and (options.chat or options.system):
        raise UserError("--raw excludes --chat and --system")
    if options.no_system and options.system:
        raise UserError("--no-system excludes --system")
    variables = pairs(options.template_vars, "--template-vars", as_json=True)
    chat = Chat(options.model, options.chat_template, variables, options.no_system)
    if options.command == "serve":
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        sys.stdout.reconfigure(encoding="utf-8")
        Server(chat).run(sys.stdin, sys.stdout)
    elif options.command == "encode":
        text = _stdin_text()
        ids = chat.user(text, options.system) if options.chat or options.system or options.no_system else chat.raw(text)
        print(*ids)
    else:
        sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.write(chat.checkpoint.decode(_stdin_ids(chat.checkpoint.vocab_size), options.skip_special))
    return 0


if __name__ == "__main__":
    run_main(main, "moesaic tokenizer")
