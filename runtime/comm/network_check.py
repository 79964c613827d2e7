"""Speed of the network between hosts: `dslaunch check --bandwidth` starts this program, one rank on each
host.

Every step has process groups of its own, so that one that fails leaves the next steps as they are: every
pair, in rounds of pairs that share no rank, and then all ranks together. The results go to rank 0 through
torch's store, which is not measured. Rank 0 prints all of it as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ...shared import marks
from .collectives import reduce_scatter_single
from .rank_group import all_gather_single

FIRST_NUMEL, LAST_NUMEL = 1 << 14, 1 << 24  # float32: 64 KiB to 64 MiB
GROWTH = 4
ENOUGH_S = 0.1  # a message that takes this long says how fast the link is
NUM_PINGS = 50
NUM_MESSAGES = 3
NONE, ANOTHER, LARGER = 0.0, 1.0, 2.0  # the message that follows
STORE_TIMEOUT = timedelta(minutes=5)  # some hosts import torch much later than others
END = b"end"
WAIT_FACTOR = 2  # ranks are waited for so many times longer than a step may take


def main(text: str) -> NoReturn:
    """Measure and tell. `text` is how many seconds one step may take."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # NCCL says that it waited too long, as gloo does
    timeout = timedelta(seconds=float(text))
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    uses_libuv = os.environ.get("USE_LIBUV", "1") == "1"  # torch's own rule, for builds without libuv
    store = TCPStore(*where, world_size, is_master=rank == 0, timeout=STORE_TIMEOUT, use_libuv=uses_libuv)
    results = _Probe(store, rank, world_size, timeout).run()
    if rank == 0:
        print(marks.NETWORK + json.dumps(results), flush=True)
        if results["silent"]:
            os._exit(1)  # the launcher ends the others
        others = [f"over/{other}" for other in range(1, world_size)]
        store.wait(others, timeout * WAIT_FACTOR)  # they need the store of this rank
    else:
        store.set(f"over/{rank}", "")
    os._exit(0)  # a group that failed may have threads that wait for ever


