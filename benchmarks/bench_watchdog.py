"""Cost of the watchdog: the note of each collective beside the smallest collective there is,
and the looks at the board.

    python benchmarks/bench_watchdog.py

Two ranks over gloo on this machine for the first, one process with eight connections to its
store for the second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing

from dslaunch.runtime.comm.collectives import Collectives
from dslaunch.runtime.comm.flight_recorder import FlightRecorder
from dslaunch.runtime.comm.mesh import make_mesh
from dslaunch.runtime.comm.watchdog.board import Board

NUM_CALLS = 2000
NUM_ROUNDS = 7
NUM_RANKS = 8


def best_us(
    *calls: Callable[[], object],
    num_calls: int = NUM_CALLS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """The shortest mean time of each over a round; they take turns, so that a busy machine slows all."""
    best = [float("inf")] * len(calls)
    for _ in range(NUM_ROUNDS):
        for place, call in enumerate(calls):
            start = clock()
            for _ in range(num_calls):
                call()
            best[place] = min(best[place], (clock() - start) / num_calls * 1e6)
    return best


def note() -> Callable[[], object]:
    recorder = FlightRecorder()
    return lambda: recorder.begin("all_gather", "unit 'x'", nbytes=8, lane=0).run(_nothing)


def _nothing() -> None:
    """Collective that takes no time."""


def _collective(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    flat = torch.zeros(64)
    comm = Collectives(make_mesh(shard_size=2))
    bare, labelled = best_us(
        lambda: dist.all_gather_into_tensor(flat, flat.chunk(2)[rank], async_op=True).wait(),
        lambda: comm.all_gather_(flat, what="unit 'x'").wait(),
        num_calls=300,
        clock=time.thread_time,  # the caller's time: its waits depend on the machine's other work
    )
    if rank == 0:
        print(
            f"all_gather of 64 floats, 2 ranks, CPU time of the caller: torch's {bare:.0f} us, as "
            f"Collectives does it {labelled:.0f} us"
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    print(f"torch {torch.__version__}")
    print(f"note of one collective: {best_us(note())[0]:.2f} us")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_collective, (f"{folder}/store",), nprocs=2)  # type: ignore[attr-defined]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    boards = [Board(store, rank=rank) for rank in range(NUM_RANKS)]
    one = best_us(lambda: [board.has("0/ring") for board in boards], num_calls=100)[0] / NUM_RANKS
    print(f"one look at the board, {NUM_RANKS} ranks in turn: {one:.0f} us, every 5 s")
    for board in boards:
        board.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
