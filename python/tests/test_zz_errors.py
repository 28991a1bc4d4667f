# SPDX-License-Identifier: Apache-2.0
"""Comes last: every place of the data step that can refuse something was reached by a test before."""

import ast
import glob
import os
import unittest

import moesaic

from . import MET

PACKAGE = os.path.dirname(moesaic.__file__)
# Not met here: why.
BEYOND = {
    "template.py:the conversation has too many parts": "65,533 parts of messages in one row",
}


def places(path):
    """(first line, last line, text) of each `raise UserError(...)` and `row.fail(...)`."""
    with open(path, encoding="utf-8") as file:
        source = file.read()
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name == "UserError" or (name == "fail" and isinstance(node, ast.Expr)):
            texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            yield node.lineno, node.end_lineno, max(texts, key=len, default="")


class AllErrors(unittest.TestCase):
    maxDiff = None

    def test_each_was_met(self):
        if len(MET) < 100:
            self.skipTest(f"{len(MET)} places: only with the whole suite")
        missing = []
        for path in sorted(glob.glob(os.path.join(PACKAGE, "*.py"))):
            lines = {line for name, line in MET if os.path.realpath(name) == os.path.realpath(path)}
            for first, last, text in places(path):
                if not lines.intersection(range(first, last + 1)):
                    missing.append(f"{os.path.basename(path)}:{text}")
        self.assertEqual([m for m in missing if m not in BEYOND], [])
