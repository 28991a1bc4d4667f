# SPDX-License-Identifier: Apache-2.0
"""moesaic: data preparation, tokenizer and demo beside the C program."""

__version__ = "0.1.0"


def _check_packages():
    """`python -m moesaic.X` without its packages: one line that says what to type, before any import fails."""
    import importlib.util
    import os
    import sys

    if sys.argv[:1] != ["-m"]:
        return
    missing = [name for name in ("numpy", "tokenizers", "jinja2") if importlib.util.find_spec(name) is None]
    if not missing:
        return
    base = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = (os.path.join(folder, "requirements.txt") for folder in (base, os.path.dirname(base)))
    what = next(("-r " + path for path in places if os.path.isfile(path)), " ".join(missing))
    print(
        f"moesaic: {sys.executable} has no {', '.join(missing)}: python3 -m venv ~/.moesaic && ~/.moesaic/bin/pip install "
        f"{what} && export MOESAIC_PYTHON=~/.moesaic/bin/python",
        file=sys.stderr,
    )
    sys.exit(2)


_check_packages()
