"""The tutorials run as they are printed, on hosts of the lab."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.docs.pages import Block, blocks_of
from tests.docs.test_links import CHECKOUT
from tests.lab import Lab
from tests.launcher.command import Command

LARGER = CHECKOUT / "docs" / "tutorials" / "larger-than-a-rank.md"
TIMEOUT_S = 200.0
STEPS = 12
NEAR = 2e-3  # relative: losses are printed with four digits, and AdamW makes much of the order of sums

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs sklearn")


def _commands(blocks: list[Block]) -> list[list[str]]:
    return [
        shlex.split(line) for block in blocks if block.language == "sh" for line in block.text.splitlines()
    ]


def _losses(command: Command) -> dict[int, float]:
    found = re.findall(r"\| step (\d+) loss ([\d.]+)$", command.out, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def _train_alone(program: str) -> dict[int, float]:
    """The program's model and batches with torch alone, in one process; without the limit."""
    scope: dict[str, object] = {}
    exec(program.partition("def limit_memory")[0], scope)
    batch_of, layers = scope["batch_of"], scope["layers"]
    assert callable(batch_of)
    assert callable(layers)
    built = []
    for index, layer in enumerate(layers()):
        torch.manual_seed(1234 + index)  # as PipelineModule(seed_layers=True) does
        built.append(layer.build())
    model = nn.Sequential(*built)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.00003)
    found = {}
    for step in range(STEPS):
        images, labels = batch_of(step)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found[step + 1] = loss.item()
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_no_rank_holds_is_trained_resumed_and_exported(lab: Lab) -> None:
    folder: Path = lab.shared / "larger-than-a-rank"
    folder.mkdir()
    blocks = blocks_of(LARGER)
    files = {block.detail: block.text for block in blocks if block.kind == "file"}
    for name, text in files.items():
        (folder / name).write_text(text)
    alone, plan, staged, resumed, export, use = _commands(blocks)

    refused = Command(lab.head, folder, *alone[1:])
    assert refused.wait(TIMEOUT_S) != 0
    assert "can't allocate memory" in refused.out + refused.err
    assert not (folder / "checkpoints").exists()

    planned = Command(lab.head, folder, *plan[1:])
    assert planned.wait(TIMEOUT_S) == 0, planned.err
    assert re.search(r"tp +2 +1 +yes", planned.out)
    assert re.search(r"pp +2 +2 +no: node1-node2", planned.out)

    losses: dict[int, float] = {}
    for words in (staged, resumed):
        command = Command(lab.head, folder, *words[1:])
        assert command.wait(TIMEOUT_S) == 0, command.out + command.err
        losses |= _losses(command)
    assert losses == pytest.approx(_train_alone(files["train.py"]), rel=NEAR)

    exported = Command(lab.head, folder, *export[1:])
    assert exported.wait(TIMEOUT_S) == 0, exported.out + exported.err
    done = subprocess.run(
        [sys.executable, *use[1:]], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert int(done.stdout.partition("%")[0]) > 50, done.stdout
