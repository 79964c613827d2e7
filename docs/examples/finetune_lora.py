"""Fine-tune a small Qwen2 of Hugging Face's `transformers` with a LoRA adapter of `peft` at ZeRO stage 3;
no download needed.

    dslaunch --num_gpus=2 docs/examples/finetune_lora.py

The base is frozen: each rank holds its share of it and nothing else, no gradients, no optimizer states. Its
weights are random, so that nothing has to be fetched; a real one comes from
`Qwen2ForCausalLM.from_pretrained(...)` in `make_base`. The task is to go on counting: 3 7 11 15 ... modulo
32, with a stride that the model has to see for itself.

At the end only the adapter is saved, loaded into a fresh base without any engine,
and asked the same questions again.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

import dslaunch

NUM_TOKENS = 32  # the vocabulary: the numbers 0 to 31
LENGTH = 24  # of a sequence
MAX_STRIDE = 4
NUM_TEST = 256
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STATES = ("exp_avg", "exp_avg_sq")  # AdamW's
TRAINED_BYTES = (
    16  # per element without ZeRO: parameter, gradient and AdamW's states, in float32 as with bf16
)
SAME_LOSS = 1e-6  # relative; the same numbers in other memory

# Letters in shapes: B sequences of a batch, T tokens of a sequence.


class Counting(Dataset[Tensor]):
    """Sequences [T] int64 of numbers with a stride, made from a seed."""

    def __init__(self, num_sequences: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(NUM_TOKENS, (num_sequences, 1), generator=generator)
        stride = torch.randint(1, MAX_STRIDE + 1, (num_sequences, 1), generator=generator)
        self.sequences = (start + stride * torch.arange(LENGTH)) % NUM_TOKENS

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sequences[index]


def main() -> None:
    args = parse_args()
    if args.cpu:
        dslaunch.init_distributed(dist_backend="gloo")
    train_set, test_set = Counting(4096, seed=1), Counting(NUM_TEST, seed=2)
    bytes_before = live_bytes()
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=LORA_LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(make_base(), lora)
    engine, _, loader, _ = dslaunch.initialize(
        model=model,
        model_parameters=model.parameters(),  # the frozen ones are left out
        training_data=train_set,
        args=args,
    )
    test = test_set.sequences.to(engine.device)
    before = evaluate(engine, test)
    train(engine, loader, num_steps=args.steps)
    after = evaluate(engine, test)
    report(engine, before, after)
    report_memory(engine, model, live_bytes() - bytes_before)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        save_adapter(engine, model, folder)
        if engine.global_rank == 0:
            check_adapter(folder, test, wanted=after)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a small Qwen2 with LoRA at ZeRO stage 3.")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--steps", type=int, default=60, help="[default: 60]")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the adapter in this folder")
    parser = dslaunch.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config_lora.json")))
    return parser.parse_args()


def make_base() -> Qwen2ForCausalLM:
    """The same weights at every call and on every rank."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=NUM_TOKENS,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
    )


def train(engine: Any, loader: Any, *, num_steps: int) -> None:
    batches = endless(loader)
    for step in range(1, num_steps + 1):
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = next(batches).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().double()
        dist.all_reduce(mean)
        if engine.global_rank == 0:
            print(f"step {step:4d}  loss {mean.item() / engine.world_size:.4f}", flush=True)


def endless(loader: Any) -> Iterator[Tensor]:
    """Full batches, epoch after epoch."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(model: nn.Module, test: Tensor) -> tuple[float, float]:
    """The mean loss, and the share of numbers that are right among those that can be known:
    from the third on.

    Shapes: test [B, T]
    Order:  a collective where the parameters are sharded
    """
    model.eval()
    output = model(input_ids=test, labels=test)
    model.train()
    is_right = output.logits[:, 1:-1].argmax(-1) == test[:, 2:]
    return output.loss.item(), is_right.float().mean().item()


def report(engine: Any, before: tuple[float, float], after: tuple[float, float]) -> None:
    if engine.global_rank == 0:
        for when, (loss, accuracy) in (("before", before), ("after", after)):
            print(f"test {when:6}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)


# ---- memory


def live_bytes() -> int:
    """The memory of all tensors of this process."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def report_memory(engine: Any, model: nn.Module, held_bytes: int) -> None:
    """Say how many parameters there are of each kind and what this model costs a rank, of the `held_bytes`
    that all of it does.

    Order: a collective
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    frozen = [param for param in model.parameters() if not param.requires_grad]
    trained_bytes = sum(map(own_bytes, trained))
    rows = (
        ("trained", trained, trained_bytes, numel(trained) * TRAINED_BYTES),
        ("frozen", frozen, held_bytes - trained_bytes, sum(param.nbytes for param in frozen)),
    )
    for kind, params, own, whole in rows:
        most = torch.tensor(own, device=engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if engine.global_rank == 0:
            print(
                f"{kind:7} {numel(params):7,} parameters  {most.item() / 2**20:.2f} MiB per rank of "
                f"{engine.world_size}, {whole / 2**20:.2f} MiB without ZeRO",
                flush=True,
            )


def numel(params: list[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def own_bytes(param: nn.Parameter) -> int:
    """What this rank holds of a trained parameter between steps: its part of the value,
    the gradient and the states.
    """
    is_alone = dist.get_world_size() == 1  # then a gradient is there from backward to step only
    parts = (
        dslaunch.zero.safe_get_local_fp32_param(param),
        None if is_alone else dslaunch.zero.safe_get_local_grad(param),
        *(dslaunch.zero.safe_get_local_optimizer_state(param, state) for state in STATES),
    )
    return sum(part.nbytes for part in parts if part is not None)


# ---- the adapter


def save_adapter(engine: Any, model: PeftModel, folder: Path) -> None:
    """Write the trained parameters as `peft` does; the base stays where it is.

    Order: a collective
    """
    adapter = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with dslaunch.zero.GatheredParameters(adapter.values()):
        if engine.global_rank == 0:
            model.save_pretrained(folder, state_dict=adapter)


def check_adapter(folder: Path, test: Tensor, *, wanted: tuple[float, float]) -> None:
    """Load it into a fresh base, without an engine, and evaluate that."""
    loss, accuracy = evaluate(PeftModel.from_pretrained(make_base(), folder).to(test.device), test)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not math.isclose(loss, wanted[0], rel_tol=SAME_LOSS):
        raise SystemExit(f"finetune_lora: the saved adapter has loss {loss}, the trained one {wanted[0]}")
    print(f"test loaded  loss {loss:.4f}  accuracy {accuracy:.4f}  from {size / 2**20:.2f} MiB", flush=True)


if __name__ == "__main__":
    main()
