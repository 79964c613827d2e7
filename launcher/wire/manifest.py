"""The list of the files that a folder must have.

A file's content is named by its digest: two files with equal bytes are one content, which travels once. The
number of a content is its place among the digests in the order of the list.
"""

from __future__ import annotations

import hashlib
import json
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NamedTuple
else:
    from .fast_tuple import Record as NamedTuple

FILE, FOLDER, LINK = "f", "d", "l"
DIGEST_BYTES = 20
# Our own folder in every folder that is sent: the record of the last sync, a lock, contents on their way.
OWN_FOLDER = b".dslaunch"
MAX_LIST_BYTES = 1 << 30
PIECE_BYTES = 1 << 18  # size of a piece of contents that travels
# So many bytes of Chunks may be on their way before the first of them was dealt with.
WINDOW_BYTES = 1 << 20
NO_COMPRESSION, COMPRESSED = b"\0", b"\1"
_SAMPLE_BYTES = 1 << 13
_WORTH_IT = 0.75


class Entry(NamedTuple):
    """One name. `path` is below the folder; `digest` is that of a file, or the target of a link."""

    path: bytes
    kind: str
    mode: int
    size: int
    mtime_ns: int
    digest: bytes


class WrongList(ValueError):
    """The data is no list of files below one folder."""


def new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def write_list(entries: Sequence[Entry]) -> bytes:
    rows = [
        [
            _text(one.path),
            one.kind,
            one.mode,
            one.size,
            one.mtime_ns,
            _text(one.digest) if one.kind == LINK else one.digest.hex(),
        ]
        for one in entries
    ]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode("ascii"), 1)


def read_list(data: bytes) -> list[Entry]:
    """Read the list. Errors: WrongList, also if a name leads out of the folder"""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MAX_LIST_BYTES)
        if not unpacker.eof:
            raise ValueError("cut off, or too long")
        rows = json.loads(text)
        entries = [
            Entry(
                _bytes(path),
                kind,
                mode,
                size,
                mtime_ns,
                _bytes(digest) if kind == LINK else bytes.fromhex(digest),
            )
            for path, kind, mode, size, mtime_ns, digest in rows
        ]
    except (ValueError, TypeError, AttributeError, zlib.error, RecursionError) as error:
        raise WrongList(f"not a list of files: {error}") from None
    check(entries)
    return entries


def check(entries: Sequence[Entry]) -> None:
    """Errors: WrongList if these cannot be the entries of one folder"""
    folders = {b""}
    seen = set()
    for one in entries:
        parent, _, name = one.path.rpartition(b"/")
        numbers = (one.mode, one.size, one.mtime_ns)
        if not all(type(number) is int for number in numbers):
            why = "has a mode, size or time that is no number"
        elif name in (b"", b".", b"..") or b"\0" in one.path or one.path.startswith(b"/"):
            why = "is no name below a folder"
        elif parent not in folders or one.path in seen:
            why = "stands twice, or not after its folder"
        elif one.path.split(b"/", 1)[0] == OWN_FOLDER:
            why = "belongs to dslaunch itself"
        elif one.kind not in (FILE, FOLDER, LINK) or one.mode & ~0o777 or one.size < 0:
            why = f"is of kind {one.kind!r} with mode {one.mode:o} and {one.size} bytes"
        elif one.kind == FILE and len(one.digest) != DIGEST_BYTES:
            why = "has no digest"
        elif one.kind == LINK and (not one.digest or b"\0" in one.digest):
            why = "leads nowhere"
        else:
            seen.add(one.path)
            if one.kind == FOLDER:
                folders.add(one.path)
            continue
        raise WrongList(f"not a list of files: {one.path[:200]!r} {why}")


def contents_of(entries: Sequence[Entry]) -> list[Entry]:
    """Return the first file of each content, in the order of their numbers."""
    first: dict[bytes, Entry] = {}
    for one in entries:
        if one.kind == FILE and one.size:
            first.setdefault(one.digest, one)
    return list(first.values())


def pack_piece(data: bytes) -> bytes:
    """Return the body of a Chunk of contents: its form, then the data, compressed if that is smaller."""
    sample = data[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) < _WORTH_IT * len(sample):
        return COMPRESSED + zlib.compress(data, 1)
    return NO_COMPRESSION + data


def unpack_piece(piece: bytes) -> bytes:
    """Return the data. Errors: ValueError if this is no piece, or more than one"""
    form, body = piece[:1], piece[1:]
    if form == NO_COMPRESSION:
        return body
    if form != COMPRESSED:
        raise ValueError(f"a piece begins with {form!r}")
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(body, 2 * PIECE_BYTES)
    except zlib.error as error:
        raise ValueError(f"a piece cannot be unpacked: {error}") from None
    if not unpacker.eof:
        raise ValueError("a piece is cut off, or too long")
    return data


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
