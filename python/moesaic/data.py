# SPDX-License-Identifier: Apache-2.0
"""moesaic data: tokenises chats and texts into a token file (tokenfile.py), with a preview and statistics."""

import array
import hashlib
import itertools
import json
import os
import random
import sys

from . import packing, report, rows, spans
from .checkpoint import Checkpoint, model_folder
from .errors import UserError, is_file, run_main, text_of
from .options import columns, Parser, pairs, positive
from .progress import Progress
from .template import NoSystem, load_template
from .tokenfile import IGNORE, file_sha256, fingerprint, save_tokens

MASK_RULE = "spans-1"  # raised when the rules of spans.py change
BATCH = 256


# ---- documents -----------------------------------------------------------------------------------


class Documents:
    """Tokenised documents one behind the other, and what was left out."""

    def __init__(self, options):
        self.options = options
        self.ids, self.labels = array.array("i"), array.array("i")
        self.lengths = []
        self.rows = self.truncated = self.dropped_long = self.dropped_untrained = self.trained = 0

    def add(self, place, ids, labels):
        self.rows += 1
        cutoff = self.options.cutoff_len
        if len(ids) > cutoff:
            if self.options.on_long == "error":
                raise UserError(
                    f"{place}: {len(ids)} tokens, more than --cutoff-len {cutoff} (--on-long truncate or drop lets it pass)"
                )
            if self.options.on_long == "drop":
                self.dropped_long += 1
                return
        long, ids, labels = len(ids) > cutoff, ids[:cutoff], labels[:cutoff]
        trained = sum(label != IGNORE for label in labels[1:])  # nothing predicts a document's first token
        if not trained:
            self.dropped_untrained += 1
            return
        self.truncated += long
        self.trained += trained
        self.lengths.append(len(ids))
        self.ids.extend(ids)
        self.labels.extend(labels)

    def document(self, index):
        begin = sum(self.lengths[:index])
        return self.ids[begin : begin + self.lengths[index]], self.labels[begin : begin + self.lengths[index]]


class Tokeniser:
    """Turns rows of one shape into documents, in batches."""

    def __init__(self, model, options):
        self.options = options
        self.model_folder = model
        self._checkpoint = self._finder = self._template = None
        self.default_system = ""

    @property
    def checkpoint(self):
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self.model_folder)
        return self._checkpoint

    @property
    def template(self):
        if self._template is None:
            self._template = load_template(self.checkpoint, self.options.chat_template, self.options.template_vars)
            unused = [] if self.options.quiet else self._template.unused(self.options.template_vars)
            if unused:
                print(f"moesaic data: the chat template does not read {', '.join(unused)} (--template-vars)", file=sys.stderr)
            if self.options.no_system:
                self._template = NoSystem(self._template)
        return self._template

    def vocab_size(self):
        """Of the model where config.json says it (rows may hold any id the embedding has), else of the tokenizer."""
        path = os.path.join(model_folder(self.model_folder), "config.json")
        if is_file(path):
            with open(path, encoding="utf-8") as file:
                size = json.load(file).get("vocab_size")
            if isinstance(size, int):
                return size
        return self.checkpoint.vocab_size

    def prepare(self, row, shape):
        """-> what tokenise() takes: (row, ids, labels) or (row, text, spans)."""
        if shape == "tokens":
            return (row, *rows.token_row(row, self.vocab_size()))
        if shape == "text":
            text = row.value.get("text")
            if not isinstance(text, str):
                row.fail("'text' must be a string")
            return row, text, None
        talk = rows.conversation(row, shape)
        if self.options.no_system:
            talk = rows.without_system(talk)
        if self._finder is None:
            eos = [self.checkpoint.tokenizer.id_to_token(i) for i in self.checkpoint.eos_ids]
            self._finder = spans.SpanFinder(self.template, self.checkpoint.special_texts, [t for t in eos if t])
        try:
            return (row, *self._finder.find(talk.messages, talk.tools, self.options.train_on))
        except UserError as error:
            row.fail(str(error))

    def tokenise(self, prepared, shape, documents):
        if shape == "tokens":
            for row, ids, labels in prepared:
                documents.add(row.place, ids, labels)
            return
        tokenizer = self.checkpoint.tokenizer
        encodings = tokenizer.encode_batch([text for _, text, _ in prepared], add_special_tokens=shape == "text")
        for (row, _, trained), encoding in zip(prepared, encodings):
            ids = encoding.ids
            if shape == "text":
                ids = self._with_eos(ids)
                labels = list(ids)
            else:
                labels = [t if on else IGNORE for t, on in zip(ids, spans.trained_tokens(encoding.offsets, trained))]
            if labels:
                labels[0] = IGNORE
            documents.add(row.place, ids, labels)

    def _with_eos(self, ids):
        eos = self.checkpoint.tokenizer.token_to_id(self.checkpoint.special_tokens.get("eos_token", ""))
        return ids if eos is None or ids[-1:] == [eos] else ids + [eos]


