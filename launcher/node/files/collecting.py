"""Files that a job has written, for the launcher."""

from __future__ import annotations

import glob
import os
import stat
import threading

from ...wire.frames import Chunk, Collect, Collected, Found, bytes_of, text_of
from ...wire.manifest import OWN_FOLDER, PIECE_BYTES, WINDOW_BYTES, pack_piece

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...wire.frames import Frame

MAX_PROBLEMS = 20


class Collecting:
    """Works in a thread, in the folder of the process, which is the job's, or in the agent's own."""

    def __init__(
        self, asked: Collect, post: Callable[[Frame], None], *, own_folder: str | None = None
    ) -> None:
        """`own_folder` None: there is no such folder, so it has no files."""
        self._top = os.path.join(os.fsencode(own_folder or "/dev/null"), b"") if asked.is_own else b""
        self._patterns = [glob.escape(self._top) + bytes_of(one) for one in asked.patterns]
        besides = bytes_of(asked.besides)
        # A job's folder that the files come into would have no file left to send.
        self._besides = b"" if _is_in(os.getcwdb(), besides) else besides
        self._post = post
        self._changed = threading.Condition()
        self._num_allowed = WINDOW_BYTES
        self._problems: list[str] = []
        threading.Thread(target=self._run, daemon=True).start()

    def grant(self, num_bytes: int) -> None:
        """Allow `num_bytes` more bytes to be sent."""
        with self._changed:
            self._num_allowed += num_bytes
            self._changed.notify_all()

    def _run(self) -> None:
        counts: list[int] = []
        try:
            sent: set[bytes] = set()
            for pattern in self._patterns:
                names = list(dict.fromkeys(self._names(pattern)))
                counts.append(len(names))
                for name in names:
                    if name not in sent:
                        sent.add(name)
                        self._send(name)
        except Exception as error:  # any error that ends the thread is reported to the launcher
            self._problems.append(f"{type(error).__name__}: {error}")
        counts += [0] * (len(self._patterns) - len(counts))
        self._post(Collected(counts, self._problems[:MAX_PROBLEMS]))

    def _names(self, pattern: bytes) -> Iterator[bytes]:
        """Yield the files that match, in order, with those in folders that match; links to files count as
        such.
        """
        for name in sorted(_matches(pattern, self._note)):
            path = os.path.normpath(name)
            if os.path.isdir(path) and not os.path.islink(name):  # latest/ is the folder that it leads to
                walked = _walk(path, self._note)
                inner = (os.path.join(folder, one) for folder, _, files in walked for one in files)
                found = [os.path.normpath(one) for one in sorted(inner)]  # the job's folder itself is a dot
            else:
                found = [path]
            yield from (one for one in found if self._is_meant(one) and self._is_file(one))

    def _note(self, error: OSError) -> None:
        """Take note of a folder that cannot be looked into."""
        name = error.filename if isinstance(error.filename, bytes) else b""
        problem = f"what is in {os.fsdecode(name)}: {os.strerror(error.errno or 0)}"
        if problem not in self._problems:
            self._problems.append(problem)

    def _is_file(self, path: bytes) -> bool:
        """Tell whether it is a file; note the name of anything that is neither a file nor a folder."""
        if not os.path.isdir(path) and not os.path.isfile(path) and os.path.lexists(path):
            self._problems.append(f"{os.fsdecode(path)} is no file")
        return os.path.isfile(path)

    def _is_meant(self, path: bytes) -> bool:
        is_besides = bool(self._besides) and _is_in(os.path.abspath(path), self._besides)
        return not is_besides and OWN_FOLDER not in path.split(b"/")

    def _send(self, name: bytes) -> None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._problems.append(f"{os.fsdecode(name)}: {os.strerror(error.errno or 0)}")
            return
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):  # it was a file a moment ago
                self._problems.append(f"{os.fsdecode(name)} is no file")
                return
            self._post(Found(text_of(name[len(self._top) :]), found.st_mode & 0o777, found.st_mtime_ns))
            left = found.st_size  # bytes written after this are not sent
            while left:
                data = os.read(fd, min(left, PIECE_BYTES))
                if not data:
                    break
                left -= len(data)
                self._send_piece(pack_piece(data))
        except OSError as error:
            self._problems.append(f"{os.fsdecode(name)} is cut off: {os.strerror(error.errno or 0)}")
        finally:
            os.close(fd)

    def _send_piece(self, piece: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_allowed > 0)
            self._num_allowed -= len(piece)
        self._post(Chunk(piece))


def _matches(pattern: bytes, on_error: Callable[[OSError], None]) -> Iterator[bytes]:
    """Match as `glob.glob(pattern, recursive=True)` does, but `**` follows no links: they may lead in a
    circle, or to all data of the site.
    """
    parts = pattern.split(b"/")
    if b"**" not in parts:
        yield from glob.glob(pattern)
        return
    place = parts.index(b"**")
    above, below = b"/".join([*parts[:place], b""]), b"/".join(parts[place + 1 :])
    for top in glob.glob(above) if above else [b""]:
        if not below:
            yield from [top] if top else glob.glob(b"*")
            continue
        for folder, inner, _ in _walk(top or b".", on_error):
            inner[:] = [one for one in inner if not one.startswith(b".")]
            yield from _matches(os.path.join(glob.escape(folder), below), on_error)


def _walk(
    top: bytes, on_error: Callable[[OSError], None]
) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Walk as os.walk does, also through folders that are nested deeper than function calls may be."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        inner: list[bytes] = []
        files: list[bytes] = []
        links: set[bytes] = set()
        try:
            with os.scandir(folder) as found:
                for one in found:
                    (inner if _is_folder(one) else files).append(one.name)
                    if one.is_symlink():
                        links.add(one.name)
        except OSError as error:
            error.filename = folder
            on_error(error)
            continue
        yield folder, inner, files
        waiting += [os.path.join(folder, one) for one in inner if one not in links]


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Tell whether it is a folder, or a link that leads to one that can be seen."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_in(path: bytes, folder: bytes) -> bool:
    return (path + b"/").startswith(folder.rstrip(b"/") + b"/")
