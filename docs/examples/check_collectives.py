"""The first thing to run on a new cluster: do all ranks reach each other, and how fast?

    dslaunch -H hosts docs/examples/check_collectives.py

Rank 0 prints who takes part, then one line for each operation. A wrong result or an operation that breaks
ends the job with code 1 and a line that names the operation and the ranks. Times are those of the slowest
rank. Bandwidths are bus bandwidths as nccl-tests counts them: what each link carries, so they can be compared
with what the network promises.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import dslaunch

T = TypeVar("T")

NUM_SMALL_ROUNDS = 20
NUM_LARGE_ROUNDS = 3
PATTERN_LENGTH = 251  # a prime: a block that arrives in the wrong place does not look like the right one
BYTES_PER_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank of the job."""

    rank: int
    local_rank: int
    host: str
    device: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one operation gave on one rank."""

    seconds: float
    detail: str  # says what was timed; the same on all ranks
    bus_bytes: float = 0.0  # that crossed each link in that time; 0: bandwidth means nothing here
    complaint: str = ""  # what is wrong with the result; empty if nothing is


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """This rank's place among the ranks, and what it sends."""

    rank: int
    world_size: int
    device: torch.device
    numel: int  # of a large message, float32

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.world_size

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.world_size

    def message(self, sender: int) -> Tensor:
        """What rank `sender` sends: [numel] small whole numbers, so that sums of them are exact."""
        return torch.arange(self.numel, device=self.device).remainder(PATTERN_LENGTH).float() + sender


def main() -> None:
    args = parse_args()
    try:
        check_all(args.megabytes, timedelta(seconds=args.timeout))
    finally:  # also on the way out with an error: gloo's threads must end before the interpreter does
        if dist.is_initialized():
            dist.destroy_process_group()


def check_all(megabytes: float, timeout: timedelta) -> None:
    """Print who takes part and how each operation goes; the first one that goes wrong ends the program."""
    with named("finding each other"):
        dslaunch.init_distributed(timeout=timeout)
        ring = make_ring(megabytes)
        workers = gather(describe_worker(ring))
    if ring.rank == 0:
        print_workers(workers)
    for name, check in CHECKS.items():
        if name in RING_CHECKS and ring.world_size == 1:
            continue  # there is no rank to send to
        run_check(name, check, ring)
    num_hosts = len({worker.host for worker in workers})
    if ring.rank == 0:
        print(
            f"check_collectives: OK, {count(len(workers), 'rank')} on {count(num_hosts, 'host')}", flush=True
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check that the ranks of a job reach each other, and how fast."
    )
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--megabytes", type=float, default=16, help="size of a large message  [default: 16]")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds to wait for a rank  [default: 120]"
    )
    args = parser.parse_args()
    if args.megabytes <= 0:
        parser.error(f"--megabytes={args.megabytes:g} must be above 0")
    return args


def make_ring(megabytes: float) -> Ring:
    is_on_gpu = dist.get_backend() == "nccl"
    return Ring(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu"),
        numel=max(1, int(megabytes * BYTES_PER_MB / 4)),
    )


def describe_worker(ring: Ring) -> Worker:
    model = f" {torch.cuda.get_device_name()}" if ring.device.type == "cuda" else ""
    return Worker(
        rank=ring.rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        host=socket.gethostname(),
        device=f"{ring.device}{model}",
        backend=dist.get_backend(),
    )


@contextmanager
def named(operation: str) -> Iterator[None]:
    """End this rank with one line if torch.distributed gives up: connection lost,
    timeout, an error of NCCL.
    """
    try:
        yield
    except RuntimeError as error:
        rank, host, reason = os.environ.get("RANK", "0"), socket.gethostname(), str(error).splitlines()[0]
        sys.exit(f"check_collectives: {operation} broke on rank {rank} ({host}): {reason}")


