"""Gradients that every rank has whole: they are averaged in the last backward of a step, and whatever comes
after that counts, or is refused, as one process would have it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.compat.engine.initialize import initialize
from dslaunch.runtime.zero.gradients.absent_gradient import AbsentGradient
from tests.runtime.models import Uneven, batch, loss_of, make_config, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.zero.model.test_reducer import KINDS, Branching, Failing, MoreAndMore

STEPS = 4
FEW_STEPS = 2  # of each of many ways: one from nothing, and one with momentum
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.5}}
# Ranks and parts of a loss are added in another order than in one process: a few roundings. Seen: 5e-7.
DRIFT = 2e-6
# The same with parameters in bfloat16, whose weights here are below 1: one rounding to a neighbour.
BF16_DRIFT = 2.0**-7
FLOAT32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _engine(model: nn.Module, stage: int, **changes: Any) -> dslaunch.Engine:
    config = make_config(stage=stage, reduce_bucket_size=1, optimizer=SGD, **changes)
    return dslaunch.initialize(model=model, config=config)[0]


def _own(engine: dslaunch.Engine, step: int) -> Tensor:
    own = batch(step).chunk(engine.world_size)[engine.global_rank]
    return own.to(engine.device, torch.bfloat16 if engine.bfloat16_enabled() else None)


def _plain(
    kind: type[nn.Module] = Uneven,
    *,
    steps: int = STEPS,
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
    edit: Callable[[Tensor], object] = lambda grad: None,
) -> dict[str, Tensor]:
    """What one process comes to; `edit` is called with each gradient before the step."""
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        before(model, step)
        loss_of(model, batch(step)).backward()
        for param in model.parameters():
            if param.grad is not None:
                edit(param.grad)
        optimizer.step()
    return snapshot(model.named_parameters())


# ---- when they are sent


def _events(rank: int, stage: int) -> list[list[str]]:
    """What is finished by autograd and asked of the other ranks in each of four micro batches of two."""
    model = make_model()
    engine = _engine(model, stage, gradient_accumulation_steps=2)
    events: list[str] = []
    reduce = engine._domains.dense.comm.reduce_scatter_or_all_reduce

    def noted(flat: Tensor, *, what: str) -> Any:
        events.append(f"reduce {what}")
        return reduce(flat, what=what)

    engine._domains.dense.comm.reduce_scatter_or_all_reduce = noted  # type: ignore[method-assign]
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    seen = []
    for step in range(2):
        for micro in batch(step).chunk(2):
            engine.backward(loss_of(engine, micro.chunk(2)[rank]))
            seen.append(list(events))
            engine.step()
            assert events == seen[-1]  # all is averaged when the backward has ended
            events.clear()
    return seen


@pytest.mark.parametrize("stage", [0, 1])
def test_a_unit_is_sent_while_autograd_goes_on_in_a_steps_last_backward(ranks: Ranks, stage: int) -> None:
    for first, unlearnt, third, learnt in ranks(_events, stage, world_size=2):
        for names in (first, third):
            assert not [one for one in names if one.startswith("reduce")]
        sent = [one for one in learnt if one.startswith("reduce")]
        assert sorted(sent) == sorted(one for one in unlearnt if one.startswith("reduce"))
        assert sent[0] == "reduce unit 'last'"
        assert len(sent) > 5
        for what in sent:  # as soon as the next gradient comes: before the next unit's are finished
            unit = what.split("'")[1]
            asked = learnt.index(what)
            finished = max(place for place, one in enumerate(learnt) if one.startswith(f"{unit}."))
            assert finished < asked <= finished + 2


# ---- how backward is called


def _usual(engine: dslaunch.Engine, step: int) -> None:
    engine.backward(loss_of(engine, _own(engine, step)))
    engine.step()


def _micro_batches(engine: dslaunch.Engine, step: int) -> None:
    """Two, of which the second is known to be the last when its backward begins."""
    for number, micro in enumerate(_own(engine, step).chunk(2)):
        engine.set_gradient_accumulation_boundary(number == 1)
        engine.backward(loss_of(engine, micro) / 2)
        engine.step()


def _without_engine(engine: dslaunch.Engine, step: int) -> None:
    loss_of(engine, _own(engine, step)).backward()
    engine.step()


def _twice_without_engine(engine: dslaunch.Engine, step: int) -> None:
    loss = loss_of(engine, _own(engine, step))
    (loss * 0.25).backward(retain_graph=True)
    (loss * 0.75).backward()
    engine.step()


def _two_losses(engine: dslaunch.Engine, step: int) -> None:
    loss = loss_of(engine, _own(engine, step))
    engine.backward(loss * 0.25, retain_graph=True)
    engine.backward(loss * 0.75)
    engine.step()


def _two_losses_on_one_rank(engine: dslaunch.Engine, step: int) -> None:
    (_usual if engine.global_rank else _two_losses)(engine, step)


def _first_in_no_sync(engine: dslaunch.Engine, step: int) -> None:
    loss = loss_of(engine, _own(engine, step))
    with engine.no_sync():
        engine.backward(loss * 0.25, retain_graph=True)
    engine.backward(loss * 0.75)
    engine.step()


def _all_in_no_sync(engine: dslaunch.Engine, step: int) -> None:
    with engine.no_sync():
        engine.backward(loss_of(engine, _own(engine, step)))
    engine.step()


def _boundary_moved(engine: dslaunch.Engine, step: int) -> None:
    """The first backward looks like the last one of a step, until it has run."""
    first, second = _own(engine, step).chunk(2)
    engine.backward(loss_of(engine, first) / 2)
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, second) / 2)
    engine.step()


def _coalesced(engine: dslaunch.Engine, step: int) -> None:
    with engine.coalesce_grad_reduction():
        for micro in _own(engine, step).chunk(2):
            engine.backward(loss_of(engine, micro) / 2)
    engine.step()


def _dropped_first(engine: dslaunch.Engine, step: int) -> None:
    engine.backward(loss_of(engine, _own(engine, step + 1)))
    engine.zero_grad()
    _usual(engine, step)


def _dropped_by_optimizer(engine: dslaunch.Engine, step: int) -> None:
    engine.backward(loss_of(engine, _own(engine, step + 1)))
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()
    _usual(engine, step)


def _looked_at(engine: dslaunch.Engine, step: int) -> None:
    """Gradients are read before, between and after."""
    loss = loss_of(engine, _own(engine, step))
    params = list(engine.module.parameters())
    for part in (0.25, 0.75):
        assert zero.safe_get_full_grad(params[0]) is not None
        engine.backward(loss * part, retain_graph=True)
        found = [zero.safe_get_full_grad(param) for param in params]
        again = [zero.safe_get_full_grad(param) for param in params]
        assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))  # type: ignore[arg-type]
    engine.step()


def _averaged_between(engine: dslaunch.Engine, step: int) -> None:
    loss = loss_of(engine, _own(engine, step))
    engine.backward(loss * 0.25, retain_graph=True)
    engine.allreduce_gradients()
    engine.backward(loss * 0.75)
    engine.allreduce_gradients()
    engine.step()


def _with_graph(engine: dslaunch.Engine, step: int) -> None:
    """A backward that makes a graph puts a tensor of its own in p.grad."""
    loss = loss_of(engine, _own(engine, step))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
        for part in (0.25, 0.75):
            (loss * part).backward(retain_graph=True, create_graph=True)
    engine.step()


def _parked(engine: dslaunch.Engine, step: int) -> None:
    loss = loss_of(engine, _own(engine, step))
    engine.backward(loss * 0.25, retain_graph=True)
    engine.offload_states(include=["lp_grads", "optim_states"])
    engine.reload_states()
    engine.backward(loss * 0.75)
    engine.offload_states(include=["lp_grads"])
    engine.reload_states()
    engine.step()


WAYS = [
    _usual, _micro_batches, _without_engine, _twice_without_engine, _two_losses, _two_losses_on_one_rank,
    _first_in_no_sync, _all_in_no_sync, _boundary_moved, _coalesced, _dropped_first, _dropped_by_optimizer,
    _looked_at, _averaged_between, _with_graph, _parked,
]  # fmt: skip


def _train_all_ways(
    rank: int, stage: int, changes: dict[str, Any], num_ways: int = len(WAYS)
) -> dict[str, tuple[dict[str, Tensor], int]]:
    found = {}
    for way in WAYS[-num_ways:]:
        model = make_model()
        engine = _engine(model, stage, **changes)
        for step in range(FEW_STEPS):
            way(engine, step)
        params = {name: value.cpu() for name, value in snapshot(model.named_parameters()).items()}
        found[way.__name__] = (params, engine.comm_order_hash())
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "stage", "changes"),
    [
        (2, 0, {}),
        (2, 1, FLOAT32_SUMS),
        pytest.param(3, 1, {}, marks=pytest.mark.exhaustive),
        pytest.param(3, 0, FLOAT32_SUMS, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, {"bf16": {"enabled": True}}, marks=pytest.mark.exhaustive),
    ],
)
def test_how_backward_is_called_makes_no_difference(
    ranks: Ranks, stage: int, changes: dict[str, Any], world_size: int
) -> None:
    expected = _plain(steps=FEW_STEPS)
    results = ranks(_train_all_ways, stage, changes, world_size=world_size)
    for result in results:
        for way, (params, order) in result.items():
            drift = BF16_DRIFT if changes else DRIFT
            assert worst_difference(params, expected) <= drift, way
            assert order == results[0][way][1], way
            assert worst_difference(params, results[0][way][0]) == 0.0, way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_ways"),
    [(0, 7), pytest.param(1, len(WAYS), marks=pytest.mark.exhaustive)],
)
def test_nor_where_collectives_go_on_beside_the_host(cuda_ranks: Ranks, stage: int, num_ways: int) -> None:
    """On the fake device, which finds memory that is used while a collective may be at work in it."""
    expected = _plain(steps=FEW_STEPS)
    for result in cuda_ranks(_train_all_ways, stage, {}, num_ways, world_size=2):
        for way, (params, _) in result.items():
            assert worst_difference(params, expected) <= DRIFT, way


# ---- what the model does


def _train_all_kinds(
    rank: int, stage: int, kinds: list[type[nn.Module]]
) -> list[tuple[dict[str, Tensor], int]]:
    found = []
    for kind in kinds:
        model = make_model(kind)
        engine = _engine(model, stage)
        for step in range(STEPS):
            if isinstance(model, MoreAndMore):
                model.num_uses = 1 + step % 2
            if isinstance(model, Branching):
                model.rank, model.step = rank, step
            _usual(engine, step)
        params = {name: value.cpu() for name, value in snapshot(model.named_parameters()).items()}
        found.append((params, engine.comm_order_hash()))
        engine.destroy()
    return found


def _branching() -> dict[str, Tensor]:
    model = make_model(Branching)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for rank, half in enumerate(batch(step).chunk(2)):
            model.rank, model.step = rank, step
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    return snapshot(model.named_parameters())


def _use_more(model: nn.Module, step: int) -> None:
    assert isinstance(model, MoreAndMore)
    model.num_uses = 1 + step % 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_come_in_several_goes_or_not_at_all_count_once(ranks: Ranks, stage: int) -> None:
    expected = [
        *(_plain(kind) for kind in KINDS),
        _plain(MoreAndMore, before=_use_more),
        _branching(),
    ]
    results = ranks(_train_all_kinds, stage, [*KINDS, MoreAndMore, Branching], world_size=2)
    for result in results:
        for (params, order), wanted, (_, first) in zip(result, expected, results[0], strict=True):
            assert worst_difference(params, wanted) <= DRIFT
            assert order == first


@pytest.mark.parametrize("stage", [0, 1])
def test_nor_do_gradients_that_come_while_others_are_sent(cuda_ranks: Ranks, stage: int) -> None:
    """On the fake device, as above."""
    expected = _plain(MoreAndMore, before=_use_more)
    for ((params, _),) in cuda_ranks(_train_all_kinds, stage, [MoreAndMore], world_size=2):
        assert worst_difference(params, expected) <= DRIFT


# ---- p.grad between the backward and the step


def _grads(engine: dslaunch.Engine) -> list[Tensor]:
    return [param.grad for param in engine.module.parameters() if param.grad is not None]


def _clip_value(engine: dslaunch.Engine) -> None:
    for grad in _grads(engine):
        grad.clamp_(-0.01, 0.01)


def _clip_replaced(engine: dslaunch.Engine) -> None:
    for param in engine.module.parameters():
        assert param.grad is not None
        param.grad = param.grad.clamp(-0.01, 0.01)


def _clip_data(engine: dslaunch.Engine) -> None:
    for grad in _grads(engine):
        grad.data.clamp_(-0.01, 0.01)


def _scale_by_rank(engine: dslaunch.Engine) -> None:
    for grad in _grads(engine):
        grad.mul_(0.5 + engine.global_rank)


def _clip_norm(engine: dslaunch.Engine) -> None:
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)


CLIPS = [_clip_value, _clip_replaced, _clip_data, _scale_by_rank, _clip_norm]


def _edit_all_ways(rank: int, stage: int) -> list[dict[str, Tensor]]:
    """At stage 1 after allreduce_gradients()."""
    found = []
    for edit in CLIPS:
        model = make_model()
        engine = _engine(model, stage)
        for step in range(STEPS):
            engine.backward(loss_of(engine, _own(engine, step)))
            if stage:
                engine.allreduce_gradients()
            edit(engine)
            engine.step()
        found.append(snapshot(model.named_parameters()))
        engine.destroy()
    return found


def _plain_clip_norm() -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_p_grad_is_the_average_and_edits_of_it_count(ranks: Ranks, stage: int) -> None:
    clipped = _plain(edit=lambda grad: grad.clamp_(-0.01, 0.01))
    expected = [clipped, clipped, clipped, _plain(), _plain_clip_norm()]
    results = ranks(_edit_all_ways, stage, world_size=2)
    for result in results:
        for edit, params, wanted, same in zip(CLIPS, result, expected, results[0], strict=True):
            assert worst_difference(params, wanted) <= DRIFT, edit
            assert worst_difference(params, same) == 0.0, edit


def _refused(rank: int) -> list[str]:
    """Whatever uses or sets p.grad, at stage 1."""
    model = make_model()
    engine = _engine(model, 1)
    param = model.get_parameter("last.weight")
    before = param.grad
    assert before is not None
    said = []

    def refuse(attempt: Callable[[], object]) -> None:
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))

    for step in range(2):
        engine.backward(loss_of(engine, _own(engine, step)))
        grad = param.grad
        assert isinstance(grad, AbsentGradient)
        assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
        assert repr(grad).startswith("AbsentGradient('last.weight', shape=(1, 15)")
        refuse(lambda: grad.mul_(2))  # noqa: B023
        refuse(lambda: grad.data.clamp_(0, 1))  # noqa: B023
        refuse(lambda: grad.norm())  # noqa: B023
        refuse(lambda: torch.nn.utils.clip_grad_norm_([param], 1.0))
        for one in (None, torch.ones(1, 15)):
            param.grad = one
            refuse(engine.step)
            refuse(lambda: engine.backward(loss_of(engine, _own(engine, 0))))
        param.grad = grad
        engine.step()
        assert param.grad is before
    return said


def test_an_absent_gradient_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks(_refused, world_size=2):
        for line in said:
            assert line.startswith("p.grad of 'last.weight' was ")
            assert "engine.allreduce_gradients() first" in line


def _as_for_deepspeed(rank: int) -> dict[str, Tensor]:
    model = make_model()
    config = make_config(stage=1, reduce_bucket_size=1, optimizer=SGD, gradient_clipping=0.0)
    engine = initialize(model=model, config=config, is_lenient=True)[0]
    for step in range(STEPS):
        loss = loss_of(engine, _own(engine, step))
        engine.backward(loss * 0.25, retain_graph=True)
        assert all(param.grad is None for param in model.parameters())
        (loss * 0.75).backward()
        assert all(param.grad is None for param in model.parameters())
        engine.step()
    return snapshot(model.named_parameters())


def test_for_programs_of_deepspeed_it_is_none_as_there(ranks: Ranks) -> None:
    for params in ranks(_as_for_deepspeed, world_size=2):
        assert worst_difference(params, _plain()) <= DRIFT


def _hooked(rank: int, stage: int) -> dict[str, Tensor]:
    """The program's own hooks on finished gradients, the last one of a unit included."""
    model = make_model()
    engine = _engine(model, stage)

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve)
    for step in range(STEPS):
        _usual(engine, step)
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_hooks_of_the_program_find_each_gradient_before_it_is_averaged(ranks: Ranks, stage: int) -> None:
    for params in ranks(_hooked, stage, world_size=2):
        assert worst_difference(params, _plain(edit=lambda grad: grad.mul_(0.5))) <= DRIFT


