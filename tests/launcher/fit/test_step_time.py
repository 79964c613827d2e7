"""The time of a step by arithmetic on amounts and speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dslaunch.launcher.fit.answer import DeviceWork, SentBytes, StepWork
from dslaunch.launcher.fit.devices import find_gpu
from dslaunch.launcher.fit.speeds import SpeedRange, Speeds, speeds_of_sheet
from dslaunch.launcher.fit.step_time import (
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    OFFLOAD,
    OPTIMIZER,
    TimeRange,
    step_range,
    step_time,
    whole_step,
)

A100 = speeds_of_sheet(find_gpu("A100-80"))
TERA = 10**12
MEASURED = Speeds(
    is_measured=True,
    arithmetic=(("float32", ((1.0, 1e9), (11.0, 2e9))),),
    memory=(("float32", 1e9),),
    launch_s=0.001,
    adds_launches=True,
    inside=(("all_gather", ((1000.0, 0.5), (2000.0, 0.75))),),
    between=(("all_gather", ((1000.0, 5.0),)),),
    update_bytes_per_s=1e9,
    copied_bytes_per_s=0.0,
    disk_bytes_per_s=1e9,
    hidden=0.0,
)


def _work(**given: object) -> StepWork:
    plain: dict[str, object] = {"on_device": (), "host_bytes": 0, "copied_bytes": (), "sent": ()}
    return StepWork(**{**plain, **given})  # type: ignore[arg-type]


def _operations(
    flops: int = 0,
    moved_bytes: int = 0,
    num_kernels: int = 1,
    *,
    dtype: str = "bfloat16",
    is_update: bool = False,
) -> DeviceWork:
    return DeviceWork(
        dtype=dtype, flops=flops, moved_bytes=moved_bytes, num_kernels=num_kernels, is_update=is_update
    )


def test_what_holds_an_operation_up_is_the_slowest_of_arithmetic_memory_and_its_launch() -> None:
    def seconds(work: DeviceWork) -> tuple[float, float]:
        return step_range(_work(on_device=(work,)), A100, leaves_host={})[COMPUTE]

    assert seconds(_operations(flops=312 * TERA)) == pytest.approx((1 / 0.75, 1 / 0.3))
    assert seconds(_operations(flops=TERA, moved_bytes=2039 * 10**9)) == pytest.approx((1 / 0.9, 2.0))
    assert seconds(_operations(num_kernels=100_000)) == pytest.approx((0.2, 1.0))


def test_messages_cost_nothing_beside_enough_arithmetic_and_all_their_time_at_worst() -> None:
    sent = SentBytes(axis="dp", ranks=(), kinds=(("all_gather", 45 * 10**9),))
    work = _work(on_device=(_operations(flops=3 * 312 * TERA),), sent=(sent,))
    parts = step_range(work, A100, leaves_host={"dp": True})
    assert parts[COMMUNICATION] == pytest.approx((0.0, 45.0))
    inside = step_range(work, A100, leaves_host={"dp": False})
    assert inside[COMMUNICATION].high == pytest.approx(45 / (300 * 0.3))


def test_messages_of_the_optimizer_step_are_waited_for() -> None:
    kinds = (("all_gather", 45 * 10**9),)
    sent = SentBytes(axis="dp", ranks=(), kinds=kinds, update_kinds=kinds)
    work = _work(on_device=(_operations(flops=3 * 312 * TERA),), sent=(sent,))
    assert step_range(work, A100, leaves_host={"dp": True})[COMMUNICATION] == pytest.approx((1.0, 45.0))


def test_stages_wait_for_the_first_and_the_last_micro_batch() -> None:
    work = _work(on_device=(_operations(flops=312 * TERA),))
    parts = step_range(work, A100, leaves_host={}, idle=3 / 6)
    assert parts[BUBBLE].low == pytest.approx(parts[COMPUTE].low / 2)
    assert whole_step(parts).low == pytest.approx(parts[COMPUTE].low * 1.5)


def test_what_goes_to_the_host_and_to_the_disk_is_told_apart() -> None:
    work = _work(host_bytes=60 * 10**9, copied_bytes=(("to host", 32 * 10**9), ("to disk", 6 * 10**9)))
    parts = step_range(work, A100, leaves_host={})
    assert parts[OPTIMIZER] == pytest.approx((1.0, 12.0))
    assert parts[OFFLOAD] == pytest.approx((1 / 0.85 + 1, 1 / 0.3 + 12))


def test_measured_speeds_give_one_number_for_each_part() -> None:
    sent = SentBytes(
        axis="dp",
        ranks=(),
        kinds=(("all_gather", 3000), ("scalar", 8)),
        number=(("all_gather", 2), ("scalar", 1)),
    )
    work = _work(
        on_device=(
            _operations(6 * 10**9, 10**9, dtype="float32"),  # 6 flops for each byte: 1.5 GFLOP/s
            _operations(0, 10**9, 10, dtype="bool", is_update=True),
        ),
        host_bytes=10**9,
        copied_bytes=(("to disk", 2 * 10**9),),
        sent=(sent,),
    )
    parts = step_time(work, MEASURED, leaves_host={"dp": False})
    assert parts == pytest.approx(
        {
            COMPUTE: 4 + 0.001,
            COMMUNICATION: 2 * 0.625 + 0.5,
            OPTIMIZER: 1 + 10 * 0.001 + 1,
            OFFLOAD: 2.0,
            BUBBLE: 0.0,
        }
    )
    assert step_time(work, MEASURED, leaves_host={"dp": True})[COMMUNICATION] == pytest.approx(2 * 7.5 + 5)
    hidden = step_time(work, replace(MEASURED, hidden=0.25), leaves_host={"dp": False})
    assert hidden[COMMUNICATION] == pytest.approx(1.75 - 4.001 / 4)
    ranges = step_range(work, SpeedRange(MEASURED, MEASURED), leaves_host={"dp": False})
    assert ranges[OFFLOAD] == TimeRange(2.0, 2.0)
