"""Threads: beside torch's own OpenMP, after fork, and in several Python threads at once.

Each in a fresh process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

TIME_LIMIT_S = 60  # a deadlock ends here; the scripts need about two seconds

SETUP = """
import os, sys, threading
import numpy as np
from dslaunch.kernels import AdamSegment, AdamShard, adamw_step, squared_norm

numel = 200_000
hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
segments = (AdamSegment(offset=0, numel=numel, step=1, **hyper),)

def run(num_threads):
    param, grad, exp_avg, exp_avg_sq = (np.full(numel, value, np.float32) for value in (1, 2, 3, 4))
    shard = AdamShard(
        param=param, grads=[(0, grad)], exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, segments=segments
    )
    adamw_step([shard], num_threads=num_threads)
    return param.tobytes(), squared_norm([param], num_threads)

def wait_for_success(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run_script(body: str) -> None:
    script = SETUP + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=TIME_LIMIT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_forked_child_can_step_after_its_parent_did() -> None:
    run_script("""
        expected = run(2)
        child = os.fork()
        if child == 0:
            grandchild = os.fork()  # before and after a step of its own
            ok = run(2) == expected and run(3) == expected
            if grandchild == 0:
                os._exit(0 if ok else 1)
            wait_for_success(grandchild)
            os._exit(0 if ok else 1)
        wait_for_success(child)
        assert run(2) == expected
    """)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", pytest.param("dslaunch", marks=pytest.mark.exhaustive)])
def test_torchs_threads_and_ours_take_turns_before_and_after_fork(first: str) -> None:
    run_script(f"""
        if {first == "dslaunch"}:
            run(2)
        import torch
        torch.set_num_threads(2)
        big = torch.ones(1_000_000)
        expected = run(2)
        for _ in range(20):
            assert float((big * 2).sum()) == 2_000_000
            assert run(2) == expected
        child = os.fork()
        if child == 0:
            os._exit(0 if run(2) == expected else 1)
        wait_for_success(child)
        assert float((big * 2).sum()) == 2_000_000
    """)


@pytest.mark.slow
def test_python_threads_can_step_at_the_same_time() -> None:
    run_script("""
        expected = run(1)
        results = []
        threads = [threading.Thread(target=lambda: results.append(run(2))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4
    """)


@pytest.mark.slow
def test_the_import_loads_neither_torch_nor_numpy() -> None:
    script = "import sys, dslaunch.kernels; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
