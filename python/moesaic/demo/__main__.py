# SPDX-License-Identifier: Apache-2.0
"""python -m moesaic.demo COMMAND: the Python side of ./run demo."""

import argparse
import os

from ..errors import run_main


def _make_model(options):
    from .gguf_model import make_model

    if os.path.isfile(os.path.join(options.output, "model.safetensors")):
        return
    parameters = make_model(options.output, options.gguf)
    print(f"model: {options.output} ({parameters / 1e6:.1f} M parameters)")


def _make_data(options):
    from .inputs import make_data

    make_data(options.model, options.output)


def _make_init(options):
    from .inputs import make_init

    make_init(options.output)


def _make_quick(options):
    from .quick import make_quick

    make_quick(options.model, options.output)


def _check(options):
    from .reference import check

    return check(options.model, options.data, options.init, options.results, options.out, options.output)


def _screen(options):
    from .screen import show

    return show(options.results, options.out, options.quick, options.weights)


def parser():
    p = argparse.ArgumentParser(
        prog="moesaic.demo",
        description="Makes the demo's inputs, compares, prints the last screen.",
        allow_abbrev=False,
    )
    commands = p.add_subparsers(required=True)

    def command(name, run, **flags):
        c = commands.add_parser(name, allow_abbrev=False)
        c.set_defaults(run=run)
        for flag, default in flags.items():
            c.add_argument("--" + flag, default=default, type=int if isinstance(default, int) else str)
        return c

    command("make-model", _make_model, output="demo/model", gguf=None)
    command("make-data", _make_data, model="demo/model", output="demo/data")
    command("make-init", _make_init, output="demo/init")
    command("make-quick", _make_quick, model="tests/fixtures/ckpt/qwen3moe", output="demo/quick")
    command(
        "check",
        _check,
        model="demo/model",
        data="demo/data",
        init="demo/init",
        results="demo/results",
        out="demo/out",
        output="demo/check.json",
    )
    screen = command("screen", _screen, results="demo/results", out="demo/out", weights="")
    screen.add_argument("--quick", action="store_true")
    return p


def main():
    options = parser().parse_args()
    return options.run(options)


if __name__ == "__main__":
    run_main(main, "moesaic.demo")
