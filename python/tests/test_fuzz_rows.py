# SPDX-License-Identifier: Apache-2.0
"""Data files at random: bytes changed, cut and spliced. Either they are read, or one UserError says where and why.
MOESAIC_FUZZ_SECONDS=600 makes it a long run."""

import json
import os
import random
import time
import unittest

from .support import REASONING, DataTest
from .template_cases import cases

SEEDS = [
    {"instruction": "ask", "input": "more", "output": "yes", "system": "be", "history": [["q", "a"]]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": '[{"name": "f"}]',
    },
    {"text": "a hack"},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    *({key: case[key] for key in ("messages", "tools") if key in case} for case in cases()),
]
VALUES = [None, True, 0, -1, 1e308, "", "\u0000", "\ud800", [], [[]], {}, {"role": "assistant"}, "<think>", "</think>", 2**70]


def change_value(rng, value):
    """One place of the tree replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        action = rng.randrange(6)
        result = dict(value)
        if action == 0:
            del result[key]
        elif action == 1:
            result[rng.choice(["role", "content", "from", "value", "x", key.upper()])] = result.pop(key)
        elif action == 2:
            result[key] = rng.choice(VALUES)
        else:
            result[key] = change_value(rng, value[key])
        return result
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice([[], [value[at]] * 2, [change_value(rng, value[at])]]) + value[at + 1 :]
    return rng.choice(VALUES)


def change_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.3:
            del data[at : at + rng.randrange(1, 20)]
        elif rng.random() < 0.5:
            data[at:at] = rng.choice([b'"', b"\\", b"{", b"]", b"\xff", b"\xf0\x9f", b"\n", b"\\ud83d", b"NaN", b"1" * 400])
        elif at < len(data):
            data[at] = rng.randrange(256)
    return bytes(data)


class FuzzRows(DataTest):
    def test_random_files(self):
        self.template(REASONING)
        rng = random.Random(int(os.environ.get("MOESAIC_FUZZ_SEED", "42")))
        seconds = float(os.environ.get("MOESAIC_FUZZ_SECONDS", "0"))
        end, runs, read = time.monotonic() + seconds, 0, 0
        while runs < 1500 or time.monotonic() < end:
            rows = [rng.choice(SEEDS) for _ in range(rng.randrange(1, 4))]
            if rng.random() < 0.7:
                rows = [change_value(rng, row) if rng.random() < 0.7 else row for row in rows]
            text = json.dumps(rows) if rng.random() < 0.2 else "".join(json.dumps(row) + "\n" for row in rows)
            data = text.encode("utf-8", "surrogatepass")
            if rng.random() < 0.5:
                data = change_bytes(rng, data)
            read += self.read_one(data)
            runs += 1
        self.assertGreater(read, runs // 20)
        self.assertLess(read, runs)

    def read_one(self, data):
        path = os.path.join(self.folder, "random.jsonl")
        with open(path, "wb") as file:
            file.write(data)
        from moesaic.errors import UserError

        try:
            self.run_data(path, "--quiet")
            return True
        except UserError as error:
            self.assertTrue(str(error))
            self.assertNotIn("\n", str(error), data)
        except RecursionError:
            pass  # run_main makes it one line
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {data!r}") from error
        return False
