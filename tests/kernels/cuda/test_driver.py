"""What cuda-core and cuda-bindings are asked for, seen by a driver that is a file of these
tests (driver.cpp).

Each test is a process of its own, which finds that driver where the machine's would be. Nothing runs on it.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.kernels import ADAM
from dslaunch.kernels.cuda import steps
from dslaunch.kernels.cuda.compiler import CubinCache, Nvrtc, cache_folder
from dslaunch.kernels.cuda.shards import Rule
from dslaunch.kernels.cuda.table import LARGE, SMALL, Variant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ctypes.util.find_library("cuda") is not None, reason="a machine with a driver has test_device.py"
    ),
]

SCRIPT = """
import numpy, sys
from dslaunch.kernels import ADAM, AdamSegment, AdamShard
from dslaunch.kernels.cuda import CudaUnavailable, steps
from dslaunch.kernels.cuda.shards import Rule
from dslaunch.kernels.cuda.device import cuda_device

numel, num_shards = 100_000, int(sys.argv[1])
hyper = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
def shard():
    param, grad, exp_avg, exp_avg_sq = numpy.zeros((4, numel), numpy.float32)
    segments = [AdamSegment(offset=0, numel=numel, **hyper)]
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return AdamShard(param=param, grads=[(0, grad)], segments=segments, **states)
shards = [shard() for _ in range(num_shards)]
rule = Rule(kernel=ADAM, mode=1)
try:
    device = cuda_device(0)
    for _ in range(2):
        steps.step(shards, rule, device_scale=None, stream=0xABC, device=device, device_types=(1,))
except (CudaUnavailable, RuntimeError, ValueError) as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the driver, and of a cache with code for its chip: compiling needs more of a driver
    than this one has.
    """
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver.cpp")
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-w", str(source), "-o", str(folder / "libcuda.so.1"), "-ldl"], check=True
    )
    rule = Rule(kernel=ADAM, mode=1)
    cache = CubinCache(cache_folder({"DSLAUNCH_CACHE_DIR": str(folder)}), Nvrtc())
    for size in (SMALL, LARGE):
        cache.load(steps.program_of(rule, Variant(grad="float32", state="float32", mode=1), size), "sm_90")
    return folder


def run(driver: Path, tmp_path: Path, num_shards: int = 1, **settings: int) -> tuple[str, list[str]]:
    """What the process printed, and the calls that the driver saw; an address of a kernel depends
    on its name alone.
    """
    log = tmp_path / "log"
    log.touch()
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "DSLAUNCH_CACHE_DIR": str(driver),
        "FAKE_DRIVER_LOG": str(log),
        **{f"FAKE_DRIVER_{name.upper()}": str(value) for name, value in settings.items()},
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(num_shards)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text().splitlines()


# 13 chunks of 8192 elements; the length of the kernel's name is in its address.
LAUNCH = "launch 0xf0e grid {grid} block 256 shared 0 stream 0xabc extra (nil) runs {runs} chunks {chunks}"


def test_code_is_loaded_once_and_launched_with_its_table_on_the_stream(driver: Path, tmp_path: Path) -> None:
    printed, calls = run(driver, tmp_path)
    assert printed == ""
    launch = LAUNCH.format(grid=13, runs=1, chunks=13)
    assert calls == ["current 0xc0", "load (nil) 127", launch, launch]  # 127: the first byte of an ELF file


def test_many_runs_are_one_launch_of_at_most_8_blocks_per_processor(driver: Path, tmp_path: Path) -> None:
    printed, calls = run(driver, tmp_path, num_shards=65)
    assert printed == ""
    assert calls[2] == LAUNCH.format(grid=24, runs=65, chunks=65 * 13)
    assert len(calls) == 4


def test_a_driver_from_before_cuda_12_1_gets_small_tables(driver: Path, tmp_path: Path) -> None:
    _, calls = run(driver, tmp_path, num_shards=65, version=12000)
    assert calls[2:4] == [
        LAUNCH.format(grid=24, runs=64, chunks=64 * 13),
        LAUNCH.format(grid=13, runs=1, chunks=13),
    ]


def test_another_current_device_is_refused(driver: Path, tmp_path: Path) -> None:
    printed, calls = run(driver, tmp_path, current=1)
    assert printed == (
        "ValueError the arrays are on CUDA device 0, but device 1 is current; make theirs current for the "
        "call, e.g. `with torch.cuda.device(0):`\n"
    )
    assert calls == []


def test_a_launch_that_the_driver_refuses_is_an_error(driver: Path, tmp_path: Path) -> None:
    printed, _ = run(driver, tmp_path, launch=700)
    assert printed == "RuntimeError the CUDA driver answered CUDA_ERROR_ILLEGAL_ADDRESS (700)\n"


def test_without_a_driver_the_kernels_are_unavailable(tmp_path: Path) -> None:
    printed, _ = run(tmp_path, tmp_path)
    assert re.match(
        r"CudaUnavailable CUDA device 0 cannot be used through cuda-core \(.*pip install", printed
    )
