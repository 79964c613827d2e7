"""One rank that trains a model with one tool, some steps for each line that it reads. It answers each line
with one of JSON, a Turn.

    python benchmarks/training_worker.py PART SHAPE TOOL

PARTS, at the end, is the table of the models, of the ranks they are divided over, and of the tools.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import (
    ADAMW,
    VOCABULARY,
    Block,
    Gpt,
    MixtureOfExperts,
    Shape,
    Sleeps,
    layers,
    llama,
    loss_of,
)
from benchmarks.turn import serve, timed

PP, MICRO = 2, 8  # stages, and micro batches of a step
COLUMNS, ROWS = (
    ("qkv", "up"),
    ("out", "down"),
)  # linear layers of a Block, by how tensor parallelism cuts them
SMALL_WHOLE = ", small parameters whole"  # the default; elsewhere stage3_param_persistence_threshold is 0

Step = Callable[[Tensor], Any]  # one step on tokens; returns the loss, a number or a tensor of one element


class Tool(NamedTuple):
    """Tool that trains: `NAME STAGE, MORE`."""

    name: str
    stage: int = 0
    more: str = ""

    @classmethod
    def of(cls, text: str) -> Tool:
        words, _, more = text.partition(", ")
        name, _, stage = words.partition(" ")
        return cls(name, int(stage or 0), more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Models that are divided in the same direction, and the tools that train them."""

    make: Callable[[Part, Shape, Tool], Step]
    shapes: Mapping[str, Shape]
    tools: tuple[str, ...]
    layout: str = ""
    num_ranks: int = 4
    tp: int = 1  # ranks that share each layer
    sp: int = 1  # ranks that share each sequence
    pp: int = 1
    steps: int = 4  # steps of a turn
    size: Callable[[Shape], tuple[int, ...]] = lambda shape: (shape.batch, shape.sequence)  # shape of a batch

    def batches(self, shape: Shape, turn: int) -> list[Tensor]:
        """Ranks that compute together have the same samples."""
        num_copies = dist.get_world_size() // (self.tp * self.sp * self.pp)
        copy = dist.get_rank() // (self.tp * self.sp) % num_copies
        generator = torch.Generator().manual_seed(100 * turn + copy)
        return [torch.randint(VOCABULARY, self.size(shape), generator=generator) for _ in range(self.steps)]


class Turn(NamedTuple):
    """Times of some steps."""

    s: float  # seconds per step
    loss: float  # loss of the last step
    page_faults: float  # per step, of this rank
    memory_mb: float  # resident at most so far, of the rank that has most


def take_turn(step: Step, batches: list[Tensor]) -> Turn:
    """Train on these batches."""
    losses: list[Any] = []
    faults = _usage().ru_minflt
    took_s = timed(lambda: losses.extend(map(step, batches)))
    faults = _usage().ru_minflt - faults
    memory_mb = torch.tensor(_usage().ru_maxrss / 1e3)
    dist.all_reduce(memory_mb, dist.ReduceOp.MAX)
    return Turn(took_s / len(batches), float(losses[-1]), faults / len(batches), memory_mb.item())


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_SELF)


# ---- what the parts have in common


def config_of(stage: int, **zero: Any) -> dict[str, Any]:
    """Without a scale for the loss and without clipping."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }


def engine_of(tool: Tool, model: Any, config: dict[str, Any], **given: Any) -> Any:
    """dslaunch's, with the AdamW of its config, or DeepSpeed's, with torch's: its own would be compiled."""
    if tool.name == "dslaunch":
        import dslaunch

        config = {**config, "optimizer": {"type": "AdamW", "params": ADAMW}}
        return dslaunch.initialize(model=model, config=config, **given)[0]
    import deepspeed  # type: ignore[import-not-found]

    config = {**config, "zero_allow_untested_optimizer": True}
    params = given.pop("params", None) or model.parameters()
    optimizer = torch.optim.AdamW(params, fused=True, **ADAMW)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **given)[0]


