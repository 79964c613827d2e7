"""The rates of every schedule, step by step. The traces marked so were printed by DeepSpeed 0.19.6."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from dslaunch.runtime.config import load_config
from dslaunch.runtime.config.scheduler import PARAMS_OF, SchedulerConfig
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.step import lr_schedules
from dslaunch.runtime.step.lr_schedules import OneCycle, Scheduler, make_scheduler

PRINTED = 5.1e-6  # the traces were printed with five decimals


def make_optimizer(
    *lrs: float, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)])


def config_of(kind: str, params: dict[str, Any]) -> SchedulerConfig:
    config = load_config({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}}, world_size=1)
    assert config.scheduler is not None
    return config.scheduler


def make(kind: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Scheduler:
    return make_scheduler(config_of(kind, params), optimizer)


def rates(kind: str, params: dict[str, Any], num_steps: int, *, lr: float = 1.0) -> list[float]:
    """The rate that each optimizer step would use: the one in the group, then step()."""
    optimizer = make_optimizer(lr)
    scheduler = make(kind, params, optimizer)
    trace = []
    for _ in range(num_steps):
        trace.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [trace[-1]]
        scheduler.step()
    return trace


LINEAR5 = {"warmup_num_steps": 5, "warmup_type": "linear"}
LOG5 = {"warmup_num_steps": 5, "warmup_type": "log"}
CYCLE4 = {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 4}

TRACES = [
    # printed by DeepSpeed
    ("WarmupLR", {**LINEAR5, "warmup_max_lr": 1}, [0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1]),
    ("WarmupLR", {**LOG5, "warmup_max_lr": 1}, [0, 0, 0.43068, 0.68261, 0.86135, 1, 1]),
    ("WarmupDecayLR", {**LINEAR5, "warmup_max_lr": 1, "total_num_steps": 10},
     [0, 0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
    ("WarmupCosineLR", {**LINEAR5, "total_num_steps": 10},
     [0, 0, 0.2, 0.4, 0.6, 0.8, 0.90452, 0.65454, 0.34556, 0.09558, 1e-4, 1e-4]),
    ("OneCycle", {**CYCLE4}, [0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1]),
    ("OneCycle", {**CYCLE4, "decay_lr_rate": 1, "decay_step_size": 2},
     [0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1, 0.06667, 0.05, 0.04, 0.03333]),
    ("OneCycle", {**CYCLE4, "cycle_second_step_size": 0}, [0.1, 0.325, 0.55, 0.775, 0.1, 0.1]),
    ("OneCycle", {**CYCLE4, "cycle_second_step_size": 0, "decay_lr_rate": 1, "decay_step_size": 2},
     [0.1, 0.325, 0.55, 0.775, 0.1, 0.06667, 0.05]),
    # from the formulas
    ("WarmupLR", {"warmup_min_lr": 0.5, "warmup_max_lr": 1, "warmup_num_steps": 2, "warmup_type": "linear"},
     [0.5, 0.5, 0.75, 1, 1]),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 1}, [0, 0, 1, 1]),  # 1 counts as 2
    # log is the default
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 4}, [0, 0, 0.5, math.log(3, 4), 1]),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 2}, [0, 0, 0.001, 0.001, 0.0005, 0, 0]),
    ("WarmupCosineLR", {**LINEAR5, "total_num_steps": 7, "warmup_min_ratio": 0.5, "cos_min_ratio": 0},
     [0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.5, 0, 0]),
    ("OneCycle", {**CYCLE4, "cycle_second_step_size": 2}, [0.1, 0.325, 0.55, 0.775, 1, 0.55, 0.1, 0.1, 0.1]),
    # decay_step_size 0: no decay
    ("OneCycle", {**CYCLE4, "decay_lr_rate": 1},
     [0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1]),
    ("OneCycle", {**CYCLE4, "cycle_first_stair_count": 2}, [0.1, 0.1, 0.55, 0.55, 1, 0.55, 0.55, 0.1, 0.1]),
    ("OneCycle", {**CYCLE4, "cycle_first_stair_count": 2, "cycle_second_stair_count": 0},
     [0.1, 0.1, 0.55, 0.55, 1, 0.775, 0.55, 0.325, 0.1]),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}, [0.1, 0.15, 0.2, 0.25, 0.3]),
    ("LRRangeTest",
     {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
     [0.1, 0.1, 0.2, 0.2, 0.3]),
    ("LRRangeTest", {"lr_range_test_min_lr": 1, "lr_range_test_step_size": 1, "lr_range_test_step_rate": 5},
     [1, 6, 11]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "expected"), TRACES)
def test_the_rates_are_those_of_the_trace(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(kind, params, len(expected)) == pytest.approx(expected, abs=PRINTED)


def test_every_schedule_has_a_trace() -> None:
    assert {kind for kind, _, _ in TRACES} == set(PARAMS_OF)


@pytest.mark.parametrize(("kind", "params", "expected"), TRACES)
def test_a_program_may_make_them_itself(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    scheduler, trace = getattr(lr_schedules, kind)(make_optimizer(), **params), []
    for _ in expected:
        trace += scheduler.get_last_lr()
        scheduler.step()
    assert trace == pytest.approx(expected, abs=PRINTED)


def test_the_part_of_a_cycle_that_goes_up_can_be_asked() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cycle = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=1, cycle_second_step_size=3)
    assert cycle.step_ratio == 0.25
    assert OneCycle(optimizer, 0.1, 1.0, cycle_second_step_size=0).step_ratio == 1.0


def test_the_order_of_arguments_is_deepspeeds() -> None:
    signatures = {kind: list(signature(getattr(lr_schedules, kind)).parameters) for kind in PARAMS_OF}
    for kind, names in signatures.items():
        assert names == ["optimizer", *PARAMS_OF[kind].model_fields]
    with pytest.raises(TypeError, match="missing a required argument: 'total_num_steps'"):
        lr_schedules.WarmupDecayLR(make_optimizer())
    with pytest.raises(ConfigError) as caught:
        lr_schedules.WarmupLR(make_optimizer(), warmup_num_steps=0, last_batch_iteration=-2)
    first, second = str(caught.value).splitlines()
    assert first.startswith("WarmupLR.warmup_num_steps 0 ")
    assert second.startswith("WarmupLR.last_batch_iteration -2 ")


def test_a_largest_rate_that_is_none_is_each_groups_own() -> None:
    for kind, more in (("WarmupLR", ()), ("WarmupDecayLR", (10,))):
        scheduler = getattr(lr_schedules, kind)(
            make_optimizer(1.0, 3.0), *more, warmup_max_lr=None, warmup_num_steps=2
        )
        scheduler.step(2)
        assert scheduler.get_last_lr() == [1.0, 3.0], kind


def test_a_schedule_of_a_programs_own_has_its_own_arguments() -> None:
    class Mine(lr_schedules.WarmupLR):
        def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
            super().__init__(optimizer, warmup_num_steps=steps)

    assert list(signature(Mine).parameters) == ["optimizer", "steps"]
    assert Mine(make_optimizer(), 7).warmup_num_steps == 7


@pytest.mark.parametrize("given", ["x", "LINEAR", None])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_an_unknown_warmup_type_that_a_program_gives_is_told_and_counts_as_log(
    kind: str, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"warmup_num_steps": 5} | ({} if kind == "WarmupLR" else {"total_num_steps": 9})
    scheduler, trace = getattr(lr_schedules, kind)(make_optimizer(), warmup_type=given, **params), []
    for _ in range(9):
        trace += scheduler.get_last_lr()
        scheduler.step()
    (record,) = caplog.records
    shown = "null" if given is None else f'"{given}"'
    assert record.getMessage() == (
        f'{kind}.warmup_type {shown} is unknown and counts as "log", as in DeepSpeed; write "log" or "linear"'
    )
    assert trace == rates(kind, {**params, "warmup_type": "log"}, 9)


@pytest.mark.parametrize(("kind", "params", "expected"), TRACES)
def test_a_schedule_that_is_stopped_and_loaded_goes_on_where_it_was(
    kind: str, params: dict[str, Any], expected: list[float]
) -> None:
    whole = rates(kind, params, len(expected))
    for stop in range(len(expected)):
        first = make(kind, params, make_optimizer())
        for _ in range(stop):
            first.step()
        optimizer = make_optimizer()
        second = make(kind, params, optimizer)
        second.load_state_dict(first.state_dict())
        assert first.state_dict() == {"last_batch_iteration": stop - 1}
        assert optimizer.param_groups[0]["lr"] == whole[stop]


def test_each_group_has_its_own_rate() -> None:
    optimizer = make_optimizer(1.0, 3.0)
    scheduler = make("WarmupLR", {**LINEAR5, "warmup_min_lr": [0, 1]}, optimizer)
    assert scheduler.get_last_lr() == [0, 1]
    scheduler.step(4)
    assert scheduler.get_last_lr() == pytest.approx([0.8, 2.6])
    scheduler.step()
    assert scheduler.get_last_lr() == [1, 3]  # no warmup_max_lr: the rate of each group
    assert scheduler.get_lr() == [1, 3]

    optimizer = make_optimizer(1.0, 3.0)
    cosine = make("WarmupCosineLR", {**LINEAR5, "total_num_steps": 10}, optimizer)
    cosine.step(4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.8, 2.4])
    assert cosine.get_lr_ratio() == pytest.approx(0.8)


def test_step_goes_to_the_iteration_that_is_given() -> None:
    optimizer = make_optimizer()
    scheduler = make("WarmupLR", LINEAR5, optimizer)
    scheduler.step(3)
    assert optimizer.param_groups[0]["lr"] == 0.6
    assert scheduler.state_dict() == {"last_batch_iteration": 3}
    scheduler.step(0)
    assert optimizer.param_groups[0]["lr"] == 0


def test_a_start_in_the_middle_leaves_the_rates_until_the_first_step() -> None:
    optimizer = make_optimizer(0.7)
    scheduler = make("WarmupLR", {**LINEAR5, "warmup_max_lr": 1, "last_batch_iteration": 2}, optimizer)
    assert scheduler.get_last_lr() == [0.7]
    scheduler.step()
    assert scheduler.get_last_lr() == [0.6]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    make("WarmupLR", {**LINEAR5, "warmup_max_lr": 1}, optimizer).step(5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 1


def test_one_cycle_moves_the_first_beta_against_the_rate() -> None:
    optimizer = make_optimizer()
    scheduler = make("OneCycle", {**CYCLE4, "decay_step_size": 2, "decay_mom_rate": 0.1}, optimizer)
    trace = []
    for _ in range(10):
        trace.append(optimizer.param_groups[0]["betas"])
        scheduler.step()
    firsts = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945]
    assert [first for first, _ in trace] == pytest.approx(firsts)
    assert {second for _, second in trace} == {0.99}


def test_one_cycle_says_the_momentum_of_the_cycle_before_its_first_step() -> None:
    """As DeepSpeed does, whose groups have the smallest one then."""
    optimizer = make_optimizer()
    scheduler = make("OneCycle", CYCLE4, optimizer)
    assert isinstance(scheduler, OneCycle)
    assert scheduler.get_mom() == [(0.9, 0.99)]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_one_cycle_takes_a_rate_and_a_momentum_for_each_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups)
    lists = {
        "cycle_min_lr": [0.1, 0.2],
        "cycle_max_lr": [1, 2],
        "cycle_min_mom": [0.5, 0.6],
        "cycle_max_mom": 0.9,
    }
    scheduler = make("OneCycle", {**lists, "cycle_first_step_size": 4}, optimizer)
    scheduler.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.55, 1.1])
    assert [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.7, 0.75])
    with pytest.raises(ConfigError, match=r"scheduler.params.cycle_max_lr \[1.0, 2.0, 3.0\] has 3 numbers"):
        make("OneCycle", {**lists, "cycle_max_lr": [1, 2, 3]}, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_cycle_can_leave_momentum_alone(
    kind: Callable[..., torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = make_optimizer(kind=kind)
    before = optimizer.param_groups[0].get("betas")
    scheduler = make("OneCycle", {**CYCLE4, "cycle_momentum": False}, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0].get("betas") == before
    assert isinstance(scheduler, OneCycle)
    assert scheduler.get_mom() is None
    assert caplog.messages == []


def test_one_cycle_says_that_an_optimizer_has_no_betas(caplog: pytest.LogCaptureFixture) -> None:
    make("OneCycle", CYCLE4, make_optimizer(kind=torch.optim.SGD)).step()
    assert caplog.messages == [
        "scheduler.params.cycle_momentum true has no effect: SGD has no betas; write false"
    ]


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_warm_up_that_outlasts_training_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make(kind, {"total_num_steps": 10}, make_optimizer())
    assert caplog.messages == [
        (
            "scheduler.params.total_num_steps 10 is below warmup_num_steps 1000: the warm-up lasts "
            "longer than training"
        )
    ]


def test_a_scheduler_of_torch_is_that_of_torch() -> None:
    optimizer, plain = make_optimizer(), make_optimizer()
    scheduler, expected = make("StepLR", {"step_size": 2, "gamma": 0.5}, optimizer), StepLR(plain, 2, 0.5)
    assert isinstance(scheduler, StepLR)
    for _ in range(5):
        optimizer.step()
        plain.step()
        scheduler.step()
        expected.step()
        assert scheduler.get_last_lr() == expected.get_last_lr()
    assert scheduler.state_dict()["last_epoch"] == 5
    assert isinstance(make("OneCycleLR", {"max_lr": 1, "total_steps": 9}, make_optimizer()), OneCycleLR)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (
            "WarmupLR",
            {"warmup_min_lr": [0, 0, 0]},
            "scheduler.params.warmup_min_lr [0.0, 0.0, 0.0] has 3 numbers, the optimizer has 2 parameter "
            "groups; write one number, or one for each group",
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": [1]},
            "scheduler.params.lr_range_test_min_lr [1.0] has 1 numbers, the optimizer has 2 parameter "
            "groups; write one number, or one for each group",
        ),
        (
            "StepLR",
            {"step_size": 2, "gamma": "x", "last_epoch": 5},
            'scheduler.params.step_size 2, scheduler.params.gamma "x", scheduler.params.last_epoch 5: '
            "torch.optim.lr_scheduler.StepLR does not take this: ",
        ),
        (
            "OneCycleLR",
            {"max_lr": 1},
            "scheduler.params.max_lr 1: torch.optim.lr_scheduler.OneCycleLR does not take this: "
            "You must define either total_steps OR (epochs AND steps_per_epoch)",
        ),
    ],
)
def test_parameters_that_do_not_fit_the_optimizer_are_named(
    kind: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(kind, params, make_optimizer(1.0, 1.0))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
