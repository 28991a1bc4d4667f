# SPDX-License-Identifier: Apache-2.0
"""moesaic: data preparation, tokenizer and demo beside the C program."""

__version__ = "0.1.0"
