"""A small model for every arrangement of ranks, and one process that trains it: the judge of them all.

Each layer takes and returns a pair, the hidden states and the sum of the losses that even out the load of the
experts, so that the same layers are an nn.Sequential or the stages of a pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dslaunch
from dslaunch.moe import MoE
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.compat.pipeline.topology import topology_of
from dslaunch.runtime.pipeline.layers import LayerSpec
from dslaunch.runtime.sequence import parallel_state
from dslaunch.runtime.sequence.attention import DistributedAttention
from dslaunch.runtime.sequence.loss import mean_over_tokens
from dslaunch.shared.axes import ORDER, SAMPLES, Axes, axes_of_job
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.models import make_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.002, "weight_decay": 0.1, "eps": 1e-3}),
}
VOCABULARY, WIDTH, HEADS, EXPERTS = 24, 8, 4, 4
LENGTH, SIZE, STEPS = 8, 2, 2  # of a sequence; samples of a micro batch; steps
MICRO = 4  # batches of two stages, whose schedules need so many; of ranks that hold all layers two
CLIP = 0.2  # below every norm here
AUX = 0.1
Pair = tuple[Tensor, Tensor]
Trained = tuple[list[float], list[float], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks of a job, and how it trains."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    stage: int = 1
    schedule: str = "1f1b"
    gradient: str = "mean"  # of the ranks that share a sequence
    zero: Mapping[str, Any] = field(default_factory=dict)  # more of that section
    precision: str = "fp32"
    optimizer: str = "SGD"
    has_mesh: bool = False  # the section mesh says all sizes, and no key beside it
    order: tuple[str, ...] = ORDER  # of the axes with more than one rank, the outermost first
    # What every second copy of the model has less of than the others: "length" of its sequences, samples in a
    # "batch", or "layers": those of its shorter sequences leave some out.
    differs: str = ""

    @property
    def axes(self) -> Axes:
        num_ranks = self.pp * self.dp * self.sp * self.tp
        return axes_of_job(num_ranks, pp=self.pp, sp=self.sp, tp=self.tp, order=self.order)

    @property
    def micro(self) -> int:
        return MICRO if self.pp > 1 else 2

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("pp", "dp", "sp", "tp", "ep")}
        more = [self.schedule] if self.pp > 1 else []
        more += [self.gradient] if self.gradient != "mean" else []
        more += [self.precision] if self.precision != "fp32" else []
        more += [self.optimizer] if self.optimizer != "SGD" else []
        more += ["mesh"] if self.has_mesh else []
        more += [f"other-{self.differs}"] if self.differs else []
        more += ["-over-".join(self.order)] if self.order != ORDER else []
        said = [*(f"{name}{size}" for name, size in sizes.items() if size > 1), f"stage{self.stage}"]
        return "-".join([*said, *more, *(_words(key, value) for key, value in self.zero.items())])


def _words(key: str, value: Any) -> str:
    """Return a setting in words for a test's name."""
    if not isinstance(value, Mapping):
        return f"{key}_{value}"
    return "_".join([key, value["device"], *(word for word in value if word not in ("device", "nvme_path"))])


class Embed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Pair:  # type: ignore[override]
        return super().forward(tokens), torch.zeros((), device=tokens.device, dtype=self.weight.dtype)


