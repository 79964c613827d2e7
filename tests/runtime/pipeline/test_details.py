"""What a batch does beside its numbers: modes, seeds, gradients that nobody needs, bytes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.errors import ConfigError, PipelineError
from dslaunch.runtime.pipeline.layers import LayerSpec
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.pipeline.models import Embed, Head, Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.pipeline.test_engine import engine_of, judged
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow


# ---- gradients


class Fork(nn.Module):
    """Hands on two tensors, of which the second is computed from weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


class TakesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(given[0])  # type: ignore[no-any-return]


def _square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def _not_needed(rank: int) -> tuple[float, float, float]:
    layers = [LayerSpec(Fork), LayerSpec(TakesFirst)]
    module = PipelineModule(layers, 2, loss_fn=_square, partition_method="uniform", seed_layers=True)
    engine = engine_of(module)
    before = [param.detach().clone() for param in module.parameters()]
    x = torch.linspace(-1, 1, 12).view(3, 4)
    engine.train_batch(iter([(x, x)] * MICRO))
    changed = [(one - was).abs().sum().item() for one, was in zip(module.parameters(), before, strict=True)]
    used, rest = sum(changed[:2]), sum(changed[2:])
    return used, rest, engine.get_global_grad_norm()


def test_what_the_next_stage_does_not_use_gets_no_gradient(ranks: Ranks) -> None:
    torch.manual_seed(1234)
    fork = Fork()
    torch.manual_seed(1235)
    taker = TakesFirst()
    x = torch.linspace(-1, 1, 12).view(3, 4)
    _square(taker(fork(x)), x).backward()  # type: ignore[no-untyped-call]
    grads = [param.grad for param in (*fork.parameters(), *taker.parameters()) if param.grad is not None]
    wanted = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt().item()
    for rank, (used, rest, norm) in enumerate(ranks(_not_needed, world_size=2)):
        assert norm == pytest.approx(wanted, rel=1e-6)
        assert used > 0
        assert rest == 0 or rank == 1


# ---- modes and seeds


class Notes(nn.Module):
    """Notes the mode of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return x


def _modes(rank: int) -> tuple[list[bool], float, float]:
    notes = Notes()
    layers = [LayerSpec(Embed), notes, LayerSpec(Head)]
    module = PipelineModule(layers, 2, loss_fn=loss_fn, partition_method="uniform")
    engine = engine_of(module, 3)
    batch = list(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    engine.train_batch(iter(batch))
    evaluated = engine.eval_batch(iter(batch), num_micro_batches=2)
    trained = engine.train_batch(iter(batch))
    evaluated = engine.eval_batch(iter(batch))
    again = engine.train_batch(iter(batch))
    return notes.modes, evaluated.item(), again.item() * bool(trained)


def test_an_evaluation_between_two_batches_leaves_the_mode_and_the_shapes_of_training(ranks: Ranks) -> None:
    found = ranks(_modes, world_size=2)
    wanted = [True] * 4 + [False] * 2 + [True] * 4 + [False] * 4 + [True] * 4
    assert [modes for modes, *_ in found if modes] == [wanted]
    assert all(evaluated == again for _, evaluated, again in found)


def _seeds(rank: int) -> list[int]:
    seeds: list[int] = []
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    module = PipelineModule(
        layers,
        2,
        loss_fn=_square,
        partition_method="uniform",
        seed_layers=True,
        seed_fn=seeds.append,
        base_seed=100,
    )
    engine = engine_of(module, gradient_accumulation_steps=2)
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2))
    return seeds


def test_seeds_are_deepspeeds(ranks: Ranks) -> None:
    """Source: DeepSpeed 0.19.8 runtime/pipe/module.py, _build() and forward()"""
    assert ranks(_seeds, world_size=2) == [
        [100, 101, 200, 201, 300, 301],
        [102, 103, 202, 203, 302, 303],
    ]


# ---- what a program gives


class Pair(nn.Module):
    """Takes a tuple, as layers behind this one do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(given, tuple), type(given)
        return self.linear(given[0] + given[1])  # type: ignore[no-any-return]


def _lists(rank: int) -> float:
    layers = [LayerSpec(Pair), LayerSpec(nn.Linear, 4, 4)]
    engine = engine_of(PipelineModule(layers, 2, loss_fn=_square, partition_method="uniform"))
    one = torch.ones(2, 4)
    return float(engine.train_batch(iter([([one, one], one)] * MICRO)))


def test_inputs_may_be_a_list(ranks: Ranks) -> None:
    assert all(loss > 0 for loss in ranks(_lists, world_size=2))


