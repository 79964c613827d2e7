"""Accelerate's way to divide sequences over ranks, as a program written for DeepSpeed has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.drop_in.guide_jobs import requires_hugging_face
from tests.runtime.tensor.models import check

pytestmark = [
    requires_hugging_face,
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PROGRAM = Path(__file__).parent / "programs" / "ulysses.py"
NUM_STEPS, VOCAB, LENGTH = 8, 96, 16
FACTORS = {1: 2, 3: 1}  # DeepSpeed's, of gradients by stage: see docs/train/sequence-parallel.md


def _one_process(factor: int) -> list[tuple[float, float]]:
    from accelerate.utils import set_seed
    from transformers import LlamaConfig, LlamaForCausalLM

    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, attn_implementation="sdpa", **sizes)
    )
    samples = torch.randint(0, VOCAB, (16, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for batch in samples.split(2):
        loss = model(input_ids=batch, labels=batch).loss
        (factor * loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found


@pytest.mark.parametrize("stage", FACTORS)
def test_the_guide_s_loop_trains_as_with_deepspeed(tmp_path: Path, stage: int) -> None:
    env = {name: one for name, one in os.environ.items() if not name.startswith(("DSLAUNCH_", "ACCELERATE_"))}
    env |= {
        "DSLAUNCH_DROP_IN": "always",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    file = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "dslaunch",
        "--num_gpus=2",
        "--no_local_rank",
        str(PROGRAM),
        str(file),
        str(stage),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    is_said = "added over the 2 ranks that share a sequence" in done.stdout + done.stderr
    assert is_said == (FACTORS[stage] > 1)
    found = json.loads(file.read_text())
    assert found["length"] == NUM_STEPS
    check(found["steps"], _one_process(FACTORS[stage]))
