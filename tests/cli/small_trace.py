# SPDX-License-Identifier: Apache-2.0
"""
One step of a made-up layer on two workers, small enough to count by hand. Times in ms:

    worker 0   plan 0-1   gate_up g0 1-5                  combine 7-8   update 8-9
    worker 1              gate_up g1 1-3   down g1 3-7                  repack 8-9.5
"""

import mxt

KINDS = ["plan", "gate_up", "down", "combine", "update", "repack", 'odd "kind", <b>']
MS = 1000000
HEADER = {
    "moesaic.version": "0", "host.name": "test", "topology.nodes": 2, "host.cpu": 'A "CPU", </script><b>', "workers": 2, "worker.0.node": 0, "worker.0.cpu": 0,
    "worker.1.node": 1, "worker.1.cpu": 1, "parts": 2, "part.0.node": 0, "part.0.workers": 0, "part.1.node": 1, "part.1.workers": 1,
    "placement": "strict", "rates.measured": 1, "rates.read_gbps": 10, "rates.read_all_gbps": 20, "rates.peak_gflops": 100, "kinds": len(KINDS),
}  # fmt: skip
HEADER.update({f"kind.{i}": name for i, name in enumerate(KINDS)})
# id, kind, worker, ready, start, stop, waits, layer, group, flops, read, written. 6 waits for 1 as well, which 2 and 4 imply.
ROWS = [
    (1, 0, 0, 0, 0, 1, [], 0, -1, 0, 1000, 0),
    (2, 1, 0, 1, 1, 5, [1], 0, 0, 8000000, 4000, 100),
    (3, 1, 1, 1, 1, 3, [1], 0, 1, 4000000, 2000, 100),
    (4, 2, 1, 3, 3, 7, [3, 1], 0, 1, 6000000, 3000, 100),
    (6, 3, 0, 7, 7, 8, [4, 2, 1], 0, -1, None, None, None),
    (7, 4, 0, 8, 8, 9, [6], 0, 0, None, None, None),
    (9, 5, 1, 8, 8, 9.5, [6, 4], 0, 1, None, None, None),
]
NA = -(1 << 63)
EDGES = {(1, 2), (1, 3), (3, 4), (1, 4), (4, 6), (2, 6), (1, 6), (6, 7), (6, 9), (4, 9)}
NEEDED = EDGES - {(1, 4), (1, 6), (4, 9)}
BUSY_MS = 1 + 4 + 2 + 4 + 1 + 1 + 1.5


def tasks():
    out = []
    for number, kind, worker, ready, start, stop, waits, layer, group, flops, read, written in ROWS:
        at = {"ready": ready, "pop": start, "start": start, "stop": stop}
        known = {k: NA if v is None else v for k, v in {"flops": flops, "read": read, "written": written}.items()}
        local = NA if read is None else (read + written if worker == 0 else 0)
        remote = NA if read is None else (read + written if worker == 1 else 0)
        out.append(
            {
                "id": number, "kind": kind, "phase": 3 if kind > 3 else 1, "layer": layer, "group": group, "slice": -1, "part": worker,
                "micro": 0, "step": 1, "worker": worker, "submit": number * 1000, "cpu": int((stop - start) * MS), "core": worker,
                "rows": 128 if kind in (1, 2) else number, "local": local, "remote": remote, "waits": waits, **{k: int(v * MS) for k, v in at.items()}, **known,
            }
        )  # fmt: skip
    for t in out:  # the first one is ready when it was submitted, and runs then
        if t["id"] == 1:
            t["ready"] = t["pop"] = t["start"] = 2000
    return out


def write(path, **changes):
    marks = [(0, 0, 1, 64, 60), (10000, 1, 1, NA, NA), (int(9.5 * MS), 2, 1, NA, NA)]
    routing = [(1, 1, 0, 0, MS, 64, 128, [100, 20, 8, 0])]
    memory = [(0, "weights", 0, 1000), (0, "weights", 1, 2000), (4 * MS, "activations", -1, 500), (8 * MS, "weights", 1, 2500), (0, "rss", -1, 9000)]
    host = [(0, 77, 0, 10000), (1, 77, 10000, int(9.5 * MS)), (0, 77, 5000, 20000)]
    mxt.write(path, HEADER, tasks(), routing=routing, memory=memory, marks=marks, host=host, **changes)
    return path
