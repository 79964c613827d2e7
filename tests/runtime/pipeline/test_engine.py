"""What a model in stages takes, returns and refuses."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.errors import ConfigError, PipelineError
from dslaunch.runtime.pipeline.layers import LayerSpec, TiedLayerSpec
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.pipeline.models import CLIP, Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs, train
from tests.runtime.ranks import RankFailed, Ranks

STEPS = 2


def engine_of(module: nn.Module, stage: int = 0, **changes: Any) -> Any:
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, **changes))
    return engine


def judged(*, is_tied: bool = False, **options: Any) -> PipelineModule:
    module = PipelineModule(specs(is_tied=is_tied), 2, loss_fn=loss_fn, partition_method="uniform", **options)
    take_values(module, Judge(is_tied=is_tied))
    return module


def _kept(rank: int) -> list[bool]:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    alive = [weakref.ref(layer) for layer in layers]
    module = PipelineModule(layers, 2, loss_fn=loss_fn, partition_method="uniform")
    del layers
    gc.collect()
    assert len(module.forward_funcs) == 2
    return [one() is not None for one in alive]


def test_a_rank_keeps_no_module_of_other_stages(ranks: Ranks) -> None:
    assert ranks(_kept, world_size=2) == [[True, True, False, False], [False, False, True, True]]


# ---- settings that change nothing


EACH = {"reduce": "micro_batch", "unshard": "micro_batch"}
VARIANTS: list[tuple[int, bool, dict[str, Any]]] = [
    (2, False, {"pipeline": {"reduce": "micro_batch"}}),
    (3, True, {"pipeline": {"unshard": "micro_batch"}}),
    (1, True, {"pipeline": {"activation_checkpoint_interval": 2}}),
    (3, False, {"pipeline": {"activation_checkpoint_interval": 1, **EACH, "schedule": "gpipe"}}),
]


@pytest.mark.parametrize(("stage", "is_tied", "changes"), VARIANTS)
def test_how_a_batch_runs_does_not_change_what_is_trained(
    ranks: Ranks, stage: int, is_tied: bool, changes: dict[str, Any]
) -> None:
    wanted = train_alone(Judge(is_tied=is_tied), [data(step, size=SIZE * MICRO * 2) for step in range(STEPS)])
    for losses, norms, values in ranks(train, 2, "1f1b", stage, is_tied, MICRO, changes, world_size=4):
        assert losses == pytest.approx(wanted[0], abs=2e-6)
        assert norms == pytest.approx(wanted[1], rel=2e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[2][name], atol=2e-6, rtol=1e-5, msg=name)


# ---- shapes


def _lengths(rank: int) -> list[float]:
    """Micro batches of several lengths in one batch, and in the evaluation between."""
    engine = engine_of(judged(schedule="zbv"), 1)
    found = []
    for step, lengths in enumerate([(5, 5, 5, 5), (3, 7, 3, 2), (5, 5, 7, 7)]):
        batch = [data(10 * step + n, size=SIZE, length=length) for n, length in enumerate(lengths)]
        found.append(engine.train_batch(iter(batch)).item())
        found.append(engine.eval_batch(iter([data(7, size=3, length=4)]), num_micro_batches=1).item())
    return found


def test_micro_batches_may_have_any_shapes(ranks: Ranks) -> None:
    model = Judge(is_tied=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wanted = []
    for step, lengths in enumerate([(5, 5, 5, 5), (3, 7, 3, 2), (5, 5, 7, 7)]):
        optimizer.zero_grad()
        total = 0.0
        for n, length in enumerate(lengths):
            inputs, labels = data(10 * step + n, size=SIZE, length=length)
            loss = loss_fn(model(inputs), labels) / MICRO
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        wanted.append(total)
        with torch.no_grad():
            inputs, labels = data(7, size=3, length=4)
            wanted.append(loss_fn(model(inputs), labels).item())
    for found in ranks(_lengths, world_size=2):
        assert found == pytest.approx(wanted, abs=2e-6)


class Masked(nn.Module):
    """Takes and hands on (hidden, mask, frozen): of these the first one alone has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, mask, still = given
        hidden = F.relu(hidden, inplace=True)  # of what has come from another rank
        return self.linear(hidden) * mask.to(hidden.dtype).unsqueeze(-1) + still, mask, still


