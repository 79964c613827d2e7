"""Train a causal language model of Hugging Face that a config.json describes, on random tokens, whole or with
a LoRA adapter; with --bits 4 beside a base that bitsandbytes has quantized.

    dslaunch docs/examples/train_by_config.py --model config.json --lora 16 --deepspeed_config ds_config.json

It needs neither weights nor data, so it says whether a model fits, and how fast a step is, before they are
there; docs/train/which-configuration.md and docs/train/70b-on-two-gpus.md plan it for some machines. The
files in docs/examples/models have the sizes of Qwen2.5-7B, Qwen2.5-14B and Llama-3-70B.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import dslaunch

LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    args = parse_args()
    model = make_model(args)
    engine: Any
    engine, *_ = dslaunch.initialize(
        model=model,
        model_parameters=model.parameters(),  # frozen ones are left out
        args=args,
    )
    shape = (engine.train_micro_batch_size_per_gpu(), args.length)
    for step in range(1, args.steps + 1):
        began = time.monotonic()
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(model.config.vocab_size, shape).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.monotonic() - began:.2f} s", flush=True)
    dist.destroy_process_group()


def make_model(args: argparse.Namespace) -> Any:
    """Return the model with random weights; at stage 3 no rank ever holds it whole, but a quantized one."""
    stage = json.loads(args.deepspeed_config.read_text()).get("zero_optimization", {}).get("stage", 0)
    config = AutoConfig.from_pretrained(args.model)
    if args.bits:
        base = quantized(config)
    else:
        with dslaunch.zero.Init(config_dict_or_path=str(args.deepspeed_config), enabled=stage == 3):
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not args.lora:
        return base
    base.enable_input_require_grads()  # or no block that is computed again would have a gradient
    lora = LoraConfig(
        r=args.lora, lora_alpha=2 * args.lora, target_modules=LORA_LAYERS, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, lora)


def quantized(config: Any) -> Any:
    """Return the model in host memory, its layers in 4 bits: made one after the other, as they are read from
    files.
    """
    from bitsandbytes.nn import Linear4bit

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, layer in list(model.named_modules()):
        if name.rpartition(".")[2] in LORA_LAYERS:
            sizes = layer.in_features, layer.out_features
            made = Linear4bit(
                *sizes, bias=layer.bias is not None, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            model.set_submodule(name, made.bfloat16().to("cpu"))  # which quantizes it
        elif "rotary" in name:
            model.set_submodule(name, type(layer)(config))
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                made = torch.ones(param.shape, dtype=param.dtype)
                module.register_parameter(
                    key, torch.nn.Parameter(made if made.ndim == 1 else made.normal_(std=0.02))
                )
    return model.requires_grad_(False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model by its config.json, on random tokens.")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--model", required=True, help="a config.json, or a folder that has one")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    parser.add_argument("--bits", type=int, choices=[4], help="of the base's weights, with --lora")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample [default: 2048]")
    parser.add_argument("--steps", type=int, default=10, help="[default: 10]")
    parser = dslaunch.add_config_arguments(parser)
    args = parser.parse_args()
    args.deepspeed_config = Path(args.deepspeed_config)
    return args


if __name__ == "__main__":
    main()
