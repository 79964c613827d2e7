"""Trains with TRL's trainers in many ways, one after the other; test_trl.py compares.

Arguments: folder, cases.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
from cases import main, rank, wait
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tiny import STEPS, Recorded, arguments, begin_case, config, norms, numbers, text, tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.models import unwrap_model_for_generation

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class LoggedSFT(Recorded, SFTTrainer):
    pass


class LoggedDPO(Recorded, DPOTrainer):
    pass


class LoggedGRPO(Recorded, GRPOTrainer):
    pass


class LoggedRLOO(Recorded, RLOOTrainer):
    pass


class LoggedOnlineDPO(Recorded, OnlineDPOTrainer):
    pass


class Generates(TrainerCallback):
    """In the middle of training, as TRL's online trainers do it."""

    def __init__(self, *, is_gathered: bool) -> None:
        self.is_gathered = is_gathered
        self.trainer: Any = None
        self.tokens: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != STEPS // 2:
            return
        prompts = torch.tensor([[5, 6, 7 + rank()], [9, 8 + rank(), 7]])
        wrapped, accelerator = self.trainer.model_wrapped, self.trainer.accelerator
        with (
            torch.no_grad(),
            unwrap_model_for_generation(
                wrapped, accelerator, gather_deepspeed3_params=self.is_gathered
            ) as model,
        ):
            self.tokens = model.generate(prompts, max_new_tokens=6, do_sample=False).tolist()


