# SPDX-License-Identifier: Apache-2.0
"""The one exception a user sees, and the entry point that turns it into exit code 2."""

import os
import signal
import stat
import sys

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Bad input or usage: one clear line, exit code 2."""


def text_of(path):
    """A path as text: bytes that are no UTF-8 become question marks."""
    return path.encode("utf-8", "replace").decode()


def is_file(path):
    """As os.path.isfile, but a file that may not be looked at is an error, not a missing one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def run_main(main, name):
    """Runs main() and exits as the command does: 0 done, 2 bad input or usage, 130 interrupted."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the command blocks it while Python starts
        status = main()
        sys.stdout.flush()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        status = EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{name}: interrupted, nothing written", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        status = EXIT_USAGE
    except (RecursionError, UnicodeError) as error:
        # rows nested beyond reason, or text that is not Unicode: bad input, found deep inside a parser
        print(f"{name}: bad input: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        status = EXIT_USAGE
    sys.exit(status or 0)
