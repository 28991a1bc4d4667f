# SPDX-License-Identifier: Apache-2.0
"""Command-line helpers shared by the subcommands."""

import argparse
import json

from .errors import UserError


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def columns(values, paths, flag="--columns"):
    """-> file -> our name -> the file's name. OURS=THEIRS holds for all files, OURS=THEIRS@FILE for that one, before the others."""
    result = {path: {} for path in paths}
    own = {}
    for item in (part for value in values or [] for part in value):
        ours, _, theirs = item.partition("=")
        path = max((p for p in paths if theirs.endswith("@" + p)), key=len, default=None)
        if path is not None:
            theirs = theirs[: -len(path) - 1]
        if not ours or not theirs:
            raise UserError(f"{flag} {item}: expected NAME=VALUE")
        if path is None:
            for names in result.values():
                names[ours] = theirs
            continue
        if own.setdefault((path, ours), theirs) != theirs:
            raise UserError(f"{flag}: {path} has {ours} from {own[path, ours]} and from {theirs}: one of both")
    for (path, ours), theirs in own.items():
        result[path][ours] = theirs
    return result


def pairs(values, flag, as_json=False):
    result = {}
    for item in (part for value in values or [] for part in value):
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UserError(f"{flag} {item}: expected NAME=VALUE")
        try:
            result[name] = json.loads(value) if as_json else value
        except ValueError:
            result[name] = value
    return result
