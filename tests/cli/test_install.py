# SPDX-License-Identifier: Apache-2.0
"""What `cmake --install` leaves: symbols, pkg-config with both libraries, the program with its Python beside it."""

import os
import re
import shutil
import subprocess
import sys
import unittest

from support import MODEL, ROOT, SANITIZED, VENV_PYTHON, Case, environment

BUILD = os.environ["MOESAIC_BUILD"]
SOURCE = """
#include <moesaic.h>
#include <stdio.h>
int main(void)
{
	struct moe_engine_params p = { .struct_size = sizeof p };
	struct moe_engine *e;
	if (moe_engine_open(&p, &e) != MOE_OK)
		return puts(moe_last_error()), 1;
	printf("%s\\n", moe_version());
	return moe_engine_close(e) != MOE_OK;
}
"""


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


class Install(Case):
    @classmethod
    def setUpClass(cls):
        cls.prefix = os.path.join(BUILD, "installed")
        shutil.rmtree(cls.prefix, ignore_errors=True)
        run("cmake", "--install", BUILD, "--prefix", cls.prefix)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.prefix, ignore_errors=True)

    def installed(self, *parts):
        return os.path.join(self.prefix, *parts)

    def libraries(self):
        for folder, _, names in os.walk(self.prefix):
            if "libmoesaic.so.0" in names:
                return folder
        self.fail("no libmoesaic.so.0")

    def test_only_the_api_is_exported(self):
        with open(os.path.join(ROOT, "include", "moesaic.h"), encoding="utf-8") as file:
            declared = set(re.findall(r"MOE_API[^;(]*?\b(moe_\w+)\(", file.read()))
        self.assertGreater(len(declared), 30)
        lines = run("nm", "-D", "--defined-only", os.path.join(self.libraries(), "libmoesaic.so")).split("\n")
        exported = {line.split()[-1].split("@")[0] for line in lines if line and " A " not in line}
        self.assertEqual(exported, declared)
        versions = run("readelf", "--dyn-syms", "--wide", os.path.join(self.libraries(), "libmoesaic.so"))
        self.assertIn("moe_version@@MOESAIC_0", versions)

    @unittest.skipIf(SANITIZED, "the sanitizer's run time is not linked")
    def test_programs_link_by_pkg_config(self):
        source = self.write("main.c", SOURCE)
        env = {**environment(), "PKG_CONFIG_PATH": os.path.join(self.libraries(), "pkgconfig")}
        env["PKG_CONFIG_PATH"] += ":" + os.environ.get("PKG_CONFIG_PATH", "")
        moved = f"--define-variable=prefix={self.prefix}"  # the file names the prefix of configuring
        for way in ([], ["--static"]):
            with self.subTest(way):
                paths = [f"-I{self.installed('include')}", f"-L{self.libraries()}"]
                flags = run("pkg-config", moved, "--libs", "--cflags", *way, "moesaic", env=env).split()
                if way:
                    flags = [f"{self.libraries()}/libmoesaic.a" if flag == "-lmoesaic" else flag for flag in flags]
                program = self.path("program" + "".join(way))
                run("cc", source, "-o", program, *paths, *flags)
                env["LD_LIBRARY_PATH"] = self.libraries()
                self.assertRegex(run(program, env=env), r"^\d+\.\d+\.\d+\n$")
                needed = run("readelf", "-d", program)
                self.assertEqual("libmoesaic.so.0" in needed, not way)
                self.example(paths + flags, env)

    def example(self, flags, env):
        """examples/experts.c, as it is installed: weights of its own, a checkpoint's, and one that does not fit."""
        program = self.path("experts")
        source = self.installed("share", "doc", "moesaic", "examples", "experts.c")
        run("cc", "-O1", "-Wall", "-Wextra", "-Werror", source, "-o", program, *flags, "-lm")
        for arguments in ([], [MODEL, "1", "8", "128", "128", "2"]):
            first, last = map(float, re.search(r"error ([\d.]+) -> ([\d.]+)", run(program, *arguments, env=env)).groups())
            self.assertLess(last, 0.2 * first)
        wrong = subprocess.run([program, MODEL, "1", "9", "128", "128", "2"], capture_output=True, text=True, env=env)
        self.assertEqual(wrong.returncode, 1)
        self.assertIn("experts.8", wrong.stderr)

    def test_pages_and_completions(self):
        for name in ("share/man/man1/moesaic.1", "share/bash-completion/completions/moesaic",
                     "share/zsh/vendor-completions/_moesaic"):  # fmt: skip
            self.assertGreater(os.path.getsize(self.installed(name)), 5000)

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
    def test_the_program_finds_its_python(self):
        env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        rows = self.write("rows.jsonl", '{"text": "a hack is a quick job"}\n')
        tool = self.installed("bin", "moesaic")
        out = run(tool, "data", "--model", MODEL, "--data", rows, env=env, cwd=self.path())
        self.assertIn("rows      1 read, 1 used", out)

    def test_without_the_packages_it_says_what_to_type(self):
        bare = self.path("bare")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
        env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        env["MOESAIC_PYTHON"] = os.path.join(bare, "bin", "python")
        rows = self.write("rows.jsonl", '{"text": "x"}\n')
        result = subprocess.run([self.installed("bin", "moesaic"), "data", "--model", MODEL, "--data", rows],
                                capture_output=True, text=True, env=env)  # fmt: skip
        self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1), result.stderr)
        self.assertIn("pip install -r " + self.installed("share", "moesaic", "requirements.txt"), result.stderr)


if __name__ == "__main__":
    unittest.main()
