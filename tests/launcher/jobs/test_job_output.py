"""What the ranks write, all the way to its reader, where there is one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.launcher.local_job import Start, assert_short, poll

pytestmark = pytest.mark.slow

NUM_LINES = 1000


def test_lines_of_many_ranks_come_whole_and_in_order(start: Start) -> None:
    job = start(
        f"""
        for number in range({NUM_LINES}):
            for stream in (1, 2):
                size = 70_000 if number in (7, 900) else number % 50
                os.write(stream, b'%d %d %d ' % (rank, stream, number) + b'x' * size + b'\\n')
        """,
        "--num_gpus=16",
    )
    assert job.wait() == 0
    for stream, text in ((1, job.out), (2, job.err)):
        numbers = [0] * 16
        for line in text.splitlines():
            if line.startswith("dslaunch: "):
                continue
            prefix, _, body = line.partition(" | ")
            rank, number = int(prefix.removeprefix("localhost:")), int(body.split(" ")[2])
            size = 70_000 if number in (7, 900) else number % 50
            assert body == f"{rank} {stream} {number} " + "x" * size
            assert number == numbers[rank]
            numbers[rank] += 1
        assert numbers == [NUM_LINES] * 16


def test_a_line_without_an_end_and_progress_bars(start: Start) -> None:
    job = start(
        """
        os.write(1, b'whole\\nfirst half, ')
        os.write(1, b'second half\\r\\n')
        for percent in range(0, 101): os.write(1, b'\\r%3d%%' % percent)
        os.write(1, b'\\nthe last words')
        """
    )
    assert job.wait() == 0
    lines = [line for line in job.lines(0) if "%" not in line or "100%" in line]
    assert lines == ["whole", "first half, second half", "100%", "the last words"]


LINE = b"x" * 1000 + b"\n"
NUM_LONG_LINES = 12_000


def test_a_reader_that_is_slow_loses_nothing_and_slows_the_workers(start: Start, tmp_path: Path) -> None:
    """Our stdout is not read for two heartbeats, so the worker waits; then all of it is read."""
    read, write = os.pipe()
    job = start(
        f"""
        progress = os.open('progress', os.O_CREAT | os.O_WRONLY)
        for number in range({NUM_LONG_LINES}):
            os.write(1, b'%06d ' % number + {LINE!r})
            if rank == 0: os.pwrite(progress, b'%06d' % number, 0)
        """,
        "--num_gpus=2",
        "--heartbeat=1",
        stdout=write,
    )
    os.close(write)
    progress = tmp_path / "progress"
    try:
        poll(lambda: progress.exists() and progress.read_text(), "the first line")
        began, last = time.monotonic(), ""

        def has_waited() -> bool:
            nonlocal began, last
            now = progress.read_text()
            if now != last:
                began, last = time.monotonic(), now
            return time.monotonic() - began > 2.0

        poll(has_waited, "the worker to wait for two seconds")
        assert int(last) < NUM_LONG_LINES / 2
        assert job.process.poll() is None
        processes = [psutil.Process(job.process.pid), job.keeper(), job.agent()]
        assert sum(process.memory_info().rss for process in processes) < 150 << 20
        with open(read, "rb", closefd=False) as file:
            lines = file.read().splitlines()
    finally:
        os.close(read)
    assert job.wait() == 0
    for rank in range(2):
        prefix = b"localhost:%d | " % rank
        mine = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert mine == [b"%06d %s" % (number, LINE[:-1]) for number in range(NUM_LONG_LINES)]


def test_who_failed_first_is_told_also_when_nobody_reads(start: Start, tmp_path: Path) -> None:
    """Rank 2 fills everything up to the worker's pipes, so that neither end can be
    reported when it happens.
    """
    read, write = os.pipe()
    job = start(
        """
        import pathlib
        def is_gone(rank):
            return os.path.exists(f'pid{rank}') and not os.path.exists('/proc/' + open(f'pid{rank}').read())
        pathlib.Path(f'writing{rank}').write_text(str(os.getpid()))
        os.rename(f'writing{rank}', f'pid{rank}')
        if rank == 0:
            while not is_gone(1): time.sleep(0.001)
            os._exit(10)
        if rank == 1:
            while not os.path.exists('full'): time.sleep(0.001)
            say('last words')
            os._exit(11)
        os.set_blocking(1, False)
        failed_at = None
        while True:
            try:
                os.write(1, b'x' * 4095 + b'\\n')
                failed_at = None
            except BlockingIOError:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > 0.5: pathlib.Path('full').touch()
                time.sleep(0.001)
        """,
        "--num_gpus=3",
        stdout=write,
    )
    os.close(write)
    poll((tmp_path / "pid0").exists, "rank 0")
    pid = (tmp_path / "pid0").read_text()
    poll(lambda: not os.path.exists(f"/proc/{pid}"), "the end of ranks 1 and 0")
    with open(read, "rb") as file:
        assert b"localhost:1 | last words\n" in file.read()
    assert job.wait() == 11
    assert "rank 1 on localhost" in job.err.partition("it failed first")[0].splitlines()[-1]


def test_one_interrupt_stops_the_job_also_while_nobody_reads(start: Start, tmp_path: Path) -> None:
    """As in a pager that waits for a key: what is still to be printed is given up after two seconds."""
    read, write = os.pipe()
    job = start(
        """
        import pathlib
        os.set_blocking(1, False)
        while True:
            try:
                os.write(1, b'x' * 4095 + b'\\n')
            except BlockingIOError:
                pathlib.Path('full').touch()
                time.sleep(0.001)
        """,
        stdout=write,
    )
    os.close(write)
    poll((tmp_path / "full").exists, "a pipe that is full")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_is_left()
    os.close(read)


def test_a_reader_that_goes_away_ends_the_job(start: Start) -> None:
    read, write = os.pipe()
    job = start("for number in range(10**9): say('line', number)", "--num_gpus=2", stdout=write)
    os.close(write)
    assert os.read(read, 10) == b"localhost:"
    os.close(read)
    assert job.wait() == 141
    assert_short(job)
    job.assert_nothing_is_left()


def test_as_the_first_part_of_a_pipeline(start: Start) -> None:
    job = start("for number in range(10**9): say('line', number)", shell='"$@" | head -n 1')
    assert job.wait() == 0
    assert job.out == "localhost:0 | line 0\n"
    assert_short(job)
    job.assert_nothing_is_left()


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(closed: str, start: Start) -> None:
    job = start("say('hello'); open('done', 'w').close(); sys.exit(4)", shell=f'exec "$@" {closed}')
    assert job.wait() == 4
    assert (job.folder / "done").exists()
    assert_short(job)


def test_a_full_disk_ends_the_job_with_one_line(start: Start) -> None:
    job = start("say('hello'); wait()", shell='exec "$@" >/dev/full')
    assert job.wait() == 2
    assert job.err.splitlines()[-1].startswith("dslaunch: cannot write to stdout: No space left on device")
    assert_short(job)
    job.assert_nothing_is_left()
