"""Jobs on real hosts whose hosts change while they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import few
from tests.lab import Lab
from tests.launcher.command import Command, poll

pytestmark = pytest.mark.slow

# Says where it is, saves when it is asked to, which is to end here, and is done when `done` is there.
WORK = """
import json, os, pathlib, sys, time
rank, asked = os.environ["RANK"], pathlib.Path(os.environ["DSLAUNCH_RESIZE_FILE"])
count = pathlib.Path(f"starts-{rank}")
start = int(count.read_text()) + 1 if count.exists() else 0
count.write_text(str(start))
print(json.dumps({"rank": int(rank), "host": os.uname().nodename, "world": os.environ["WORLD_SIZE"],
    "start": start, "restart": os.environ["TORCHELASTIC_RESTART_COUNT"]}), flush=True)
while not pathlib.Path("done").exists():
    if asked.exists() and not pathlib.Path("busy").exists():
        print("saved:", asked.read_text().strip(), flush=True)
        sys.exit(75)
    time.sleep(0.02)
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "work.py").write_text(WORK)
    return folder


def launch(lab: Lab, folder: Path, *words: str, hosts: int = 3) -> Command:
    text = "".join(f"{node.name} slots=1\n" for node in lab.nodes[:hosts])
    (folder / "hosts").write_text(text)
    return Command(
        lab.head, folder, "-H", "hosts", "--kill_grace=1", "--heartbeat=2", "--report=report.json", *words
    )


def starts(command: Command) -> list[str]:
    """Of each line of rank 0 that says where it is: the hosts of all ranks that said so after it."""
    ranks: list[dict[int, str]] = []
    world = "0"
    for line in command.out.splitlines():
        text = line.partition(" | ")[2]
        if not text.startswith("{"):
            continue
        said: dict[str, Any] = json.loads(text)
        if not ranks or said["rank"] in ranks[-1] or len(ranks[-1]) == int(world):
            ranks.append({})
        world = said["world"]
        ranks[-1][said["rank"]] = said["host"]
    return [" ".join(one[rank] for rank in sorted(one)) for one in ranks]


def wait_for_starts(command: Command, *expected: str) -> None:
    poll(lambda: starts(command) == list(expected), f"starts {expected}", command)


def end(command: Command, folder: Path) -> dict[str, Any]:
    (folder / "done").touch()
    assert command.wait() == 0, command.err
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.parametrize("launcher", few(["ssh", "openssh"], lambda launcher: launcher == "ssh"))
def test_a_host_that_was_cut_off_is_back_at_the_next_checkpoint(
    lab: Lab, folder: Path, launcher: str
) -> None:
    words = (f"--launcher={launcher}", "--num_nodes=1:3", "--max_restarts=1", "--min_uptime=0")
    command = launch(lab, folder, *words, "work.py")
    wait_for_starts(command, "node1 node2 node3")
    lost = lab.host("node2")
    lost.link_down()
    wait_for_starts(command, "node1 node2 node3", "node1 node3")
    lost.link_up()
    wait_for_starts(command, "node1 node2 node3", "node1 node3", "node1 node3 node2")
    report = end(command, folder)
    assert "dslaunch: node2 is back: the hosts change when the program has saved" in command.err
    last = "3 hosts from now on (node2 is back): starting again from where it was saved"
    assert f"dslaunch: {last}" in command.err
    assert [one["decision"] for one in report["attempts"]][1:] == [last, ""]
    assert [one["change"] for one in report["attempts"]] == [None, "node2 is back", None]
    assert [one["exit_code"] for one in report["attempts"]] == [3, 75, 0]
    assert lab.wait_until_clean() == []


