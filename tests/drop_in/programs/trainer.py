"""transformers' Trainer with a small Llama, dropout in its attention, and on request adapters of PEFT."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers.training_args
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH = 96, 12

# Without a GPU Trainer says that bf16 needs one.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    ds_config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": args.stage},
    }
    arguments = TrainingArguments(
        output_dir="out",
        deepspeed=ds_config,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=1e-3,
        warmup_steps=2,
        max_grad_norm=0.5,
        bf16=args.bf16,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=1,
    )
    model: Any = LlamaForCausalLM(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    samples = torch.randint(0, VOCAB, (64, LENGTH))
    data = [{"input_ids": one, "labels": one} for one in samples]
    Trainer(model=model, args=arguments, train_dataset=data).train()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
