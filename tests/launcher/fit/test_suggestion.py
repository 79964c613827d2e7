"""Configurations that a job could have: bounds, what is tried next, and the rows with their reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.fit.answer import Answer, StepWork
from dslaunch.launcher.fit.candidates import Candidate, Placing, Setup, has_own_batch, placing_of
from dslaunch.launcher.fit.finding import finding_of
from dslaunch.launcher.fit.forecast import Forecast
from dslaunch.launcher.fit.mesh_choices import mesh_choices
from dslaunch.launcher.fit.model_bytes import ModelBytes, RankRoom, model_bytes, room_of, setups_of
from dslaunch.launcher.fit.step_time import COMPUTE, TimeRange
from dslaunch.launcher.fit.suggestion import Suggestions, Tried, in_order
from dslaunch.launcher.fit.ways_out import WayOut, ways_text
from dslaunch.launcher.job.mesh import HostSlots, JobMesh
from dslaunch.shared.zero_bytes import TrainedBytes

from .answers import GIB, answer, memory, rehearsed

GOLDEN = Path(__file__).parents[1] / "golden"
ON_HOST = Placing(stage=3, has_optimizer_on_host=True, has_parameters_on_host=True)


def candidate(placing: Placing, size: int = 2, number: int = 2, **setup: Any) -> Candidate:
    return Candidate(setup=Setup(placing=placing, **setup), micro_batch_size=size, num_micro_batches=number)


SIZES = ModelBytes(
    num_trained=GIB,
    num_frozen=0,
    each=TrainedBytes(parameter=2, states=12),
    activation_bytes=GIB,
    has_gpus=True,
    given=candidate(Placing(stage=1)),
)


def test_sizes_are_those_that_the_rehearsal_told() -> None:
    phase = {
        "name": "step 2",
        "clock": 1,
        "peaks": {
            "device": {
                "bytes": 11 * GIB,
                "kinds": {"activations": 8 * GIB, "masters and optimizer states": 3 * GIB},
                "module": "",
            }
        },
    }
    found = answer(
        phases=[phase],
        model={"num_trained": GIB, "num_frozen": 0, "micro_batch_size": 8, "num_micro_batches": 2},
        file_bytes={},
    )
    setup = Setup(placing=Placing(stage=1))
    sizes = model_bytes(found, {"bf16": {"enabled": True}}, setup, world_size=4, has_gpus=True)
    assert sizes == ModelBytes(
        num_trained=GIB,
        num_frozen=0,
        each=TrainedBytes(parameter=2, states=12),  # of 4 ranks, each has 3 of the latter
        activation_bytes=GIB,
        has_gpus=True,
        given=candidate(Placing(stage=1), 8, 2),
    )


@pytest.mark.parametrize(
    ("setup", "gibs"),
    [
        # parameters, gradients, masters and states of 4 ranks, activations of 2 samples
        (Setup(placing=Placing(stage=1)), 2 + 2 + 12 / 4 + 2),
        (Setup(placing=Placing(stage=2)), 2 + 4 / 4 + 12 / 4 + 2),
        (Setup(placing=Placing(stage=3)), 2 / 4 + 4 / 4 + 12 / 4 + 2),
        (Setup(placing=Placing(stage=2, has_optimizer_on_host=True)), 2 + 2),
        (Setup(placing=ON_HOST), 2),
        (Setup(placing=Placing(stage=1), is_checkpointed=True), 2 + 2 + 12 / 4),
        (Setup(placing=Placing(stage=1), mesh=JobMesh(dp=2, tp=2)), (2 + 2 + 12 / 2) / 2 + 1),
    ],
)
def test_a_bound_has_the_parts_that_a_rank_surely_needs(setup: Setup, gibs: float) -> None:
    assert SIZES.bound(setup, 2, world_size=4).on_device == gibs * GIB


def test_configurations_keep_the_samples_of_a_step() -> None:
    one, two = (Setup(placing=Placing(stage=1), mesh=mesh) for mesh in (None, JobMesh(dp=2, tp=2)))
    found = [one.text for one in SIZES.configurations([one, two])]
    assert found == [
        *(f"stage 1, micro batch {sizes}" for sizes in ("4 x 1", "2 x 2", "1 x 4")),
        *(f"stage 1, tp=2, micro batch {sizes}" for sizes in ("8 x 1", "4 x 2", "2 x 4", "1 x 8")),
    ]
    fixed = SIZES.configurations([one], may_change_batch=False)
    assert [one.text for one in fixed] == ["stage 1, micro batch 2 x 2"]


def test_setups_leave_out_what_cannot_be() -> None:
    stages = JobMesh(pp=2, dp=2)
    found = setups_of(meshes=[None, stages], checkpointing=[False], has_gpus=False)
    assert [one.text for one in found] == ["stage 1", "stage 2", "stage 3", "stage 1, pp=2"]


@pytest.mark.parametrize(
    ("given", "axes", "sizes"),
    [
        (None, ["tp"], ["", "tp=2", "tp=4"]),
        (None, [], [""]),
        (JobMesh(dp=4, tp=2), ["tp"], ["tp=2", "", "tp=4"]),
        (JobMesh(pp=2, dp=4), ["pp"], ["pp=2", "", "pp=4", "pp=8"]),
    ],
)
def test_tp_stays_inside_a_host(given: JobMesh | None, axes: list[str], sizes: list[str]) -> None:
    found = mesh_choices(given, axes=axes, hosts=[HostSlots("a", 4), HostSlots("b", 4)])
    texts = [Setup(placing=ON_HOST, mesh=one).text.removeprefix(ON_HOST.text).strip(", ") for one in found]
    assert texts == sizes


def test_a_candidate_changes_its_own_keys_of_the_ds_config() -> None:
    base: dict[str, Any] = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}, "overlap_comm": True},
    }
    placing = Placing(stage=2, has_optimizer_on_host=True)
    made = candidate(placing, 2, 4, mesh=JobMesh(dp=1, tp=2), says_mesh=True).config(base)
    assert made == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "mesh": {"tp": 2},
    }
    assert base["zero_optimization"]["stage"] == 1
    assert "mesh" not in candidate(placing, 2, 4, mesh=JobMesh(dp=1, tp=2)).config(base)
    assert placing_of(made) == placing
    trainers = base | {"train_micro_batch_size_per_gpu": "auto"}
    assert has_own_batch(trainers)
    assert not has_own_batch(made)
    assert candidate(placing, 2, 4).config(trainers)["train_micro_batch_size_per_gpu"] == "auto"


@pytest.mark.parametrize(
    ("old", "placing"),
    [
        (True, Placing(stage=1)),
        ({"stage": 2, "cpu_offload": True}, Placing(stage=2, has_optimizer_on_host=True)),
        ({"stage": 3, "cpu_offload_param": True}, Placing(stage=3, has_parameters_on_host=True)),
    ],
)
def test_old_spellings_of_a_placing_are_read_and_replaced(old: Any, placing: Placing) -> None:
    assert placing_of({"zero_optimization": old}) == placing
    made = candidate(Placing(stage=2)).config({"zero_optimization": old})
    assert made["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(("held", "number_bytes"), [(2 * GIB, 2), (4 * GIB, 4)])
def test_a_dtype_that_a_trainer_fills_in_is_that_of_the_parameters(held: int, number_bytes: int) -> None:
    peak = {"bytes": held, "kinds": {"parameters": held}, "module": ""}
    found = answer(
        phases=[{"name": "step 2", "clock": 1, "peaks": {"device": peak}}],
        model={"num_trained": GIB, "num_frozen": 0},
    )
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    setup = Setup(placing=Placing(stage=2))
    assert model_bytes(found, config, setup, world_size=4, has_gpus=True).each.parameter == number_bytes


def test_states_that_files_have_are_counted_as_the_ds_config_keeps_them() -> None:
    config = {"bf16": {"enabled": True}, "data_types": {"optimizer_state_dtype": "8bit"}}
    found = answer(model={"num_trained": GIB}, file_bytes={"offloaded": GIB})
    sizes = model_bytes(found, config, Setup(placing=Placing(stage=2)), world_size=4, has_gpus=True)
    assert sizes.each == TrainedBytes(parameter=2, states=6 + 1 / 32)


HOSTS = (HostSlots("a", 2), HostSlots("b", 2))


def forecast(room: float = 22.5, found: Answer | None = None) -> Forecast:
    """Return the forecast of a job that was seen with 3 GiB of parameters and 1 of gradients."""
    made = Forecast(SIZES, RankRoom(room * GIB, None), hosts=HOSTS)
    made.saw(SIZES.given, found or answer(activations=16), world_size=4)
    return made


def test_what_was_seen_is_expected_again() -> None:
    found = forecast()
    # its own setup as it was seen: 4 GiB beside 8 for a sample
    assert found.expected(candidate(Placing(stage=1), 1, 4)).on_device == 12 * GIB
    # another by its parts, which are 2.5 GiB less; checkpointed ones keep a part of their activations
    assert found.expected(candidate(Placing(stage=3), 1, 4)).on_device == (12 - 2.5) * GIB
    assert found.expected(candidate(Placing(stage=1), 1, 4, is_checkpointed=True)).on_device < 6 * GIB
    checkpointed = candidate(Placing(stage=2), 2, 2, is_checkpointed=True)
    found.saw(checkpointed, answer(activations=1), world_size=4)
    assert found.expected(candidate(Placing(stage=2), 4, 1, is_checkpointed=True)).on_device == 6 * GIB


def test_the_hosts_that_it_takes_are_those_that_hold_its_shares() -> None:
    # of 22.5 GiB, 16 are activations and 4 other parts, of which 3 are shared by 4 ranks
    assert forecast(19).hosts_needed(SIZES.given) == 3
    assert forecast(12).hosts_needed(SIZES.given) is None


def test_the_work_of_a_step_tells_apart_what_is_sent_copied_and_computed() -> None:
    found, work = forecast(), answer().steps[0]

    def of(placing: Placing, size: int = 2, **setup: Any) -> StepWork:
        return found.work(candidate(placing, size, 4 // size, **setup), work)

    sent = [sum(one.num_bytes for one in of(Placing(stage=stage)).sent) for stage in (1, 2, 3)]
    kept = 2 * GIB  # along tp, as it was
    assert [one - kept for one in sent] == [times * 3 / 4 * 2 * GIB for times in (2, 2 + 1, 3 * 2)]
    assert of(ON_HOST).host_bytes == 2 * GIB / 4 * (12 + 4)
    assert dict(of(Placing(stage=1)).copied_bytes) == {"to and from the host": 0}
    again = of(Placing(stage=1), is_checkpointed=True)
    assert again.on_device[0].flops == work.on_device[0].flops * 4 // 3
    assert of(Placing(stage=1), 1).on_device[0].num_kernels == 2 * work.on_device[0].num_kernels


def test_a_rank_has_the_room_of_its_device_and_its_part_of_the_host() -> None:
    found = room_of(memory(device=20, hosts=(None, 8), num_ranks=2), margin=0.1)
    assert found == RankRoom(17 * GIB, 3 * GIB)


def way(
    placing: Placing, size: int = 2, *, num_hosts: int | None = None, is_rehearsed: bool = True
) -> WayOut:
    return WayOut(
        candidate=candidate(placing, size, 4 // size),
        num_hosts=num_hosts,
        is_rehearsed=is_rehearsed,
        device_bytes=GIB,
        host_bytes=118 * GIB,
    )


@pytest.mark.parametrize(
    ("ways", "text"),
    [
        (
            [way(Placing(stage=3, has_optimizer_on_host=True)), way(Placing(stage=1), num_hosts=6)],
            "fits with stage 3 and the optimizer on cpu (118 GiB of each host), or on 6 hosts",
        ),
        (
            [way(Placing(stage=1), 1), way(Placing(stage=3), num_hosts=6, is_rehearsed=False)],
            "fits with micro batches of 1; would fit by its bounds with stage 3 on 6 hosts",
        ),
        (
            [way(ON_HOST, 1)],
            "fits with stage 3, the optimizer and the parameters on cpu and micro batches of 1 (118 GiB of "
            "each host)",
        ),
        ([], ""),
    ],
)
def test_the_way_out_says_what_changes(ways: list[WayOut], text: str) -> None:
    assert ways_text(SIZES.given, ways) == text


def tried(
    stage: int, *, activations: float, seconds: float | None = 1.0, host_memory: float | None = None
) -> Tried:
    """Return a configuration that needs 5 GiB of a GPU beside its activations, and 6 GiB of each host."""
    found = finding_of(
        [rehearsed(answer(activations=activations))],
        memory(hosts=(host_memory, host_memory)),
        device="A10",
        device_from="",
        times=[] if seconds is None else [{COMPUTE: TimeRange(seconds, 4 * seconds)}],
    )
    return Tried(candidate=candidate(Placing(stage=stage), 1, 4), finding=found)


def test_rows_have_the_fastest_first_and_a_reason() -> None:
    failed = candidate(Placing(stage=3), 1, 4, is_checkpointed=True)
    found = Suggestions(
        tried=in_order(
            [
                tried(1, activations=20),
                tried(2, activations=8, seconds=3),
                tried(3, activations=9, seconds=2),
                Tried(candidate=failed, finding=None, why_not="no"),
            ]
        ),
        too_large=((ON_HOST, 30 * GIB),),
        hosts=None,
        config={},
        num_others=7,
        notes=("not tried: meshes",),
    )
    text = "\n".join(found.lines()) + "\n"
    assert text == (GOLDEN / "plan-suggest.txt").read_text(), f"\n{text}"
    assert [one["fits"] for one in found.as_data()] == [True, True, False, False]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (tried(2, activations=18), "too large by 0.5 GiB"),
        (tried(2, activations=1, host_memory=5), "too large for the memory of node1 by 1.0 GiB"),
        (tried(2, activations=15.3), "fits, with less than a tenth to spare"),
        (tried(2, activations=15.25, seconds=1.04), "fits, and is about as fast"),  # a tenth of 22.5 is free
        (tried(2, activations=8, seconds=1.06), "fits; 1.1 times as long"),
        (tried(2, activations=8, seconds=None), "fits, and sends or copies more"),
    ],
)
def test_a_row_says_why_it_is_not_the_first(other: Tried, why: str) -> None:
    first = tried(1, activations=8)
    found = Suggestions(tried=(first, other), too_large=(), hosts=None, config={}).as_data()
    assert [one["why"] for one in found] == ["the fastest that fits", why]


def test_what_does_not_fit_is_told_below_the_rows_too() -> None:
    many = [tried(2, activations=8), *(tried(3, activations=18 + number) for number in range(1, 6))]
    found = Suggestions(
        tried=in_order(many), too_large=((Placing(stage=1), 30 * GIB),), hosts=None, config={}
    )
    assert found.lines()[-1] == (
        "others that do not fit: stage 3, micro batch 1 x 4 (too large by 5.5 GiB); stage 1 (30.0 GiB at "
        "least)"
    )


def test_where_nothing_fits_the_hosts_that_would_are_named() -> None:
    hosts = way(Placing(stage=3), num_hosts=6)
    found = Suggestions(tried=(tried(3, activations=20),), too_large=(), hosts=hosts, config={})
    assert found.best is None
    assert found.lines()[1] == (
        "suggested: nothing that was tried fits with a tenth to spare; stage 3, micro batch 2 x 2 fits on 6 "
        "such hosts"
    )
