# SPDX-License-Identifier: Apache-2.0
"""Data files under libFuzzer, guided by what of the reader ran (scripts/fuzz rows): one tokenizer for all inputs. Either rows are read,
or one UserError says where and why. Arguments: libFuzzer's, the corpus's folder last."""

import json
import os
import sys

import atheris

with atheris.instrument_imports(include=["moesaic"]):
    from moesaic import data, rows, spans, template  # noqa: F401
    from moesaic.errors import UserError
from tests.support import REASONING, DataTest
from tests.test_fuzz_rows import SEEDS


class Reader(DataTest):
    def runTest(self):
        """DataTest makes the checkpoint; libFuzzer brings the inputs."""

    def open(self):
        self.setUp()
        self.template(REASONING)
        self.path = os.path.join(self.folder, "random.jsonl")
        self.options = data.parser().parse_args(["--model", self.model, "--data", self.path, "--quiet"])
        self.options.template_vars, self.options.columns = {}, {self.path: {}}
        self.tokeniser = data.Tokeniser(self.model, self.options)

    def read(self, content):
        with open(self.path, "wb") as file:
            file.write(content)
        shapes, documents, progress = {}, data.Documents(self.options), data.Progress("", 0, None)
        try:
            for row, shape in data._stream_rows(self.options, shapes, progress):
                self.tokeniser.tokenise([self.tokeniser.prepare(row, shape)], shape, documents)
        except UserError as error:
            if not str(error) or "\n" in str(error):
                raise AssertionError(f"not one line: {str(error)!r}") from error
        except RecursionError:
            pass  # run_main makes it one line


def main():
    corpus = sys.argv[-1]
    for number, row in enumerate(SEEDS):
        for name, text in ((f"row-{number}", json.dumps(row) + "\n"), (f"list-{number}", json.dumps([row, SEEDS[0]]))):
            with open(os.path.join(corpus, name), "w", encoding="utf-8") as file:
                file.write(text)
    reader = Reader()
    reader.open()
    atheris.Setup(sys.argv, reader.read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
