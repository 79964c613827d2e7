"""A training that goes on from snapshots in memory, on real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Rank 1 kills its agent, with which its host's memory goes. The reference is a training of plain torch.
TRAIN = """
import os, signal, torch, dslaunch
from torch.nn.functional import mse_loss
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 15), torch.nn.Tanh(), torch.nn.Linear(15, 1))
def batch(step):
    drawn = torch.Generator().manual_seed(step)
    inputs = torch.randn(12, 7, generator=drawn)
    return inputs, inputs.sum(1, keepdim=True)
config = {"train_batch_size": 12, "zero_optimization": {"stage": 3}, "gradient_clipping": 1.0,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}}
engine = dslaunch.initialize(model=make(), config=config)[0]
kept = engine.resume(client_state=lambda: {"seen": engine.global_samples})
if kept:
    assert kept == {"seen": 12 * engine.global_steps}
losses = []
first = engine.global_steps
for step in range(first, 10):
    inputs, targets = (one.chunk(size)[rank] for one in batch(step))
    loss = mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    loss = loss.detach() / size
    torch.distributed.all_reduce(loss)
    losses.append(loss.item())
    if step == 5 and size == 4 and rank == 1:
        engine._saver.snapshots._current.thread.join()  # the one of step 4 is whole
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
if rank == 0:
    plain, found = make(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(10):
        loss = mse_loss(plain(batch(step)[0]), batch(step)[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    apart = max(abs(one - other) for one, other in zip(losses, found[first:], strict=True))
    shown = "1e-6 at most" if apart <= 1e-6 else apart
    print(f"{size} ranks from step {first}, {len(losses)} losses, apart by {shown}")
"""


def test_three_ranks_go_on_from_the_memory_of_four_though_a_host_is_lost(lab: Lab, folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    hosts = "".join(f"{node.name} slots=1 rack={node.name[-1]}\n" for node in lab.nodes[:4])
    (folder / "hosts").write_text(hosts)
    words = ("--max_restarts=1", "--min_nodes=3", "--min_uptime=0", "--snapshot_every=4", "--no_local_rank")
    command = Command(lab.head, folder, "-H", "hosts", *words, "train.py")
    assert command.wait(180) == 0, command.err  # seven ranks import torch on two cores
    assert "training goes on after step 4, from the memory of the hosts" in command.out + command.err
    assert "3 ranks from step 4, 6 losses, apart by 1e-6 at most" in command.out, command.out
    assert not [*folder.glob("**/*.distcp")]
    assert lab.wait_until_clean() == []
