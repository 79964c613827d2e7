"""Accelerate with sequences divided over two ranks, as its guide writes it: ulysses.py FILE STAGE.

Rank 0 writes the loss and the norm of each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed.nn.functional
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    InitProcessGroupKwargs,
    ParallelismConfig,
    set_seed,
)
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCAB, SIZE = 16, 96, 2

set_seed(0)
parallelism = ParallelismConfig(
    sp_backend="deepspeed",
    sp_size=SIZE,
    sp_handler=DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    ),
)
plugin = DeepSpeedPlugin(
    hf_ds_config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": int(sys.argv[2])},
    }
)
accelerator = Accelerator(
    deepspeed_plugin=plugin,
    parallelism_config=parallelism,
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
)
samples = [
    {"input_ids": one, "labels": one, "position_ids": torch.arange(LENGTH)}
    for one in torch.randint(0, VOCAB, (16, LENGTH))
]
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=2))

from deepspeed.utils import groups  # noqa: E402  (as the guide has it)

sp_group = groups._get_sequence_parallel_group()
sp_world_size = groups._get_sequence_parallel_world_size()
found = []
for batch in loader:
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    shift_labels = batch.pop("shift_labels")
    outputs = model(**batch)
    loss = accelerator.unwrap_model(model).loss_function(
        logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=VOCAB
    )
    losses = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
    good_tokens = (shift_labels != -100).view(-1).sum()
    counts = torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group)
    loss = sum(losses[rank] * counts[rank] for rank in range(sp_world_size)) / max(sum(counts), 1)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    found.append((loss.item(), float(model.get_global_grad_norm())))
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps({"length": len(loader), "steps": found}))
