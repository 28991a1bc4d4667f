# SPDX-License-Identifier: Apache-2.0
"""moesaic trace report: what the page contains, and that a browser opens it without complaint."""

import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
import unittest

import mxt
import small_trace
from small_trace import BUSY_MS, KINDS, MS
from support import Case

TRACE_TOOL = os.environ["MOESAIC_TRACE_TOOL"]
MAKE = os.environ["MOESAIC_TRACE_MAKE"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# Moves and clicks as a person would, after the page is there; says what it sees in an element of its own.
TRIAL = """
<pre id="trial"></pre><script>
(async () => {
const $ = id => document.getElementById(id), canvas = document.querySelector('#gantt canvas'), seen = {};
const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
const change = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event('change')); };
const key = k => canvas.dispatchEvent(new KeyboardEvent('keydown', { key: k, bubbles: true }));
canvas.setPointerCapture = () => {};
const point = (type, x, y, id = 1) => { const r = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent(type, { pointerId: id, clientX: r.left + x, clientY: r.top + y, bubbles: true })); };
const note = async name => { await frame(); seen[name] = $('range').textContent.replace(/\u202f/g, ' '); };
const width = canvas.clientWidth - 72, x = ms => 64 + width * ms / 9.5, rows = canvas.clientHeight - 4 - 60;
await note('whole');
canvas.dispatchEvent(new WheelEvent('wheel', { deltaY: -80, clientX: canvas.getBoundingClientRect().left + x(0), bubbles: true, cancelable: true }));
await note('wheel');
key('0'); await note('all'); key('+'); await note('plus'); key('ArrowRight'); await note('right'); key('-'); key('-'); await note('minus');
point('pointermove', x(5), rows + 45); seen.tip = $('tip').textContent;
point('pointerdown', x(5), rows + 45); point('pointerup', x(5), rows + 45); await frame(); seen.clicked = $('facts').textContent;
key('n'); seen.next = $('facts').textContent; key('p'); seen.before = $('facts').textContent;
key('Escape'); seen.cleared = $('facts').textContent; key('0');
change('find', '7'); seen.found = $('facts').textContent; change('find', '8'); seen.not_found = $('find').value;
for (const c of ['phase', 'layer', 'cpu', 'kind']) { change('colour', c); await frame(); seen[c] = $('legend').textContent; }
for (const t of ['dark', 'light', 'auto']) { change('theme', t); await frame(); seen[t] = getComputedStyle(document.body).backgroundColor; }
key('0'); await frame(); key('+'); await frame();
point('pointerdown', x(5), rows); point('pointermove', x(4), rows); point('pointerup', x(4), rows); await note('dragged');
$('trial').textContent = JSON.stringify(seen);
})();
</script></body>"""


# Where the names of the roofline lie, and the ends of its memory lines.
ROOFLINE = """
<pre id="trial"></pre><script>
{
  const box = t => { const b = t.getBBox(); return [t.textContent, b.x, b.y, b.x + b.width, b.y + b.height]; };
  const all = [...document.querySelectorAll('#roofline svg > text:not([transform])')].map(box);
  const slopes = [...document.querySelectorAll('#roofline polyline')].map(l => l.getAttribute('points').split(' ').map(p => p.split(',').map(Number)));
  document.getElementById('trial').textContent = JSON.stringify({ all, slopes });
}
</script></body>"""


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
        result = subprocess.run([TRACE_TOOL, "report", trace, "-o", path, *more], capture_output=True, text=True, timeout=900)
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
        with open(path, encoding="utf-8") as file:
            text = file.read()
        with open(path, "w", encoding="utf-8") as file:  # a page that is only dumped has no frames, and would not draw
            file.write(text.replace("<head>", "<head><script>window.requestAnimationFrame = f => setTimeout(f, 10)</script>", 1))
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.path('browser')}", "--enable-logging=stderr"]
        command += ["--window-size=1280,1000", "--virtual-time-budget=20000", *flags, "--dump-dom", f"file://{path}{fragment}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=900)
        console = [line for line in result.stderr.split("\n") if ":CONSOLE" in line]
        self.assertEqual(console, [])
        self.assertIn("</html>", result.stdout, result.stderr[-2000:])
        return Page(result.stdout)

    # ---- what is in the file ----

    def test_dependencies_given_twice(self):
        """More of them than what is made room for by tasks: each counts once, and the file is said to be wrong."""
        tasks = small_trace.tasks()
        for task in tasks:
            task["waits"] = task["waits"] * 1000
        trace = self.path("twice.mxt")
        mxt.write(trace, small_trace.HEADER, tasks)
        data = json.loads(Page(self.report(trace)[1]).texts["data"])
        self.assertEqual((data["tasks"], data["deps"]), (7, len(small_trace.EDGES)))
        result = subprocess.run([TRACE_TOOL, "check", trace], capture_output=True, text=True)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("9990 rows say what cannot be; the first: a dependency that is there twice", result.stdout)

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

    def test_names_on_the_roofline(self):
        """None on another; lines where rate = GB/s times flop per byte, which grid labels show."""
        path, text = self.report(self.made())
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("</body>", ROOFLINE))
        seen = json.loads(self.browse(path).texts["trial"])
        names = [b[0] for b in seen["all"]]
        self.assertIn("down_bwd", names)
        self.assertIn("100 GFLOP/s, one core", names)
        self.assertTrue(any(n.endswith("GB/s, one core") for n in names) and any(n.endswith("each, all cores") for n in names), names)
        for i, (a, x0, y0, x1, y1) in enumerate(seen["all"]):
            for b, u0, v0, u1, v1 in seen["all"][:i]:
                self.assertFalse(x0 < u1 and u0 < x1 and y0 < v1 - 2 and v0 < y1 - 2, (a, b))
        decade_x = {float(b[0]): (b[1] + b[3]) / 2 for b in seen["all"] if b[0].replace(".", "").isdigit() and b[2] > 290}
        decade_y = {float(b[0]): (b[2] + b[4]) / 2 for b in seen["all"] if b[0].replace(".", "").isdigit() and b[3] < 52 and b[2] < 290}
        (x_low, x_high), (y_low, y_high) = ((min(d), max(d)) for d in (decade_x, decade_y))
        steep = (decade_y[y_low] - decade_y[y_high]) / math.log(y_high / y_low) / ((decade_x[x_high] - decade_x[x_low]) / math.log(x_high / x_low))
        for (x0, y0), (x1, y1) in seen["slopes"]:
            self.assertAlmostEqual((y0 - y1) / (x1 - x0), steep, delta=0.02 * steep)

    def test_moving_about(self):
        path, text = self.report(self.small())
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("</body>", TRIAL))
        seen = json.loads(self.browse(path).texts["trial"])
        self.assertIn("(9.50 ms shown)", seen["whole"])
        self.assertRegex(seen["wheel"], r"^0 ns to 6\.\d+ ms")
        self.assertEqual(seen["all"], seen["whole"])
        self.assertIn("(5.70 ms shown)", seen["plus"])
        self.assertRegex(seen["right"], r"^3\.04\d* ms to 8\.74\d* ms")
        self.assertEqual(seen["minus"], seen["whole"])
        self.assertIn("down L0 g1", seen["tip"])
        self.assertIn("down L0 g1", seen["clicked"])
        self.assertIn("task 3 of 5 on the realised critical path", seen["clicked"])
        self.assertIn("task 4 of 5", seen["next"])
        self.assertIn("task 3 of 5", seen["before"])
        self.assertEqual(seen["cleared"], "")
        self.assertIn("update L0 g0", seen["found"])
        self.assertEqual(seen["not_found"], "")
        self.assertIn("forward", seen["phase"])
        self.assertIn("layer 0", seen["layer"])
        self.assertIn("half of it", seen["cpu"])
        self.assertIn("gate_up", seen["kind"])
        self.assertNotEqual(seen["dark"], seen["light"])
        self.assertEqual(seen["auto"], seen["light"])
        self.assertRegex(seen["dragged"], r"^2\.5\d* ms to 8\.2\d* ms")

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