# ---- command -------------------------------------------------------------------------------------


def parser():
    p = Parser(
        prog="moesaic data", description="Tokenises data for training; prints what it found.", allow_abbrev=False
    )
    p.add_argument(
        "--model", required=True, metavar="DIR", help="checkpoint folder: its tokenizer and chat template are used"
    )
    p.add_argument(
        "--data",
        required=True,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="json or jsonl: alpaca, sharegpt, messages, text, or input_ids and labels",
    )
    p.add_argument("--output", metavar="FILE", help="token file to write (safetensors)")
    p.add_argument(
        "--cutoff-len", type=positive, default=4096, metavar="N", help="longest document, and size of a pack (4096)"
    )
    p.add_argument(
        "--packing", choices=["on", "off"], default="on", help="several documents a row; they never see each other (on)"
    )
    p.add_argument(
        "--train-on",
        choices=["assistant", "last", "all"],
        default="assistant",
        help="which turns (assistant: every one)",
    )
    p.add_argument(
        "--on-long",
        choices=["truncate", "drop", "error"],
        default="truncate",
        help="documents above --cutoff-len (truncate)",
    )
    p.add_argument("--chat-template", metavar="FILE", help="jinja file in place of the checkpoint's template")
    p.add_argument(
        "--template-vars",
        nargs="+",
        action="append",
        metavar="K=V",
        help="variables for the template, such as enable_thinking=false",
    )
    p.add_argument("--no-system", action="store_true", help="no system turn: neither the rows' nor the template's own")
    p.add_argument(
        "--columns", nargs="+", action="append", metavar="OURS=THEIRS", help="names of columns, as instruction=question"
    )
    p.add_argument("--max-samples", type=positive, metavar="N", help="use the first N rows of each file")
    p.add_argument(
        "--show", type=int, default=1, metavar="N", help="examples to show with the trained tokens marked (1)"
    )
    p.add_argument(
        "--seed",
        type=int,
        help="shuffle the rows with this seed before --max-samples and packing (default: keep their order)",
    )
    p.add_argument("--json", action="store_true", help="print the statistics as JSON")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return p


def _stream_rows(paths, options, shapes, progress):
    """Yields (Row, shape) in order; a file's shape is recognised from its first row."""
    for path in paths:
        for row in rows.read_rows(path, progress.read):
            row = rows.rename(row, options.columns[path])
            if path not in shapes:
                shapes[path] = rows.recognise(row)
            yield row, shapes[path]


def _chosen_rows(options, shapes, progress):
    """The rows that --seed and --max-samples leave; shuffling needs them all in memory."""
    files = [_stream_rows([path], options, shapes, progress) for path in options.data]
    if options.seed is None:
        return itertools.chain.from_iterable(itertools.islice(rows, options.max_samples) for rows in files)
    chance, chosen = random.Random(options.seed), []
    for stream in files:
        stream = list(stream)
        chance.shuffle(stream)
        chosen.extend(stream[: options.max_samples])
    chance.shuffle(chosen)
    return chosen


