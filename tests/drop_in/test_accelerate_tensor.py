"""Accelerate's ParallelismConfig with layers divided over two ranks, in a loop of a program's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drop_in.guide_jobs import LIMIT_S, command_of, requires_hugging_face, run

pytestmark = [
    requires_hugging_face,
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 30),
]

LIMIT = 2e-6
SCRIPT = """
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM


def make_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ))


config = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.5,
    "tensor_parallel": {"autotp_size": 2},
}
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
    parallelism_config=ParallelismConfig(tp_size=2),
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
)
data = torch.randint(0, 96, (24, 16), generator=torch.Generator().manual_seed(3))

plain, expected = make_model(), []
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for batch in data.chunk(3):
    optimizer.zero_grad()
    loss = plain(input_ids=batch, labels=batch).loss
    loss.backward()
    expected.append((loss.item(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()))
    optimizer.step()

model, found = make_model(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = torch.utils.data.DataLoader(data, batch_size=8)  # accelerate's own mesh of tp cuts it
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    found.append((loss.item(), float(model.get_global_grad_norm())))
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    differences = [float((weights[name] - param).abs().max()) for name, param in plain.named_parameters()]
    results = {"found": found, "expected": expected, "sizes": [model.dp_world_size, model.mp_world_size]}
    Path(sys.argv[-1], "results.json").write_text(json.dumps({**results, "weights": max(differences)}))
torch.distributed.destroy_process_group()
"""


def test_accelerate_divides_layers_over_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = command_of("accelerate", world_size=2, script=script, more=("--main_process_port=0",))
    shown = subprocess.run(
        [sys.executable, "-m", "dslaunch.drop_in"], check=True, stdout=subprocess.PIPE, text=True
    )
    (job,) = run({tmp_path: command}, PYTHONPATH=shown.stdout.strip())
    results = job.results
    assert results["sizes"] == [1, 2]
    assert len(results["found"]) == 3, json.dumps(results)
    for got, expected in zip(results["found"], results["expected"], strict=True):
        assert got == pytest.approx(expected, abs=LIMIT)
    assert results["weights"] < LIMIT