def _in_order(rank: int) -> list[float]:
    module = judged()
    dataset = [(x, y) for x, y in zip(*data(0, size=64), strict=True)]
    engine, _, loader, _ = dslaunch.initialize(model=module, training_data=dataset, config=config_of(0))
    assert len(loader) == 64 // SIZE
    given: Any = engine
    first = given.eval_batch(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    return [first.item(), given.train_batch().item()]


def test_training_data_come_in_their_order_as_with_deepspeed(ranks: Ranks) -> None:
    for first, trained in ranks(_in_order, world_size=2):
        assert trained == pytest.approx(first, abs=1e-6)


def _outputs(rank: int) -> tuple[int, Any]:
    module = PipelineModule([LayerSpec(nn.Identity), nn.Linear(1, 1)], 2, partition_method="uniform")
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(1.0)
    engine = engine_of(module)
    micro = [(torch.full((2, 1), 10.0 * (rank % 2) + one), torch.zeros(1)) for one in range(MICRO)]
    return engine.stage_id, engine.eval_batch(iter(micro), compute_loss=False)


def test_the_mean_of_outputs_is_that_of_all_copies(ranks: Ranks) -> None:
    for stage, mean in ranks(_outputs, world_size=4):
        if stage == 0:
            assert mean is None
        else:  # 1.5 of each copy, 10 more on the second one, and the bias
            torch.testing.assert_close(mean, torch.full((2, 1), 1.5 + 5.0 + 1.0))


# ---- what is refused, and what cannot go on


def _uneven(rank: int, stage: int) -> tuple[float, float]:
    """The tied layer's stages have other numbers of units, and so of collectives, than each other."""
    layers = specs(5, is_tied=True)
    module = PipelineModule(layers, 2, loss_fn=loss_fn, partition_method="parameters")
    take_values(module, Judge(5, is_tied=True))
    engine = engine_of(module, stage)
    loss = engine.train_batch(pairs(*data(0, size=SIZE * MICRO * 2), engine, MICRO))
    norm = engine.get_global_grad_norm()
    engine.train_batch(pairs(*data(1, size=SIZE * MICRO * 2), engine, MICRO))
    return float(loss), float(norm)


@pytest.mark.parametrize("stage", [1, 3])
def test_stages_with_other_numbers_of_units_share_a_tied_layer(ranks: Ranks, stage: int) -> None:
    losses, norms, _ = train_alone(Judge(5, is_tied=True), [data(0, size=SIZE * MICRO * 2)])
    for loss, norm in ranks(_uneven, stage, world_size=4):
        assert loss == pytest.approx(losses[0], abs=2e-6)
        assert norm == pytest.approx(norms[0], rel=2e-6)


def _tied_differently(rank: int) -> str:
    module = PipelineModule(specs(is_tied=True), 3, loss_fn=loss_fn, partition_method="uniform")
    if rank == 2:
        module.tied_modules["embed"].weight.requires_grad_(False)
    with pytest.raises(ConfigError) as raised:
        engine_of(module)
    return str(raised.value)


def test_stages_that_treat_a_tied_layer_differently_are_refused(ranks: Ranks) -> None:
    """On the rank between them, too, which has nothing of it."""
    for said in ranks(_tied_differently, world_size=3):
        assert "the stages 0, 2 treat the parameters of the tied layer 'embed' differently" in said


def _differs(rank: int) -> list[str]:
    """What all are told where rank 1 builds another PipelineModule."""
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    other: list[Any] = [*layers[:3], nn.Tanh()]
    given: list[dict[str, Any]] = [
        {"num_stages": 4 if rank == 1 else 2},
        {"num_stages": 2, "schedule": "gpipe" if rank == 1 else "1f1b"},
        {"num_stages": 2, "partition_method": "uniform" if rank == 1 else "parameters"},
        {"num_stages": 2, "layers": layers[:3] if rank == 1 else layers},
        {"num_stages": 2, "layers": other if rank == 1 else layers},
    ]
    told = []
    for one in given:
        with pytest.raises(ConfigError) as raised:
            PipelineModule(**{"layers": layers, **one})
        told.append(str(raised.value))
    return told


def test_ranks_that_build_another_pipeline_are_named(ranks: Ranks) -> None:
    first, *others = ranks(_differs, world_size=4)
    assert others == [first] * 3
    topology, schedule, method, number, layer = first
    begin = "rank 1 and rank 0 were given different PipelineModules: "
    assert topology.startswith(f"{begin}topology is pp=4,dp=1,sp=1,tp=1 on rank 1 and pp=2,dp=2,")
    assert schedule.startswith(f"{begin}schedule is gpipe on rank 1 and 1f1b on rank 0;")
    assert method.startswith(f"{begin}partition_method is uniform on rank 1 and parameters on rank 0;")
    assert number.startswith(f"{begin}num_layers is 3 on rank 1 and 4 on rank 0;")
    assert layer.startswith(f"{begin}layer 3 is Tanh on rank 1 and Linear on rank 0;")


class Fails(nn.Module):
    """In its second forward."""

    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == 2:
            raise ValueError("no second one")
        return x


def _broken(rank: int) -> str:
    """Each stage fails, so that none waits: the first has sent a micro batch before that."""

    def fails(outputs: Tensor, labels: Tensor) -> Tensor:
        raise ValueError("no loss")

    layers = [LayerSpec(Embed), Fails(), LayerSpec(nn.Linear, 8, 8), LayerSpec(Head)]
    engine = engine_of(PipelineModule(layers, 2, loss_fn=fails, partition_method="uniform"))
    micro = list(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    with pytest.raises(ValueError, match="no second one" if rank == 0 else "no loss"):
        engine.train_batch(iter(micro))
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(PipelineError, match="a batch has failed in the middle") as raised:
            call(iter(micro))
    assert engine.global_steps == 0
    return str(raised.value)


def test_no_batch_follows_one_that_has_failed_between_stages(ranks: Ranks) -> None:
    assert all("go on from a checkpoint" in said for said in ranks(_broken, world_size=2))


def _checkpointed(rank: int) -> tuple[list[bool], str]:
    notes = Notes()
    layers = [LayerSpec(Embed), LayerSpec(nn.Linear, 8, 8), notes, LayerSpec(Head)]

    def built(schedule: str) -> Any:
        given: list[Any] = layers if schedule == "1f1b" else [*layers, *layers[2:3] * 4]
        return PipelineModule(given, 2, loss_fn=loss_fn, partition_method="uniform", schedule=schedule)

    config = config_of(0, pipeline={"activation_checkpoint_interval": 2})
    engine: Any
    engine, *_ = dslaunch.initialize(model=built("1f1b"), config=config)
    engine.train_batch(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    with pytest.raises(ConfigError) as raised:
        dslaunch.initialize(model=built("zbv"), config=config)
    return notes.modes, str(raised.value)


def test_checkpointed_layers_run_again_and_not_where_the_backward_is_split(ranks: Ranks) -> None:
    (others, said), (modes, _) = ranks(_checkpointed, world_size=2)
    assert (len(modes), len(others)) == (2 * MICRO, 0)
    assert "activation_checkpoint_interval 2 with the schedule zbv: its backward comes in two halves" in said


# ---- bytes


def _gathered(rank: int, unshard: str) -> tuple[int, int]:
    """Bytes that a rank sends for parameters in one batch, and those of its stage's parameters."""
    engine = engine_of(judged(), 3, pipeline={"unshard": unshard})
    micro = [list(pairs(*data(step, size=SIZE * MICRO * 2), engine, MICRO)) for step in range(2)]
    engine.train_batch(iter(micro[0]))
    before = engine._wire.meter.bytes_by_kind()["parameters"]
    engine.train_batch(iter(micro[1]))
    sent = engine._wire.meter.bytes_by_kind()["parameters"] - before
    return sent, sum(param.ds_numel for param in engine.module.parameters()) * 4


def test_parameters_are_sent_once_for_a_batch_or_twice_for_each_micro_batch(ranks: Ranks) -> None:
    once = ranks(_gathered, "batch", world_size=4)
    often = ranks(_gathered, "micro_batch", world_size=4)
    for (sent, whole), (more, _) in zip(once, often, strict=True):
        assert whole / 2 <= sent < 0.7 * whole  # each half to the other rank; small units end in padding
        assert more == 2 * MICRO * sent


def _tied_with_other_values(rank: int, stage: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rank)
    module = PipelineModule(specs(is_tied=True), 2, loss_fn=loss_fn, partition_method="uniform")
    weight = module.tied_modules["embed"].weight
    before = weight.detach().clone()
    engine = engine_of(module, stage)
    at_start = safe_get_full_fp32_param(weight)
    engine.train_batch(pairs(*data(0, size=SIZE * MICRO * 2), engine, MICRO))
    after = safe_get_full_fp32_param(weight)
    assert at_start is not None
    assert after is not None
    return before, at_start, after


@pytest.mark.parametrize("stage", [0, 3])
def test_stages_that_made_other_values_of_a_tied_layer_have_those_of_the_first_and_keep_one(
    ranks: Ranks, stage: int
) -> None:
    found = ranks(_tied_with_other_values, stage, world_size=4)
    assert not torch.equal(found[0][0], found[2][0])
    for _, at_start, after in found:
        assert torch.equal(at_start, found[0][0])
        assert torch.equal(after, found[0][2])
    assert not torch.equal(found[0][1], found[0][2])