def gather(mine: T) -> list[T]:
    """Every rank's `mine`, in rank order."""
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def print_workers(workers: list[Worker]) -> None:
    head = ("rank", "world size", "local rank", "host", "device", "backend")
    rows = [head] + [
        (str(one.rank), str(len(workers)), str(one.local_rank), one.host, one.device, one.backend)
        for one in workers
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    print("\n".join(line.rstrip() for line in lines), flush=True)


def run_check(name: str, check: Callable[[Ring], Outcome], ring: Ring) -> None:
    """Run one operation on all ranks; rank 0 prints how it went.

    Ends the job if a rank did not get what it should.
    """
    with named(name):
        outcomes = gather(check(ring))
    wrong = [rank for rank, outcome in enumerate(outcomes) if outcome.complaint]
    if wrong and ring.rank == 0:  # the others end well: rank 0's line is to be the one that is seen
        ranks = f"{'rank' if len(wrong) == 1 else 'ranks'} {', '.join(map(str, wrong))}"
        sys.exit(
            f"check_collectives: {name} is wrong on {ranks}; rank {wrong[0]} {outcomes[wrong[0]].complaint}"
        )
    if wrong:
        sys.exit()
    if ring.rank == 0:
        print(describe_outcome(name, outcomes), flush=True)


def describe_outcome(name: str, outcomes: list[Outcome]) -> str:
    seconds = max(outcome.seconds for outcome in outcomes)
    bandwidth = f"{outcomes[0].bus_bytes / seconds / 1e9:8.2f} GB/s" if outcomes[0].bus_bytes else ""
    return f"{name:<18} ok  {seconds * 1e3:9.3f} ms {bandwidth:14}  {outcomes[0].detail}".rstrip()


def timed(run: Callable[[], object], device: torch.device, num_rounds: int) -> float:
    """Seconds that one round takes, after one that is not counted; all ranks begin together."""
    run()
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(num_rounds):
        run()
    synchronize(device)
    return (time.perf_counter() - began) / num_rounds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def complain(got: Tensor, wanted: Tensor) -> str:
    """Where `got` first differs from `wanted`; empty if nowhere."""
    different = (got != wanted).nonzero()
    if not len(different):
        return ""
    at = int(different[0])
    return f"got {got[at]:g} at element {at} of {len(got)}, expected {wanted[at]:g} ({len(different)} differ)"


# ---- the operations


def check_broadcast(ring: Ring) -> Outcome:
    root = ring.world_size - 1
    got = ring.message(ring.rank)
    seconds = timed(lambda: dist.broadcast(got, src=root), ring.device, NUM_LARGE_ROUNDS)
    return Outcome(
        seconds=seconds,
        bus_bytes=got.nbytes if ring.world_size > 1 else 0,
        detail=f"{size(got)} from rank {root} to all",
        complaint=complain(got, ring.message(root)),
    )


def check_ring_latency(ring: Ring) -> Outcome:
    """A token of 4 bytes goes round; every rank adds 1 to it."""
    token = torch.zeros(1, device=ring.device)

    def go_round() -> None:
        if ring.rank == 0:
            dist.send(token + 1, dst=ring.next)
            dist.recv(token, src=ring.previous)
        else:
            dist.recv(token, src=ring.previous)
            dist.send(token + 1, dst=ring.next)

    seconds = timed(go_round, ring.device, NUM_SMALL_ROUNDS)
    before_me = NUM_SMALL_ROUNDS * ring.world_size + (
        ring.rank or ring.world_size
    )  # and one round unmeasured
    return Outcome(
        seconds=seconds / ring.world_size,
        detail=f"4 bytes to the next rank, {NUM_SMALL_ROUNDS} times round",
        complaint=complain(token, torch.full_like(token, before_me)),
    )


def check_ring_bandwidth(ring: Ring) -> Outcome:
    """Every rank sends to the next one at the same time."""
    outgoing, incoming = ring.message(ring.rank), torch.empty(ring.numel, device=ring.device)

    def pass_on() -> None:
        sending = dist.P2POp(dist.isend, outgoing, ring.next)
        receiving = dist.P2POp(dist.irecv, incoming, ring.previous)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    seconds = timed(pass_on, ring.device, NUM_LARGE_ROUNDS)
    return Outcome(
        seconds=seconds,
        bus_bytes=outgoing.nbytes,
        detail=f"{size(outgoing)} to the next rank, all at once",
        complaint=complain(incoming, ring.message(ring.previous)),
    )


def check_all_reduce(ring: Ring) -> Outcome:
    mine, total = ring.message(ring.rank), torch.empty(ring.numel, device=ring.device)
    dist.all_reduce(total.copy_(mine))
    sum_of_ranks = ring.world_size * (ring.world_size - 1) / 2
    complaint = complain(total, ring.message(0) * ring.world_size + sum_of_ranks)
    total.zero_()  # the timed rounds add up what is there: zeros stay finite
    return Outcome(
        seconds=timed(lambda: dist.all_reduce(total), ring.device, NUM_LARGE_ROUNDS),
        bus_bytes=2 * total.nbytes * (ring.world_size - 1) / ring.world_size,
        detail=f"{size(total)} summed over all ranks",
        complaint=complaint,
    )


def check_all_gather(ring: Ring) -> Outcome:
    mine = ring.message(ring.rank)
    parts = [torch.empty_like(mine) for _ in range(ring.world_size)]
    seconds = timed(lambda: dist.all_gather(parts, mine), ring.device, NUM_LARGE_ROUNDS)
    complaints = (complain(part, ring.message(rank)) for rank, part in enumerate(parts))
    return Outcome(
        seconds=seconds,
        bus_bytes=mine.nbytes * (ring.world_size - 1),
        detail=f"{size(mine)} of each rank to all",
        complaint=next(
            (f"{what}, in rank {rank}'s part" for rank, what in enumerate(complaints) if what), ""
        ),
    )


def check_barrier(ring: Ring) -> Outcome:
    """Timed only: clocks of different hosts cannot tell whether a rank left before the last one came."""
    seconds = timed(dist.barrier, ring.device, NUM_SMALL_ROUNDS)
    return Outcome(seconds=seconds, detail=f"{NUM_SMALL_ROUNDS} times")


def size(message: Tensor) -> str:
    return f"{message.nbytes / BYTES_PER_MB:g} MB"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


CHECKS: dict[str, Callable[[Ring], Outcome]] = {
    "broadcast": check_broadcast,
    "send/recv latency": check_ring_latency,
    "send/recv": check_ring_bandwidth,
    "all_reduce": check_all_reduce,
    "all_gather": check_all_gather,
    "barrier": check_barrier,
}
RING_CHECKS = ("send/recv latency", "send/recv")

if __name__ == "__main__":
    main()
