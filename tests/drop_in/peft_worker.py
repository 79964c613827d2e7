"""Trains LoRA adapters with Trainer in many ways, one after the other; test_peft.py compares.

Arguments: folder, cases.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import transformers
from cases import main, rank, wait
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import LoggedTrainer, Rows, arguments, begin_case, config, norms, numbers
from transformers import AutoModelForCausalLM

SAVED_AT = 2
MODULES = ["embed_tokens", "lm_head"]


def base_folder(folder: Path) -> Path:
    """Where the base model is, written by rank 0 of the first case."""
    return folder / "base"


def write_base(folder: Path) -> dict[str, Any]:
    begin_case()
    if rank() == 0:
        AutoModelForCausalLM.from_config(config("qwen2")).save_pretrained(base_folder(folder))
    wait()
    return {}


def train(
    folder: Path,
    *,
    name: str,
    stage: int | None,
    is_read_sharded: bool = False,
    resumes: str | None = None,
    saved_modules: list[str] | None = None,
) -> dict[str, Any]:
    """Train the adapters, and copies of `saved_modules`; `stage` None: without a ds_config, which is DDP."""
    begin_case()
    prepared = partial(arguments, folder / name, stage=stage, save_strategy="steps", save_steps=SAVED_AT)
    args = prepared() if is_read_sharded else None
    base = AutoModelForCausalLM.from_pretrained(base_folder(folder))
    is_sharded = any(getattr(param, "ds_tensor", None) is not None for param in base.parameters())
    transformers.set_seed(1)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
        modules_to_save=saved_modules,
    )
    model = get_peft_model(base, lora)
    trainer = LoggedTrainer(model, args or prepared(), train_dataset=Rows())
    last = folder / resumes / f"checkpoint-{SAVED_AT}" if resumes else None
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    saved = folder / f"{name}.adapter"
    trainer.save_model(str(saved))
    result = {"losses": trainer.losses, "norms": norms(trainer), "was_sharded": is_sharded}
    trained = trainer.model.num_parameters(only_trainable=True), trainer.model.num_parameters()
    wait()
    if stage is not None:
        half = folder / name / f"checkpoint-{SAVED_AT}"
        result["kept"] = sorted(get_fp32_state_dict_from_zero_checkpoint(half)) if half.exists() else []
    del trainer, model, base
    begin_case()
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder(folder)), saved)
    trained_parts = ("lora_", "modules_to_save")
    adapters = {
        key: value for key, value in again.state_dict().items() if any(part in key for part in trained_parts)
    }
    return {**result, "trained": trained, "weights": numbers(adapters)}


CASES = {
    "base": write_base,
    "ddp": partial(train, name="ddp", stage=None),
    "stage 2": partial(train, name="two", stage=2),
    "stage 3": partial(train, name="three", stage=3),
    "stage 3, read under zero.Init": partial(train, name="read", stage=3, is_read_sharded=True),
    "modules, ddp": partial(train, name="ddp m", stage=None, saved_modules=MODULES),
    "modules, stage 2": partial(train, name="two m", stage=2, saved_modules=MODULES),
    "modules, stage 3": partial(train, name="three m", stage=3, is_read_sharded=True, saved_modules=MODULES),
    "stage 2, resumed": partial(train, name="two again", stage=2, resumes="two"),
    "stage 3, resumed": partial(train, name="three again", stage=3, is_read_sharded=True, resumes="read"),
}

if __name__ == "__main__":
    main(CASES)
