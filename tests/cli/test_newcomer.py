# SPDX-License-Identifier: Apache-2.0
"""What meets a new user on a machine of others: files and folders that may not be read or written, a small disk, no HOME, another locale,
odd paths, Ctrl-C, two runs into one folder."""

import os
import pwd
import resource
import shutil
import signal
import subprocess
import time
import unittest

from support import MODEL, QUICK_TEMPLATE, ROOT, SANITIZED, TOOL, VENV_PYTHON, Case, environment, save_tokens, documents

FAULT = os.environ["MOESAIC_FAULT"]
ROWS = '{"instruction": "Gr\u00fc\u00df Gott, wer bist du?", "output": "Ich bin m\u00fcde \u2014 \u65e5\u672c"}\n' * 3
TRAIN = ["--max-steps", 2, "--threads", 2, "--quiet", "--lora-rank", 4, "--batch-size", 2]


class Newcomer(Case):
    def other_user(self):
        """Of a process that permissions hold for; a skip where there is none."""
        if os.getuid():
            return None
        try:
            user = pwd.getpwnam("nobody").pw_uid
        except KeyError:
            self.skipTest("no user nobody")
        os.chmod(self.path(), 0o755)
        probe = subprocess.run([TOOL, "--version"], user=user, capture_output=True, check=False) if os.access(TOOL, os.X_OK) else None
        if not probe or probe.returncode:
            self.skipTest("the program may not be run by nobody")
        return user

    def as_user(self, user, *arguments):
        env = {**environment(), "HOME": "/nonexistent", "PYTHONPATH": os.path.join(ROOT, "python"), "STARPU_HOME": self.path("starpu")}
        return subprocess.run([TOOL, *map(str, arguments)], user=user, capture_output=True, text=True, env=env, cwd=self.path(), timeout=120)

    def test_what_may_not_be_read_or_written(self):
        """Each line names the file and says that permission is denied; nothing is called missing."""
        try:
            user = self.other_user()
        except PermissionError:
            self.skipTest("the program may not be run by nobody")
        tokens = self.tokens()
        os.makedirs(self.path("starpu"))
        os.makedirs(self.path("mine"))
        os.chmod(self.path("starpu"), 0o777)
        os.chmod(self.path("mine"), 0o777)
        os.makedirs(self.path("closed", "inner"))
        shutil.copy(tokens, self.path("secret.safetensors"))
        self.write("secret.jsonl", ROWS)
        for name in ("folder", "config", "weights", "tokenizer"):
            shutil.copytree(MODEL, self.path(name))
        first = next(n for n in sorted(os.listdir(MODEL)) if n.endswith(".safetensors"))
        closed = {"folder": "", "config": "config.json", "weights": first, "tokenizer": "tokenizer.json"}
        shutil.copytree(MODEL, self.path("closed", "model"))
        shutil.copytree(self.path("config"), self.path("adapter"))
        self.write("adapter/adapter_config.json", "{}")
        self.good("data", "--model", MODEL, "--data", self.write("text.jsonl", '{"text": "some words"}\n'), "--output", self.path("own.safetensors"),
                  "--quiet") if os.path.exists(VENV_PYTHON) else save_tokens(self.path("own.safetensors"), documents(4))  # fmt: skip
        for name in ("secret.safetensors", "secret.jsonl", "adapter/adapter_config.json", *(os.path.join(k, v) for k, v in closed.items())):
            os.chmod(self.path(name), 0)
        os.chmod(self.path("closed"), 0)
        self.addCleanup(os.chmod, self.path("closed"), 0o755)
        train = lambda model, data=tokens, out="mine/out": ["train", "--model", model, "--data", data, "--output-dir", out, *TRAIN]  # noqa: E731
        rows = [
            (train("folder"), "folder: config.json"), (train("config"), "config: config.json"), (train("weights"), first), (train("closed/model"), "closed/model"),
            (train(MODEL, "secret.safetensors"), "secret.safetensors"), (train(MODEL, "secret.jsonl"), "secret.jsonl"),
            (train(MODEL, out="closed/inner"), "closed/inner"), (train(MODEL, out="/usr/share/moesaic-out"), "/usr/share/moesaic-out"),
            (["estimate", "--model", "folder"], "folder/config.json"), (["estimate", "--model", "closed/model"], "closed/model"),
            (["estimate", "--model", "config"], "config/config.json"), (["eval", "--model", "config", "--data", tokens], "config.json"),
            (["eval", "--model", MODEL, "--adapter", "adapter", "--data", tokens], "adapter_config.json"),
            *((["inspect", name], name) for name in ("folder", "closed/model", "config", "weights", "secret.safetensors")),
            (["convert", "folder", "mine/new", "--weights", "int8"], "folder"), (["convert", "closed/model", "mine/new", "--weights", "int8"], "closed/model"),
            (["convert", "weights", "mine/new", "--weights", "int8"], first), (["convert", MODEL, "closed/new", "--weights", "int8"], "closed/new"),
            (["merge", "--model", "closed/model", "--adapter", "adapter", "--output-dir", "mine/new"], "closed/model"),
            (["train", "--config", "closed/run.yaml"], "closed/run.yaml"), (["trace", "summary", "closed/t.mxt"], "closed/t.mxt"),
            (["train", *train(MODEL)[1:], "--resume", "closed/inner"], "closed/inner"), (["train", *train(MODEL)[1:], "--trace", "closed/t.mxt"], "closed/t.mxt"),
        ]  # fmt: skip
        if os.path.exists(VENV_PYTHON):
            rows.append((train("tokenizer", "own.safetensors"), "tokenizer.json"))
        for arguments, part in rows:
            with self.subTest(" ".join(map(str, arguments[:4]))):
                result = self.as_user(user, *arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                (line,) = result.stderr.strip().split("\n")
                self.assertIn(part, line)
                self.assertIn("ermission denied", line)
        self.assertEqual(os.listdir(self.path("mine")), [])
        # and with what it may read it works, without a home
        result = self.as_user(user, *train(MODEL))
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
    def test_other_locales_and_odd_paths(self):
        """Spaces, umlauts and bytes that are no UTF-8 in every path, in a locale that is not UTF-8: the same tokens, the same answers."""
        folder = os.path.join(os.fsencode(self.path()), "ein W\u00f6rter buch".encode(), b"d\xe4ten")
        os.makedirs(folder)
        model = shutil.copytree(os.fsencode(MODEL), os.path.join(folder, "m\u00f6 del".encode()))
        shutil.copy(QUICK_TEMPLATE, os.path.join(model, b"chat_template.jinja"))
        data = os.path.join(folder, "x \u65e5.jsonl".encode())
        with open(data, "w", encoding="utf-8") as file:
            file.write(ROWS)
        found = []
        for number, extra in enumerate(({}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"})):
            out, trace, merged = (os.path.join(folder, b"%d " % number + name) for name in ("ou\u00df".encode(), b"t x.mxt", b"mer ged"))
            run = lambda *arguments: subprocess.run([os.fsencode(TOOL), *arguments], capture_output=True, env={**environment(), **extra}, timeout=120)  # noqa: E731, B023
            results = [
                run(b"data", b"--model", model, b"--data", data), run(b"train", b"--model", model, b"--data", data, b"--output-dir", out,
                    b"--max-steps", b"2", b"--threads", b"2", b"--json", b"--save-steps", b"1", b"--trace", trace),
                run(b"generate", b"--model", model, b"--adapter", out, b"--max-new-tokens", b"4", "Gr\u00fc\u00df dich".encode()),
                run(b"eval", b"--model", model, b"--adapter", out, b"--data", data), run(b"inspect", out), run(b"trace", b"report", trace),
                run(b"merge", b"--model", model, b"--adapter", out, b"--output-dir", merged, b"--json"), run(b"inspect", merged),
                run(b"train", b"--model", model, b"--data", data, b"--output-dir", out, b"--max-steps", b"2", b"--threads", b"2", b"--quiet", b"--resume"),
            ]  # fmt: skip
            for result in results:
                self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("\u27e6Ich bin m\u00fcde \u2014 \u65e5\u672c".encode(), results[0].stdout)
            found.append([results[0].stdout, *(result.stdout for result in results[2:4])])
        self.assertEqual(*found)

    def test_names_of_one_model(self):
        """Relative, absolute, through links, with a slash at the end: the same run, and no way into the model's own folder."""
        shutil.copytree(MODEL, self.path("model"))
        os.symlink("model", self.path("link"))
        tokens, found = self.tokens(), set()
        for number, name in enumerate(("model", "./model/", "link", "link//", self.path("model"), os.path.join("..", os.path.basename(self.path()), "link"))):
            self.good("train", "--model", name, "--data", tokens, "--output-dir", f"out{number}", *TRAIN, cwd=self.path())
            found.add(self.read(f"out{number}", "adapter_model.safetensors"))
            self.good("eval", "--model", "link", "--adapter", f"out{number}", "--data", tokens, cwd=self.path())
            line = self.bad(2, "train", "--model", "link", "--data", tokens, "--output-dir", name, *TRAIN, cwd=self.path())
            self.assertIn("is the base model's folder", line)
        self.assertEqual(len(found), 1)

    def test_two_runs_into_one_folder(self):
        """The second is refused before it reads anything, whatever it was told, and takes nothing from the first."""
        data = self.tokens()
        first = subprocess.Popen([FAULT, *map(str, self.train_arguments("--max-steps", 4, "--save-steps", 2, data=data))], stderr=subprocess.PIPE, text=True,
                                 env={**environment(), "FAULT": "slow:2", "FAULT_REPORT": self.path("waits")})  # fmt: skip
        while not os.path.exists(self.path("waits")) and first.poll() is None:
            time.sleep(0.02)
        before = sorted(os.listdir(self.out))
        self.write("text.jsonl", '{"text": "some words"}\n')
        for flags in ([], ["--overwrite"], ["--resume"], ["--data", self.path("text.jsonl"), "--overwrite"]):
            line = self.bad(2, *self.train_arguments(*flags, data=data))
            self.assertRegex(line, "another process is training into it|has results of a run|no checkpoint to go on from")
        self.assertEqual(sorted(os.listdir(self.out)), before)
        _, error = first.communicate(timeout=120)
        self.assertEqual((first.returncode, error), (0, ""))
        self.good("eval", "--model", MODEL, "--adapter", self.out, "--data", data)

    def test_a_run_that_did_nothing_leaves_nothing(self):
        trace = self.path("t.mxt")
        self.assertIn("leaves nothing to train on", self.bad_training(2, "--trace", trace, "--eval-split", 16))
        self.assertFalse(os.path.exists(trace))
        self.write("t.mxt", "kept")
        line = self.bad_training(2, "--trace", trace, "--eval-data", self.path("absent.safetensors"))
        self.assertIn("absent.safetensors: No such file", line)
        self.assertEqual(self.read("t.mxt"), b"kept")

    def test_closed_standard_files(self):
        """`>&-` as daemons and cron have it: no file gets their numbers, so nothing that is printed lands in one; no Python trace."""
        trace = self.path("run.mxt")
        flags = [str(a) for a in self.train_arguments("--max-steps", 2, "--trace", trace) if a != "--quiet"]
        rows = self.write("rows.jsonl", '{"text": "some words"}\n')
        python = [environment()["MOESAIC_PYTHON"], "-m", "moesaic.data"]
        for closed in ("<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"):
            def run(*command, closed=closed):
                line = ["sh", "-c", f'exec "$@" {closed}', "sh", *map(str, command)]
                return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120)

            code = 2 if ">&-" in closed else 0
            with self.subTest(closed=closed):
                result = run(TOOL, *flags, "--overwrite")
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertIn("good: ", self.good("trace", "check", trace).stdout)
                for command in ([TOOL, "data"], python):
                    result = run(*command, "--model", MODEL, "--data", rows)
                    self.assertEqual(result.returncode, code, result.stderr)
                    self.assertNotIn("Traceback", result.stderr)
                result = run(TOOL, "generate", "--model", MODEL, "--raw", "Hello", "--max-new-tokens", 2)
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertEqual(run(TOOL, "trace", "summary", trace).returncode, code)

    @unittest.skipIf(SANITIZED, "a sanitizer reserves more")
    def test_little_address_space(self):
        """`ulimit -v` below what OpenBLAS's threads reserve, 128 MiB a core: every command ends, with an answer or one line."""
        for size in (120 << 20, 160 << 20, 400 << 20):
            def run(*command, size=size):
                return subprocess.run([TOOL, *map(str, command)], capture_output=True, text=True, env=environment(), timeout=60,
                                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)))  # fmt: skip

            self.assertEqual(run("--version").stdout, self.good("--version").stdout)
            self.assertEqual(run("inspect", MODEL).returncode, 0)
            self.assertEqual(run("train", "--nonsense").returncode, 2)

    def test_interrupted(self):
        """Ctrl-C while other commands work: code 130 or the signal's own death, nothing under the final name, and the next one works."""
        self.good(*self.train_arguments("--max-steps", 1))
        rows = self.write("rows.jsonl", '{"text": "%s"}\n' % ("word " * 400) * 6000)
        for arguments, new in (
            (["convert", MODEL, self.path("new"), "--weights", "int4"], "new"), (["merge", "--model", MODEL, "--adapter", self.out, "--output-dir", self.path("new")], "new"),
            (["data", "--model", MODEL, "--data", rows, "--output", self.path("new.safetensors")], "new.safetensors"),
            (["train", "--model", MODEL, "--data", rows, "--output-dir", self.path("new"), *TRAIN], "new"),
        ):  # fmt: skip
            if rows in arguments and not os.path.exists(VENV_PYTHON):
                continue
            for delay in (0.02, 0.3):
                with self.subTest(f"{arguments[0]} after {delay} s"):
                    process = subprocess.Popen([TOOL, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
                                               start_new_session=True)  # fmt: skip
                    time.sleep(delay)
                    try:
                        os.killpg(process.pid, signal.SIGINT)
                    except ProcessLookupError:
                        pass
                    _, error = process.communicate(timeout=120)
                    self.assertIn(process.returncode, (0, 130, -signal.SIGINT), error)
                    self.assertNotIn("Traceback", error)
                    if process.returncode and arguments[0] == "train":  # before its first step at most what the next one uses again
                        left = os.listdir(self.path(new)) if os.path.exists(self.path(new)) else []
                        self.assertFalse([name for name in left if not name.startswith("tokens-")], left)
                    elif process.returncode:
                        self.assertFalse(os.path.exists(self.path(new)), error)
                    elif os.path.isdir(self.path(new)):
                        shutil.rmtree(self.path(new))
                    else:
                        os.unlink(self.path(new))
            if rows not in arguments:
                self.good(*arguments)
                shutil.rmtree(self.path(new))


if __name__ == "__main__":
    unittest.main()