def _masked(rank: int, schedule: str, per_rank: int | None) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    layers = [Masked() for _ in range(8)]

    def last(given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return given[0]

    module = PipelineModule(
        [*layers, last],
        2,
        loss_fn=lambda out, labels: (out - labels).square().mean(),
        partition_method="type:masked",
        schedule=schedule,
        stages_per_rank=per_rank,
    )
    engine = engine_of(module, 2)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        micro = [
            (
                (
                    torch.randn(3, 4, generator=generator),
                    torch.randint(0, 2, (3,), generator=generator),
                    torch.randn(3, 4, generator=generator),
                ),
                torch.randn(3, 4, generator=generator),
            )
            for _ in range(MICRO)
        ]
        before = deepcopy(micro)
        losses.append(engine.train_batch(iter(micro)).item())
        assert all(torch.equal(one[0][0], other[0][0]) for one, other in zip(micro, before, strict=True))
    return losses, {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", None), ("interleaved", 4), ("zero_bubble", 2)])
def test_a_tuple_with_tensors_that_take_no_gradient_passes_the_stages(
    ranks: Ranks, schedule: str, per_rank: int | None
) -> None:
    alone = ranks(_alone_masked, world_size=1)[0]
    for losses, values in ranks(_masked, schedule, per_rank, world_size=2):
        assert losses == pytest.approx(alone[0], abs=2e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, alone[1][name], atol=2e-6, rtol=1e-5, msg=name)


def _alone_masked(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    layers = nn.Sequential(*(Masked() for _ in range(8)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO):
            given = (
                torch.randn(3, 4, generator=generator),
                torch.randint(0, 2, (3,), generator=generator),
                torch.randn(3, 4, generator=generator),
            )
            labels = torch.randn(3, 4, generator=generator)
            loss = (layers(given)[0] - labels).square().mean() / MICRO
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(layers.parameters(), CLIP)
        optimizer.step()
        losses.append(total)
    return losses, {name: param.detach() for name, param in layers.named_parameters()}


class Picks(nn.Module):
    """As many rows as there are positive ones: a shape that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def _by_values(rank: int, is_said: bool) -> list[float]:
    torch.manual_seed(3)
    module = PipelineModule(
        [nn.Linear(4, 4), Picks(), nn.Linear(4, 1)],
        2,
        loss_fn=lambda out, labels: out.square().sum() + labels.sum() * 0,
        partition_method="type:linear",
        dynamic_shape=is_said,
    )
    engine = engine_of(module)
    generator = torch.Generator().manual_seed(1)
    return [
        engine.train_batch(
            iter([(torch.randn(6, 4, generator=generator), torch.zeros(1)) for _ in range(MICRO)])
        ).item()
        for _ in range(2)
    ]


def test_shapes_that_depend_on_values_are_named_unless_they_were_said_to(ranks: Ranks) -> None:
    first, second = ranks(_by_values, True, world_size=2)
    assert first == second
    with pytest.raises(
        RankFailed, match=r"stage 0 hands on float32 \[\d, 4\] for micro batch \d, and handed"
    ):
        ranks(_by_values, False, world_size=2, deadline_s=30)


# ---- precision


def _precision(rank: int, stage: int, config: dict[str, Any]) -> tuple[list[float], list[float], list[bool]]:
    engine = engine_of(judged(is_tied=True), stage, **config)
    losses, norms, applied = [], [], []
    for step in range(STEPS):
        batch = data(step, size=SIZE * MICRO * engine.dp_world_size)
        losses.append(engine.train_batch(pairs(*batch, engine, MICRO)).item())
        norms.append(engine.get_global_grad_norm())
        applied.append(engine.was_step_applied())
    return losses, norms, applied


def test_bfloat16_with_gradients_in_float32_trains_near_float32(ranks: Ranks) -> None:
    wanted = train_alone(Judge(is_tied=True), [data(step, size=SIZE * MICRO * 2) for step in range(STEPS)])
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for losses, norms, applied in ranks(_precision, 1, config, world_size=4):
        assert losses == pytest.approx(wanted[0], abs=0.02)
        assert norms == pytest.approx(wanted[1], rel=0.03)
        assert all(applied)


def test_float16_skips_a_step_on_all_stages(ranks: Ranks) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    found = ranks(_precision, 2, config, world_size=4)
    losses, _, applied = found[0]
    assert not applied[0]  # 2 ** 24 is too much
    assert all((one[0], one[2]) == (losses, applied) for one in found)
    assert losses[:2] == pytest.approx(
        [
            loss_fn(Judge(is_tied=True)(x), y).item()
            for x, y in (data(step, size=SIZE * MICRO * 2) for step in range(2))
        ],
        abs=0.01,
    )


# ---- stages with little in them


def _sparse(rank: int, stage: int, kind: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    layers: list[Any] = [nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4), torch.tanh]
    if kind == "frozen":
        layers[2].requires_grad_(False)
    torch.manual_seed(3)
    if kind == "nothing":
        layers = [nn.Linear(4, 4), torch.tanh]
    elif kind == "functions":
        layers = [torch.tanh, torch.sin, nn.Linear(4, 4), torch.tanh]
    module = PipelineModule(
        layers,
        3 if kind == "nothing" else 2,
        loss_fn=lambda out, y: (out - y).square().mean(),
        partition_method="uniform",
    )
    engine = engine_of(module, stage)
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        micro = [
            (torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator))
            for _ in range(MICRO)
        ]
        losses.append(engine.train_batch(iter(micro)).item())
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


def _alone_sparse(kind: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    one, two = nn.Linear(4, 4), nn.Linear(4, 4) if kind not in ("nothing", "functions") else None
    if kind == "frozen" and two is not None:
        two.requires_grad_(False)

    def forward(x: Tensor) -> Tensor:
        x = torch.sin(torch.tanh(x)) if kind == "functions" else x
        x = torch.tanh(one(x))
        return x if two is None else torch.tanh(two(x))

    optimizer = torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO):
            x, y = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
            loss = (forward(x) - y).square().mean() / MICRO
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), CLIP).item())
        optimizer.step()
        losses.append(total)
    return losses, norms


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "frozen"), (3, "frozen"), (1, "nothing"), (3, "nothing"), (0, "functions")]
)
def test_a_stage_may_train_nothing_of_its_own(ranks: Ranks, stage: int, kind: str) -> None:
    wanted = _alone_sparse(kind)
    for losses, norms in ranks(_sparse, stage, kind, world_size=3 if kind == "nothing" else 2):
        assert losses == pytest.approx(wanted[0], abs=2e-6)
        assert norms == pytest.approx(wanted[1], rel=2e-6)


# ---- data


def _data(rank: int) -> list[str]:
    """Data that end: what each rank is told."""
    engine = engine_of(judged())
    batch = list(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    told = []

    def tell(call: Callable[[], Any]) -> None:
        try:
            told.append(f"{call().item():.3f}")
        except (StopIteration, ConfigError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")

    tell(lambda: engine.train_batch())  # none were given
    once = iter(batch)
    tell(partial(engine.train_batch, once))
    tell(partial(engine.train_batch, once))
    tell(partial(engine.train_batch, iter(batch[:3])))
    tell(partial(engine.train_batch, iter(batch[: 4 if rank == 0 else 2])))
    tell(partial(engine.train_batch, iter([batch[0][0]] * MICRO)))
    tell(partial(engine.train_batch, batch))
    tell(partial(engine.eval_batch, iter(batch), reduce_output="max"))
    with torch.no_grad():
        tell(partial(engine.train_batch, iter(batch)))
    engine.set_batch_fn(lambda item: (item["x"], item["y"]))
    tell(partial(engine.train_batch, iter([{"x": x, "y": y} for x, y in batch])))
    engine.set_batch_fn(lambda item: item)
    engine.set_dataloader(batch * 2)
    tell(lambda: engine.train_batch())
    tell(lambda: engine.train_batch())
    tell(lambda: engine.train_batch())
    assert (engine.global_steps, engine.micro_steps) == (4, 4 * MICRO)
    return told


def test_data_that_end_are_told_of_on_all_ranks(ranks: Ranks) -> None:
    for rank, told in enumerate(ranks(_data, world_size=2)):
        assert told[0].startswith("ConfigError: there are no data: give train_batch(data_iter)")
        assert float(told[1]) > 3
        assert told[2] == "StopIteration: the data have ended"
        assert "a batch of 4 micro batches: there were 3 on ranks 0-1" in told[3]
        assert "there were 4 on rank 0 (stage 0 of 2), 2 on rank 1 (stage 1 of 2)" in told[4]
        assert told[5].startswith("ConfigError: a micro batch is Tensor of 2; a PipelineModule is trained on")
        assert told[6].startswith("ConfigError: train_batch() and eval_batch() take an iterator"), rank
        assert told[7].startswith("ConfigError: eval_batch(reduce_output='max')")
        assert told[8].startswith("RuntimeError: train_batch() inside torch.no_grad()")
        assert [float(one) > 0 for one in told[9:12]] == [True] * 3
        assert told[12] == "StopIteration: the data have ended"


# ---- what a program may ask for, and what not


def _asks(rank: int) -> dict[str, Any]:
    engine = engine_of(judged(schedule="zbv"), 3)
    batch = list(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    found: dict[str, Any] = {
        "losses": engine.eval_batch(iter(batch), reduce_output=None),
        "own": engine.eval_batch(iter(batch), bcast_loss=False),
        "logits": engine.eval_batch(iter(batch), return_logits=True)[1],
        "outputs": engine.eval_batch(iter(batch), compute_loss=False, reduce_output=None),
        "mean output": engine.eval_batch(iter(batch), compute_loss=False),
        "places": (engine.is_first_stage(), engine.is_last_stage(), engine.stage_id, engine.num_stages),
        "neighbours": (engine.prev_stage, engine.next_stage),
        "training": engine.module.training,
    }
    for name, call in {
        "forward": lambda: engine(batch[0][0]),
        "backward": lambda: engine.backward(torch.ones(())),
        "step": lambda: engine.step(),
        "no_sync": lambda: engine.no_sync(),
        "coalesce_grad_reduction": lambda: engine.coalesce_grad_reduction(),
        "scale": lambda: engine.scale(torch.ones(())),
        "allreduce_gradients": lambda: engine.allreduce_gradients(),
        "set_gradient_accumulation_boundary": lambda: engine.set_gradient_accumulation_boundary(False),
    }.items():
        with pytest.raises(PipelineError, match=rf"engine.{name}\(\): a model in stages has train_batch"):
            call()
    assert engine.is_gradient_accumulation_boundary()  # each batch is a step
    with pytest.raises(ConfigError, match="compiled layers cannot have their backward in two halves"):
        engine.compile()
    return found


def test_an_evaluation_gives_what_is_asked_for(ranks: Ranks) -> None:
    judge = Judge(is_tied=False)
    inputs, labels = data(0, size=SIZE * MICRO)
    with torch.no_grad():
        outputs = [judge(one) for one in inputs.chunk(MICRO)]
    losses = [loss_fn(out, y).item() for out, y in zip(outputs, labels.chunk(MICRO), strict=True)]
    first, second = ranks(_asks, world_size=2)
    for found in (first, second):
        assert [one.item() for one in found["losses"]] == pytest.approx(losses, abs=2e-6)
        assert not found["training"]
    assert first["places"] == (True, True, 0, 2)  # in a V the first rank has both ends
    assert second["places"] == (False, False, 1, 2)
    assert (first["neighbours"], second["neighbours"]) == ((-1, 1), (0, 2))
    assert first["own"].item() == pytest.approx(sum(losses) / MICRO, abs=2e-6)
    torch.testing.assert_close(first["logits"], outputs[-1])
    torch.testing.assert_close(first["outputs"], outputs)
    torch.testing.assert_close(first["mean output"], torch.stack(outputs).mean(0))
    assert [second[name] for name in ("own", "logits", "outputs", "mean output")] == [None] * 4


class Regularized(PipelineModule):
    """With another loss, for who looks at it."""

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        return {"size": next(self.parameters()).detach().square().sum()} if self.stage_id == 1 else None


def _more_losses(rank: int) -> tuple[float, float, dict[str, float]]:
    """Without loss_fn the last layer's output is the loss."""
    torch.manual_seed(3)
    layers = [nn.Linear(4, 4), nn.Linear(4, 1), lambda x: x.square().mean()]
    module = Regularized(layers, 2, partition_method="type:linear")
    engine = engine_of(module)
    micro = [(torch.ones(2, 4) * n, torch.zeros(0)) for n in range(MICRO)]
    loss = engine.train_batch(iter(micro)).item()
    norm = engine.get_global_grad_norm()
    return loss, norm, {name: one.item() for name, one in engine.get_additional_losses().items()}


def test_the_last_layer_may_be_the_loss_and_the_module_may_have_others(ranks: Ranks) -> None:
    torch.manual_seed(3)
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    loss = torch.stack([two(one(torch.ones(2, 4) * n)).square().mean() for n in range(MICRO)]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_([*one.parameters(), *two.parameters()], 1.0).item()
    for found in ranks(_more_losses, world_size=2):
        assert found[0] == pytest.approx(loss.item(), abs=1e-6)
        assert found[1] == pytest.approx(norm, rel=1e-6)
        assert found[2] == {"size": pytest.approx(two.weight.square().sum().item(), rel=1e-6)}


def _seeded(rank: int, num_stages: int, schedule: str) -> list[float]:
    """Layers that draw numbers, when they are built and when they run."""
    torch.manual_seed(rank)
    layers = [spec for _ in range(4) for spec in (LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Dropout, 0.5))]
    module = PipelineModule(
        layers,
        num_stages,
        loss_fn=lambda out, y: (out - y).square().mean(),
        seed_layers=True,
        base_seed=77,
        partition_method="uniform",
        schedule=schedule,
    )
    engine = engine_of(module)
    micro = [(torch.full((3, 8), float(n)), torch.ones(3, 8)) for n in range(MICRO)]
    return [engine.train_batch(iter(micro)).item() for _ in range(STEPS)]


def test_seeded_layers_draw_the_same_numbers_wherever_the_model_is_cut(ranks: Ranks) -> None:
    alone = ranks(_seeded, 1, "1f1b", world_size=1)[0]
    for num_stages, schedule in ((2, "1f1b"), (4, "gpipe"), (2, "interleaved")):
        for found in ranks(_seeded, num_stages, schedule, world_size=num_stages):
            assert found == pytest.approx(alone, abs=2e-6), (num_stages, schedule)


def _sequential(rank: int, folder: str) -> tuple[list[float], list[str], str]:
    torch.manual_seed(3)
    place = Path(folder, f"place-{rank}")
    os.environ["DSLAUNCH_PLACE_FILE"] = str(place)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    module = dslaunch.pipeline(model, num_stages=2, loss_fn=lambda out, y: (out - y).square().mean())
    engine = engine_of(module, 3)
    micro = [(torch.ones(2, 4) * n, torch.zeros(2, 4)) for n in range(MICRO)]
    losses = [engine.train_batch(iter(micro)).item() for _ in range(2)]
    with pytest.raises(ConfigError, match=r"pipeline\(model=Linear\): must be a torch.nn.Sequential"):
        dslaunch.pipeline(nn.Linear(2, 2), num_stages=2)  # type: ignore[arg-type]
    shared = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="layers 0 and 2 share the parameter 'weight'"):
        dslaunch.pipeline(nn.Sequential(shared, nn.Tanh(), shared), num_stages=2, partition_method="uniform")
    engine.destroy()
    stage = place.read_text()
    engine_of(nn.Linear(2, 2)).destroy()
    assert not place.exists(), "an engine without axes has no stage"
    place.write_text("of the program's own")
    engine_of(nn.Linear(2, 2)).destroy()
    assert place.exists()
    del os.environ["DSLAUNCH_PLACE_FILE"]
    return losses, [name for name, _ in module.named_parameters()], stage


def test_a_sequential_keeps_its_names(ranks: Ranks, tmp_path: Path) -> None:
    (losses, first, *places), (others, second, place) = ranks(_sequential, str(tmp_path), world_size=2)
    assert losses == others
    assert losses[1] < losses[0]
    assert [*first, *second] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [*places, place] == ["stage 0 of 2", "stage 1 of 2"], "where the launcher reads them"


class Breaks(nn.Module):
    """Fails in its third forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("broken")
        return x


def _breaks(rank: int, stage: int) -> None:
    """With one stage; with more, the others wait for the one that has failed, until it ends."""
    layers = [nn.Linear(4, 4), Breaks()]
    engine = engine_of(PipelineModule(layers, 1, loss_fn=lambda out, y: out.sum()), stage)
    micro = [(torch.ones(2, 4), torch.zeros(1)) for _ in range(MICRO)]
    with pytest.raises(ValueError, match="broken"):
        engine.train_batch(iter(micro))
    assert engine._accumulation.num_partial == 0  # else a checkpoint would warn of what it leaves out
    engine.train_batch(iter(micro))
    # 4 weights and a bias for each of 4 outputs, each with a gradient of 2: that of the last batch alone
    assert engine.get_global_grad_norm() == pytest.approx((20 * 2.0**2) ** 0.5)
    assert (engine.global_steps, engine.micro_steps) == (1, MICRO)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_that_fails_leaves_nothing_behind(ranks: Ranks, stage: int) -> None:
    ranks(_breaks, stage, world_size=2)


# ---- what a stranger found


class WithProperty(nn.Module):
    """As Megatron names what it ties."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(x)
        return embedded


def _tied_kinds(rank: int) -> None:
    def tied(kind: type[nn.Module], *given: Any, **options: Any) -> list[Any]:
        ends = [TiedLayerSpec("a", kind, *given, **options) for _ in range(2)]
        return [ends[0], LayerSpec(nn.Linear, 4, 4), ends[1]]

    attr = {"tied_weight_attr": ["word_embeddings_weight"]}
    module = PipelineModule(tied(WithProperty, **attr), 2, partition_method="uniform")
    with pytest.raises(AttributeError, match="a step sums the gradients of tied layers with all others"):
        module.allreduce_tied_weight_gradients()
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = module.no_such_name
    with pytest.raises(ConfigError, match=r"no parameter 'weight'; it has embedding\.weight\. All of"):
        PipelineModule(tied(WithProperty), 2, partition_method="uniform")
    with pytest.raises(ConfigError, match="'a' lies on several stages and has a buffer, 'running_mean'"):
        PipelineModule(tied(nn.BatchNorm1d, 4), 2, partition_method="uniform")


def test_what_is_tied_is_a_parameter_by_any_name_and_no_buffer(ranks: Ranks) -> None:
    ranks(_tied_kinds, world_size=2)


def _save_and_go_on(rank: int, folder: str) -> None:
    engine = engine_of(judged(is_tied=True), 1)
    for step in range(2):
        batch = data(step, size=SIZE * MICRO * engine.dp_world_size)
        engine.train_batch(pairs(*batch, engine, MICRO))
        engine.save_16bit_model(folder, "model.bin")
        engine.save_16bit_model(folder, "model.safetensors")


def test_training_goes_on_after_the_weights_were_written(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_save_and_go_on, str(tmp_path), world_size=4)
