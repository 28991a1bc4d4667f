# SPDX-License-Identifier: Apache-2.0
"""Kept templates: ids as transformers renders and tokenises the whole conversation, trained tokens as marked by hand."""

import json
import os
import subprocess
import unittest

from .support import DataTest
from .template_cases import FIXTURES, cases, make_model, stretches, template

CHECK_PYTHON = os.path.join(FIXTURES, "..", "..", "build", "check-venv", "bin", "python")


class Templates(DataTest):
    def document_of(self, case):
        """-> (ids, labels, stretches)"""
        make_model(self.model, template(case))
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(os.path.join(self.model, "tokenizer.json"))
        row = {key: case[key] for key in ("messages", "tools") if key in case}
        flags = list(case.get("flags", []))
        if "variables" in case:
            flags += ["--template-vars", *(f"{name}={json.dumps(value)}" for name, value in case["variables"].items())]
        _, arrays, _ = self.run_data(self.rows(row), "--quiet", *flags)
        ids, labels = arrays["input_ids"].tolist(), arrays["labels"].tolist()
        return ids, labels, self.stretches(ids, labels)

    def test_ids_are_those_of_transformers(self):
        for case in cases():
            with self.subTest(case["name"]):
                self.assertEqual(self.document_of(case)[0], case["ids"])

    def test_trained_tokens_are_those_marked_by_hand(self):
        for case in cases():
            with self.subTest(case["name"]):
                ids, labels, found = self.document_of(case)
                self.assertEqual(found, stretches(case["marked"]))
                trained = sum(len(self.tokenizer.encode(t, add_special_tokens=False).ids) for t, on in found if on)
                self.assertEqual(sum(label != -100 for label in labels), trained)

    def test_every_template_has_a_case(self):
        kept = {name[:-6] for name in os.listdir(os.path.join(FIXTURES, "templates")) if name.endswith(".jinja")}
        self.assertEqual(kept, {case["template"] for case in cases()})

    @unittest.skipUnless(os.path.exists(CHECK_PYTHON), "no build/check-venv (./run demo --check makes it)")
    def test_transformers_agrees_today(self):
        run = subprocess.run(
            [CHECK_PYTHON, "-W", "ignore", "-m", "tests.reference_ids"],
            cwd=os.path.join(os.path.dirname(__file__), ".."),
            capture_output=True,
            text=True,
        )
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(json.loads(run.stdout), [case["ids"] for case in cases()])


if __name__ == "__main__":
    unittest.main()
