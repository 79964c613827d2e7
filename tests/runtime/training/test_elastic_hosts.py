"""The hosts of a job change while it trains: every loss, and the weights at its end, are those of a job that
had the same hosts all the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.launcher.command import Command, poll

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

# Of a step's loss, the mean over the same 12 samples, and of the weights: two and three ranks add in
# another order.
TOLERANCE = 1e-5
STEPS = 60
LIMIT_S = 150.0  # of each part, on a machine that does other things

TRAIN = """
import json, os, pathlib, sys, time, torch, dslaunch
config, save_every = json.loads(sys.argv[-2]), int(sys.argv[-1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
rank = engine.global_rank
where, _ = engine.load_checkpoint("checkpoints")
print(json.dumps({"world": engine.world_size, "from": engine.global_steps}), flush=True)
while engine.global_steps < STEPS:
    step = engine.global_steps
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    own = x.chunk(engine.world_size)[rank]
    loss = (engine(own) - own.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    whole = loss.detach().clone()
    torch.distributed.all_reduce(whole)
    if rank == 0:
        with open("losses", "a") as file:
            print(json.dumps([step, whole.item() / engine.world_size]), file=file)
    engine.step()
    if save_every and engine.global_steps % save_every == 0:
        engine.save_checkpoint("checkpoints")
    while str(engine.global_steps) in pathlib.Path("hold").read_text().split():
        time.sleep(0.01)  # until the test has done what is to be done at this step
with dslaunch.zero.GatheredParameters(list(model.parameters())):
    if rank == 0:
        torch.save({name: value.detach().clone() for name, value in model.named_parameters()}, "weights")
engine.destroy()
"""

OPTIMIZERS = {
    "SGD": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    "Adam": {"type": "Adam", "params": {"lr": 0.01}},
}


def _config(optimizer: str, stage: int, **checkpoint: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 12,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50},
        "checkpoint": {"keep_last": 2, **checkpoint},
    }


def _folder(lab: Lab, name: str, num_hosts: int, hold: str) -> Path:
    folder = lab.shared / name
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN.replace("STEPS", str(STEPS)))
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:num_hosts]))
    (folder / "hold").write_text(hold)
    return folder


def _start(lab: Lab, folder: Path, config: dict[str, Any], save_every: int) -> Command:
    words = ("--max_nodes=3", "--notice_file=/tmp/going", "--kill_grace=5", "--report=report.json")
    return Command(lab.head, folder, "-H", "hosts", *words, "train.py", json.dumps(config), str(save_every))


def _result(folder: Path) -> tuple[dict[int, list[float]], dict[str, Any]]:
    import torch

    losses: dict[int, list[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        losses.setdefault(step, []).append(loss)
    weights: dict[str, Any] = torch.load(folder / "weights", weights_only=True)
    return losses, weights


# Of every two of them each pair of values: half a minute each on real hosts.
CASES = [
    ("SGD", 0, False, False),
    ("Adam", 0, True, True),
    ("Adam", 1, False, True),
    ("SGD", 1, True, False),
    ("Adam", 2, False, False),
    ("SGD", 2, True, True),
    ("SGD", 3, False, True),
    ("Adam", 3, True, False),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("optimizer", "stage", "is_async", "has_dir"), CASES)
def test_two_hosts_become_three_and_two_again(
    lab: Lab, optimizer: str, stage: int, is_async: bool, has_dir: bool
) -> None:
    name = f"{optimizer}-{stage}-{is_async}-{has_dir}"
    more = {"preemption_save_dir": "checkpoints"} if has_dir else {}
    config = _config(optimizer, stage, async_save=is_async, **more)
    folder = _folder(lab, f"changing-{name}", 2, hold="12 32")
    command = _start(lab, folder, config, 0 if has_dir else 5)

    def go_on(hold: str) -> None:
        (folder / "hold").write_text(hold)

    command.wait_for('"world": 2', times=2, timeout_s=LIMIT_S)
    with (folder / "hosts").open("a") as file:
        file.write("node3 slots=1\n")
    poll(
        lambda: "node3 is new in the hostfile: the hosts change" in command.err,
        "the third host",
        command,
        LIMIT_S,
    )
    go_on("32")
    command.wait_for('"world": 3', times=3, timeout_s=LIMIT_S)
    lab.host("node1").run(["touch", "/tmp/going"], check=True)
    poll(lambda: "node1 was told to go" in command.err, "the notice", command, LIMIT_S)
    go_on("")
    assert command.wait(LIMIT_S) == 0, command.err
    report = json.loads((folder / "report.json").read_text())
    assert [(one["exit_code"], len(one["hosts"])) for one in report["attempts"]] == [(75, 2), (75, 3), (0, 2)]
    assert report["attempts"][2]["hosts"] == ["node2", "node3"]
    assert lab.wait_until_clean() == []

    plain = _folder(lab, f"plain-{name}", 2, hold="")
    assert _start(lab, plain, _config(optimizer, stage), 0).wait(LIMIT_S) == 0
    losses, weights = _result(folder)
    plain_losses, plain_weights = _result(plain)
    assert sorted(losses) == sorted(plain_losses) == list(range(STEPS))
    assert all(len(one) == 1 for one in losses.values()), "no step was done twice"
    for step in range(STEPS):
        assert abs(losses[step][0] - plain_losses[step][0]) < TOLERANCE, step
    for key, weight in weights.items():
        assert (weight - plain_weights[key]).abs().max() < TOLERANCE, key
        assert abs(weight.norm() - plain_weights[key].norm()) < TOLERANCE, key
    assert sum(losses[step][0] for step in range(5)) > 2 * sum(losses[step][0] for step in range(55, 60))
