# SPDX-License-Identifier: Apache-2.0
"""moesaic trace report: what the page contains, and that a browser opens it without complaint."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import unittest

import small_trace
from small_trace import BUSY_MS, KINDS, MS
from support import Case

TRACE_TOOL = os.environ["MOESAIC_TRACE_TOOL"]
MAKE = os.environ["MOESAIC_TRACE_MAKE"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(html.parser.HTMLParser):
    """Elements that would fetch something, and the texts of elements with an id."""

    def __init__(self, text):
        super().__init__()
        self.fetches, self.texts, self._open = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        if tag in ("link", "iframe", "img", "object", "embed") or "src" in a or (tag == "a" and "href" in a):
            self.fetches.append((tag, a))
        if tag not in ("meta", "input", "br", "link", "img"):
            self._open.append(a.get("id"))

    def handle_endtag(self, _):
        if self._open:
            self._open.pop()

    def handle_data(self, data):
        for name in filter(None, self._open):
            self.texts[name] = self.texts.get(name, "") + data


class Report(Case):
    def report(self, trace, *more):
        path = self.path("page.html")
        result = subprocess.run([TRACE_TOOL, "report", trace, "-o", path, *more], capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(path, encoding="utf-8") as file:
            return path, file.read()

    def small(self):
        return small_trace.write(self.path("small.mxt"))

    def made(self, *more):
        path = self.path("made.mxt")
        shape = "--layers 3 --groups 4 --experts 16 --workers 4 --parts 2 --steps 6 --tokens 64 --skew 1".split()
        subprocess.run([MAKE, path, *(more or shape)], check=True, capture_output=True)
        return path

    def browse(self, path, *flags, fragment=""):
        """The page's elements after its script ran; fails on anything in its console."""
        if not BROWSER:
            self.skipTest("no chromium, chromium-browser or google-chrome")
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.path('browser')}", "--enable-logging=stderr"]
        command += ["--window-size=1280,1000", "--virtual-time-budget=20000", *flags, "--dump-dom", f"file://{path}{fragment}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        console = [line for line in result.stderr.split("\n") if ":CONSOLE" in line]
        self.assertEqual(console, [])
        self.assertIn("</html>", result.stdout, result.stderr[-2000:])
        return Page(result.stdout)

    # ---- what is in the file ----

    def test_figures(self):
        _, text = self.report(self.small())
        page = Page(text)
        data = json.loads(page.texts["data"])
        self.assertEqual((data["tasks"], data["deps"], data["kinds"], len(data["workers"])), (7, 10, KINDS, 2))
        self.assertEqual(data["header"]["host.cpu"], 'A "CPU", </script><b>')
        self.assertEqual([v["name"] for v in data["views"]], ["step 1 (the median step)"])
        v = data["views"][0]
        span = round(9.5 * MS)
        self.assertEqual((v["begin"], v["end"], v["tokens"]), (0, span, 64))
        self.assertEqual(v["busy"], round(BUSY_MS * MS) - 2000)  # the plan began when it was submitted
        self.assertEqual(v["busy"] + sum(v["idle"]), 2 * span)
        for c in range(5):
            self.assertEqual(sum(w["idle"][c] for w in v["by_worker"]), v["idle"][c])
            self.assertAlmostEqual(sum(v["strip"]["idle"][c]), v["idle"][c], delta=480)
        self.assertEqual(v["realised"]["task"], [0, 2, 3, 4, 6])  # 1, 3, 4, 6, 9
        self.assertEqual(v["path"]["length"], round((1 + 2 + 4 + 1 + 1.5) * MS) - 2000)
        self.assertEqual(v["bounds"]["makespan"], span)
        times = {KINDS[k["kind"]]: k["time"] for k in v["kinds"]}
        self.assertEqual(times["gate_up"], 6 * MS)
        tokens = v["experts"]["tokens"]
        self.assertEqual(tokens["columns"], 4)
        self.assertEqual([(r["layer"], r["v"], r["top"]) for r in tokens["rows"]], [(0, [100, 20, 8, 0], 0)])
        self.assertAlmostEqual(tokens["rows"][0]["ratio"], 100 / 32)
        self.assertEqual([r["v"] for r in v["experts"]["group_times"]["rows"]], [[4 * MS, 6 * MS]])
        weights = next(p for p in data["memory"]["purposes"] if p["name"] == "weights")["bytes"]
        self.assertEqual((weights[0], weights[-1]), (3000, 3500))
        self.assertEqual(v["numa"]["matrix"][0][:2], [5100, 0])
        self.assertEqual(sum(v["numa"]["matrix"][1]), 5200)

    def test_needs_nothing_else(self):
        _, text = self.report(self.made())
        page = Page(text)
        self.assertEqual(page.fetches, [])
        rest = re.sub(r"<script type=.*?</script>", "", text, flags=re.S)
        self.assertIsNone(re.search(r"https?://|@import|url\((?!#)|fetch\(|XMLHttp|import\(", rest))
        code = re.search(r"<script>\n'use strict'(.*?)</script>", text, re.S).group(1)
        self.assertLess(len(code), 60000)

    def test_size_of_a_task(self):
        """Delta-packed columns: about 40 bytes of page for each task."""
        _, text = self.report(self.made("--tasks", "20000"))
        tasks = json.loads(Page(text).texts["data"])["tasks"]
        columns = sum(len(m) for m in re.findall(r'<script type="text/plain".*?</script>', text, re.S))
        self.assertLess(columns / tasks, 55)

    def test_steps(self):
        _, text = self.report(self.made(), "--step", "2:3")
        data = json.loads(Page(text).texts["data"])
        self.assertEqual([s[0] for s in data["steps"]], [2, 3])

    # ---- in a browser ----

    def test_opens(self):
        path, _ = self.report(self.small())
        page = self.browse(path, fragment="#task=3")
        self.assertIn("The step took 9.50", page.texts["limit"].replace("\u202f", " "))
        self.assertIn("expert 0 has 100 rows, 3.13 times the mean", page.texts["layer"].replace("\u202f", " "))
        self.assertIn("task 2 of 5 on the realised critical path", page.texts["facts"])
        self.assertIn("waits for 1 task", page.texts["facts"])
        self.assertIn("down L0 g1", page.texts["facts"])
        for name in ("kinds", "roofline", "tokens", "grouptimes", "layers", "imbalance", "memory", "steps", "workers", "numa", "hidden", "critical", "outliers", "header"):
            self.assertGreater(len(page.texts[name]), 12, name)
            self.assertNotRegex(page.texts[name], "NaN|undefined|Infinity", name)
        self.assertEqual(page.fetches, [])

    def test_opens_in_the_dark_and_on_a_phone(self):
        path, _ = self.report(self.made())
        self.browse(path, "--blink-settings=preferredColorScheme=0", "--window-size=400,800", fragment="#view=1")

    def test_opens_what_knows_little(self):
        rec = self.write("tasks.rec", "Name: a\nJobId: 1\nWorkerId: 0\nStartTime: 1\nEndTime: 1\n\n")
        subprocess.run([TRACE_TOOL, "import", rec], check=True, capture_output=True)
        page = self.browse(self.report(self.path("tasks.mxt"))[0])
        for name, text in page.texts.items():
            if name != "data":
                self.assertNotRegex(text, "NaN|undefined|Infinity", name)

    def test_a_large_trace_opens(self):
        if not os.environ.get("MOESAIC_TEST_FULL"):
            self.skipTest("a large trace: only in ./run test --full")
        page = self.browse(self.report(self.made("--tasks", "400000", "--layers", "24", "--groups", "32", "--experts", "128", "--workers", "16"))[0])
        self.assertIn("took", page.texts["limit"])

    def test_refusals(self):
        result = subprocess.run([TRACE_TOOL, "report", self.small(), "--step", "7"], capture_output=True, text=True)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1))
        self.assertIn("no task has run", result.stderr)


if __name__ == "__main__":
    if not BROWSER:
        print("skipped: no chromium: the report was not opened in a browser", file=sys.stderr)
    unittest.main()
