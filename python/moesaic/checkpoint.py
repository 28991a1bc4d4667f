# SPDX-License-Identifier: Apache-2.0
"""What the data step reads of a checkpoint folder: tokenizer.json, the chat template, special tokens."""

import hashlib
import json
import os

from .errors import UserError, is_file


def _read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None


def _token_text(value):
    return value.get("content") if isinstance(value, dict) else value


def _keep_offsets_whole(node):
    """trim_offsets would cut leading spaces off the character spans that the mask is found with."""
    if isinstance(node, dict):
        if "trim_offsets" in node:
            node["trim_offsets"] = False
        for child in node.values():
            _keep_offsets_whole(child)
    elif isinstance(node, list):
        for child in node:
            _keep_offsets_whole(child)


def model_folder(model):
    """The folder with a model's tokenizer: a model that is a GGUF file has the one it lies in."""
    return os.path.dirname(model) or "." if is_file(model) else model


class Checkpoint:
    """The tokenizer and template of one model: a folder, or a GGUF file in one."""

    def __init__(self, model):
        folder = model_folder(model)
        if not os.path.isdir(folder):
            raise UserError(f"--model {folder}: no such folder")
        path = os.path.join(folder, "tokenizer.json")
        if not is_file(path) and folder != model:
            raise UserError(
                f"--model {model}: no tokenizer.json beside it, and the tokenizer inside a GGUF file is not read: put the original model's tokenizer.json (and tokenizer_config.json, chat_template.jinja) into {folder}"
            )
        if not is_file(path):
            raise UserError(
                f"--model {folder}: no tokenizer.json in it (only the fast tokenizer format is read; rows with input_ids and labels need none)"
            )
        self.folder = folder
        self.config = self._optional("tokenizer_config.json")
        self.tokenizer, self.tokenizer_sha256, self.special_texts = _load_tokenizer(path)
        self.special_tokens = self._special_tokens()
        self.eos_ids = self._eos_ids()
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)

    def _optional(self, name):
        path = os.path.join(self.folder, name)
        return _read_json(path) if is_file(path) else {}

    def _special_tokens(self):
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        merged = {**self._optional("special_tokens_map.json"), **self.config}
        return {name: _token_text(merged[name]) for name in names if merged.get(name)}

    def _eos_ids(self):
        ids = []
        for source in (self._optional("generation_config.json"), self._optional("config.json")):
            value = source.get("eos_token_id")
            ids += value if isinstance(value, list) else [value]
        ids.append(self.tokenizer.token_to_id(self.special_tokens.get("eos_token", "")))
        return sorted({i for i in ids if i is not None})

    def template(self):
        """The model's own chat template, or None."""
        path = os.path.join(self.folder, "chat_template.jinja")
        if is_file(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
        value = self.config.get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
            value = named.get("default") or next(iter(named.values()), None)
        if value is None:
            value = self._optional("chat_template.json").get("chat_template")
        return value

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids, skip_special=False):
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)


def _load_tokenizer(path):
    from tokenizers import Tokenizer

    with open(path, "rb") as file:
        data = file.read()
    try:
        spec = json.loads(data)
        _keep_offsets_whole(spec.get("post_processor"))
        _keep_offsets_whole(spec.get("pre_tokenizer"))
        spec["truncation"] = spec["padding"] = None
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise UserError(f"{path}: cannot be read as a tokenizer: {error}") from None
    special = [t["content"] for t in spec.get("added_tokens", []) if t.get("special")]
    return tokenizer, hashlib.sha256(data).hexdigest(), special
