# SPDX-License-Identifier: Apache-2.0
"""What `moesaic data` prints: statistics, the length histogram and examples with the trained tokens marked."""

import sys

import numpy as np

BAR = 40


def _histogram(lengths):
    """[(from, to, count)] with powers of two as limits."""
    result, low = [], 1
    while low <= max(lengths):
        high = 2 * low - 1
        result.append((low, high, sum(low <= n <= high for n in lengths)))
        low *= 2
    while result and not result[0][2]:
        result.pop(0)
    return result


def summary(options, documents, shapes, packs, metadata):
    lengths = documents.lengths
    tokens = len(documents.ids)
    return {
        "shapes": shapes,
        "rows": documents.rows,
        "docs": len(lengths),
        "tokens": tokens,
        "trained_tokens": documents.trained,
        "trained_share": documents.trained / tokens,
        "dropped_untrained": documents.dropped_untrained,
        "dropped_long": documents.dropped_long,
        "truncated": documents.truncated,
        "cutoff_len": options.cutoff_len,
        "packs": len(packs),
        "packing": options.packing,
        "fill": tokens / (len(packs) * options.cutoff_len),
        "length": {
            "min": int(min(lengths)),
            "median": float(np.median(lengths)),
            "mean": tokens / len(lengths),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(max(lengths)),
        },
        "histogram": [{"from": low, "to": high, "docs": n} for low, high, n in _histogram(lengths)],
        "hash": metadata["hash"],
        "output": options.output,
    }


def _marks():
    return ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("\u27e6", "\u27e7")


def marked_text(checkpoint, ids, labels):
    """The document decoded, trained stretches enclosed in marks."""
    begin, end = _marks()
    pieces, at = [], 0
    while at < len(ids):
        trained = labels[at] != -100
        stop = at
        while stop < len(ids) and (labels[stop] != -100) == trained:
            stop += 1
        text = checkpoint.decode(ids[at:stop])
        pieces.append(begin + text + end if trained else text)
        at = stop
    return "".join(pieces)


def _example(documents, tokeniser, index):
    ids, labels = documents.document(index)
    trained = sum(label != -100 for label in labels[1:])
    begin, end = _marks()
    lines = [f"\nExample {index + 1}: {len(ids)} tokens, {trained} trained ({begin}trained{end})"]
    try:
        text = marked_text(tokeniser.checkpoint, ids, labels)
    except Exception as error:  # pre-tokenised rows need no tokenizer
        text = f"(not decoded: {error})"
    return "\n".join(lines + ["  " + line for line in text.split("\n")])


def show(stats, options, documents, tokeniser):
    for path, shape in stats["shapes"].items():
        print(f"{path}: {shape}")
    print(
        f"rows      {stats['rows']:,} read, {stats['docs']:,} used; dropped: {stats['dropped_untrained']:,} without a trained token, "
        f"{stats['dropped_long']:,} too long; {stats['truncated']:,} truncated at {stats['cutoff_len']:,}"
    )
    print(f"tokens    {stats['tokens']:,}, trained {stats['trained_tokens']:,} ({100 * stats['trained_share']:.1f} %)")
    length = stats["length"]
    print(
        f"lengths   min {length['min']}, median {length['median']:.0f}, mean {length['mean']:.1f}, 95 % {length['p95']:.0f}, max {length['max']}"
    )
    most = max(bucket["docs"] for bucket in stats["histogram"])
    for bucket in stats["histogram"]:
        print(
            f"  {bucket['from']:>7,}-{bucket['to']:<7,} {bucket['docs']:>9,} {'#' * -(-BAR * bucket['docs'] // most)}"
        )
    if options.packing == "on":
        print(
            f"packing   {stats['packs']:,} rows of up to {stats['cutoff_len']:,} tokens, {100 * stats['fill']:.1f} % full"
        )
    else:
        print(f"packing   off: {stats['packs']:,} rows of one document")
    for index in range(min(options.show, stats["docs"])):
        print(_example(documents, tokeniser, index))
    if options.output:
        print(f"\nwritten   {options.output} (hash {stats['hash'][:12]})")