def test_a_line_that_is_added_to_the_hostfile_is_a_host_that_joins(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--max_nodes=3", "work.py", hosts=2)
    wait_for_starts(command, "node1 node2")
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=oops\n")
    poll(lambda: "slots=oops" in command.err, "a word on the broken line", command)
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\nnode4 slots=2\n")
    wait_for_starts(command, "node1 node2", "node1 node2 node4 node4")
    (folder / "hosts").write_text("node1 slots=1\nnode4 slots=2\n")
    wait_for_starts(command, "node1 node2", "node1 node2 node4 node4", "node1 node4 node4")
    end(command, folder)
    assert "the hostfile has changed, and is not used as it is now: hosts:2" in command.err
    assert "node4 is new in the hostfile" in command.err
    assert "2 hosts from now on (node2 is no longer in the hostfile)" in command.err
    assert lab.wait_until_clean() == []


def test_a_host_with_a_notice_file_leaves_and_comes_back_without_it(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--max_nodes=3", "--notice_file=/tmp/going", "work.py")
    wait_for_starts(command, "node1 node2 node3")
    lab.host("node2").run(["touch", "/tmp/going"], check=True)
    wait_for_starts(command, "node1 node2 node3", "node1 node3")
    lab.host("node2").run(["rm", "/tmp/going"], check=True)
    wait_for_starts(command, "node1 node2 node3", "node1 node3", "node1 node3 node2")
    end(command, folder)
    assert "node2 was told to go (there is /tmp/going)" in command.err
    assert lab.wait_until_clean() == []


def test_a_host_told_to_go_that_is_gone_before_the_save_costs_no_restart(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--max_nodes=3", "--notice_file=/tmp/going", "work.py")
    wait_for_starts(command, "node1 node2 node3")
    (folder / "busy").touch()
    lab.host("node3").run(["touch", "/tmp/going"], check=True)
    poll(lambda: "node3 was told to go" in command.err, "the notice", command)
    lab.host("node3").die()
    wait_for_starts(command, "node1 node2 node3", "node1 node2")
    (folder / "busy").unlink()
    report = end(command, folder)
    assert (
        "starting again, which counts as no restart; without node3 (told to go: there is /tmp" in command.err
    )
    assert [one["exit_code"] for one in report["attempts"]] == [3, 0]
    assert lab.wait_until_clean() == []


def test_a_host_that_fails_when_it_joins_is_left_out_again(lab: Lab, folder: Path) -> None:
    """It answers, so it is waited for, but what it has to have is not there."""
    command = launch(lab, folder, "--max_nodes=3", "work.py", hosts=2)
    wait_for_starts(command, "node1 node2")
    text = (folder / "hosts").read_text()
    (folder / "hosts").write_text(text + "node3 slots=1 python=/no/such/python\n")
    wait_for_starts(command, "node1 node2", "node1 node2")
    end(command, folder)
    assert "3 hosts from now on (node3 is new in the hostfile)" in command.err
    assert "starting again, which counts as no restart; without node3 (it had just joined: " in command.err
    assert lab.wait_until_clean() == []


def test_a_host_that_dies_when_it_has_joined_is_left_out_again(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--max_nodes=3", "work.py", hosts=2)
    wait_for_starts(command, "node1 node2")
    with (folder / "hosts").open("a") as file:
        file.write("node3 slots=1\n")
    wait_for_starts(command, "node1 node2", "node1 node2 node3")
    lab.host("node3").die()
    wait_for_starts(command, "node1 node2", "node1 node2 node3", "node1 node2")
    end(command, folder)
    assert "without node3 (it had just joined: " in command.err
    assert lab.wait_until_clean() == []


TRAIN = """
import json, os, pathlib, time, torch, dslaunch
torch.manual_seed(0)
inputs = torch.randn(12, 4)
config = {"train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2}}
model = torch.nn.Linear(4, 1)
engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
state = {"losses": []}
state.update(engine.resume(client_state=lambda: state))
rank, world = engine.global_rank, engine.world_size
print(json.dumps({"rank": rank, "host": os.uname().nodename, "world": str(world),
    "step": engine.global_steps}), flush=True)
is_over = torch.zeros(())
while not is_over:
    loss = engine(inputs[rank::world]).pow(2).mean()
    engine.backward(loss)
    state["losses"].append(float(loss.detach()))
    engine.step()
    time.sleep(0.05)
    is_over.fill_(pathlib.Path("done").exists())
    dslaunch.comm.all_reduce(is_over)
print("end", engine.global_steps, len(state["losses"]), flush=True)
"""


def test_a_host_with_a_notice_leaves_at_the_next_step_and_training_goes_on_from_memory(
    lab: Lab, folder: Path
) -> None:
    """The program saves nothing on a disk."""
    (folder / "train.py").write_text(TRAIN)
    words = ("--max_nodes=3", "--notice_file=/tmp/going", "--snapshot_every=1000000", "train.py")
    command = launch(lab, folder, *words)
    wait_for_starts(command, "node1 node2 node3")
    lab.host("node2").run(["touch", "/tmp/going"], check=True)
    wait_for_starts(command, "node1 node2 node3", "node1 node3")
    report = end(command, folder)
    assert "training is saved in the memory of the hosts, and ends to go on" in command.err
    assert "training goes on after step " in command.out
    lines = [line.partition(" | ")[2] for line in command.out.splitlines()]
    steps = [json.loads(line)["step"] for line in lines if '"step"' in line]
    assert steps[:3] == [0, 0, 0]
    assert len(set(steps[3:])) == 1
    assert steps[3] > 0
    (told,) = {line for line in lines if line.startswith("end ")}
    _, last, num_losses = told.split()
    assert last == num_losses, "no step is done twice or left out"
    assert [one["exit_code"] for one in report["attempts"]] == [75, 0]
    assert lab.wait_until_clean() == []
