# SPDX-License-Identifier: Apache-2.0
"""safetensors files from numpy arrays, BF16 included (as uint16 bits); written atomically."""

import itertools
import json
import os
import struct

import numpy as np

from .errors import UserError

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint16): "BF16",
    np.dtype(np.uint8): "U8",
}


def to_bf16(values):
    """float32 -> BF16 bits, rounded to nearest even (finite values and infinities)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_atomically(path, chunks):
    """Writes the byte chunks to a temporary name in the same folder, syncs, renames."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    temporary = f"{path}.tmp.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError) and not error.filename:  # a failed write does not say where
            raise OSError(error.errno, error.strerror, path) from None
        raise


def write_text(path, text):
    write_atomically(path, [text.encode()])


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save(path, arrays, metadata=None):
    """arrays: name -> numpy array (uint16 means BF16), written in the given order."""
    header = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    head = json.dumps(header, ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    data = (np.ascontiguousarray(array).data for array in arrays.values() if array.size)
    write_atomically(path, itertools.chain([struct.pack("<Q", len(head)), head], data))


def load(path):
    """-> (name -> array, metadata); BF16 comes as uint16 bits."""
    with open(path, "rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= os.path.getsize(path) - 8:
            raise UserError(f"{path}: not a safetensors file")
        header = json.loads(file.read(size))
        data = file.read()
    arrays = {}
    metadata = header.pop("__metadata__", {})
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[begin:end], dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata
