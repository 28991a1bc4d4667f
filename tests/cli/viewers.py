# SPDX-License-Identifier: Apache-2.0
"""Reads what moesaic trace export writes: walks Perfetto's protobuf, reads Paje as its head defines it."""

import shlex
import struct


def varint(data, at):
    """Its value and where it ends."""
    v = shift = 0
    while True:
        byte = data[at]
        at += 1
        v |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return v, at


def fields(data):
    """(number, value) of a protobuf message; a message or text is bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            (value,) = struct.unpack_from("<Q", data, at)
            at += 8
        elif key & 7 == 2:
            size, at = varint(data, at)
            assert at + size <= len(data), "a field is longer than its message"
            value = bytes(data[at : at + size])
            at += size
        else:
            raise AssertionError(f"wire type {key & 7}")
        yield key >> 3, value


def one(data, number, otherwise=None):
    return dict(fields(data)).get(number, otherwise)


def perfetto(data):
    """{tracks: uuid -> name, slices: [(track, name, begin, end, annotations)], flows: {id: (from, to)}, counters: {name: [(time, value)]}}"""
    names, notes, tracks, slices, counters, open_slices, flows = {}, {}, {}, [], {}, {}, {}
    for number, packet in fields(data):
        assert number == 1, "a Trace has packets only"
        parts = list(fields(packet))
        for kind, value in parts:
            if kind == 12:
                for what, entry in fields(value):
                    {2: names, 3: notes}[what][one(entry, 1)] = one(entry, 2).decode()
            elif kind == 60:
                thread, process = one(value, 4), one(value, 3)
                name = one(value, 2) or (one(thread, 5) if thread else one(process, 6))
                tracks[one(value, 1)] = name.decode()
        event = dict(parts).get(11)
        if event is None:
            continue
        time, kind, track = dict(parts)[8], one(event, 9), one(event, 11)
        if kind == 4:
            counters.setdefault(tracks[track], []).append((time, one(event, 30)))
        elif kind == 1:
            assert track not in open_slices, "slices of a track overlap"
            name = names[one(event, 10)] if one(event, 10) else one(event, 23).decode()
            annotations = {}
            for n, v in fields(event):
                if n == 4:
                    annotations[notes[one(v, 1)]] = one(v, 4) if one(v, 4) is not None else one(v, 6).decode()
                elif n in (47, 48):
                    flows.setdefault(v, [None, None])[n - 47] = annotations.get("id")
            open_slices[track] = (name, time, annotations)
        else:
            name, begin, annotations = open_slices.pop(track)
            slices.append((tracks[track], name, begin, time, annotations))
    assert not open_slices, "a slice does not end"
    return {"tracks": tracks, "slices": slices, "flows": {tuple(f) for f in flows.values()}, "counters": counters}


def paje(text):
    """[(event name, {field: value})], in order"""
    heads, events, head = {}, [], None
    for line in text.split("\n"):
        if line.startswith("%EventDef"):
            _, name, number = line.split()
            head = heads[number] = (name, [])
        elif line.startswith("%EndEventDef"):
            head = None
        elif line.startswith("%"):
            head[1].append(line.split()[1])
        elif line:
            values = shlex.split(line)
            name, names = heads[values[0]]
            assert len(values) == len(names) + 1, line
            events.append((name, dict(zip(names, values[1:]))))
    return events
