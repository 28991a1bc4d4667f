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
