"""Disks that are full, that fail, that move less than was asked for; and folders that have no direct I/O."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.kernels.disk import DiskEngine, DiskFile
from tests.small_disk import small_disk_at

TIME_LIMIT_S = 60
SMALL_BYTES = 1 << 20

# Stands between the engine and the C library. FAULT is one of
#   short        no call moves more than a page and a half
#   interrupted  every other call is interrupted before it moves anything
#   <errno>@<n>  calls that reach byte n move what is before it, and fail from there on
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_uint calls;

static ssize_t fault(size_t *count, off_t offset) {
    const char *what = getenv("FAULT");
    if (strcmp(what, "short") == 0) {
        if (*count > 6144) *count = 6144;
    } else if (strcmp(what, "interrupted") == 0) {
        if (atomic_fetch_add(&calls, 1) % 2 == 0) { errno = EINTR; return -1; }
    } else {
        off_t at = atol(strchr(what, '@') + 1) / 512 * 512;
        if (offset + (off_t)*count > at) {
            if (offset >= at) { errno = atoi(what); return -1; }
            *count = at - offset;
        }
    }
    return 0;
}

ssize_t pread(int fd, void *data, size_t count, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    return fault(&count, offset) < 0 ? -1 : real(fd, data, count, offset);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite");
    return fault(&count, offset) < 0 ? -1 : real(fd, data, count, offset);
}
"""

TRANSFER = """
import os, sys
from dslaunch.kernels.disk import DiskEngine
path, nbytes, want = sys.argv[1], int(sys.argv[2]), sys.argv[3]
contents = os.urandom(nbytes)
with DiskEngine(num_threads=3, block_bytes=16384) as engine:
    with engine.create(path, nbytes) as file:
        for offset in (0, 1, 5000):
            back = bytearray(nbytes - offset)
            said = []
            for start in (lambda: file.write(contents[offset:], offset), lambda: file.read(back, offset)):
                try:
                    start().wait()
                except OSError as error:
                    assert error.filename == path
                    said.append(f"{error.errno} {error.strerror}")
            if want:
                assert said == [want.format("writing", offset), want.format("reading", offset)], said
            else:
                assert said == [], said
                assert back == contents[offset:]
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True)
    return library


def transfer(path: Path, shim: Path, fault: str, want: str = "", nbytes: int = 100_001) -> None:
    preloaded = " ".join((os.environ.get("LD_PRELOAD", ""), str(shim)))  # a sanitizer must stay the first
    done = subprocess.run(
        [sys.executable, "-c", TRANSFER, str(path), str(nbytes), want],
        env={**os.environ, "LD_PRELOAD": preloaded, "FAULT": fault},
        timeout=TIME_LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["short", "interrupted"])
def test_short_and_interrupted_calls_go_on_where_they_stopped(tmp_path: Path, shim: Path, fault: str) -> None:
    transfer(tmp_path / "file", shim, fault)


@pytest.mark.slow
@pytest.mark.parametrize("failure", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_is_said_with_the_file_and_the_byte(tmp_path: Path, shim: Path, failure: int) -> None:
    at = 40_960
    words = f"{failure} {os.strerror(failure)}: {{}} bytes {{}} to 100001 stopped at byte {at}"
    transfer(tmp_path / "file", shim, f"{failure}@{at}", words)


# ---- file systems in memory ------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with one MiB of space, and without direct I/O."""
    with small_disk_at(tmp_path, f"size={SMALL_BYTES}") as folder:
        yield folder


@pytest.fixture
def quiet_engine() -> Iterator[DiskEngine]:
    with warnings.catch_warnings(), DiskEngine(num_threads=2, block_bytes=8192) as engine:
        warnings.simplefilter("ignore", RuntimeWarning)
        yield engine


def test_a_full_disk_is_found_when_the_file_is_made_and_nothing_stays(
    small_disk: Path, quiet_engine: DiskEngine
) -> None:
    (small_disk / "other").write_bytes(bytes(SMALL_BYTES // 2))
    path = small_disk / "file"
    with pytest.raises(OSError, match="No space left") as caught:
        quiet_engine.create(path, SMALL_BYTES)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert caught.value.strerror == (
        f"No space left on device: {SMALL_BYTES} bytes are wanted, {SMALL_BYTES // 2} are free; "
        "free some or use another folder"
    )
    assert os.listdir(small_disk) == ["other"]
    quiet_engine.create(path, SMALL_BYTES // 2).close()


def test_a_disk_that_gets_full_on_the_way_fails_the_request(
    small_disk: Path, quiet_engine: DiskEngine
) -> None:
    path = small_disk / "hole"
    path.touch()
    os.truncate(path, 2 * SMALL_BYTES)  # takes no space, until it is written
    file = quiet_engine.open(path)
    request = file.write(bytes(2 * SMALL_BYTES))
    with pytest.raises(
        OSError, match=f"No space left on device: writing bytes 0 to {2 * SMALL_BYTES} "
    ) as caught:
        request.wait()
    assert caught.value.errno == errno.ENOSPC
    file.close()


def contents_after_writes(file: DiskFile) -> bytes:
    file.write(b"a" * file.nbytes).wait()
    file.write(b"b" * 5000, 4000).wait()
    read = bytearray(file.nbytes)
    file.read(read).wait()
    return bytes(read)


def test_a_folder_without_direct_io_is_warned_about_once_and_works(small_disk: Path) -> None:
    with (
        DiskEngine(num_threads=2, block_bytes=8192) as engine,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        file = engine.create(small_disk / "first", 20_000)
        second = engine.create(small_disk / "second", 20_000)
        assert [str(warning.message) for warning in caught] == [
            f"{small_disk}: no direct I/O here (tmpfs keeps its files in memory); files go through the page "
            "cache, which is slower and takes memory: use a folder on a local disk, e.g. with ext4 or xfs"
        ]
        assert Path(caught[0].filename).name == Path(__file__).name
        assert not file.is_direct
        assert second.why_not_direct == "tmpfs keeps its files in memory"
        assert contents_after_writes(file) == b"a" * 4000 + b"b" * 5000 + b"a" * 11_000


@pytest.mark.slow
def test_a_warning_that_is_an_error_leaves_no_file_and_no_descriptor(small_disk: Path) -> None:
    script = f"""
        import os, warnings
        from dslaunch.kernels.disk import DiskEngine
        warnings.simplefilter("error")
        engine = DiskEngine(num_threads=1)
        before = os.listdir("/proc/self/fd")
        try:
            engine.create({str(small_disk / "file")!r}, 1000)
        except RuntimeWarning:
            pass
        assert os.listdir("/proc/self/fd") == before
        assert os.listdir({str(small_disk)!r}) == []
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=TIME_LIMIT_S)


def test_the_disk_that_the_tests_use_tells_what_it_is(tmp_path: Path) -> None:
    with warnings.catch_warnings(), DiskEngine(num_threads=1) as engine:
        warnings.simplefilter("ignore", RuntimeWarning)
        file = engine.create(tmp_path / "file", 10_000)
        assert file.is_direct == (file.why_not_direct is None)
        assert contents_after_writes(file) == b"a" * 4000 + b"b" * 5000 + b"a" * 1000
