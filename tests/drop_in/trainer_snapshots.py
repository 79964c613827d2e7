"""Train with Trainer, as any program does; rank 1 is killed once: trainer_snapshots.py STAGE."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # with what follows it is for machines without a GPU
PartialState(backend="gloo")
config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": int(sys.argv[1])},
}
args = TrainingArguments(
    "out",
    deepspeed=config,
    accelerator_config={"use_configured_state": True},
    per_device_train_batch_size=6,
    max_steps=8,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
set_seed(3)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
)
tokens = torch.randint(0, 64, (48, 8), generator=torch.Generator().manual_seed(0))


class Watching(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            print(json.dumps([state.global_step, logs["loss"]]), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and state.global_step == 7 and os.environ["RANK"] == "1":
            trainer.deepspeed._saver.snapshots._current.thread.join()  # the one of step 5 is whole
            os.kill(os.getpid(), signal.SIGKILL)


data = [{"input_ids": one, "labels": one} for one in tokens]
trainer = Trainer(model, args, train_dataset=data, callbacks=[Watching()])
trainer.train()
if trainer.is_world_process_zero():
    print(f"{sum('loss' in one for one in trainer.state.log_history)} losses", flush=True)
