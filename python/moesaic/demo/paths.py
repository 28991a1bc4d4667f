# SPDX-License-Identifier: Apache-2.0
"""Where the demo's inputs lie in the project."""

import os

PROJECT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def fixture(name):
    return os.path.join(PROJECT, "tests", "fixtures", "demo", name)