def _all_reduce(whole: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_reduce(whole.fill_(1))


def _all_gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    all_gather_single(whole, part)


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
    reduce_scatter_single(part, whole)


# With the number of times that (N-1)/N of the whole buffer crosses each link.
COLLECTIVES = {
    "all_reduce": (_all_reduce, 2),
    "all_gather": (_all_gather, 1),
    "reduce_scatter": (_reduce_scatter, 1),
}


class _Probe:
    """The measurements of one rank."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        store.set(f"gpu/{rank}", "1" if torch.cuda.is_available() else "0")
        has_gpus = [store.get(f"gpu/{other}") == b"1" for other in range(world_size)]
        self._backend = "nccl" if all(has_gpus) else "gloo"
        self._device = torch.device("cuda", 0) if all(has_gpus) else torch.device("cpu")

    def run(self) -> dict[str, Any]:
        """On rank 0: what each rank of each group measured, and the ranks that fell silent.

        The ranks are measured together last, and only if every pair works: torch waits for a connection that
        does not come for longer than it was told.
        """
        everyone = tuple(range(self._world_size))
        steps: list[list[tuple[int, ...]]] = [*rounds_of_pairs(self._world_size), [everyone]]
        groups: list[dict[str, Any]] = []
        silent: list[int] = []
        for step, round_ in enumerate(steps):
            measure = self._measure_together if round_[0] == everyone and step else self._measure_pair
            mine = next((ranks for ranks in round_ if self._rank in ranks), ())
            found = self._in_group(f"{step}/{mine[0]}", mine, measure) if mine else {}
            self._store.set(f"found/{step}/{self._rank}", json.dumps(found))
            if self._rank:
                self._store.wait([f"go/{step}"], self._timeout * WAIT_FACTOR**2)
                if self._store.get(f"go/{step}") == END:
                    break
                continue
            answers = self._collect(step)
            silent = [rank for rank in everyone if rank not in answers]
            groups += [
                {"ranks": list(ranks), "found": [answers.get(rank, {}) for rank in ranks]} for ranks in round_
            ]
            is_broken = any("error" in one for group in groups for one in group["found"])
            is_over = bool(silent) or (is_broken and step == len(steps) - 2)
            self._store.set(f"go/{step}", END.decode() if is_over else "on")
            if is_over:
                break
        is_whole = len(groups) > self._world_size * (self._world_size - 1) // 2
        together = groups.pop() if is_whole else {"ranks": [], "found": []}
        return {"backend": self._backend, "together": together, "pairs": groups, "silent": silent}

    def _in_group(
        self, name: str, ranks: tuple[int, ...], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the result of `measure` in a process group of these ranks, or the reason why there is
        none.
        """
        try:
            dist.init_process_group(
                self._backend,
                store=PrefixStore(name, self._store),
                rank=ranks.index(self._rank),
                world_size=len(ranks),
                timeout=self._timeout,
            )
            return measure()
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _collect(self, step: int) -> dict[int, dict[str, Any]]:
        answers = {}
        deadline = time.monotonic() + self._timeout.total_seconds() * WAIT_FACTOR
        for rank in range(self._world_size):
            left_s = max(0.01, deadline - time.monotonic())
            try:
                self._store.wait([f"found/{step}/{rank}"], timedelta(seconds=left_s))
                answers[rank] = json.loads(self._store.get(f"found/{step}/{rank}"))
            except dist.DistStoreError:
                continue
        return answers

    def _measure_together(self) -> dict[str, Any]:
        """Bus bandwidths as nccl-tests counts them: what each link carries."""
        size, device = dist.get_world_size(), self._device

        def seconds_of(run: Callable[[], object]) -> float:
            took = torch.tensor(self._timed(run), device=device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            return float(took)

        results: dict[str, Any] = {}
        for name, (operation, num_ways) in COLLECTIVES.items():
            numel = FIRST_NUMEL
            while True:
                part = torch.ones(numel // size, device=device)
                whole = torch.ones(numel // size * size, device=device)
                operation(whole, part)
                seconds = seconds_of(partial(operation, whole, part))
                if seconds >= ENOUGH_S or numel >= LAST_NUMEL:
                    break
                numel *= GROWTH
            bus_bytes = num_ways * whole.nbytes * (size - 1) / size
            results[name] = {"bytes": whole.nbytes, "seconds": seconds, "bytes_per_s": bus_bytes / seconds}
        return results

    def _measure_pair(self) -> dict[str, Any]:
        """Half of the shortest round trip, and the bytes per second that this rank sends."""
        token = torch.zeros(1, device=self._device)

        def ping() -> None:
            self._pass_on(token, sender=0)
            self._pass_on(token, sender=1)

        times = [self._timed(ping) for _ in range(NUM_PINGS)]
        sent = [self._send_speed(sender) for sender in (0, 1)]
        return {"latency_s": min(times) / 2, "bytes_per_s": sent[dist.get_rank()]}

    def _send_speed(self, sender: int) -> float:
        """The best of several messages that take long enough: what else a host does makes some slower.

        The receiver answers each message, and learns then whether a larger one, or another one, follows.
        """
        numel, speed, num_left = FIRST_NUMEL, 0.0, NUM_MESSAGES
        follows = torch.full([1], ANOTHER, device=self._device)
        while follows.item() != NONE:
            message = torch.ones(numel, device=self._device)
            seconds = self._timed(partial(self._send_and_hear, message, sender))
            if dist.get_rank() == sender:
                is_long = seconds >= ENOUGH_S or numel >= LAST_NUMEL
                if is_long:
                    num_left -= 1
                    speed = max(speed, message.nbytes / seconds)
                follows.fill_(LARGER if not is_long else ANOTHER if num_left else NONE)
            self._pass_on(follows, sender=sender)
            if follows.item() == LARGER:
                numel *= GROWTH
        return speed

    def _send_and_hear(self, message: torch.Tensor, sender: int) -> None:
        self._pass_on(message, sender=sender)
        self._pass_on(torch.zeros(1, device=self._device), sender=1 - sender)

    def _pass_on(self, message: torch.Tensor, *, sender: int) -> None:
        me = dist.get_rank()
        if me == sender:
            dist.send(message, 1 - me)
        else:
            dist.recv(message, 1 - me)

    def _timed(self, run: Callable[[], object]) -> float:
        self._synchronize()
        began = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def rounds_of_pairs(number: int) -> list[list[tuple[int, ...]]]:
    """Every pair of ranks once, in as few rounds as can be; a rank is in one pair of a round at most.

    One rank keeps its place in two rows, and the others go round; of an odd number, one pauses in each round.
    """
    ranks = list(range(number + number % 2))
    half = len(ranks) // 2
    rounds: list[list[tuple[int, ...]]] = []
    for _ in range(len(ranks) - 1):
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < number])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


if __name__ == "__main__":
    main(sys.argv[1])
