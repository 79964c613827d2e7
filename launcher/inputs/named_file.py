"""Reading a file that the user named, or whose name is always looked for.

[Note: What is waited for]
A pipe that the shell made, as of `--hostfile <(scontrol ...)` or `--hostfile /dev/stdin`, is read to its end,
as ssh does it with -F: this process was started together with the writer. A named pipe in a folder is
refused: without a writer, dslaunch would silently wait for ever. Devices are refused, too, except /dev/null,
which counts as an empty file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import LaunchError

MAX_BYTES = 64 << 20  # more than any real input; ends the reading of an endless file such as /dev/zero
_NULL = os.makedev(1, 3)  # /dev/null, by any name
_REFUSED = {
    stat.S_IFIFO: "it is a named pipe, which may be waited for without end",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
    stat.S_IFDIR: os.strerror(errno.EISDIR),
}


def open_named(path: Path) -> int:
    """Return a descriptor that reads the file. See [Note: What is waited for].

    Errors: OSError whose `strerror` is a clause that follows the path
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is a socket, or a device that is not there", str(path)) from None
        raise
    kind = stat.S_IFMT((found := os.fstat(fd)).st_mode)
    is_null = kind == stat.S_IFCHR and found.st_rdev == _NULL
    if kind == stat.S_IFDIR or not (kind == stat.S_IFREG or is_null or _is_stream_of_ours(path)):
        os.close(fd)
        raise OSError(errno.EINVAL, _REFUSED.get(kind, "it is no regular file"), str(path))
    os.set_blocking(fd, True)
    return fd


def read_named(
    path: Path, *, refuse: Callable[[os.stat_result], str] | None = None, max_bytes: int | None = None
) -> bytes:
    """Return the content of the file. `refuse` says why the open file may not be used; empty if it may.

    Errors: as open_named(); LaunchError with the text of `refuse`
    """
    with open(open_named(path), "rb") as file:
        why = refuse(os.fstat(file.fileno())) if refuse is not None else ""
        if why:
            raise LaunchError(f"{path}: {why}")
        limit = MAX_BYTES if max_bytes is None else max_bytes
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit >> 20} MiB", str(path))
    return data


def read_stdin() -> bytes:
    """Return the content of standard input.

    Errors: OSError whose `strerror` is a clause that follows its name, if it is closed or a terminal
    """
    if os.isatty(0):
        raise OSError(errno.EINVAL, "it is a terminal, on which nothing is written yet", "standard input")
    with open(0, "rb", closefd=False) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES >> 20} MiB", "standard input")
    return data


def _is_stream_of_ours(path: Path) -> bool:
    """Tell whether the path names a descriptor of this process, as /dev/stdin and /dev/fd/63 do."""
    folder = path.parent.resolve()
    return folder.is_relative_to("/proc") or (folder == Path("/dev") and path.is_symlink())
