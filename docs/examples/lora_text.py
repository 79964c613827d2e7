"""Fine-tune a causal language model of Hugging Face with a LoRA adapter on the lines of a text file.

    dslaunch -H hosts docs/examples/lora_text.py --model Qwen/Qwen2.5-7B --text lines.txt --out adapter

docs/train/lora-7b.md says what it needs. The base is frozen and sharded (stage 3), and the adapter alone is
saved.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import dslaunch

IGNORED = -100  # a label that is not learned: padding
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = [line for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)

    def collate(texts: list[str]) -> dict[str, Tensor]:
        """int64 [B, T] tokens, their mask, and as labels the tokens without padding."""
        batch = tokenizer(
            texts, truncation=True, max_length=args.length, padding="max_length", return_tensors="pt"
        )
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}

    engine, _, loader, _ = dslaunch.initialize(
        model=model,
        model_parameters=model.parameters(),  # the frozen ones are left out
        training_data=lines,
        collate_fn=collate,
        config=ds_config(args.micro_batch),
    )
    for _ in range(args.epochs):
        for batch in loader:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"step {engine.global_steps:4d}  loss {loss.item():.4f}", flush=True)
    save_adapter(engine, model, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with LoRA at ZeRO stage 3.")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--model", required=True, help="a folder, or a name on Hugging Face's hub")
    parser.add_argument("--text", type=Path, required=True, help="a text file; each line is one sample")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the adapter")
    parser.add_argument("--epochs", type=int, default=1, help="[default: 1]")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample at most [default: 1024]")
    parser.add_argument("--micro_batch", type=int, default=1, help="samples of a rank at a time [default: 1]")
    return parser.parse_args()


def ds_config(micro_batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3},
    }


def save_adapter(engine: Any, model: Any, folder: Path) -> None:
    """Write the trained parameters as `peft` does; every rank must call this."""
    adapter = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with dslaunch.zero.GatheredParameters(adapter.values()):
        if engine.global_rank == 0:
            model.save_pretrained(folder, state_dict=adapter)


if __name__ == "__main__":
    main()