class Attention(nn.Module):
    """Causal, over whole sequences wherever their parts are."""

    def __init__(self, sp: int = 1) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        group = parallel_state.get_sequence_parallel_group() if sp > 1 else None
        self.over_ranks = None if group is None else DistributedAttention(_attend, group)

    def forward(self, pair: Pair) -> Pair:
        x, aux = pair
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (one.reshape(heads) for one in self.qkv(x).chunk(3, dim=-1))
        done = _attend(q, k, v) if self.over_ranks is None else self.over_ranks(q, k, v, 0)
        return x + self.out(done.reshape(x.shape)), aux


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Mlp(nn.Module):
    """What axis tp divides. Sequences, or parts of them, that are shorter than `least` do without it."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, pair: Pair) -> Pair:
        x, aux = pair
        if x.shape[1] < self.least:
            return pair
        return x + self.down(torch.tanh(self.up(self.norm(x)))), aux


class Experts(nn.Module):
    """A layer of experts, each of which has `room` for so many times its even share of tokens. `parts`: a
    forward takes so many parts of sequences after each other, as ranks do that have one each.
    """

    def __init__(self, ep: int = 1, parts: int = 1, seed: int = 0, room: float = 0.6) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.moe = MoE(
            WIDTH,
            expert,
            num_experts=EXPERTS,
            ep_size=ep,
            k=2,
            capacity_factor=room,
            min_capacity=0,
            top2_2nd_expert_sampling=False,
        )
        self.parts, self.seed = parts, seed

    def forward(self, pair: Pair) -> Pair:
        x, aux = pair
        found = [self.moe(part) for part in x.chunk(self.parts, dim=1)]
        more = torch.stack([one for _, one, _ in found]).mean()
        return x + torch.cat([one for one, *_ in found], dim=1), aux + more


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        return super().forward(pair[0]), pair[1]


def specs(layout: Layout, *, parts: int = 1) -> list[LayerSpec]:
    """Two stages of a pipeline have a layer of each kind; of four, the outer ones have no experts."""
    # Ranks that exchange tokens have the room of the one with most, which one process does not know of.
    room = 2.0 * EXPERTS if layout.differs else 0.6
    attention, experts = LayerSpec(Attention, layout.sp), LayerSpec(Experts, layout.ep, parts, room=room)
    mlp = LayerSpec(Mlp, LENGTH // layout.sp if layout.differs == "layers" else 0)
    return [
        LayerSpec(Embed),
        attention,
        experts,
        mlp,
        attention,
        experts,
        mlp,
        LayerSpec(Head),
    ]


def make_judge(parts: int = 1, differs: str = "") -> nn.Sequential:
    """All layers in one process, with all experts, each with values of its own."""
    torch.manual_seed(5)
    judge = nn.Sequential(*(spec.build() for spec in specs(Layout(differs=differs), parts=parts)))
    with torch.no_grad():
        for name, param in judge.named_parameters():
            if "deepspeed_experts" in name:
                param.copy_(0.4 * torch.randn(param.shape))
    return judge


def take_values(module: nn.Module, layout: Layout) -> None:
    """Give a rank's layers, and its experts, the judge's values."""
    wanted = make_judge().state_dict()
    sharers = layout.axes.line_of(dist.get_rank(), SAMPLES)
    place = sharers.index(dist.get_rank()) % layout.ep  # among those that hold all experts
    num_local = EXPERTS // layout.ep
    with torch.no_grad():
        for name, param in module.named_parameters():
            before, found, after = name.partition("deepspeed_experts.")
            if found:
                number, _, rest = after.partition(".")
                name = f"{before}{found}{place * num_local + int(number)}.{rest}"
            param.copy_(wanted[name])


def data(step: int, *, size: int) -> Pair:
    """Return tokens, and labels that are shifted, of a batch; parts of a sequence have unequal numbers."""
    drawn = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=drawn)
    labels = tokens[:, 1:].clone()
    labels[:, : LENGTH // 2 - 1] = -100
    return tokens[:, :-1].contiguous(), labels


def _less(layout: Layout, copy: int, micro_batch: Tensor) -> Tensor:
    """Return what this copy of the model has of it."""
    if not (layout.differs and copy % 2):
        return micro_batch
    return micro_batch[: SIZE - 1] if layout.differs == "batch" else micro_batch[:, : LENGTH - 2]


def loss_of(layout: Layout, outputs: Pair, labels: Tensor) -> Tensor:
    """The mean over labelled tokens, and the loss of the gates; of the latter each rank has a part's, which
    count as much together as that of a whole.
    """
    logits, aux = outputs
    loss = mean_over_tokens(logits, labels)
    if layout.gradient == "sum":
        own = aux / layout.sp
        aux = own + (aux - own).detach()
    return loss + AUX * aux


def train_alone(layout: Layout) -> Trained:
    """Return losses, norms before clipping, and the masters' values after training in one process."""
    masters = make_judge(layout.sp, layout.differs)
    judge = copy.deepcopy(masters).to(DTYPES[layout.precision])
    kind, params = OPTIMIZERS[layout.optimizer]
    optimizer = kind(masters.parameters(), **params)
    losses, norms = [], []
    for step in range(STEPS):
        judge.zero_grad()
        total = 0.0
        number = layout.micro * layout.dp
        tokens, labels = data(step, size=SIZE * number)
        for place, (one, its) in enumerate(zip(tokens.chunk(number), labels.chunk(number), strict=True)):
            one, its = _less(layout, place // layout.micro, one), _less(layout, place // layout.micro, its)
            logits, aux = judge(one)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), its.flatten(), ignore_index=-100) + AUX * aux
            (loss / number).backward()
            total += loss.item() / number
        for master, param in zip(masters.parameters(), judge.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        norms.append(nn.utils.clip_grad_norm_(masters.parameters(), CLIP).item())
        optimizer.step()
        judge.load_state_dict(masters.state_dict())
        losses.append(total)
    return losses, norms, {name: param.detach() for name, param in masters.named_parameters()}


def make_engine(layout: Layout, **changes: Any) -> Any:
    """Return this rank's engine, with the judge's values."""
    if layout.sp > 1:
        parallel_state.initialize_sequence_parallel(layout.sp, tensor_parallel_size=layout.tp)
    torch.manual_seed(dist.get_rank())
    module: nn.Module
    if layout.pp > 1:
        # initialize() may hear of divided sequences later
        is_simple = layout.tp == 1 and layout.ep == 1 and layout.order == ORDER
        module = PipelineModule(
            specs(layout),
            num_stages=layout.pp,
            topology=None if is_simple else topology_of(layout.axes),
            loss_fn=lambda outputs, labels: loss_of(layout, outputs, labels),
            partition_method="uniform",
            schedule=layout.schedule,
        )
    else:
        module = nn.Sequential(*(spec.build() for spec in specs(layout)))
    take_values(module, layout)
    return dslaunch.initialize(model=module, config=config_of(layout, **changes))[0]


def config_of(layout: Layout, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": layout.micro,
        "optimizer": {"type": layout.optimizer, "params": OPTIMIZERS[layout.optimizer][1]},
        "gradient_clipping": CLIP,
    }
    if layout.precision != "fp32":
        settings[layout.precision] = {"enabled": True}
    if layout.precision == "fp16":
        settings["fp16"]["loss_scale"] = 64
    if layout.sp > 1:
        settings |= {"sequence_parallel_size": layout.sp, "sequence": {"gradient": layout.gradient}}
    if layout.tp > 1:
        rules = [
            {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
        ]
        settings["tensor_parallel"] = {
            "autotp_size": layout.tp,
            "partition_config": {"layer_specs": rules},
        }
    if layout.has_mesh:
        settings["mesh"] = {name: getattr(layout, name) for name in ("pp", "dp", "ep", "sp", "tp")}
        settings.pop("sequence_parallel_size", None)
        settings.get("tensor_parallel", {}).pop("autotp_size", None)
    if layout.order != ORDER:
        settings["mesh"] = {**settings.get("mesh", {}), "order": list(layout.order)}
    config = make_config(stage=layout.stage, reduce_bucket_size=50, **{**settings, **changes})
    config["zero_optimization"] |= layout.zero
    config.pop("train_batch_size", None)
    return config


def batches(layout: Layout, step: int, device: torch.device) -> Iterator[Pair]:
    """This rank's part of its micro batches of a step, on its device."""
    place = layout.axes.coordinates(dist.get_rank())
    own = [one.chunk(layout.dp)[place["dp"]] for one in data(step, size=SIZE * layout.micro * layout.dp)]
    for pair in zip(*(one.chunk(layout.micro) for one in own), strict=True):
        tokens, labels = (
            _less(layout, place["dp"], one).chunk(layout.sp, dim=1)[place["sp"]].to(device) for one in pair
        )
        yield tokens, labels


def train(engine: Any, layout: Layout, *, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Return losses, means over all ranks, and norms."""
    losses, norms = [], []
    for step in range(steps):
        if layout.pp > 1:
            losses.append(engine.train_batch(batches(layout, step, engine.device)).item())
        else:
            total = torch.zeros((), dtype=torch.float64, device=engine.device)
            for tokens, labels in batches(layout, step, engine.device):
                loss = loss_of(layout, engine(tokens), labels)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / layout.micro
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        norms.append(engine.get_global_grad_norm() or 0.0)
    return losses, norms


def values_of(engine: Any) -> dict[str, Tensor]:
    """Return this rank's parameters, whole, by their names in the whole model."""
    found = {}
    for sub_buffer in (one for unit in engine._model.units for one in unit.sub_buffers):
        for index, member in enumerate(sub_buffer.members):
            found[sub_buffer.true_name(index)] = safe_get_full_fp32_param(member.param)
    return found
