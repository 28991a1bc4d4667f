# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/*.md and README.md, as they stand there, on the tests' model under the names that the pages use; and flags,
programs and files that they name in passing."""

import glob
import json
import os
import re
import shutil
import subprocess
import unittest

from support import MODEL, QUICK_TEMPLATE, ROOT, TOOL, VENV_PYTHON, Case, environment

FIXTURES = os.path.join(ROOT, "tests", "fixtures")
# Blocks of README that test_readme.py types, and lines of what cannot be typed here, by their beginning.
ELSEWHERE = {
    "./run ": "installs packages and builds",
    "python3 -m venv": "downloads packages",
    "export ": "what the line before made",
    "cc ": "test_install.py, with an installed library",
    "PATH=": "test_readme.py",
    "moesaic convert MODEL OUT --kt-weights": "kt-kernel's files: scripts/kt-tests",
    "moesaic inspect DIR": "the same",
    "moesaic convert MODEL KT": "kt-kernel's files: test_convert_kt.py",
}
DESIGNED = ("engine/sched/",)  # docs/add-policy.md: not built
README_BLOCK = "ckpt/qwen3moe"  # test_readme.py
YAML = "stage: sft\nfinetuning_type: lora\nlora_rank: 4\nuse_kt: true\nkt_backend: AMXBF16\nnum_train_epochs: 1\nbf16: true\n"


def pages():
    for path in [os.path.join(ROOT, "README.md"), *sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")))]:
        with open(path, encoding="utf-8") as file:
            yield os.path.relpath(path, ROOT), file.read()


def blocks(text):
    """Lines of indented and fenced blocks that begin like a command."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and re.match(r" *(\./|moesaic |[a-z0-9]+ |export |PATH=|\$)", line):
            if re.match(r" *(moesaic|bench_[a-z]+|cc|python3|sqlite3|export) |[ ]*(\./run|PATH=|\$MOESAIC_PYTHON |echo .*\| )", line):
                yield line.strip()


def inline(text):
    """`code` outside of blocks; a line's end inside of it is a space."""
    prose = re.sub(r"(?ms)^```.*?^```|^    .*?$", "", text)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def plain(command):
    """One of a|b|c, [what may be left out] too, and no remark."""
    command = re.sub(r"\s+# .*", "", command).replace("train ...", "train --config /path/to/adapter/run.yaml --output-dir out").replace("...", "")
    command = command.replace("[", "").replace("]", "")
    if "sqlite3" not in command:
        command = re.sub(r"([A-Za-z0-9-]+)(\|[A-Za-z0-9-]*)+", r"\1", command)
    return command.replace("/path/to/", "")


@unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
class Docs(Case):
    def setUp(self):
        super().setUp()
        self.env = {**environment(), "PATH": os.path.dirname(TOOL) + ":" + os.environ["PATH"], "MOESAIC_MACHINE": ""}
        model = shutil.copytree(MODEL, self.path("base"))
        shutil.copy(QUICK_TEMPLATE, os.path.join(model, "chat_template.jinja"))
        for name in ("Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "checkpoint", "MODEL", "BASE"):
            os.symlink("base", self.path(name))
        shutil.copy(os.path.join(MODEL, "config.json"), self.path("config.json"))
        shutil.copy(os.path.join(FIXTURES, "demo", "identity.jsonl"), self.path("chats.jsonl"))
        self.write("qwen3moe_lora_sft_kt.yaml", YAML)
        self.good("train", "--model", model, "--data", self.path("chats.jsonl"), "--output-dir", self.path("adapter"), "--max-steps", 2, "--quiet",
                  "--threads", 2, "--trace", self.path("run.mxt"))  # fmt: skip
        os.symlink("adapter", self.path("DIR"))
        # what the block's compiler makes of examples/policy.c
        shutil.copy(os.path.join(os.environ["MOESAIC_BUILD"], "tests", "libpolicy_example.so"), self.path("policy.so"))

    def type(self, command):
        if command.startswith("sqlite3") and not shutil.which("sqlite3"):
            return
        # a trained adapter where the page has one, a new folder where the page makes one
        makes = re.search(r"--output-dir (\S+)|convert \S+ (\S+)", command)
        target = next(filter(None, makes.groups())) if makes else None
        if target and target != "out2":
            shutil.rmtree(self.path(target), ignore_errors=True)
        if " out" in command and target != "out" and not os.path.exists(self.path("out")):
            shutil.copytree(self.path("adapter"), self.path("out"))
        if "--adapter DIR --output-dir MERGED" in command:
            command = command.replace("--model OUT", "--model BASE").replace("--weights keep", "--weights bf16")
        result = subprocess.run(["sh", "-c", command], cwd=self.path(), env=self.env, capture_output=True, text=True, timeout=300, input="")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn("warning", result.stderr)
        self.assertTrue(result.stdout.strip() or result.stderr.strip())

    def test_commands_of_blocks(self):
        typed = 0
        for page, text in pages():
            for name in ("out", "OUT", "merged", "MERGED", "out-vllm"):
                shutil.rmtree(self.path(name), ignore_errors=True)
            for command in blocks(text):
                if README_BLOCK in command or command.startswith(tuple(ELSEWHERE)) or "/tmp/out" in command or "/tmp/run" in command:
                    continue
                with self.subTest(f"{page}: {command}"):
                    self.type(plain(command))
                    typed += 1
        self.assertGreater(typed, 18)

    def test_python(self):
        """The blocks of docs/python.md, one after the other."""
        with open(os.path.join(ROOT, "docs", "python.md"), encoding="utf-8") as file:
            page = file.read()
        for command in blocks(page):
            if "moesaic.data" in command:
                self.type(plain(command))
        code = re.findall(r"(?ms)^```python\n(.*?)^```", page)
        self.assertEqual(len(code), 4)
        result = subprocess.run([self.env["MOESAIC_PYTHON"], "-c", "\n".join(code)], cwd=self.path(), env=self.env,
                                capture_output=True, text=True, timeout=300)  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr)
        documents, prompt, loss, losses = (line for line in result.stdout.splitlines() if line.strip())
        self.assertRegex(documents, r"^8 documents, [1-9]\d* of \d+ tokens trained, 4096$")
        self.assertIn("Who are you?", prompt)
        self.assertTrue(0 < float(loss) < 20)
        self.assertRegex(losses, r"^\[\d.*\d\] \d+ tensors$")

    def flags_of(self, words):
        """All flags of the command that the words name."""
        if words[0] in ("trace", "bench"):
            return set(re.findall(r"(?m)^ *(--?[a-z-]+)", self.good(*words[:2], "--help").stdout)) | {"--help", "--quiet"}
        text = self.good(words[0], "--help-all").stdout
        return set(re.findall(r"(?m)^ *(--[a-z0-9-]+)", text)) | {"--help", "--help-all"}

    def test_flags_named_in_passing(self):
        known, named = {}, 0
        for page, text in pages():
            for code in inline(text):
                words = code.split()
                if words[0] != "moesaic" or len(words) < 2 or words[1].startswith("--") or not re.fullmatch("[a-z]+", words[1]):
                    continue
                key = " ".join(words[1:3]) if words[1] in ("trace", "bench") else words[1]
                with self.subTest(f"{page}: {code}"):
                    if len(words) == 2:
                        self.assertIn(f"\n  {words[1]} ", self.good("--help").stdout)
                        continue
                    if key not in known:
                        known[key] = self.flags_of(words[1:])
                    for flag in re.findall(r"(?<!\S)--[a-z0-9-]+", code):
                        self.assertIn(flag, known[key])
                        named += 1
        self.assertGreater(named, 10)

    def test_flags_alone(self):
        """`--flag` in prose is one of some command or script."""
        known = set(re.findall(r"--[a-z0-9-]+", self.good("--help-all").stdout)) | {"--help-all", "--help", "--version", "--completion", "--man"}
        for name in ("check", "diff", "export", "import", "report", "summary", "whatif"):
            known |= set(re.findall(r"--[a-z0-9-]+", self.good("trace", name, "--help").stdout))
        sources = glob.glob(os.path.join(ROOT, "bench", "**", "*"), recursive=True) + glob.glob(os.path.join(ROOT, "scripts", "*"))
        for path in [*sources, os.path.join(ROOT, "run")]:
            if os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    known |= set(re.findall(r"--[a-z0-9-]+", file.read()))
        for page, text in pages():
            if page in ("docs/decisions.md", "docs/serving.md"):  # of compilers; of servers
                continue
            for code in inline(text):
                if re.match(r"--[a-z]", code):
                    self.assertIn(re.match(r"--[a-z0-9-]+", code)[0], known, page)

    def test_files_named_in_passing(self):
        """Paths of this repository that pages name are there."""
        listed = subprocess.run(["git", "-C", ROOT, "ls-tree", "-d", "--name-only", "HEAD"], capture_output=True, text=True)
        if listed.returncode:
            self.skipTest("no git checkout")
        tops = tuple(name + "/" for name in listed.stdout.split() if name[0] != ".")
        self.assertIn("docs/", tops)
        for page, text in pages():
            for code in {*inline(text), *re.findall(r"\]\(([^)#:]+)\)", text)}:
                word = code.split()[0].rstrip(",;")
                if "(" in code or word in DESIGNED or not re.fullmatch(r"[A-Za-z0-9_./-]+", word):
                    continue
                for folder in (ROOT, os.path.dirname(os.path.join(ROOT, page))):
                    if os.path.exists(os.path.join(folder, word)):
                        break
                else:
                    with self.subTest(f"{page}: {code}"):
                        self.assertFalse(word.startswith((*tops, "../")) or word.endswith(".md"), "no such file")


if __name__ == "__main__":
    unittest.main()
