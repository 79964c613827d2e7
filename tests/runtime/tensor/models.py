"""Models whose layers are divided over ranks, and what plain torch makes of them in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch

CLIP = 0.5  # below every norm here
SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
VOCAB, LENGTH, SAMPLES, STEPS = 96, 12, 8, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 70,  # a row of the embedding that is in no first part
}
Numbers = list[tuple[float, float]]  # loss and norm of each step


def make_hugging_face(kind: str, *, seed: int = 0, is_tied: bool = False, **changes: Any) -> Any:
    """A causal model of transformers, which the workers import late."""
    import transformers

    torch.manual_seed(seed)
    more: dict[str, Any] = {
        "Qwen3": {"head_dim": 8},
        "Gemma": {"head_dim": 8},
        "Mixtral": {"num_local_experts": 4},
        "DeepseekV2": {
            **{"q_lora_rank": 12, "kv_lora_rank": 8, "first_k_dense_replace": 2, "num_key_value_heads": 4},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        },
    }.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, **more, "tie_word_embeddings": is_tied, **changes}
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).float()  # Apertus has some in bfloat16


class Block(nn.Module):
    """LayerNorm and two layers, the second of them with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    """Sequences of numbers go through blocks."""

    def __init__(self, depth: int = 3, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def make_net(seed: int = 0, *, depth: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net(depth)


def tokens(step: int = 0) -> Tensor:
    """The samples of a step, the same on every rank."""
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3 + step))


def numbers(step: int = 0) -> Tensor:
    return torch.randn(SAMPLES, 6, 7, generator=torch.Generator().manual_seed(30 + step))


def loss_of_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    labels = batch.clone()
    labels[:, :2] = -100  # of each sample as many count, so that the mean of means is the mean
    loss: Tensor = model(input_ids=batch, labels=labels).loss
    return loss


def loss_of_numbers(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().pow(2).mean()
    return loss


LossOf = Callable[[nn.Module, Tensor], Tensor]


def make_config(stage: int, *, tp: int = 1, **changes: Any) -> dict[str, Any]:
    """Units of one layer, so that the order of collectives matters; two micro batches."""
    divided = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIP,
        "optimizer": SGD,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 50,
            "stage3_param_persistence_threshold": 0,
        },
        **divided,
        **changes,
    }


def train_plain(model: nn.Module, loss_of: LossOf, batches: Iterable[Tensor]) -> Numbers:
    """SGD with a clip, in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), float(norm)))
    return found


def train(engine: dslaunch.Engine, loss_of: LossOf, batches: Iterable[Tensor], *, tp: int) -> Numbers:
    """The same on this rank's part of each batch; the losses are the means over all ranks."""
    found = []
    dp, place = engine.world_size // tp, engine.global_rank // tp
    for batch in batches:
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in batch.chunk(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, micro_batch.chunk(dp)[place])
            engine.backward(loss)
            engine.step()
            total += loss.item() / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        found.append((total.item() / engine.world_size, float(engine.get_global_grad_norm() or 0.0)))
    return found


def token_batches() -> list[Tensor]:
    return [tokens(step) for step in range(STEPS)]


def number_batches() -> list[Tensor]:
    return [numbers(step) for step in range(STEPS)]


def check(got: Numbers, expected: Numbers, *, limit: float = 1e-6) -> None:
    """Losses to `limit`, norms to `limit` of themselves."""
    assert len(got) == len(expected)
    for (loss, norm), (loss_there, norm_there) in zip(got, expected, strict=True):
        assert abs(loss - loss_there) <= limit, (got, expected)
        assert abs(norm - norm_there) <= limit * norm_there, (got, expected)


def torch_plan(*, is_sequence: bool) -> Any:
    """What torch's parallelize_module() takes; with `is_sequence` activations between layers are divided
    along the sequence.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    columns = partial(ColwiseParallel, input_layouts=Shard(1)) if is_sequence else ColwiseParallel
    rows = partial(RowwiseParallel, output_layouts=Shard(1)) if is_sequence else RowwiseParallel
    plan: dict[str, Any] = {}
    for number in range(3):
        plan |= {f"blocks.{number}.up": columns(), f"blocks.{number}.down": rows()}
        if is_sequence:
            plan[f"blocks.{number}.norm"] = SequenceParallel(use_local_output=True)
    return plan


def cut_sequence(model: Net, mesh: Any) -> None:
    """Divide the first layer's output along the sequence, and put together what the last one gets."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        whole = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        part: Tensor = whole.redistribute(placements=[Shard(1)]).to_local()
        return part

    def join(module: nn.Module, args: Any) -> Any:
        whole = DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False).redistribute(
            placements=[Replicate()]
        )
        return (whole.to_local(grad_placements=[Replicate()]),)

    model.first.register_forward_hook(cut)
    model.last.register_forward_pre_hook(join)
