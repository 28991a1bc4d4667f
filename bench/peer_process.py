# SPDX-License-Identifier: Apache-2.0
"""Programs that are set up once and stepped on demand, one running at a time: the others are stopped, for some spin while idle."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys

HIDDEN = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PATIENCE_S = 900  # for one answer
TICK = os.sysconf("SC_CLK_TCK")


PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def die_with_parent():
    """In the child: a stopped process would keep its gigabytes for ever."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Failed(Exception):
    """A program ended or did not answer; says where its messages are."""


def environment(**more):
    return {**{k: v for k, v in os.environ.items() if k not in HIDDEN}, **more}


class Program:
    """A server: a ready line, then one line of JSON for each command. Stopped whenever it is not asked."""

    def __init__(self, name, command, log, env):
        self.name, self.log = name, log
        self._buffer = b""
        with open(log, "wb") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self._process = subprocess.Popen(command, env=env, preexec_fn=die_with_parent, **pipes)
        self.ready = self._answer()
        self._signal(signal.SIGSTOP)

    def _signal(self, number):
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _read_line(self):
        stream = self._process.stdout
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([stream], [], [], PATIENCE_S)
            piece = os.read(stream.fileno(), 65536) if readable else b""
            if not piece:
                self.kill()
                raise Failed(f"{self.name} {'ended' if readable else 'did not answer'}; its messages: {self.log}")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _answer(self):
        return json.loads(self._read_line())

    def ask(self, line):
        self._signal(signal.SIGCONT)
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def cpu_s(self):
        """User and system time of all its threads."""
        with open(f"/proc/{self._process.pid}/stat", encoding="utf-8") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def kill(self):
        if self._process.poll() is None:
            self._process.kill()  # also a stopped one
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Busy:
    """Processes that only use CPU time, stopped except inside `with`."""

    def __init__(self, count):
        loop = [sys.executable, "-c", "while True: pass"]
        self._processes = [subprocess.Popen(loop, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent) for _ in range(count)]
        self._signal(signal.SIGSTOP)

    def _signal(self, number):
        for process in self._processes:
            process.send_signal(number)

    def __enter__(self):
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *exception):
        self._signal(signal.SIGSTOP)

    def kill(self):
        for process in self._processes:
            process.kill()
            process.wait()


def machine_cpu_s():
    """CPU time used on the machine since it started, guests and interrupts included."""
    with open("/proc/stat", encoding="utf-8") as file:
        v = [int(n) for n in file.readline().split()[1:9]]  # user nice system idle iowait irq softirq steal
    return (sum(v) - v[3] - v[4]) / TICK


def available_bytes():
    with open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def running(starters):
    """The programs of a round; ended however the block is left."""
    programs = []
    try:
        for start in starters:
            programs.append(start())
        yield programs
    finally:
        for program in programs:
            program.kill()
