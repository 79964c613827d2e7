"""The time of a step by arithmetic on amounts and speeds."""

from __future__ import annotations

import pytest

from dslaunch.launcher.fit.answer import DeviceWork, SentBytes, StepWork
from dslaunch.launcher.fit.devices import find_gpu
from dslaunch.launcher.fit.step_time import (
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    OFFLOAD,
    OPTIMIZER,
    step_time,
    whole_step,
)

A100 = find_gpu("A100-80")
TERA = 10**12


def _work(**given: object) -> StepWork:
    plain: dict[str, object] = {"on_device": (), "host_bytes": 0, "copied_bytes": (), "sent": ()}
    return StepWork(**{**plain, **given})  # type: ignore[arg-type]


def _operations(flops: int = 0, moved_bytes: int = 0, num_kernels: int = 1) -> DeviceWork:
    return DeviceWork(dtype="bfloat16", flops=flops, moved_bytes=moved_bytes, num_kernels=num_kernels)


def test_what_holds_an_operation_up_is_the_slowest_of_arithmetic_memory_and_its_launch() -> None:
    def seconds(work: DeviceWork) -> tuple[float, float]:
        parts = step_time(_work(on_device=(work,)), A100, leaves_host={}, num_stages=1, num_micro_batches=1)
        return parts[COMPUTE]

    assert seconds(_operations(flops=312 * TERA)) == pytest.approx((1 / 0.75, 1 / 0.3))
    assert seconds(_operations(flops=TERA, moved_bytes=2039 * 10**9)) == pytest.approx((1 / 0.9, 2.0))
    assert seconds(_operations(num_kernels=100_000)) == pytest.approx((0.2, 1.0))


def test_messages_cost_nothing_beside_enough_arithmetic_and_all_their_time_at_worst() -> None:
    sent = SentBytes(axis="dp", ranks=(), kinds=(("all_gather", 45 * 10**9),))
    work = _work(on_device=(_operations(flops=3 * 312 * TERA),), sent=(sent,))
    parts = step_time(work, A100, leaves_host={"dp": True}, num_stages=1, num_micro_batches=1)
    assert parts[COMMUNICATION] == pytest.approx((0.0, 45.0))
    inside = step_time(work, A100, leaves_host={"dp": False}, num_stages=1, num_micro_batches=1)
    assert inside[COMMUNICATION].high == pytest.approx(45 / (300 * 0.3))


def test_stages_wait_for_the_first_and_the_last_micro_batch() -> None:
    work = _work(on_device=(_operations(flops=312 * TERA),))
    parts = step_time(work, A100, leaves_host={}, num_stages=4, num_micro_batches=6)
    assert parts[BUBBLE].low == pytest.approx(parts[COMPUTE].low / 2)
    assert whole_step(parts).low == pytest.approx(parts[COMPUTE].low * 1.5)


def test_what_goes_to_the_host_and_to_the_disk_is_told_apart() -> None:
    work = _work(host_bytes=60 * 10**9, copied_bytes=(("to host", 32 * 10**9), ("to disk", 6 * 10**9)))
    parts = step_time(work, A100, leaves_host={}, num_stages=1, num_micro_batches=1)
    assert parts[OPTIMIZER] == pytest.approx((1.0, 12.0))
    assert parts[OFFLOAD] == pytest.approx((1 / 0.85 + 1, 1 / 0.3 + 12))
