#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""errors_met.py FILE: which error texts of the library the tests met, by the lines that errors_met.so wrote to FILE while they ran. Comes
last in ctest; fails where a text was met by no test and does not stand in BEYOND with a reason. --list prints every text and its place."""

import argparse
import glob
import os
import re
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
FOLDERS = "api codelets engine graphs model tasks train".split()
ENOUGH = 600  # formats: fewer were met by some tests alone
LITERAL = r'"(?:[^"\\]|\\.)*"'
ARGUMENT = rf"(?:MOE_\w+_(?:FORMAT|NAME|FILE)\s*)?{LITERAL}(?:\s*(?:{LITERAL}|[A-Z]\w+))*"  # literals, and macros between them
# Functions whose text is an argument of another format: that argument.
HELPERS = {"model/adapters/pattern.c": "refuse", "model/file.c": "io_error", "engine/trace_read.c": "fail", "engine/trace_write.c": "fail"}

# Texts that no test can meet: why. A text stands for all that begin with it.
BEYOND = {
    "only other code of the library calls these, with what it has checked": """
tasks/
graphs/decoder_forward.c:
graphs/decoder_head.c: nothing is trained
train/batches.c: a micro-batch of
api/model.c: %d slots of
api/model_shape.c: router
api/model_shape.c: %d heads over
model/readers/safetensors_table.c: %s: weights of experts were put
model/rewrite_coded.c: %s: the base's codes
model/rewrite_coded.c: %s: there is no writer
model/readers/kt.c: %s: layer %d has no experts
model/adapters/forms/kt.c: <MOE_ADAPTER_KT_FILE>: a layer lacks
model/convert_plan.c: %s has too many dimensions
model/convert_scan.c: %s and %s have
model/convert_cut.c: %s would be there twice
codelets/format.c: weights cannot be made
codelets/formats/gptq.c: %s: a [%lld, %lld] weight
codelets/kernels/packed/requantise.c: %s weights cannot be made
engine/submit.c: task %s: ticket of another
engine/submit.c: task %s: tensor %s is of another""",
    "before another text, where a task of the graph fails in the middle": """
api/block.c: the update was applied in part
api/block_coded.c: %s, expert %d
api/experts_pass.c: the backward failed
api/experts_window.c: the update was applied in part
api/model_pack_ways.c: expert %d
api/optimizer.c: layer %d
api/optimizer.c: the update was applied in part
model/convert_work.c: %s, expert""",
    "sizes beyond the memory of any machine, or counts that a checksum of ours guards": """
api/pass.c: x has %lld tokens: their
train/params.c: state.json: step""",
    "two threads in one object at one instant": """
api/block.c: another thread
api/experts.c: another thread
api/model.c: another thread
api/optimizer.c: another thread""",
    "the operating system fails between two calls that agree, or a machine of another kind": """
api/calibrate.c: a measurement gave
codelets/kernels.c: the operating system refuses
engine/engine.c: cannot create a thread
engine/policy_file.c: policy %s: is linked with another
engine/recorder.c: cannot create a thread
engine/roof.c: cannot start
engine/starpu_start.c: StarPU needs a folder
engine/starpu_start.c: this StarPU
engine/starpu_start.c: StarPU does not start
engine/submit.c: StarPU refuses
engine/topology.c: hwloc cannot read
engine/trace_write.c: nothing can be written
model/convert_folder.c: %s: cannot list
model/file.c: open the directory
model/file.c: list the directory
model/folder.c: %s: cannot list
model/readers/safetensors.c: %s: cannot list
model/rewrite.c: %s: cannot list
model/state.c: %s: cannot list
model/state_files.c: %s: cannot list
train/train_save.c: %s. Nor was there room
train/train_setup.c: the output directory %s is not writable""",
    "a signal at an instant that depends on the machine: test_convert.py, test_newcomer.py": """
model/merge_shards.c: interrupted
model/convert.c: interrupted""",
    "printed by moesaic-trace itself: test_trace.py": """