class Held(TrainerCallback):
    """Keeps what this process holds at the end of each step: tensors, bytes of memory, and descriptors."""

    def __init__(self) -> None:
        self.numbers: list[tuple[int, int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gc.collect()
        num_tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
        process = psutil.Process()
        self.numbers.append((num_tensors, process.memory_info().rss, process.num_fds()))


def base_folder(folder: Path) -> Path:
    """Where the model is that all cases begin with."""
    return folder / "model"


def write_model(folder: Path) -> dict[str, Any]:
    begin_case()
    if rank() == 0:
        AutoModelForCausalLM.from_config(config("llama")).save_pretrained(base_folder(folder))
        tokenizer().save_pretrained(base_folder(folder))
        texts = {"text": [text(seed, length=10 + seed % 7) for seed in range(32)]}
        Dataset.from_dict(texts).save_to_disk(folder / "texts")
        pairs = {
            "prompt": [text(seed, length=4 + seed % 3) for seed in range(32)],
            "chosen": [" " + text(100 + seed, length=6) for seed in range(32)],
            "rejected": [" " + text(200 + seed, length=5 + seed % 4) for seed in range(32)],
        }
        Dataset.from_dict(pairs).save_to_disk(folder / "pairs")
    wait()
    return {}


def _result(trainer: Any, folder: Path, name: str) -> dict[str, Any]:
    place = folder / name
    trainer.save_model(str(place))
    wait()
    file = (
        "adapter_model.safetensors" if (place / "adapter_model.safetensors").exists() else "model.safetensors"
    )
    return {"losses": trainer.losses, "norms": norms(trainer), "weights": numbers(load_file(place / file))}


def sft(
    folder: Path,
    *,
    name: str,
    stage: int | None,
    lora: LoraConfig | None = None,
    is_gathered: bool = True,
    **more: Any,
) -> dict[str, Any]:
    begin_case()
    args = arguments(
        folder / name, stage=stage, kind=SFTConfig, bf16=False, max_length=24, weight_decay=0.0, **more
    )
    texts = Dataset.load_from_disk(str(folder / "texts"))
    generates = Generates(is_gathered=is_gathered)
    trainer = LoggedSFT(
        str(base_folder(folder)), args=args, train_dataset=texts, peft_config=lora, callbacks=[generates]
    )
    generates.trainer = trainer
    trainer.train()
    return {**_result(trainer, folder, name), "tokens": generates.tokens}


def dpo(
    folder: Path, *, name: str, stage: int | None, lora: LoraConfig | None = None, **more: Any
) -> dict[str, Any]:
    begin_case()
    args = arguments(
        folder / name,
        stage=stage,
        kind=DPOConfig,
        bf16=False,
        max_length=24,
        beta=0.5,
        has_optimizer=False,
        **more,
    )
    pairs = Dataset.load_from_disk(str(folder / "pairs"))
    trainer = LoggedDPO(str(base_folder(folder)), args=args, train_dataset=pairs, peft_config=lora)
    trainer.train()
    result = _result(trainer, folder, name)
    if trainer.ref_model is not None:
        ref = trainer.ref_model
        is_engine = isinstance(ref, deepspeed.DeepSpeedEngine)
        result["reference"] = {
            "is engine": is_engine,
            "stage": ref.zero_optimization_stage() if is_engine else None,
            "optimizer": ref.optimizer if is_engine else None,
        }
    return result


def _reward(completions: list[str], **columns: Any) -> list[float]:
    """Like other words more than the ones before."""
    return [len(set(words.split())) - 0.1 * len(words.split()) for words in completions]


def online(
    folder: Path,
    *,
    name: str,
    kind: type[Any],
    config_kind: type[Any],
    stage: int | None,
    lora: LoraConfig | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train on answers that the model samples for itself; they end at different lengths."""
    begin_case()
    args = arguments(
        folder / name,
        stage=stage,
        kind=config_kind,
        bf16=False,
        has_optimizer=False,
        num_generations=2,
        max_completion_length=8,
        beta=0.1,
        log_completions=False,
        **more,
    )
    return _train_online(folder, name, partial(kind, peft_config=lora), args)


def online_dpo(folder: Path, *, name: str, stage: int | None, **more: Any) -> dict[str, Any]:
    """Train on pairs of answers that the model samples for itself."""
    begin_case()
    args = arguments(
        folder / name,
        stage=stage,
        kind=OnlineDPOConfig,
        bf16=False,
        has_optimizer=False,
        max_new_tokens=8,
        max_length=24,
        gradient_accumulation_steps=1,  # TRL divides the loss by it where DeepSpeed trains, and not with DDP
        **more,
    )
    # At stage 3 TRL neither loads a model by its name nor copies one.
    model, reference = (AutoModelForCausalLM.from_pretrained(base_folder(folder)) for _ in range(2))
    return _train_online(folder, name, partial(LoggedOnlineDPO, ref_model=reference), args, model=model)


def _train_online(
    folder: Path, name: str, kind: Callable[..., Any], args: Any, *, model: Any = None
) -> dict[str, Any]:
    held = Held()
    prompts = Dataset.load_from_disk(str(folder / "pairs")).select_columns(["prompt"])
    trainer = kind(
        model or str(base_folder(folder)),
        reward_funcs=_reward,
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer(),
        callbacks=[held],
    )
    trainer.train()
    return {**_result(trainer, folder, name), "held": held.numbers}


_GRPO = partial(online, kind=LoggedGRPO, config_kind=GRPOConfig)
_RLOO = partial(online, kind=LoggedRLOO, config_kind=RLOOConfig)
CASES = {
    "model": write_model,
    "sft, ddp": partial(sft, name="sft", stage=None),
    "sft, stage 2": partial(sft, name="sft2", stage=2),
    "sft, stage 3": partial(sft, name="sft3", stage=3),
    "sft lora, ddp": partial(sft, name="sftl", stage=None, lora=LORA),
    "sft lora, stage 3": partial(sft, name="sftl3", stage=3, lora=LORA, is_gathered=False),
    "dpo, ddp": partial(dpo, name="dpo", stage=None),
    "dpo, stage 2": partial(dpo, name="dpo2", stage=2),
    "dpo, stage 3": partial(dpo, name="dpo3", stage=3),
    "dpo lora, ddp": partial(dpo, name="dpol", stage=None, lora=LORA),
    "dpo lora, stage 3": partial(dpo, name="dpol3", stage=3, lora=LORA),
    "dpo precomputed, stage 2": partial(dpo, name="dpop2", stage=2, precompute_ref_log_probs=True),
    "dpo synced, ddp": partial(dpo, name="dpos", stage=None, sync_ref_model=True, ref_model_sync_steps=1),
    "dpo synced, stage 3": partial(dpo, name="dpos3", stage=3, sync_ref_model=True, ref_model_sync_steps=1),
    "grpo, ddp": partial(_GRPO, name="grpo", stage=None),
    "grpo, stage 2": partial(_GRPO, name="grpo2", stage=2),
    "grpo, stage 3": partial(_GRPO, name="grpo3", stage=3),
    "grpo ungathered, stage 3": partial(_GRPO, name="grpou3", stage=3, ds3_gather_for_generation=False),
    "grpo lora, ddp": partial(_GRPO, name="grpol", stage=None, lora=LORA),
    "grpo lora, stage 3": partial(_GRPO, name="grpol3", stage=3, lora=LORA),
    "grpo long, stage 3": partial(_GRPO, name="grpo3long", stage=3, max_steps=200),
    "odpo, ddp": partial(online_dpo, name="odpo", stage=None),
    "odpo, stage 2": partial(online_dpo, name="odpo2", stage=2),
    "odpo, stage 3": partial(online_dpo, name="odpo3", stage=3),
    "rloo, ddp": partial(_RLOO, name="rloo", stage=None),
    "rloo, stage 3": partial(_RLOO, name="rloo3", stage=3),
}

if __name__ == "__main__":
    main(CASES)
