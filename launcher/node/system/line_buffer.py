"""Whole lines of the bytes that a worker writes."""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in pieces, so a worker cannot fill the agent's memory
PROGRESS_INTERVAL_S = 1.0


class LineBuffer:
    """Collects the bytes of one stream and gives them back as whole lines.

    A carriage return means that the text before it is overwritten (progress bars). A finished line keeps only
    the text after its last carriage return; an unfinished one is returned in its newest version once a
    second. Verbatim, carriage returns are bytes like any other.
    """

    def __init__(self, *, is_verbatim: bool = False) -> None:
        self._is_verbatim = is_verbatim
        self._pending = b""
        self._last_progress = float("-inf")

    def add(self, data: bytes, *, now: float) -> bytes:
        """Take `data` and return the lines that are complete, each with its newline; may be empty."""
        head, newline, tail = (self._pending + data).rpartition(b"\n")
        lines = head + newline if self._is_verbatim or not newline else _after_returns(head + newline)
        if b"\r" in tail and not self._is_verbatim:
            body = tail.rstrip(b"\r")
            returned = b"\r" if len(body) < len(tail) else b""  # may be the first half of "\r\n"
            shown, _, rest = body.rpartition(b"\r")
            newest = _after_return(shown)
            if newest and now - self._last_progress >= PROGRESS_INTERVAL_S:
                lines += newest + b"\n"
                self._last_progress = now
                newest = b""
            tail = (newest + b"\r" if newest else b"") + rest + returned
        if len(tail) > MAX_LINE_BYTES:
            end = len(tail) - _num_cut_bytes(tail)
            lines, tail = lines + tail[:end] + b"\n", tail[end:]
        self._pending = tail
        return lines

    def begun(self) -> bytes:
        """Return the line that was begun, as a whole line; not that of a progress bar."""
        return b"" if b"\r" in self._pending else self.rest()

    def rest(self) -> bytes:
        """Return the rest at the end of the stream: the last line, with a newline if it had none."""
        pending, self._pending = self._pending if self._is_verbatim else _after_return(self._pending), b""
        return pending + b"\n" if pending else b""


def _after_returns(lines: bytes) -> bytes:
    """Do the same for many lines; mostly there is nothing to do, so look at them together first."""
    if b"\r" not in lines:
        return lines
    lines = lines.replace(b"\r\n", b"\n")
    if b"\r" not in lines:
        return lines
    return b"".join(_after_return(line) + b"\n" for line in lines[:-1].split(b"\n"))


def _num_cut_bytes(data: bytes) -> int:
    """Return how many bytes at the end begin an incomplete UTF-8 character; 0 if that is not UTF-8."""
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte & 0xC0 != 0x80:  # not a continuation byte
            length = 4 if byte >> 3 == 0x1E else 3 if byte >> 4 == 0xE else 2 if byte >> 5 == 0x6 else 1
            return count if length > count else 0
    return 0


def _after_return(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