# ---- setting gradients


def _set(rank: int, stage: int) -> dict[str, Tensor]:
    """All gradients are set to a half of what they are: at once, and with a later gradient."""
    model = make_model()
    engine = _engine(model, stage)
    params = list(model.parameters())
    for step in range(STEPS):
        loss = loss_of(engine, _own(engine, step))
        engine.backward(loss * 0.5, retain_graph=True)
        for param in params:
            grad = zero.safe_get_full_grad(param)
            assert grad is not None
            zero.safe_set_full_grad(param, grad / 2)
        engine.backward(loss)
        if step % 2:
            zero.safe_update_full_grad_vectorized(params, lambda grad, _: grad / 2.5)
        else:
            (grads,) = ([zero.safe_get_full_grad(param) for param in params],)
            for param, grad in zip(params, grads, strict=True):
                assert grad is not None
                zero.safe_set_full_grad(param, grad / 2.5)
        engine.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_set_are_what_the_step_uses(ranks: Ranks, stage: int) -> None:
    expected = _plain(edit=lambda grad: grad.mul_(0.5))
    for params in ranks(_set, stage, world_size=2):
        assert worst_difference(params, expected) <= DRIFT


# ---- ranks that do not do the same


def _dropped_by_one(rank: int, stage: int) -> str:
    model = make_model()
    engine = _engine(model, stage)
    _usual(engine, 0)
    engine.backward(loss_of(engine, _own(engine, 1)))
    if rank == 1:
        engine.zero_grad()
    with pytest.raises(ConfigError) as refused:
        engine.step()
    return str(refused.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_averages_that_one_rank_drops_are_an_error_on_all(ranks: Ranks, stage: int) -> None:
    for message in ranks(_dropped_by_one, stage, world_size=2):
        assert message.startswith("engine.zero_grad() on rank 1 only, after the backward that ends a step")


def _uneven(rank: int, stage: int) -> tuple[dict[str, Tensor], int]:
    """Rank 1 runs no backward in step 1, and drops what it has made in no_sync() in step 3."""
    model = make_model()
    engine = _engine(model, stage)
    for step in range(STEPS):
        loss = loss_of(engine, _own(engine, step))
        if rank == 1 and step == 3:
            with engine.no_sync():
                engine.backward(loss)
            engine.zero_grad()
        elif rank == 0 or step != 1:
            engine.backward(loss)
        engine.step()
    return snapshot(model.named_parameters()), engine.comm_order_hash()


def _uneven_plain() -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, half in enumerate(batch(step).chunk(2)):
            if rank == 0 or step not in (1, 3):
                (loss_of(model, half) / 2).backward()
        optimizer.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_without_a_backward_has_gradients_of_zero(ranks: Ranks, stage: int) -> None:
    results = ranks(_uneven, stage, world_size=2)
    for params, order in results:
        assert worst_difference(params, _uneven_plain()) <= DRIFT
        assert order == results[0][1]


def _failed(rank: int, stage: int) -> dict[str, Tensor]:
    """The backward of step 1 fails: on rank 1 alone, and the ranks agree to drop it."""
    model = make_model(Failing)
    engine = _engine(model, stage)
    for step in range(STEPS):
        model.is_failing = step == 1 and rank == 1
        has_failed = torch.zeros(1)
        try:
            engine.backward(loss_of(engine, _own(engine, step)))
        except RuntimeError:
            has_failed += 1
            engine.zero_grad()
        torch.distributed.all_reduce(has_failed)
        if has_failed:
            engine.zero_grad()
            continue
        engine.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_backward_that_failed_on_one_rank_can_be_dropped_on_all(ranks: Ranks, stage: int) -> None:
    expected = make_model(Failing)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.5)
    for step in (0, 2, 3):
        optimizer.zero_grad()
        loss_of(expected, batch(step)).backward()
        optimizer.step()
    for params in ranks(_failed, stage, world_size=2):
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT
