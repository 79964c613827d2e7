"""What is told of the GPUs of a host, by a process beside the agent that asks NVML."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.launcher.node.observe.gpu_sample import GpuSample
from dslaunch.launcher.node.observe.metrics import MetricsReader
from dslaunch.launcher.node.system.lean_stdlib import Selector
from dslaunch.launcher.wire.frames import Decoder, Frame, Metrics, encode
from tests.launcher.local_job import Start, poll

FAKE = Path(__file__).parents[2] / "fake_nvml"
NOT_SUPPORTED, NO_PERMISSION = {"error": 3}, {"error": 4}

Make = Callable[..., GpuSample]


@pytest.fixture
def selector() -> Selector:
    return Selector()


@pytest.fixture
def make(tmp_path: Path, selector: Selector) -> Iterator[Make]:
    """A sample of eight H100, with what is given for single ones; or of what `module` is, not pynvml."""
    made = []

    def sample(
        gpu: dict[str, object] | None = None, *, module: str = "", python: str = sys.executable
    ) -> GpuSample:
        record = json.loads((FAKE / "h100x8.json").read_text())
        record["gpu"] = gpu or {}
        (tmp_path / "record.json").write_text(json.dumps(record))
        folder = FAKE
        if module:
            folder = tmp_path / "modules"
            folder.mkdir()
            (folder / "pynvml.py").write_text(module)
        env = {
            **os.environb,
            b"PYTHONPATH": os.fsencode(folder),
            b"FAKE_NVML": os.fsencode(tmp_path / "record.json"),
        }
        one = GpuSample(python, env, interval_s=0.05, selector=selector)
        made.append(one)
        return one

    yield sample
    for one in made:
        one.close()


def wait_for_numbers(sample: GpuSample, selector: Selector) -> list[dict[str, object]]:
    def has_some() -> bool:
        selector.wait(0.01)
        return bool(sample.last(time.monotonic()))

    poll(has_some, "numbers of the GPUs", 10.0)
    return sample.last(time.monotonic())


def test_each_gpu_tells_what_it_can(make: Make, selector: Selector) -> None:
    odd = {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetPowerUsage": NOT_SUPPORTED}
    sample = make({"1": odd, "2": {"nvmlDeviceGetHandleByIndex": NO_PERMISSION}})
    gpus = wait_for_numbers(sample, selector)
    usual = {"util": 0.97, "mem_used": 555220992, "mem_total": 85520809984, "power_w": 612.345, "temp_c": 64}
    assert len(gpus) == 8
    assert gpus[0] == {**usual, "ecc": 0}
    assert gpus[1] == {**{name: usual[name] for name in usual if name != "power_w"}, "ecc": 3}
    assert gpus[2] == {}, "the numbers of the others stay theirs"


def test_they_go_to_the_launcher_with_the_numbers_of_the_host(
    make: Make, selector: Selector, tmp_path: Path
) -> None:
    sent: list[Frame] = []
    sample = make()
    reader = MetricsReader(
        str(tmp_path / "metrics"),
        ranks=[0],
        interval_s=1.0,
        is_folding=False,
        send=lambda frame: sent.extend(Decoder().feed(encode(frame))),
        gpus=sample,
    )
    reader.send(time.monotonic())
    wait_for_numbers(sample, selector)
    reader.send(time.monotonic())
    before, after = (one for one in sent if isinstance(one, Metrics))
    assert "gpus" not in before.host
    assert len(after.host["gpus"]) == 8
    assert "cores" in after.host
    process = sample._process
    assert process is not None
    reader.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, 0)


@pytest.mark.parametrize(
    ("module", "python"),
    [
        ("raise ImportError", sys.executable),
        ("def nvmlInit(): raise OSError", sys.executable),
        ("print('noise'); print('[1, {', flush=True); raise ImportError", sys.executable),
        ("", "/missing/python"),
    ],
)
def test_without_nvml_nothing_is_told(make: Make, selector: Selector, module: str, python: str) -> None:
    sample = make(module=module, python=python)
    if sample._process is not None:
        poll(lambda: selector.wait(0.01) >= 0 and not list(selector), "its end", 10.0)
    assert sample.last(time.monotonic()) == []


def test_a_driver_that_hangs_holds_up_nothing(
    make: Make, selector: Selector, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = make()
    wait_for_numbers(sample, selector)
    process = sample._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    now = time.monotonic()
    assert sample.last(now) != []
    assert sample.last(now + 60.0) == [], "old numbers are not told as new ones"
    began = time.monotonic()
    sample.close()
    assert time.monotonic() - began < 2.0
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, 0)


def test_it_ends_with_the_agent(make: Make, selector: Selector) -> None:
    sample = make()
    wait_for_numbers(sample, selector)
    process = sample._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as when the agent's process is gone
    assert process.wait(10) == 0


SOME_DEVICES = """
mount --make-rprivate /
mkdir old
mount --rbind /dev old
mount -t tmpfs tmpfs /dev
for name in null zero full random urandom tty; do touch /dev/$name; mount --bind old/$name /dev/$name; done
mkdir /dev/shm /dev/pts
mount --rbind old/shm /dev/shm
mount --rbind old/pts /dev/pts
ln -s /proc/self/fd /dev/fd
touch /dev/nvidia0 /dev/nvidia1
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a /dev of its own")
def test_a_job_on_a_host_with_gpus_tells_of_them(start: Start, tmp_path: Path) -> None:
    job = start(
        "while not os.path.exists('go'): time.sleep(0.01)",
        *("--metrics_interval", "0.1", "--events", "events"),
        env={"PYTHONPATH": str(FAKE), "FAKE_NVML": str(FAKE / "h100x8.json")},
        shell=f"unshare -m sh -e -c '{SOME_DEVICES}' sh \"$@\"",
    )
    events = tmp_path / "events"
    poll(lambda: events.exists() and '"power_w":612.345' in events.read_text(), "numbers of the GPUs")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert "2 workers ended with code 0" in job.err
    assert "outlived" not in job.err, "what asks is no process that a worker left"
    job.assert_nothing_is_left()
