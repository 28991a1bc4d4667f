# SPDX-License-Identifier: Apache-2.0
"""Writes traces by hand, from docs/trace-format.md alone: plain columns, nothing of the library."""

import struct

HEADER, TASKS, DEPS, ROUTING, MEMORY, COUNTERS, MARKS, HOST, END = range(1, 10)
NONE = (1, 0)  # an empty range
TASK_COLUMNS = (
    "id kind phase layer group slice part micro step worker submit ready pop start stop cpu core rows flops read written local remote"
).split()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def varint(v):
    out = b""
    while v > 127:
        out += bytes([v & 127 | 128])
        v >>= 7
    return out + bytes([v])


def signed(v):
    return varint(v * 2 if v >= 0 else -v * 2 - 1)


def chunk(kind, rows, payload, time=NONE, ids=NONE, steps=NONE, layers=NONE):
    head = struct.pack("<IIIII8q", 0x4354584D, kind, rows, len(payload), crc32c(payload), *time, *ids, *steps, *layers)
    return head + struct.pack("<I", crc32c(head)) + payload


def table(kind, rows, columns, **ranges):
    """columns: id -> values (PLAIN), or bytes (BYTES)"""
    payload = b""
    for number, values in sorted(columns.items()):
        data = values if isinstance(values, bytes) else b"".join(map(signed, values))
        payload += varint(number) + bytes([4 if isinstance(values, bytes) else 2]) + varint(len(values)) + varint(len(data)) + data
    return chunk(kind, rows, payload, **ranges)


def spread(values):
    values = list(values)
    return (min(values), max(values)) if values else NONE


def write(path, header, tasks, routing=(), memory=(), marks=(), host=(), ended=True):
    """
    header: dict. tasks: dicts with names of TASK_COLUMNS and "waits" (ids). routing: (task, step, layer, micro, time, tokens, slots, loads).
    memory: (time, purpose, part, bytes). marks: (time, what, step, tokens, trained). host: (what, thread, begin, end).
    """
    text = "".join(f"{k}={v}\n" for k, v in header.items()).encode()
    out = b"\x89MXT\r\n\x1a\n" + struct.pack("<II", 1, 0) + chunk(HEADER, 0, text)
    columns = {i + 1: [t[name] for t in tasks] for i, name in enumerate(TASK_COLUMNS)}
    ranges = {"ids": spread(t["id"] for t in tasks), "steps": spread(t["step"] for t in tasks)}
    layers = spread(t["layer"] for t in tasks if t["layer"] >= 0)
    times = spread(v for t in tasks for v in (t["start"], t["stop"]))
    out += table(TASKS, len(tasks), columns, time=times, layers=layers, **ranges)
    ordered = sorted(tasks, key=lambda t: t["id"])
    deps = {i + 1: [t[name] for t in ordered] for i, name in enumerate("id kind layer micro step submit".split())}
    deps[7] = [len(t["waits"]) for t in ordered]
    deps[8] = [t["id"] - w for t in ordered for w in sorted(t["waits"])]
    out += table(DEPS, len(tasks), deps, time=spread(t["submit"] for t in tasks), layers=layers, **ranges)
    if routing:
        values = list(zip(*routing))
        columns = {i + 1: list(values[i]) for i in range(7)}
        columns[8] = [len(loads) for loads in values[7]]
        columns[9] = [v for loads in values[7] for v in loads]
        out += table(ROUTING, len(routing), columns, time=spread(values[4]), ids=spread(values[0]), steps=spread(values[1]), layers=spread(values[2]))
    if memory:
        names = sorted({m[1] for m in memory})
        columns = {1: "".join(n + "\0" for n in names).encode(), 2: [m[0] for m in memory], 3: [names.index(m[1]) for m in memory]}
        columns.update({4: [m[2] for m in memory], 5: [m[3] for m in memory]})
        out += table(MEMORY, len(memory), columns, time=spread(m[0] for m in memory))
    if marks:
        out += table(MARKS, len(marks), {i + 1: [m[i] for m in marks] for i in range(5)}, time=spread(m[0] for m in marks), steps=spread(m[2] for m in marks))
    if host:
        out += table(HOST, len(host), {i + 1: [h[i] for h in host] for i in range(4)}, time=(min(h[2] for h in host), max(h[3] for h in host)))
    if ended:
        out += table(END, 1, {1: b"executed\0", 2: [0], 3: [0], 4: [len(tasks)]})
    with open(path, "wb") as file:
        file.write(out)
