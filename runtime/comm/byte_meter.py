"""Count of the bytes that this rank has sent so far, and a fingerprint of their order."""

from __future__ import annotations

from zlib import crc32

from .flight_recorder import DATA_LANE, NUM_LANES, Line


class Meter:
    """Counts the bytes of each kind of collective and keeps a rolling hash of their order.

    Units: bytes that this rank sends by the ring formulas: (N-1)/N of the whole buffer for a reduce_scatter
           or an all_gather, twice that for an all_reduce. gloo and NCCL may send a little more or less.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._hashes = [0] * NUM_LANES
        self._data_hashes: dict[Line, int] = {}

    @property
    def order_hash(self) -> int:
        """Equal on all ranks that issued the same collectives in the same order, in each lane but that of
        data.
        """
        return crc32(repr(self._hashes).encode()) if any(self._hashes) else 0

    def data_hash(self, line: Line) -> int:
        """Return the like of what these ranks have sent each other because of their data."""
        return self._data_hashes.get(line, 0)

    def record(
        self,
        kind: str,
        what: str,
        *,
        nbytes: int,
        sent_bytes: int | None = None,
        lane: int = 0,
        line: Line = Line(),  # noqa: B008  (it cannot change)
    ) -> None:
        """Note one collective of `what`, over `nbytes`, of which this rank sends `sent_bytes`;
        None: that is unknown.

        A lane is a communicator of its own: what the two send may pass each other in any way.
        """
        if sent_bytes is not None:
            self._bytes[kind] = self._bytes.get(kind, 0) + sent_bytes
        done = f"{kind} {what} {nbytes}".encode()
        if lane == DATA_LANE:
            self._data_hashes[line] = crc32(done, self._data_hashes.get(line, 0))
        else:
            self._hashes[lane] = crc32(done, self._hashes[lane])

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes sent so far, by kind of collective."""
        return dict(self._bytes)
