"""Freed host memory stays in the process of an engine on CPUs.

Each case in a process of its own, as it is for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from dslaunch.runtime.offload.host_memory import keep_freed_memory

TIMEOUT_S = 120
CHUNKS, CHUNK_NUMEL = 40, 2**18  # 40 MiB in pieces of 1 MiB
ROUND_FAULTS = CHUNKS * CHUNK_NUMEL * 4 // 4096  # one for each page

ROUNDS = f"""
import json, resource, torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def a_round():
    before = faults()
    chunks = [torch.ones({CHUNK_NUMEL}) for _ in range({CHUNKS})]
    del chunks
    return faults() - before

for _ in range(3):
    a_round()
print(json.dumps({{"kept": kept, "faults": min(a_round() for _ in range(5))}}))
"""
# glibc's first thresholds, which it changes by itself as memory is freed, held fast
RETURNED = """
import ctypes
for setting in (-1, -3):
    assert ctypes.CDLL(None).mallopt(setting, 131072)
kept = False
"""
KEPT = (
    RETURNED
    + "from dslaunch.runtime.offload.host_memory import keep_freed_memory\nkept = keep_freed_memory()"
)
OF_AN_ENGINE = f"""
{RETURNED}
import dslaunch, torch
dslaunch.initialize(model=torch.nn.Linear(2, 2), config={{"train_micro_batch_size_per_gpu": 1}})
"""

GIVEN_BACK = f"""
import dslaunch, json, re, torch
from dslaunch.runtime.offload.host_memory import keep_freed_memory

def resident_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3

config = {{"train_micro_batch_size_per_gpu": 1}}
dslaunch.initialize(model=torch.nn.Linear(2, 2), config=config)[0].destroy()  # loads what it needs
assert keep_freed_memory()
chunks = [torch.ones({CHUNK_NUMEL}) for _ in range({CHUNKS})]
model = torch.nn.Linear(2, 2)
del chunks
before = resident_mb()
engine = dslaunch.initialize(model=model, config=config)[0]
kept, given = True, before - resident_mb()
"""


def run(first: str, **environment: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", first + ROUNDS],
        env={**os.environ, **environment},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_memory_that_is_freed_is_used_again_without_a_page_fault() -> None:
    assert run(RETURNED)["faults"] > ROUND_FAULTS / 2
    kept = run(KEPT)
    assert kept["kept"]
    assert kept["faults"] < ROUND_FAULTS / 20


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on a GPU leaves host memory alone")
def test_an_engine_on_the_cpu_asks_for_it() -> None:
    assert run(OF_AN_ENGINE)["faults"] < ROUND_FAULTS / 20


@pytest.mark.slow
def test_what_was_freed_before_an_engine_is_made_goes_back_to_the_system() -> None:
    assert run(GIVEN_BACK + "assert given > 30, given")["kept"]


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_what_the_environment_says_goes_first(environment: dict[str, str]) -> None:
    assert keep_freed_memory(environment) is False
