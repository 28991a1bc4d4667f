# SPDX-License-Identifier: Apache-2.0
"""First-fit packing of whole documents, in order, deterministic."""


def first_fit(lengths, capacity):
    """-> packs, each a list of document numbers; a document goes into the first pack that has room for it.

    A tree of the largest room below each node finds that pack in log time; a document longer than the capacity gets a
    pack alone."""
    size = 1
    while size < max(1, len(lengths)):
        size *= 2
    room = [capacity] * (2 * size)
    packs = []
    for document, length in enumerate(lengths):
        length = min(length, capacity)
        at = 1
        while at < size:
            at = 2 * at if room[2 * at] >= length else 2 * at + 1
        slot = at - size
        if slot == len(packs):
            packs.append([])
        packs[slot].append(document)
        room[at] -= length
        while at > 1:
            at //= 2
            room[at] = max(room[2 * at], room[2 * at + 1])
    return packs
