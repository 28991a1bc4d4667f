# SPDX-License-Identifier: Apache-2.0
"""The token file that `train` and `eval` read."""

import hashlib
import json

import numpy as np

from . import tensors

FORMAT = "moesaic-tokens-1"
IGNORE = -100


def save_tokens(path, ids, labels, lengths, packs, metadata):
    """input_ids I32 [N], labels I32 [N] (the token itself where trained, else -100; not shifted), doc_offsets I64 [D+1],
    pack_offsets I64 [R+1] (row r = documents pack_offsets[r] .. pack_offsets[r+1]-1), metadata strings."""
    ids, labels, lengths = np.asarray(ids, np.int32), np.asarray(labels, np.int32), np.asarray(lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    order = [document for pack in packs for document in pack]
    if order != list(range(len(order))):
        picks = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in order])
        ids, labels = ids[picks], labels[picks]
    arrays = {
        "doc_offsets": np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64),
        "pack_offsets": np.concatenate([[0], np.cumsum([len(p) for p in packs])]).astype(np.int64),
        "input_ids": ids,
        "labels": labels,
    }
    tensors.save(path, arrays, {"format": FORMAT, **{k: str(v) for k, v in metadata.items()}})


def fingerprint(parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
