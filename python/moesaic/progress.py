# SPDX-License-Identifier: Apache-2.0
"""A progress line with rate and remaining time, on a terminal only."""

import time


class Progress:
    """Rows are counted, the remaining time follows from the bytes read of the files' total."""

    def __init__(self, what, total_bytes, stream):
        self._what, self._total = what, max(total_bytes, 1)
        self._stream = stream if stream and stream.isatty() else None
        self._bytes = self._rows = 0
        self._start, self._shown = time.monotonic(), 0.0

    def read(self, size):
        self._bytes += size

    def row(self):
        self._rows += 1
        now = time.monotonic()
        if self._stream and now - self._shown > 0.2:
            self._shown = now
            seconds = max(now - self._start, 1e-9)
            done = min(self._bytes / self._total, 1.0)
            left = f"{seconds * (1 - done) / done:.0f} s left" if done else ""
            self._stream.write(
                f"\r{self._what}: {self._rows:,} rows, {100 * done:.0f} %, {self._rows / seconds:,.0f} rows/s, {left}\x1b[K"
            )
            self._stream.flush()

    def close(self):
        if self._stream and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
