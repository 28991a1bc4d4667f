# SPDX-License-Identifier: Apache-2.0
"""moesaic trace export and import: every format read back by something else, counts by hand (small_trace.py)."""

import csv
import json
import os
import re
import sqlite3
import subprocess
import unittest
from random import Random

import mxt
import small_trace
import viewers
from small_trace import EDGES, KINDS, MS, NEEDED, ROWS
from support import Case

TRACE_TOOL = os.environ["MOESAIC_TRACE_TOOL"]
MAKE = os.environ["MOESAIC_TRACE_MAKE"]
FORMATS = ["chrome", "csv", "paje", "perfetto", "sqlite", "starpu-rec"]
DURATION = {row[0]: round((row[5] - row[4]) * MS) - (2000 if row[0] == 1 else 0) for row in ROWS}


class Export(Case):
    def setUp(self):
        super().setUp()
        self.small = small_trace.write(self.path("small.mxt"))

    def run_trace(self, *arguments):
        return subprocess.run([TRACE_TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=900)

    def trace(self, *arguments):
        result = self.run_trace(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def refused(self, *arguments):
        result = self.run_trace(*arguments)
        self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        return result.stderr

    def export(self, to, *more, trace=None):
        path = self.path("out-" + to)
        self.trace("export", trace or self.small, "--to", to, "-o", path, *more)
        return path

    def text(self, path):
        with open(path, encoding="utf-8") as file:
            return file.read()

    # ---- the small trace itself: another writer, the same reader ----

    def test_the_small_trace_is_good(self):
        self.assertIn("good: 7 tasks, 10 dependencies, 1 routing", self.trace("check", self.small))

    # ---- formats ----

    def test_chrome(self):
        events = json.loads(self.text(self.export("chrome")))["traceEvents"]
        tasks = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
        self.assertEqual({t["args"]["id"]: (t["name"], t["tid"]) for t in tasks}, {r[0]: (KINDS[r[1]], r[2] + 1) for r in ROWS})
        self.assertEqual({t["args"]["id"]: round(1000 * t["dur"]) for t in tasks}, DURATION)
        self.assertEqual([t["args"]["layer"] for t in tasks], [0] * 7)
        self.assertNotIn("flops", next(t for t in tasks if t["args"]["id"] == 6)["args"])  # not known is not 0
        self.assertFalse([e for e in events if e["ph"] in "sf"])
        ready = [(e["ts"], e["args"]["tasks"]) for e in events if e["name"] == "ready tasks"]
        self.assertEqual(ready, [(2.0, 0), (1000.0, 0), (3000.0, 0), (7000.0, 0), (8000.0, 0)])
        weights = [(e["ts"], e["args"]["bytes"]) for e in events if e["name"] == "memory: weights"]
        self.assertEqual(weights, [(0, 3000), (8000, 3500)])
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.assertEqual(threads[1, 1], "worker 0")
        self.nested([e for e in events if e["ph"] == "X"])

    def nested(self, slices):
        last = {}
        for e in sorted(slices, key=lambda e: e["ts"]):
            track = e["pid"], e["tid"]
            self.assertGreaterEqual(e["ts"] + 1e-6, last.get(track, 0), e)
            last[track] = e["ts"] + e["dur"]

    def arrows(self, *more):
        events = json.loads(self.text(self.export("chrome", *more)))["traceEvents"]
        number = {(e["tid"], t): e["args"]["id"] for e in events if e["ph"] == "X" and e["pid"] == 1 for t in (e["ts"], round(e["ts"] + e["dur"] - 0.001, 3))}
        ends = {}
        for e in events:
            if e["ph"] in "sf":
                ends.setdefault(e["id"], {})[e["ph"]] = number[e["tid"], e["ts"]]
        return {(e["s"], e["f"]) for e in ends.values()}

    def test_arrows(self):
        self.assertEqual(self.arrows("--dep", "none"), set())
        self.assertEqual(self.arrows("--dep", "all"), NEEDED)
        self.assertEqual(self.arrows("--dep", "3"), {(1, 3), (3, 4)})
        self.assertEqual(self.arrows("--dep", "7,3"), {(1, 3), (3, 4), (6, 7)})
        # the last to end is 9, which waited for 6, that for 4, 3 and 1
        self.assertEqual(self.arrows("--dep", "path"), {(1, 3), (3, 4), (4, 6), (6, 9)})

    def test_perfetto(self):
        with open(self.export("perfetto"), "rb") as file:
            p = viewers.perfetto(file.read())
        tasks = {s[4]["id"]: s for s in p["slices"] if "id" in s[4]}
        self.assertEqual({i: s[3] - s[2] for i, s in tasks.items()}, DURATION)
        self.assertEqual({i: s[1] for i, s in tasks.items()}, {r[0]: KINDS[r[1]] for r in ROWS})
        self.assertEqual({i: s[0] for i, s in tasks.items()}, {r[0]: f"worker {r[2]}" for r in ROWS})
        self.assertEqual(p["flows"], NEEDED)
        self.assertEqual(tasks[3][4]["flops"], 4000000)
        self.assertNotIn("flops", tasks[6][4])
        self.assertEqual(p["counters"]["memory: weights"], [(0, 3000), (8 * MS, 3500)])
        self.assertEqual([v for _, v in p["counters"]["ready tasks"]], [0] * 5)
        self.assertEqual([s[1:4] for s in p["slices"] if s[0] == "steps"], [("step 1", 0, round(9.5 * MS))])
        submit = [s[2:4] for s in p["slices"] if s[1] == "submit"]
        self.assertEqual(submit, [(0, 10000), (10000, 20000)])  # what overlaps begins later

    def test_paje(self):
        events = viewers.paje(self.text(self.export("paje", "--dep", "all")))
        times = [float(f["Time"]) for _, f in events if "Time" in f]
        self.assertEqual(times, sorted(times))
        kinds = {f["Alias"]: f["Name"] for n, f in events if n == "PajeDefineEntityValue"}
        self.assertEqual(kinds["K0"], "plan")
        states, busy, open_at = [f for n, f in events if n == "PajeSetState"], {}, {}
        for f in states:
            if "Id" in f:
                open_at[f["Container"]] = f
            elif f["Container"] in open_at:
                begin = open_at.pop(f["Container"])
                busy[int(begin["Id"])] = round(1e9 * (float(f["Time"]) - float(begin["Time"])))
                self.assertEqual(kinds[begin["Value"]], KINDS[next(r[1] for r in ROWS if r[0] == int(begin["Id"]))])
        self.assertEqual(busy, DURATION)
        keys = {n: {f["Key"] for m, f in events if m == n} for n in ("PajeStartLink", "PajeEndLink")}
        self.assertEqual(keys["PajeStartLink"], keys["PajeEndLink"])
        self.assertEqual(len(keys["PajeStartLink"]), len(NEEDED))

    def test_sqlite(self):
        path = self.export("sqlite")
        db = sqlite3.connect(path)
        self.addCleanup(db.close)
        self.assertEqual(db.execute("pragma integrity_check").fetchall(), [("ok",)])
        rows = db.execute("select id, kind, worker, stop - start from tasks order by id").fetchall()
        self.assertEqual(rows, [(r[0], KINDS[r[1]], r[2], DURATION[r[0]]) for r in ROWS])
        self.assertEqual(set(db.execute("select waits_for, task from deps")), EDGES)
        self.assertEqual(set(db.execute("select waits_for, task from deps where needed")), NEEDED)
        self.assertEqual(db.execute("select sum(rows), max(slots), count(*) from routing").fetchone(), (128, 128, 4))
        self.assertEqual(db.execute("select flops from tasks where id = 6").fetchone(), (None,))
        self.assertEqual(db.execute("select tokens, trained, tasks from steps").fetchall(), [(64, 60, 7)])
        self.assertEqual(db.execute("select value from header where key = 'host.cpu'").fetchone(), ('A "CPU", </script><b>',))
        self.assertEqual(db.execute("select sum(bytes) from memory where purpose = 'weights'").fetchone(), (5500,))

    def test_sqlite_says_why_it_is_not_written(self):
        os.mkdir(self.path("folder"))
        for path, why in ((self.path("folder"), "Is a directory"), (self.path("nowhere", "x"), "No such file or directory")):
            line = self.refused("export", self.small, "--to", "sqlite", "-o", path)
            self.assertIn(path + ": ", line)
            self.assertIn(why, line)
        self.assertEqual([n for n in os.listdir(self.path()) if ".part-" in n], [])

    def test_csv(self):
        folder = self.export("csv")

        def read(name):
            with open(os.path.join(folder, name), newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))

        tasks = read("tasks.csv")
        self.assertEqual([(int(t["id"]), t["kind"], int(t["stop"]) - int(t["start"])) for t in tasks], [(r[0], KINDS[r[1]], DURATION[r[0]]) for r in ROWS])
        self.assertEqual(tasks[4]["flops"], "")
        self.assertEqual({(int(d["waits_for"]), int(d["task"])) for d in read("deps.csv")}, EDGES)
        self.assertEqual({h["key"]: h["value"] for h in read("header.csv")}["host.cpu"], 'A "CPU", </script><b>')
        self.assertEqual([int(r["rows"]) for r in read("routing.csv")], [100, 20, 8, 0])
        self.assertEqual(len(read("memory.csv")), 5)
        self.assertEqual(len(read("marks.csv")), 3)
        self.assertEqual(len(read("host.csv")), 3)
        self.assertEqual([w["node"] for w in read("workers.csv")], ["0", "1"])

    def test_starpu_rec_and_back(self):
        folder = self.export("starpu-rec")
        records = [dict(line.split(": ", 1) for line in r.split("\n")) for r in self.text(os.path.join(folder, "tasks.rec")).strip().split("\n\n")]
        self.assertEqual([r["Name"] for r in records], [KINDS[r[1]] for r in ROWS])
        ids = [r[0] for r in ROWS]
        edges = {(ids[int(d) - 1], ids[int(r["JobId"]) - 1]) for r in records for d in r.get("DependsOn", "").split()}
        self.assertEqual(edges, EDGES)
        models = os.path.join(folder, "sampling", "codelets", "45")
        self.assertEqual(sorted(os.listdir(models)), sorted(KINDS[k] + ".moesaic" for k in {r[1] for r in ROWS}))
        entries = [line.split() for line in self.text(os.path.join(models, "gate_up.moesaic")).split("\n") if re.match("[0-9a-f]{8}\t", line)]
        self.assertEqual([(int(e[0], 16), float(e[3])) for e in entries], [(2, 4000.0), (3, 2000.0)])

        back = self.path("back.mxt")
        self.trace("import", os.path.join(folder, "tasks.rec"), "-o", back)
        self.assertIn("good: 7 tasks, 10 dependencies", self.trace("check", back))
        db = sqlite3.connect(self.export("sqlite", trace=back))
        self.addCleanup(db.close)
        self.assertEqual({(ids[a - 1], ids[b - 1]) for a, b in db.execute("select waits_for, task from deps")}, EDGES)
        self.assertEqual([d for (d,) in db.execute("select stop - start from tasks order by id")], [DURATION[i] for i in ids])

    def test_a_slice(self):
        db = sqlite3.connect(self.export("sqlite", "--time", "0:2"))
        self.addCleanup(db.close)
        self.assertEqual([i for (i,) in db.execute("select id from tasks")], [1, 2, 3])
        self.assertIn("no task has run", self.refused("export", self.small, "--to", "csv", "--layer", "5", "-o", self.path("x")))
        self.assertIn("no task has run", self.refused("export", self.small, "--to", "csv", "--step", "2:9", "-o", self.path("x")))

    # ---- import ----

    def imported(self, text):
        rec, out = self.write("tasks.rec", text), self.path("tasks.mxt")
        self.trace("import", rec)
        db = sqlite3.connect(self.export("sqlite", trace=out))
        self.addCleanup(db.close)
        return db

    def test_import_contracts_tasks_of_starpu(self):
        one = "Name: {}\nJobId: {}\nSubmitOrder: {}\n{}WorkerId: 1\nSubmitTime: 0.5\nStartTime: {}\nEndTime: {}\n\n"
        text = one.format("c", "0_9", "0_4", "DependsOn: 0_7 0_3\n", 9, 10.25)  # before what it waits for; 7 is StarPU's own
        text += one.format("a", "0_3", "0_1", "", 1, 2) + one.format("b", "0_5", "0_2", "DependsOn: 0_3\n", 2, 4)
        text += "Name: _starpu_sync_task\nJobId: 0_7\nSubmitOrder: 0_3\nDependsOn: 0_5 0_3 0_99\n\n"
        db = self.imported(text)
        self.assertEqual(db.execute("select kind, worker, start, stop from tasks order by id").fetchall(), [("a", 1, 1000000, 2000000), ("b", 1, 2000000, 4000000), ("c", 1, 9000000, 10250000)])
        self.assertEqual(set(db.execute("select waits_for, task from deps")), {(1, 2), (1, 3), (2, 3)})

    def test_import_of_tasks_in_no_order(self):
        one = "Name: t{0}\nJobId: {0}\n{1}WorkerId: 0\nStartTime: {2}\nEndTime: {3}\n\n"
        waits = {1: [4, 3], 2: [1], 3: [], 4: [3]}
        text = "".join(one.format(i, "DependsOn: " + " ".join(map(str, w)) + "\n" if w else "", 9 - i, 10 - i) for i, w in waits.items())
        db = self.imported(text)
        names = dict(db.execute("select id, kind from tasks"))
        self.assertEqual([names[i] for i in (1, 2, 3, 4)], ["t3", "t4", "t1", "t2"])
        edges = {(names[a], names[b]) for a, b in db.execute("select waits_for, task from deps")}
        self.assertEqual(edges, {(f"t{w}", f"t{i}") for i, of in waits.items() for w in of})

    def test_import_refuses(self):
        cases = {
            "hello\n": "Key: value",
            "": "no task",
            "Name: a\nStartTime: 1\nEndTime: 2\n\n": "without JobId",
            "Name: a\nJobId: x\n": "no job id",
            "Name: a\nJobId: 1\nStartTime: 3\nEndTime: 2\n\n": "before StartTime",
            "Name: a\nJobId: 1\nStartTime: soon\n": "no time in ms",
            "Name: a\nJobId: 1\nGFlop: 1e12\n": "no GFlop of 0 to 1e9",
            # what would be written and then left out by whoever reads it
            "Name: a\nJobId: 1\nStartTime: 1e11\n": "no time in ms",
            "Name: a\nJobId: 1\nWorkerId: 65536\n": "small number",
            "".join(f"Name: {i}\nJobId: {i}\n\n" for i in range(513)): "too many names",
            "Name: a\nJobId: 1\nWorkerId: -7\n": "small number",
            "JobId: 1\n\nJobId: 1\n\n": "same JobId",
            "JobId: 1\nDependsOn: 2\n\nJobId: 2\nDependsOn: 1\n\n": "cycle",
        }
        for text, message in cases.items():
            line = self.refused("import", self.write("bad.rec", text), "-o", self.path("bad.mxt"))
            self.assertIn(message, line)
            self.assertIn("bad.rec:", line)
            self.assertFalse(os.path.exists(self.path("bad.mxt")))
        self.assertIn("No such file", self.refused("import", self.path("none.rec")))

    # ---- errors ----

    def test_refusals(self):
        self.assertIn("--to is missing", self.refused("export", self.small))
        self.assertIn("there are " + ", ".join(FORMATS), self.refused("export", self.small, "--to", "otf2"))
        self.assertIn("--dep: 'x'", self.refused("export", self.small, "--to", "chrome", "--dep", "x"))
        self.assertIn("task 5 is not in", self.refused("export", self.small, "--to", "chrome", "--dep", "5"))
        self.assertIn("--time", self.refused("export", self.small, "--to", "chrome", "--time", "2:1"))
        for to in FORMATS:
            line = self.refused("export", self.small, "--to", to, "-o", "/proc/none/x")
            self.assertRegex(line, "/proc|unable to open")
            self.write("file", "")
            if to in ("csv", "starpu-rec"):
                self.assertIn("file", self.refused("export", self.small, "--to", to, "-o", self.path("file")))
        self.assertEqual([n for n in os.listdir(self._folder.name) if "part-" in n], [])

    def test_chrome_is_for_a_window(self):
        if not os.environ.get("MOESAIC_TEST_FULL"):
            self.skipTest("a large trace: only in ./run test --full")
        made = self.path("made.mxt")
        subprocess.run([MAKE, made, "--tasks", "410000"], check=True, capture_output=True)
        self.assertIn("choose a window with --step or --time", self.refused("export", made, "--to", "chrome"))
        self.export("chrome", "--step", "2", trace=made)

    def test_a_folder_in_the_way(self):
        os.mkdir(self.path("dir"))
        for to in ("chrome", "perfetto", "paje"):  # a folder is in the way of the rename
            line = self.refused("export", self.small, "--to", to, "-o", self.path("dir"))
            self.assertIn("dir", line)
        self.assertEqual(os.listdir(self.path("dir")), [])

    def test_hostile_values(self):
        """Well-formed chunks that say what cannot be: an answer or one line of error, and what is written can be read."""
        random = Random(6)
        values = [0, 1, -1, 2, 255, 1 << 20, 1 << 31, -(1 << 31), 1 << 40, 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63)]
        for _ in range(60 if os.environ.get("MOESAIC_TEST_FULL") else 15):
            tasks = small_trace.tasks()
            for _ in range(random.randint(1, 4)):
                field = random.choice(sorted(set(tasks[0]) - {"id", "waits"}))
                random.choice(tasks)[field] = random.choice(values)
            random.choice(tasks)["waits"] = [random.choice([1, 2, 3, 6, 99])]
            header = {**small_trace.HEADER, random.choice(list(small_trace.HEADER)): random.choice(["", "x", "-1", "99999999"])}
            any_of = lambda n: [random.choice(values) for _ in range(n)]  # noqa: E731
            routing = [(1, 1, random.choice([0, 5, -1]), 0, *any_of(3), any_of(4))]
            memory = [(random.choice(values), "w", random.choice([-5, -1, 0, 1, 9]), random.choice(values)) for _ in range(3)]
            marks = [(random.choice(values), random.choice([0, 1, 2, 9]), random.choice([0, 1, 2]), 64, 60) for _ in range(3)]
            host = [(random.choice([0, 1, 9]), 1, *any_of(2)) for _ in range(3)]
            mxt.write(self.path("odd.mxt"), header, tasks, routing=routing, memory=memory, marks=marks, host=host)
            for to in FORMATS + ["report"]:
                out = self.path("odd-" + to)
                command = ["report"] if to == "report" else ["export", "--to", to, "--dep", random.choice(["all", "path"])]
                result = self.run_trace(*command, self.path("odd.mxt"), "-o", out)
                if result.returncode:
                    self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1), result.stderr)
                elif to == "chrome":
                    json.loads(self.text(out))
                elif to == "perfetto":
                    with open(out, "rb") as file:
                        viewers.perfetto(file.read())
                elif to == "paje":
                    viewers.paje(self.text(out))
                elif to == "report":
                    json.loads(re.search(r'id="data">\n(.*?)\n</script>', self.text(out), re.S).group(1))

    def test_every_format_of_a_made_trace_counts_the_same(self):
        made = self.path("made.mxt")
        subprocess.run([MAKE, made, *"--layers 2 --groups 4 --experts 16 --workers 4 --steps 4 --tokens 64".split()], check=True, capture_output=True)
        db = sqlite3.connect(self.export("sqlite", trace=made))
        self.addCleanup(db.close)
        count, busy = db.execute("select count(*), sum(stop - start) from tasks").fetchone()
        needed = db.execute("select sum(needed) from deps").fetchone()[0]
        with open(self.export("perfetto", trace=made), "rb") as file:
            p = viewers.perfetto(file.read())
        tasks = [s for s in p["slices"] if "id" in s[4]]
        self.assertEqual((len(tasks), sum(s[3] - s[2] for s in tasks), len(p["flows"])), (count, busy, needed))
        events = json.loads(self.text(self.export("chrome", trace=made)))["traceEvents"]
        tasks = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
        self.assertEqual((len(tasks), sum(round(1000 * e["dur"]) for e in tasks)), (count, busy))
        self.nested([e for e in events if e["ph"] == "X"])
        # needed dependencies imply all others
        ancestors = {}
        for (task,) in db.execute("select id from tasks order by id").fetchall():
            direct = [a for (a,) in db.execute("select waits_for from deps where task = ? and needed", (task,))]
            ancestors[task] = set(direct).union(*(ancestors[a] for a in direct))
        for task, on in db.execute("select task, waits_for from deps"):
            self.assertIn(on, ancestors[task])
        for task, on in db.execute("select task, waits_for from deps where needed"):
            others = [a for (a,) in db.execute("select waits_for from deps where task = ?", (task,)) if a != on]
            self.assertFalse(any(on in ancestors[a] for a in others), (task, on))


if __name__ == "__main__":
    unittest.main()
