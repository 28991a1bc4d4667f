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


def _take_standard_files():
    """Those that a shell closed (`>&-`), which Python has as None: their numbers, opened so that using one is an OSError."""
    for number, name, mode, access in ((0, "stdin", "r", os.O_WRONLY), (1, "stdout", "w", os.O_RDONLY), (2, "stderr", "w", os.O_RDONLY)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, access)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _drop_output(file):
    """What could not be written: Python would try again when it ends, and end with a code of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, file.fileno())
    os.close(null)


def _say(text):
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody is there to be told; the exit code says it


def run_main(main, name):
    """Runs main() and exits as the command does: 0 done, 2 bad input or usage, 130 interrupted."""
    _take_standard_files()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the command blocks it while Python starts
        status = main()
        sys.stdout.flush()
    except UserError as error:
        _say(f"{name}: {error}")
        status = EXIT_USAGE
    except KeyboardInterrupt:
        _say(f"{name}: interrupted, nothing written")
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output(sys.stdout)
        status = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{name}: {where}{error.strerror or error}")
        status = EXIT_USAGE
    except (RecursionError, UnicodeError) as error:
        # rows nested beyond reason, or text that is not Unicode: bad input, found deep inside a parser
        _say(f"{name}: bad input: {type(error).__name__}: {str(error).splitlines()[0]}")
        status = EXIT_USAGE
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            _drop_output(file)
            if file is sys.stdout:
                status = status or EXIT_USAGE
    sys.exit(status or 0)
