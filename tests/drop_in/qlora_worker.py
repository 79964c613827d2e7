"""Trains LoRA adapters beside bases that bitsandbytes or torchao has quantized; test_qlora.py compares.

Arguments: folder, cases.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import main, rank, wait
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tiny import LoggedTrainer, Recorded, Rows, arguments, begin_case, config, norms, numbers, tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig, TrainerCallback
from trl import SFTConfig, SFTTrainer

SAVED_AT = 2
PACKED = (torch.uint8, torch.int8)
TARGETS = ["q_proj", "v_proj", "down_proj", "o_proj"]


class LoggedSFT(Recorded, SFTTrainer):
    pass


class Weighs(TrainerCallback):
    """Notes how many bytes of packed weights this process has between two steps."""

    def __init__(self) -> None:
        self.nbytes = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.nbytes = packed_bytes()


def packed_bytes() -> int:
    """Return the bytes of all storages of integers of 8 bits, but for those of generators."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        storages = {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes()
            for one in gc.get_objects()
            if issubclass(type(one), torch.Tensor) and one.dtype in PACKED and one.device.type == "cpu"
        }
    return sum(nbytes for nbytes in storages.values() if nbytes != torch.get_rng_state().numel())


def lora(*, is_dora: bool = False) -> LoraConfig:
    """Return new adapters each time: PEFT writes into it what suits a model of experts."""
    return LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", use_dora=is_dora)


def base_folder(folder: Path, kind: str) -> Path:
    """Where a base is, written by rank 0 of the first case."""
    return folder / f"{kind} base"


def write_bases(folder: Path) -> dict[str, Any]:
    for kind in ("llama", "qwen3_moe"):
        begin_case()
        if rank() == 0:
            AutoModelForCausalLM.from_config(config(kind)).save_pretrained(base_folder(folder, kind))
            tokenizer().save_pretrained(base_folder(folder, kind))
    wait()
    return {}


def quantized(folder: Path, kind: str, by: str) -> Any:
    """Return the base, quantized while it is read."""
    how: Any = BitsAndBytesConfig(load_in_8bit=True)
    if by == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how = TorchAoConfig(Int8WeightOnlyConfig())
    if by == "4 bits":
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    return AutoModelForCausalLM.from_pretrained(
        base_folder(folder, kind), quantization_config=how, dtype=torch.float32
    )


def train(
    folder: Path,
    *,
    name: str,
    stage: int | None,
    kind: str = "llama",
    by: str = "4 bits",
    resumes: str | None = None,
    is_sft: bool = False,
    is_checkpointed: bool = False,
    is_dora: bool = False,
) -> dict[str, Any]:
    """Train adapters; `stage` None: without a ds_config, which is DDP."""
    begin_case()
    begun = packed_bytes()
    more: dict[str, Any] = {"kind": SFTConfig, "bf16": False, "max_length": 16} if is_sft else {}
    args = arguments(
        folder / name,
        stage=stage,
        save_strategy="steps",
        save_steps=SAVED_AT,
        gradient_checkpointing=is_checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False} if is_checkpointed else None,
        **more,
    )
    base = quantized(folder, kind, by)
    if is_checkpointed:
        base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
    transformers.set_seed(1)
    weighs = Weighs()
    if is_sft:
        from datasets import Dataset

        texts = Dataset.from_list([{"text": f"the cat sees one dog number {place}"} for place in range(64)])
        trainer: Any = LoggedSFT(base, args=args, train_dataset=texts, peft_config=lora(), callbacks=[weighs])
    else:
        model = get_peft_model(base, lora(is_dora=is_dora))
        if stage is None and by == "torchao":  # DDP cannot send these, and all ranks have the same
            names = [name for name, param in model.named_parameters() if type(param) is not nn.Parameter]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        trainer = LoggedTrainer(model, args, train_dataset=Rows(), callbacks=[weighs])
    last = folder / resumes / f"checkpoint-{SAVED_AT}" if resumes else None
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    saved = folder / f"{name}.adapter"
    trainer.save_model(str(saved))
    result = {"losses": trainer.losses, "norms": norms(trainer), "bytes": weighs.nbytes - begun}
    wait()
    del trainer, base, weighs
    begin_case()
    again = PeftModel.from_pretrained(quantized(folder, kind, by), saved)
    adapters = {key: value for key, value in again.state_dict().items() if "lora_" in key}
    ids = Rows()[0]["input_ids"].unsqueeze(0)
    merged = again.merge_and_unload().train()
    with torch.no_grad():
        logits = merged(ids).logits
    return {**result, "weights": numbers(adapters), "logits": numbers({"logits": logits})}


def cases() -> dict[str, Any]:
    """Return each way of training, on dslaunch and as DDP."""
    found: dict[str, Any] = {"base": write_bases}
    kinds: dict[str, dict[str, Any]] = {
        "4 bits": {},
        "8 bits": {"by": "8 bits"},
        "torchao": {"by": "torchao"},
        "experts": {"kind": "qwen3_moe"},
        "checkpointed": {"is_checkpointed": True},
        "DoRA": {"is_dora": True},
        "sft": {"is_sft": True},
    }
    for what, options in kinds.items():
        for stage in (None, 2, 3):
            way = "ddp" if stage is None else f"stage {stage}"
            found[f"{what}, {way}"] = partial(train, name=f"{what} {way}", stage=stage, **options)
    found["resumed, stage 3"] = partial(train, name="again", stage=3, resumes="4 bits stage 3")
    return found


CASES = cases()

if __name__ == "__main__":
    main(CASES)
