"""Supervised fine-tuning of a small language model with LoRA, as DeepSpeed-Chat does its first step.

    dslaunch --num_gpus 2 docs/examples/deepspeed/finetune_lora.py --zero_stage 3 --gradient_checkpointing

The base is a tiny Qwen2 of Hugging Face's `transformers` with random weights, written to a folder first so
that it can be loaded as a real one would. At stage 3 each rank loads its shards only. The task is to go on
counting with a stride.
"""

import argparse
import math
import tempfile

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.utils import set_random_seed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

NUM_TOKENS, LENGTH, MICRO_BATCH = 32, 16, 8
NUM_TRAIN, NUM_TEST = 256, 64


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune a small language model with LoRA.")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--zero_stage", type=int, default=3, choices=[0, 1, 2, 3])
    parser.add_argument("--offload", action="store_true", help="keep parameters and states in host memory")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--lora_dim", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1234)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def make_config(args):
    device = "cpu" if args.offload else "none"
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1000,
        "zero_optimization": {
            "stage": args.zero_stage,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": args.dtype == "bf16"},  # the old name of bf16
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False},
        "tensorboard": {"enabled": False},
    }


# ---- the base and the data


def write_base(folder):
    config = Qwen2Config(
        vocab_size=NUM_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def count_on(num_sequences, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(NUM_TOKENS, (num_sequences, 1), generator=generator)
    stride = torch.randint(1, 4, (num_sequences, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(LENGTH)) % NUM_TOKENS)


# ---- LoRA


class LoraLinear(nn.Module):
    """A frozen layer and a trained product of two thin matrices beside it."""

    def __init__(self, base, dim):
        super().__init__()
        out_width, in_width = getattr(base.weight, "ds_shape", base.weight.shape)
        self.base = base
        right = torch.randn(dim, in_width) / math.sqrt(in_width)
        self.right = nn.Parameter(right.to(base.weight.dtype))
        self.left = nn.Parameter(torch.zeros(out_width, dim, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.right.t() @ self.left.t()


def add_lora(model, dim):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoraLinear(module, dim))
    for name, param in model.named_parameters():
        param.requires_grad = name.endswith((".left", ".right"))
    return model


def fuse_lora(model, is_sharded):
    """Add the products to the frozen layers."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            params = [module.base.weight, module.left, module.right]
            with (
                deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=is_sharded),
                torch.no_grad(),
            ):
                module.base.weight += module.left @ module.right


def optimizer_groups(model, weight_decay):
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    decayed = [param for name, param in trained.items() if name.endswith(".left")]
    others = [param for name, param in trained.items() if not name.endswith(".left")]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


# ---- saving


def absent(params):
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def whole_state_dict(model, is_sharded):
    """The weights of a model without LoRA, one parameter at a time; on rank 0 only."""
    state = {}
    for name, param in model.named_parameters():
        if name.endswith((".left", ".right")):
            continue
        with deepspeed.zero.GatheredParameters(absent([param]), enabled=is_sharded):
            if torch.distributed.get_rank() == 0:
                state[name.replace(".base.", ".")] = param.data.float().cpu().clone()
    return state


# ---- training


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    losses = [model(input_ids=one.to(device), labels=one.to(device)).loss.float() for (one,) in loader]
    mean = torch.stack(losses).mean()
    torch.distributed.all_reduce(mean)
    model.train()
    return mean.item() / torch.distributed.get_world_size()


def load_model(args, config):
    """The base of a folder, in shards at stage 3, with LoRA beside its layers."""
    set_random_seed(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = [scratch]
        torch.distributed.broadcast_object_list(folder, src=0)
        if args.global_rank == 0:
            write_base(scratch)
        torch.distributed.barrier()
        hf_config = HfDeepSpeedConfig(config) if args.zero_stage == 3 else None
        model = AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32)
        del hf_config  # it has to live while the model is made
        torch.distributed.barrier()
    set_random_seed(args.seed)
    return add_lora(model, args.lora_dim)


def make_loaders():
    train_set, test_set = count_on(NUM_TRAIN, seed=1), count_on(NUM_TEST, seed=2)
    train_loader = DataLoader(train_set, batch_size=MICRO_BATCH, sampler=DistributedSampler(train_set))
    return train_loader, DataLoader(test_set, batch_size=MICRO_BATCH)


def make_engine(args, config, model, num_steps):
    adam = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = adam(optimizer_groups(model, weight_decay=0.1), lr=args.learning_rate, betas=(0.9, 0.95))
    lr_scheduler = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=num_steps
    )
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=config,
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()  # the base is frozen
    return model, lr_scheduler


def train(args, model, lr_scheduler, loader, device):
    model.train()
    for step, (tokens,) in enumerate(loader, start=1):
        tokens = tokens.to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        model.backward(loss)
        model.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        if args.global_rank == 0:
            mean = mean.item() / torch.distributed.get_world_size()
            print(f"step {step:4d}  loss {mean:.7f}  lr {lr_scheduler.get_last_lr()[0]:.6f}", flush=True)
    model.tput_timer.update_epoch_count()


def main():
    args = parse_args()
    if args.local_rank == -1:
        device = torch.device(get_accelerator().device_name())
    else:
        get_accelerator().set_device(args.local_rank)
        device = torch.device(get_accelerator().device_name(), args.local_rank)
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    config = make_config(args)
    is_sharded = args.zero_stage == 3
    model = load_model(args, config)
    train_loader, test_loader = make_loaders()
    model, lr_scheduler = make_engine(args, config, model, num_steps=len(train_loader))

    before = evaluate(model, test_loader, device)
    train(args, model, lr_scheduler, train_loader, device)
    after = evaluate(model, test_loader, device)

    sizes = {True: 0, False: 0}
    for param in model.parameters():
        sizes[param.requires_grad] += getattr(param, "ds_numel", param.numel())
    fuse_lora(model.module, is_sharded)
    state = whole_state_dict(model.module, is_sharded)
    if args.global_rank == 0:
        print(f"parameters trained {sizes[True]} frozen {sizes[False]}", flush=True)
        print(f"perplexity before {math.exp(before):.3f} after {math.exp(after):.3f}", flush=True)
        plain = Qwen2ForCausalLM(model.module.config).eval()
        plain.load_state_dict(state, strict=False)  # the tied output layer is in it once
        with torch.no_grad():
            losses = [plain(input_ids=one, labels=one).loss for (one,) in test_loader]
        print(f"perplexity of the saved model {math.exp(torch.stack(losses).mean().item()):.3f}", flush=True)


if __name__ == "__main__":
    main()
