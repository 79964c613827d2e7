"""Training over a network between hosts: the same result as one process,
and the bytes that the formula says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drop_in.jobs import asked_for
from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPO = Path(__file__).parents[3]
EXAMPLES = REPO / "docs" / "examples"
# A step's loss is the mean over the same 96 samples; only the order in which float32 sums are rounded
# differs between 1 and 4 ranks. Rounding differences of 1e-7 per step grow as training goes on; 48
# steps stay below this.
LOSS_TOLERANCE = 2e-4
FIRST_STEPS_TOLERANCE = 2e-6  # before they have grown
NUM_EPOCHS = 3
# TCP, IP and Ethernet headers, acknowledgements, and gloo's own small messages, as a part of the payload.
PROTOCOL_OVERHEAD = 0.08

# Four units of 250,000 parameters and an empty root; its arguments are the stages, one after the other.
EXCHANGE = """
import json, os, sys, torch, dslaunch
from pathlib import Path
steps = 6
def sent():
    wire = os.environ.get("WIRE", "eth0") + ":"
    words = [line.split() for line in open("/proc/net/dev") if line.strip().startswith(wire)][0]
    return int(words[9])
def exchange(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500, bias=False) for _ in range(4)))
    engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0,
                              "reduce_bucket_size": 250_000}})
    def step():
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(1, 500)).square().mean())
            engine.step()
    for num_micro_batches in (1, 2):
        engine.set_train_batch_size(num_micro_batches * engine.world_size)
        step()
        torch.distributed.barrier()
        before, counted = sent(), sum(engine.comm_bytes().values())
        torch.distributed.barrier()  # on loopback, others' bytes count too
        for _ in range(steps):
            step()
        torch.distributed.barrier()
        after = sent()
        torch.distributed.barrier()
        Path(f"bytes-{stage}-{num_micro_batches}-{os.environ['RANK']}").write_text(json.dumps({
            "wire": (after - before) / steps,
            "meter": (sum(engine.comm_bytes().values()) - counted) / steps}))
    engine.destroy()
for word in sys.argv[1:]:
    exchange(int(word))
torch.distributed.destroy_process_group()
heavy = {"torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "sympy"}
heavy &= sys.modules.keys()
assert not heavy, f"a second for each rank of a job that neither compiles nor saves: {heavy}"
"""


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Path:
    path = lab.shared / request.node.name
    path.mkdir()
    (path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    return path


def digits(lab: Lab, folder: Path, name: str, *launcher_words: str, stage: int) -> tuple[list[float], str]:
    """Losses of every step and the line with the accuracy."""
    command = Command(
        lab.head,
        folder,
        *launcher_words,
        *(
            str(EXAMPLES / "train_digits.py"),
            f"--stage={stage}",
            f"--log_losses={name}",
            f"--epochs={NUM_EPOCHS}",
        ),
        *("--deepspeed", "--deepspeed_config", str(EXAMPLES / "ds_config_digits.json")),
    )
    assert command.wait(180) == 0, command.err
    losses = [float(line) for line in (folder / name).read_text().splitlines()]
    return losses, next(
        line.partition(" | ")[2] for line in command.out.splitlines() if "| test after " in line
    )


@pytest.mark.exhaustive
def test_digits_on_two_hosts_at_stages_0_and_2_equal_one_process(lab: Lab, folder: Path) -> None:
    reference, accuracy = digits(lab, folder, "one", "--launcher=local", "--num_gpus=1", stage=0)
    assert len(reference) == 48
    assert reference[-1] < reference[0] / 4
    by_stage = {}
    for stage in (0, 2):
        words = ("-H", "hosts", "--preload=torch,sklearn.datasets")
        losses, found = digits(lab, folder, f"two-{stage}", *words, stage=stage)
        assert losses == pytest.approx(reference, abs=LOSS_TOLERANCE)
        assert losses[:8] == pytest.approx(reference[:8], abs=FIRST_STEPS_TOLERANCE)
        assert found == accuracy
        by_stage[stage] = losses
    assert by_stage[0] == by_stage[2], "bit-identical: the same sums in the same order"


@pytest.fixture(scope="module")
def exchanged(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """The folder with what three hosts with one rank each counted at the stages that are asked for."""
    folder = lab.shared / "exchange"
    folder.mkdir()
    (folder / "exchange.py").write_text(EXCHANGE)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    words = ("--no_local_rank", "exchange.py", *map(str, asked_for(request, "stage")))
    command = Command(lab.head, folder, "-H", "hosts", *words)
    assert command.wait(180) == 0, command.err
    return folder


# How often a step sends all parameters, by the number of micro batches. Sharded gradients are averaged in
# every one; sharded parameters are gathered in forward and again in backward, but for the two units, half the
# model, that the backward begins with.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "times"), [(2, {1: 2.0, 2: 3.0}), (3, {1: 2.5, 2: 5.0})])
def test_bytes_on_the_wire_are_those_of_the_formula(
    exchanged: Path, stage: int, times: dict[int, float]
) -> None:
    """Each time a rank sends psi * (N - 1) / N elements; one rank per host, so the interface counts them."""
    num_ranks, psi = 3, 4 * 500 * 500
    for num_micro_batches, number in times.items():
        expected = number * psi * (num_ranks - 1) / num_ranks * 4
        for rank in range(num_ranks):
            found = json.loads((exchanged / f"bytes-{stage}-{num_micro_batches}-{rank}").read_text())
            assert found["meter"] == pytest.approx(expected, rel=0.002), "padding and the norm's few bytes"
            assert found["meter"] <= found["wire"] <= found["meter"] * (1 + PROTOCOL_OVERHEAD)
