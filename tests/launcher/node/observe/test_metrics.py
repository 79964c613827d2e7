"""What workers write into the pipe of their agent, and what an agent makes of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.node.observe.host_sample import HostSample
from dslaunch.launcher.node.observe.metrics import (
    MAX_FILE_BYTES,
    MAX_NAMES,
    MAX_REST_BYTES,
    MetricsReader,
    fold,
)
from dslaunch.launcher.wire.frames import Decoder, Frame, Metrics, Note, Told, encode
from tests.launcher.local_job import poll

Reader = Callable[..., MetricsReader]


@pytest.fixture
def sent() -> list[Frame]:
    return []


@pytest.fixture
def reader(tmp_path: Path, sent: list[Frame]) -> Reader:
    """Makes a reader of ranks 0 to 3; all that it sends is in `sent`, as it came over the wire."""

    def send(frame: Frame) -> None:
        sent.extend(Decoder().feed(encode(frame)))

    def made(*, is_folding: bool = False) -> MetricsReader:
        return MetricsReader(
            str(tmp_path / "metrics"),
            ranks=range(4),
            interval_s=5.0,
            is_folding=is_folding,
            send=send,
        )

    return made


def write(folder: Path, text: str) -> None:
    fd = os.open(folder / "metrics", os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, text.encode())
    os.close(fd)


def read(reader: MetricsReader) -> None:
    """And send nothing."""
    reader.look(0.0, is_behind=True)


def numbers(sent: list[Frame]) -> dict[str, object]:
    (frame,) = (one for one in sent if isinstance(one, Metrics))
    return frame.ranks


def test_sums_are_added_up_and_of_others_the_last_counts(
    reader: Reader, sent: list[Frame], tmp_path: Path
) -> None:
    one = reader()
    write(tmp_path, '1 {"step": 3, "steps": 2, "step_s": 0.5, "loss": 2.5}\n2 {"state": "saving"}\n1 {"step"')
    read(one)
    write(tmp_path, ': 4, "steps": 1, "step_s": 0.25, "loss": NaN}\n2 {"loss": -Infinity}\n')
    read(one)
    one.send(1.0)
    assert numbers(sent) == {
        "1": {"step": 4, "steps": 3, "step_s": 0.75, "loss": "nan"},
        "2": {"state": "saving", "loss": "-inf"},
    }
    sent.clear()
    one.send(2.0)
    assert numbers(sent) == {}, "what was told is told once"
    one.close()


@pytest.mark.parametrize(
    "line",
    [
        "7 {}",
        "x {}",
        "1 [1]",
        f'1 {{"a": 1{"0" * 400}, "a_s": -1{"0" * 400}}}',
        '1 {"a": [1], "b": null, "c": true, "d": {}}',
        f'1 {{"{"n" * 99}": 1}}',
        "1",
        "",
        '1 {"a": 1',
        "1 " + "[" * 3000,
        '1 {"file": "../secret"}',
    ],
)
def test_what_is_no_line_of_ours_is_left_out(
    reader: Reader, sent: list[Frame], tmp_path: Path, line: str
) -> None:
    one = reader(is_folding=True)
    write(tmp_path, f'{line}\n3 {{"loss": 1.0}}\n')
    read(one)
    one.send(1.0)
    assert numbers(sent) == {"*": {"loss": [1.0, 1.0, 1.0, 3, 3]}}
    one.close()


def test_a_rank_may_not_fill_the_memory_of_its_agent(
    reader: Reader, sent: list[Frame], tmp_path: Path
) -> None:
    one = reader()
    for start in range(0, 3 * MAX_NAMES, 50):
        write(tmp_path, f"0 {json.dumps({f'name{i}': i for i in range(start, start + 50)})}\n")
        read(one)
    for _ in range(3):
        write(tmp_path, "x" * 60_000)
        read(one)
    assert len(one._rest) <= MAX_REST_BYTES
    write(tmp_path, '\n1 {"loss": 1.0}\n')
    read(one)
    one.send(1.0)
    ranks = numbers(sent)
    assert len(ranks["0"]) == MAX_NAMES  # type: ignore[arg-type]
    assert ranks["1"] == {"loss": 1.0}
    one.close()


def test_a_worker_that_writes_without_end_does_not_keep_its_agent(
    reader: Reader, sent: list[Frame], tmp_path: Path
) -> None:
    one = reader()
    writing = subprocess.Popen(["sh", "-c", "exec yes '1 {\"loss\": 1.0}' > metrics"], cwd=tmp_path)
    try:
        poll(lambda: one.send(1.0) or any(frame.ranks for frame in sent), "its numbers")  # type: ignore[union-attr]
        read(one)
    finally:
        writing.kill()
        writing.wait()
    assert {"1": {"loss": 1.0}} in [frame.ranks for frame in sent if isinstance(frame, Metrics)]
    one.close()


def test_numbers_of_many_ranks_are_folded(reader: Reader, sent: list[Frame], tmp_path: Path) -> None:
    one = reader(is_folding=True)
    for rank, loss, wait in ((0, 4.0, 0.5), (1, 1.0, 0.0), (3, 1.0, 2.5)):
        write(tmp_path, f'{rank} {{"loss": {loss}, "comm_s": {wait}, "state": "saving"}}\n')
    read(one)
    one.send(1.0)
    folded = {"loss": [1.0, 2.0, 4.0, 1, 0], "comm_s": [0.0, 1.0, 2.5, 1, 3], "pause": [3, 3.0, 3, 0, 3]}
    assert numbers(sent) == {"*": folded}
    one.close()


def test_folding_leaves_out_what_is_no_number() -> None:
    assert fold({0: {"loss": float("nan"), "state": "saving"}, 1: {"loss": 2.0}}) == {
        "loss": [2.0, 2.0, 2.0, 1, 1]
    }
    assert fold({0: {"loss": float("inf")}})["loss"] == [float("inf")] * 3 + [0, 0]


def test_they_go_to_the_launcher_once_an_interval_and_wait_while_it_does_not_read(
    reader: Reader, sent: list[Frame]
) -> None:
    one = reader()
    one.look(100.0, is_behind=False)
    one.look(104.9, is_behind=False)
    assert len(sent) == 1
    one.look(105.0, is_behind=True)
    assert len(sent) == 1
    one.look(105.1, is_behind=False)
    assert len(sent) == 2
    one.close()


def test_a_file_beside_the_pipe_is_passed_on(reader: Reader, sent: list[Frame], tmp_path: Path) -> None:
    one = reader()
    (tmp_path / "config-2.json").write_text('{"zero": 3}')
    (tmp_path / "config-3.json").symlink_to("/etc/hostname")
    write(tmp_path, '2 {"file": "config"}\n3 {"file": "config"}\n1 {"file": "config"}\n')
    read(one)
    assert sent == [Told(2, "config", '{"zero": 3}')]
    (tmp_path / "config-1.json").write_text(" " * (MAX_FILE_BYTES + 1))
    write(tmp_path, '1 {"file": "config"}\n')
    read(one)
    assert sent[1:] == [Note("the config that rank 1 tells is longer than 1 MiB, and is left out")]
    one.close()


def test_a_host_is_looked_at_by_what_its_kernel_counts(tmp_path: Path) -> None:
    """As two looks half a second apart would see it: a quarter of the processors' time, and so many bytes."""
    (tmp_path / "net").mkdir()
    disk = tmp_path / "sys" / "block" / "sda" / "device"
    disk.mkdir(parents=True)
    (tmp_path / "sys" / "block" / "loop0").mkdir()

    def write_counters(busy: int, idle: int, received: int, sectors: int) -> None:
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1\n")
        row = f"{received} 0 0 0 0 0 0 0 {2 * received} 0 0 0 0 0 0 0"
        (tmp_path / "net" / "dev").write_text(f"head\nhead\n    lo: {row}\n  eth0: {row}\n")
        disks = [f"8 0 {name} 1 0 {sectors} 0 1 0 {3 * sectors} 0 0 0 0" for name in ("sda", "sda1", "loop0")]
        (tmp_path / "diskstats").write_text("\n".join(disks))

    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    write_counters(100, 1000, 5000, 10)
    sample = HostSample(proc=str(tmp_path), sys=str(tmp_path / "sys"))
    write_counters(150, 1150, 105_000, 110)
    found = sample.look()
    assert found["cpu"] == 0.25
    assert found["mem_total"] == 1_024_000
    assert found["mem_used"] == 600 * 1024
    assert found["net_out"] == pytest.approx(2 * found["net_in"], abs=1)
    assert found["disk_read"] == pytest.approx(found["net_in"] * 512 * 100 / 100_000, rel=0.01)
    assert found["disk_write"] == pytest.approx(3 * found["disk_read"], abs=2)
    (tmp_path / "stat").unlink()
    write_counters(0, 0, 0, 0)  # as after a device went
    later = sample.look()
    assert later["net_in"] == 0
    assert "cpu" not in later


def test_a_real_host_tells_all_of_it() -> None:
    found = HostSample().look()
    assert {"cores", "load1", "mem_total", "mem_used"} <= found.keys()
    assert 0 < found["mem_used"] < found["mem_total"]


def test_where_a_rank_is_along_the_axes_is_told_with_its_first_numbers(
    reader: Reader, sent: list[Frame], tmp_path: Path
) -> None:
    one = reader()
    (tmp_path / "place-1").write_text("stage 1 of 2, dp 0")
    (tmp_path / "place-3").write_text("a\nb")
    for line in ('1 {"steps": 1}\n3 {"steps": 1}\n', '1 {"steps": 1}\n2 {"steps": 1}\n'):
        write(tmp_path, line)
        read(one)
        one.send(1.0)
    places = [frame.host.get("places") for frame in sent if isinstance(frame, Metrics)]
    assert places == [{"1": "stage 1 of 2, dp 0"}, None]
    one.close()


def test_folded_numbers_have_the_own_time_of_ranks(reader: Reader, sent: list[Frame], tmp_path: Path) -> None:
    one = reader(is_folding=True)
    write(tmp_path, '0 {"step_s": 2.0, "comm_s": 0.5}\n2 {"step_s": 2.0, "comm_s": 1.5}\n3 {"step_s": 2.0}\n')
    read(one)
    one.send(1.0)
    assert numbers(sent)["*"]["own_s"] == [0.5, 1.0, 1.5, 2, 0]  # type: ignore[index]
    one.close()
