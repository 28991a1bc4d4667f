# SPDX-License-Identifier: Apache-2.0
"""tests/fixtures/schedules.json is what transformers' get_scheduler gives; `python test_schedules.py write` renews it."""

import json
import os
import sys
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
FILE = os.path.join(ROOT, "tests", "fixtures", "schedules.json")

# name, arguments, steps, steps of warm-up
CASES = [
    ("cosine", {}, 20, 0),
    ("cosine", {}, 20, 3),
    ("cosine", {"num_cycles": 1.25}, 20, 3),
    ("cosine", {}, 4, 9),
    ("linear", {}, 20, 3),
    ("linear", {}, 1, 1),
    ("constant", {}, 5, 3),
    ("constant_with_warmup", {}, 20, 3),
    ("cosine_with_restarts", {}, 20, 3),
    ("cosine_with_restarts", {"num_cycles": 3}, 20, 2),
    ("polynomial", {}, 20, 3),
    ("polynomial", {"power": 2.5, "lr_end": 1e-5}, 20, 3),
    ("inverse_sqrt", {}, 20, 3),
    ("inverse_sqrt", {}, 20, 0),
    ("inverse_sqrt", {"timescale": 7}, 20, 3),
    ("cosine_with_min_lr", {"min_lr": 1e-5}, 20, 3),
    ("cosine_with_min_lr", {"min_lr_rate": 0.25, "num_cycles": 1}, 20, 3),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 20, 4),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-5, "warmup_lr_rate": 0.2}, 20, 4),
    ("warmup_stable_decay", {"num_decay_steps": 6}, 20, 3),
    ("warmup_stable_decay", {"num_decay_steps": 6, "min_lr_ratio": 0.1, "warmup_type": "cosine", "decay_type": "linear"}, 20, 5),
    ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 4, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"}, 20, 5),
]  # fmt: skip
PEAK = 2e-4


def values(name, arguments, total, warmup):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total,
                              scheduler_specific_kwargs=dict(arguments))  # fmt: skip
    result = []
    for _ in range(total):
        result.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return result


def table():
    rows = [{"name": name, "args": ",".join(f"{k}={v}" for k, v in arguments.items()), "total": total, "warmup": warmup,
             "learning_rate": values(name, arguments, total, warmup)} for name, arguments, total, warmup in CASES]  # fmt: skip
    return {"peak": PEAK, "cases": rows}


class Schedules(unittest.TestCase):
    def test_stored_values(self):
        with open(FILE) as file:
            stored = json.load(file)
        made = table()
        self.assertEqual(len(stored["cases"]), len(made["cases"]))
        for a, b in zip(stored["cases"], made["cases"]):
            for x, y in zip(a.pop("learning_rate"), b.pop("learning_rate")):
                self.assertAlmostEqual(x, y, delta=1e-15)
            self.assertEqual(a, b)


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        with open(FILE, "w") as file:
            head, rows = table(), []
            rows = ",\n".join(json.dumps(row) for row in head["cases"])
            file.write(f'{{"peak": {head["peak"]}, "cases": [\n{rows}\n]}}\n')
    else:
        unittest.main()