def engine_loop(engine: Any, forward: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x)) -> Step:
    """`forward` returns the loss."""

    def step(tokens: Tensor) -> Tensor:
        loss = forward(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def torch_loop(
    model: nn.Module,
    forward: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    **adamw: Any,
) -> Step:
    """The same in plain torch."""
    optimizer = torch.optim.AdamW(model.parameters(), **(adamw or {"fused": True}), **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        loss = forward(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def shard_fully(model: nn.Module, blocks: Iterable[nn.Module], mesh: Any = None, **options: Any) -> None:
    """FSDP2, one block at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, **options)


def divide(module: nn.Module, mesh: Any, columns: Iterable[str], rows: Iterable[str]) -> None:
    """torch's own styles of tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    parallelize_module(module, mesh, plan | {name: RowwiseParallel() for name in rows})


def numel_of(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


# ---- each part


def _zero(part: Part, shape: Shape, tool: Tool) -> Step:
    """A GPT whose parameters, gradients and states are sharded, a block at a time."""
    model = Gpt(shape)
    match tool.name:
        case "torch":
            return torch_loop(model)
        case "DDP":
            return torch_loop(nn.parallel.DistributedDataParallel(model))
        case "FSDP2":
            shard_fully(model, model.blocks)
            return torch_loop(model)
    threshold = {} if tool.more else {"stage3_param_persistence_threshold": 0}
    config = config_of(tool.stage, stage3_prefetch_bucket_size=numel_of(model.blocks[0]), **threshold)
    return engine_loop(engine_of(tool, model, config))


def _llama_config(stage: int, model: Any) -> dict[str, Any]:
    """Return a configuration that wraps one block at a time, as fully_shard() is told to."""
    block = numel_of(model.model.layers[0])
    return config_of(
        stage,
        reduce_bucket_size=block,
        stage3_prefetch_bucket_size=block,
        stage3_param_persistence_threshold=0,
    )


def _tensor(part: Part, shape: Shape, tool: Tool) -> Step:
    """A Llama whose layers are divided; in torch as torchtitan does, by its styles and fully_shard()."""

    def forward(model: Any, tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    model = llama(shape)
    if tool.name == "torch":
        from torch.distributed.device_mesh import init_device_mesh

        num_copies = dist.get_world_size() // part.tp
        mesh = init_device_mesh("cpu", (num_copies, part.tp), mesh_dim_names=("dp", "tp"))
        columns = [f"self_attn.{one}_proj" for one in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        for block in model.model.layers:
            divide(block, mesh["tp"], columns, ("self_attn.o_proj", "mlp.down_proj"))
        shard_fully(model, model.model.layers, mesh["dp"])
        return torch_loop(model, forward, foreach=False)
    config = {**_llama_config(tool.stage, model), "tensor_parallel": {"autotp_size": part.tp}}
    if tool.name == "DeepSpeed":
        import deepspeed

        config["zero_allow_untested_optimizer"] = True
        model = deepspeed.tp_model_init(model, tp_size=part.tp, dtype=torch.float32, config=config)
    return engine_loop(engine_of(tool, model, config), forward)


def _sequences(part: Part, shape: Shape, tool: Tool) -> Step:
    """A Llama on sequences of which each rank has a part."""

    def parts(tokens: Tensor) -> tuple[dict[str, Any], Tensor]:
        """This rank's inputs and labels, shifted before: the next token may be the next rank's."""
        labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        tokens, labels, positions = (
            one.chunk(part.sp, dim=1)[dist.get_rank()].contiguous() for one in (tokens, labels, positions)
        )
        return {"input_ids": tokens, "position_ids": positions, "use_cache": False}, labels

    def forward(engine: Any, tokens: Tensor) -> Tensor:
        inputs, labels = parts(tokens)
        return mean_over_tokens(engine(**inputs).logits, labels)

    if tool.name == "dslaunch":
        from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
        from dslaunch.runtime.sequence.loss import mean_over_tokens

        model = llama(shape)
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sequence_parallel_size=part.sp)
        return engine_loop(engine_of(tool, model, _llama_config(tool.stage, model), mpu=mpu), forward)
    import deepspeed
    from deepspeed.runtime.sequence_parallel import ulysses_sp  # type: ignore[import-not-found]

    deepspeed.init_distributed(dist_backend="gloo")
    model = llama(shape)
    register = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers
    mpu = register(model, "sdpa", part.sp, micro_batch_size=shape.batch)
    engine = engine_of(tool, model, _llama_config(tool.stage, model), mpu=mpu)

    def step(tokens: Tensor) -> Tensor:
        """The loss is each rank's part of the mean, of which DeepSpeed's engine adds up the gradients."""
        inputs, labels = parts(tokens)
        logits = engine(**inputs).logits
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        sums = torch.stack((total.detach(), (labels != -100).sum().float()))
        dist.all_reduce(sums)
        engine.backward(total / sums[1])
        engine.step()
        return sums[0] / sums[1]

    return step


def _experts(part: Part, shape: Shape, tool: Tool) -> Step:
    """Blocks of a Transformer whose MLPs are layers of experts, of which each rank has another part."""
    if tool.name == "dslaunch":
        from dslaunch.moe import MoE

        return engine_loop(engine_of(tool, MixtureOfExperts(MoE, shape), config_of(tool.stage)))
    import deepspeed
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]
    from deepspeed.moe.utils import (  # type: ignore[import-not-found]
        split_params_into_different_moe_groups_for_optimizer,
    )

    deepspeed.init_distributed(dist_backend="gloo")
    model = MixtureOfExperts(MoE, shape)
    group = {"params": list(model.parameters()), "name": "all"}
    params = split_params_into_different_moe_groups_for_optimizer(group)
    return engine_loop(engine_of(tool, model, config_of(tool.stage), params=params))


def _micro_batches(batch: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels, [batch, sequence] each."""
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in batch]


def _stages(part: Part, shape: Shape, tool: Tool) -> Step:
    """Blocks of a Transformer in two stages, whose layers may be divided, too."""
    if tool.name == "torch":
        return _torch_stages(part, shape)
    config = {**config_of(tool.stage), "gradient_accumulation_steps": MICRO}
    options: dict[str, Any] = {"loss_fn": loss_of, "partition_method": "uniform"}
    if tool.name == "DeepSpeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        module = deepspeed.PipelineModule(layers(shape), PP, **options)
    else:
        import dslaunch
        from dslaunch.runtime.compat.pipeline.topology import PipeModelDataParallelTopology

        num_copies = dist.get_world_size() // (PP * part.tp)
        topology = PipeModelDataParallelTopology(num_pp=PP, num_mp=part.tp, num_dp=num_copies)
        schedule = tool.more or "1f1b"
        module = dslaunch.PipelineModule(layers(shape), topology=topology, schedule=schedule, **options)
    if part.tp > 1:
        rules = [
            {"patterns": [rf".*\.({'|'.join(names)})\.weight$"], "partition_type": kind}
            for kind, names in (("column", COLUMNS), ("row", ROWS))
        ]
        config["tensor_parallel"] = {"autotp_size": part.tp, "partition_config": {"layer_specs": rules}}
    engine = engine_of(tool, module, config)
    return lambda batch: engine.train_batch(iter(_micro_batches(batch))).item()


def _torch_stages(part: Part, shape: Shape) -> Step:
    """torch's own 1F1B. Where layers are divided, its styles and fully_shard() are put together with it as
    torchtitan does; elsewhere DistributedDataParallel's sum is done by hand, once for a batch.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    num_copies = dist.get_world_size() // (PP * part.tp)
    mesh = init_device_mesh("cpu", (PP, num_copies, part.tp), mesh_dim_names=("pp", "dp", "tp"))
    place, every = mesh["pp"].get_local_rank(), layers(shape)
    half = len(every) // PP
    module = nn.Sequential(*every[place * half : (place + 1) * half])
    if part.tp > 1:
        blocks = [block for block in module if isinstance(block, Block)]
        for block in blocks:
            divide(block, mesh["tp"], COLUMNS, ROWS)
        shard_fully(module, blocks, mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(module, place, PP, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, **ADAMW)

    def step(batch: Tensor) -> float:
        inputs, labels = (torch.cat(one) for one in zip(*_micro_batches(batch), strict=True))
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        if part.tp == 1:
            for param in module.parameters():
                dist.all_reduce(param.grad, group=mesh["dp"].get_group())
                param.grad /= num_copies
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return mean.item() / (num_copies * part.tp)

    return step


def _sleeping(part: Part, shape: Shape, tool: Tool) -> Step:
    """Layers that sleep, one on each stage of the schedule that the tool is called after. What a batch takes
    is then what the schedule's table says, and what is done beside.
    """
    import dslaunch
    from dslaunch.runtime.pipeline.schedule import shape_of

    stages = shape_of(tool.name, num_ranks=dist.get_world_size(), per_rank=None)
    module = dslaunch.PipelineModule(
        [Sleeps() for _ in range(stages.num_stages)],
        stages.num_ranks,
        loss_fn=lambda out, y: out.sum(),
        partition_method="uniform",
        schedule=tool.name,
    )
    config = {
        **config_of(0),
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine: Any = dslaunch.initialize(model=module, config=config)[0]
    batch = [(torch.ones(2, 4), torch.zeros(1)) for _ in range(MICRO)]
    return lambda _: engine.train_batch(iter(batch)).item()


def _engines(name: str, *stages: int, more: str = "") -> tuple[str, ...]:
    return tuple(f"{name} {stage}{more}" for stage in stages)


def _micro_size(shape: Shape) -> tuple[int, ...]:
    return MICRO, shape.batch, shape.sequence + 1


MANY_SMALL = "many small modules"
PARTS = {
    "zero": Part(
        make=_zero,
        shapes={
            # 19 million parameters, 8 tokens
            "comm-bound": Shape(width=512, blocks=6, batch=1, sequence=8),
            # 3.4 million parameters, 1024 tokens
            "compute-bound": Shape(width=256, blocks=4, batch=8, sequence=128),
            # 1,000 parameters in 2,000 modules
            MANY_SMALL: Shape(width=16, blocks=10, batch=1, sequence=8, layers=50),
        },
        tools=(
            *("torch", "DDP", "FSDP2"),
            *_engines("dslaunch", 0, 1, 2, 3),
            *_engines("dslaunch", 3, more=SMALL_WHOLE),
            *_engines("DeepSpeed", 1, 2, 3),
            *_engines("DeepSpeed", 3, more=SMALL_WHOLE),
        ),
    ),
    "tensor": Part(
        make=_tensor,
        shapes={
            "few tokens": Shape(width=512, blocks=4, batch=1, sequence=16),
            "many tokens": Shape(width=256, blocks=4, batch=4, sequence=128),
        },
        tools=("torch", *_engines("dslaunch", 1, 3), *_engines("DeepSpeed", 1)),
        layout="dp2 x tp2",
        tp=2,
    ),
    "stages": Part(
        make=_stages,
        shapes={
            "few tokens": Shape(width=384, blocks=6, batch=1, sequence=32),
            "many tokens": Shape(width=192, blocks=6, batch=2, sequence=128),
        },
        tools=("torch", *_engines("dslaunch", 1, 3), "dslaunch 1, zbv", *_engines("DeepSpeed", 1)),
        layout="dp2 x pp2",
        pp=PP,
        steps=2,
        size=_micro_size,
    ),
    "sequences": Part(
        make=_sequences,
        shapes={
            "short sequences": Shape(width=512, blocks=4, batch=1, sequence=64),
            "long sequences": Shape(width=256, blocks=4, batch=1, sequence=2048),
        },
        tools=(*_engines("dslaunch", 1, 3), *_engines("DeepSpeed", 1, 3)),
        layout="sp4",
        sp=4,
        steps=2,
    ),
    "experts": Part(
        make=_experts,
        shapes={
            "few tokens": Shape(width=256, blocks=4, batch=1, sequence=32),
            "many tokens": Shape(width=128, blocks=4, batch=4, sequence=128),
        },
        tools=(*_engines("dslaunch", 2, 3), *_engines("DeepSpeed", 2)),
        layout="ep4",
        size=lambda shape: (shape.batch, shape.sequence + 1),
    ),
    "together": Part(
        make=_stages,
        shapes={
            "few tokens": Shape(width=384, blocks=6, batch=1, sequence=32),
            "many tokens": Shape(width=256, blocks=6, batch=2, sequence=128),
        },
        tools=("torch", *_engines("dslaunch", 1, 3)),
        layout="pp2 x dp2 x tp2",
        num_ranks=8,
        tp=2,
        pp=PP,
        steps=2,
        size=_micro_size,
    ),
    "bubbles": Part(make=_sleeping, shapes={"bubble": Shape(1, 1, 1, 1)}, tools=(), pp=4, steps=1),
}


def main(name: str, shape_name: str, tool: str) -> None:
    part = PARTS[name]
    shape = part.shapes[shape_name]

    def prepare() -> Callable[[int, str], Turn]:
        step = part.make(part, shape, Tool.of(tool))
        return lambda number, _: take_turn(step, part.batches(shape, number))

    serve(prepare)


if __name__ == "__main__":
    main(*sys.argv[1:])