engine/trace_read.c: not a trace""",
    "a model that this version cannot open": """
api/model_load_experts.c: %s: %s has rows of gate and up in turn""",
    "a limit on the size of files, which the list of what was met obeys too: suite_trace_ends, a disk that is full": """
engine/recorder.c: the trace ends early""",
    "traces of more than 4 GiB a chunk or header": """
engine/trace_write.c: the header is too long
engine/trace_write.c: a chunk is too large""",
}  # fmt: skip
NO_MEMORY = re.compile(r"\b(no|out of) memory\b")  # allocations that fail: test_faults.py, suites' "allocation failures"


def unescaped(match):
    """Of a literal, as errors_met.c writes it."""
    return " " if match[1] in "nt" else match[1]


def wildcard(argument):
    """A pattern for the text of literals; a macro between them is anything."""
    parts = re.findall(rf"({LITERAL})|[A-Z]\w+", argument)
    return "".join(re.escape(re.sub(r"\\(.)", unescaped, literal[1:-1])) if literal else ".*" for literal in parts)


def arguments_of(source, at):
    """What stands between the parenthesis that opened before `at` and the one that closes it."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)+\'|[()]', source[at:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth < 0:
            return source[at : at + token.start()]
    raise SystemExit("a call without an end")


class Place:
    def __init__(self, file, line, argument, is_format):
        self.file, self.line, self.is_format = file, line, is_format
        words = re.findall(rf"{LITERAL}|[A-Z]\w+", argument)
        self.text = "".join(re.sub(r"\\(.)", unescaped, word[1:-1]) if word[0] == '"' else f"<{word}>" for word in words)
        self.pattern = wildcard(argument)

    def met(self, formats, texts):
        if not self.is_format:
            return re.search(self.pattern, texts) is not None
        return self.text in formats or (".*" in self.pattern and any(re.fullmatch(self.pattern, form) for form in formats))

    def excused(self):
        """The reason for which no test has to meet it, or None."""
        if NO_MEMORY.search(self.text):
            return "an allocation fails"
        key = f"{self.file}: {self.text}"
        return next((why for why, starts in BEYOND.items() if key.startswith(tuple(starts.strip().split("\n")))), None)


def places():
    for folder in FOLDERS:
        for path in sorted(glob.glob(os.path.join(ROOT, folder, "**", "*.[ch]"), recursive=True)):
            name = os.path.relpath(path, ROOT)
            with open(path, encoding="utf-8") as file:
                source = file.read()
            names = ["moe_fail", "moe_fail_in"] + ([HELPERS[name]] if name in HELPERS else [])
            for call in re.finditer(rf"\b({'|'.join(names)})\(", source):
                argument = re.search(ARGUMENT, arguments_of(source, call.end()))
                if argument:
                    yield Place(name, source.count("\n", 0, call.start()) + 1, argument[0], call[1].startswith("moe_fail"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="+")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    lines = set()
    for path in filter(os.path.exists, options.file):
        with open(path, encoding="utf-8", errors="replace") as file:
            lines |= set(file)
    formats = {line.partition("\t")[0] for line in lines}
    texts = "".join(lines)
    found = list(places())
    met = {place for place in found if place.met(formats, texts)}
    missing = [place for place in found if place not in met and not place.excused()]
    print(f"{len(found)} error texts, {len(met)} met by tests, {len(missing)} neither met nor excused")
    for place in found if options.list else missing:
        what = "met" if place in met else place.excused() or "NOT MET"
        print(f"{place.file}:{place.line}: {place.text}: {what}")
    if len({place.text for place in met}) < ENOUGH:
        print("SKIPPED errors_met: only after the whole of ctest")
        return 77
    useless = [start for starts in BEYOND.values() for start in starts.strip().split("\n") if not any(f"{p.file}: {p.text}".startswith(start) for p in found)]
    for start in useless:
        print(f"BEYOND names what is not there: {start}")
    return 1 if missing or useless else 0


if __name__ == "__main__":
    sys.exit(main())