def tokenise(options, stream):
    """-> (Documents, Tokeniser, shape of each file)"""
    options.template_vars = pairs(options.template_vars, "--template-vars", as_json=True)
    options.columns = columns(options.columns, options.data)
    if not os.path.isdir(model_folder(options.model)):
        raise UserError(f"--model {options.model}: no such folder")
    tokeniser, documents, shapes = Tokeniser(options.model, options), Documents(options), {}
    progress = Progress("tokenising", sum(map(_size, options.data)), stream)
    batch, batch_shape = [], None
    for row, shape in _chosen_rows(options, shapes, progress):
        if batch and (shape != batch_shape or len(batch) == BATCH):
            tokeniser.tokenise(batch, batch_shape, documents)
            batch = []
        batch_shape = shape
        batch.append(tokeniser.prepare(row, shape))
        progress.row()
    if batch:
        tokeniser.tokenise(batch, batch_shape, documents)
    progress.close()
    if not documents.lengths:
        raise UserError(
            f"no row has a trained token: {documents.rows} rows read, {documents.dropped_untrained} without one, {documents.dropped_long} too long"
        )
    return documents, tokeniser, shapes


def _size(path):
    return os.path.getsize(path) if os.path.isfile(path) else 0


def _metadata(options, documents, tokeniser, shapes):
    chat = any(s in ("alpaca", "sharegpt", "messages") for s in shapes.values())
    template = tokeniser.template.source if chat else ""
    has_tokenizer = is_file(os.path.join(model_folder(options.model), "tokenizer.json"))
    tokenizer = tokeniser.checkpoint.tokenizer_sha256 if has_tokenizer else ""
    parts = {
        "data": [file_sha256(path) for path in options.data],
        "template": template,
        "variables": options.template_vars,
        "tokenizer": tokenizer,
        "cutoff_len": options.cutoff_len,
        "mask": [MASK_RULE, options.train_on, options.on_long, options.no_system],
        "packing": options.packing,
        "rows": [list(options.columns.values()), options.max_samples, options.seed],
    }
    return {
        "hash": fingerprint(parts),
        "source": text_of(" ".join(os.path.basename(p) for p in options.data)),
        "shape": " ".join(sorted(set(shapes.values()))),
        "template": hashlib.sha256(template.encode()).hexdigest() if template else "",
        "template_from": text_of(options.chat_template or "model") if template else "",
        "tokenizer": tokenizer,
        "tokenizer_vocab_size": tokeniser.checkpoint.vocab_size if has_tokenizer else tokeniser.vocab_size(),
        "cutoff_len": options.cutoff_len,
        "packing": options.packing,
        "train_on": options.train_on,
        "docs": len(documents.lengths),
        "tokens": len(documents.ids),
        "trained_tokens": documents.trained,
    }


def _check_output(path, inputs):
    """The result replaces its file: never a device, a folder or the data itself."""
    if not os.path.exists(path):
        return
    if not os.path.isfile(path):
        raise UserError(f"--output {path} is not a regular file")
    if any(os.path.exists(name) and os.path.samefile(path, name) for name in inputs):
        raise UserError(f"--output {path} is the data itself")


def main(arguments=None):
    options = parser().parse_args(arguments)
    if options.output:
        _check_output(options.output, options.data)
    documents, tokeniser, shapes = tokenise(options, None if options.quiet or options.json else sys.stderr)
    capacity = options.cutoff_len
    packs = (
        packing.first_fit(documents.lengths, capacity)
        if options.packing == "on"
        else [[d] for d in range(len(documents.lengths))]
    )
    metadata = _metadata(options, documents, tokeniser, shapes)
    if options.output:
        save_tokens(options.output, documents.ids, documents.labels, documents.lengths, packs, metadata)
    summary = report.summary(options, documents, shapes, packs, metadata)
    if options.json:
        print(json.dumps(summary))
    elif not options.quiet:
        report.show(summary, options, documents, tokeniser)
    return 0


if __name__ == "__main__":
    run_main(main, "moesaic data")
