# SPDX-License-Identifier: Apache-2.0
"""Every UserError that the tests meet is noted with the places it came from: test_zz_errors.py reads them."""

import sys

from moesaic import errors

MET = set()  # (file, line)


def _note(self, *arguments):
    Exception.__init__(self, *arguments)
    frame = sys._getframe(1)
    while frame:
        MET.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back


errors.UserError.__init__ = _note
