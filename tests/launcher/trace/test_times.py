"""Where the time went, of traces whose numbers can be added up by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.launcher.trace.intervals import common, length, union, without
from dslaunch.launcher.trace.rank_trace import RankTrace, read_rank
from dslaunch.launcher.trace.shown import head_of, lines_of
from dslaunch.launcher.trace.times import RankTimes, times_of
from tests.launcher.trace.made_up import clock, span, torch_event, write_rank


def read(folder: Path, rank: int = 0, host: str = "a") -> RankTrace:
    trace = read_rank(folder, rank=rank, host=host, clock=clock(), wanted=(1, 2))
    assert trace.problems == ()
    return trace


def times(folder: Path, rank: int = 0) -> RankTimes:
    found = times_of(read(folder, rank))
    assert found is not None
    return found


def ms(s: float | None) -> float | None:
    return None if s is None else round(s * 1e3, 6)


def on_cpu(folder: Path) -> None:
    """Two steps of 100 ms and 60 ms."""
    first = [
        span("data", "data", 0, 10),
        span("communication", "all_gather of unit 'a'", 10, 30, op="all_gather", what="unit 'a'"),
        span("wait", "wait for all_gather of unit 'a'", 22, 30),
        span("unit", "forward of a", 12, 40),
        span("forward", "forward", 10, 40),
        span("communication", "reduce_scatter of unit 'a'", 50, 80, op="reduce_scatter", what="unit 'a'"),
        span("wait", "wait for reduce_scatter of unit 'a'", 66, 80),
        span("backward", "backward", 42, 80),
        span("disk", "read states of unit 'a'", 60, 90),
        span("disk wait", "wait for read of states of unit 'a'", 85, 90),
        span("update", "update of unit 'a'", 90, 95),
        span("optimizer", "optimizer", 80, 96),
        span("wait", "wait for something of another thread", 0, 100, thread=1),
    ]
    second = [
        span("data", "data", 100, 130),
        span("checkpoint", "save checkpoint global_step1", 104, 120),
        span("evaluation", "forward without gradients", 120, 126),
        span("forward", "forward", 130, 140),
        span("backward", "backward", 140, 150),
        span("optimizer", "optimizer", 150, 160),
    ]
    operators = [
        torch_event("cpu_op", "outer", 10, 20),
        torch_event("cpu_op", "inner", 12, 15),
        torch_event("cpu_op", "inner", 15, 16),
        torch_event("cpu_op", "deepest", 13, 14),
        torch_event("cpu_op", "inner", 50, 51, tid=7),
        torch_event("cpu_op", "before", -10, 1),  # begins before the steps
    ]
    write_rank(folder, 0, [(1, 0, 100, first), (2, 100, 160, second)], torch=operators)


def test_on_a_cpu_the_parts_are_those_of_the_programs_thread(tmp_path: Path) -> None:
    on_cpu(tmp_path)
    found = times(tmp_path)
    assert (found.on, found.steps) == ("cpu", [1, 2])
    assert ms(found.step_s) == 80
    assert ms(found.exposed_s) == (8 + 14) / 2
    assert ms(found.communication_s) == (20 + 30) / 2
    assert found.hidden == pytest.approx(1 - 22 / 50)
    assert ms(found.compute_s) == ((30 - 8) + (38 - 14) + 20) / 2
    assert ms(found.disk_s) == 5 / 2
    assert ms(found.optimizer_s) == (16 - 5 + 10) / 2
    assert ms(found.checkpoint_s) == 16 / 2
    assert ms(found.data_s) == (10 + 30 - 16 - 6) / 2
    assert ms(found.idle_s) == (2 + 4 + 6) / 2  # the loss, what follows the step, an evaluation
    parts = (found.exposed_s, found.compute_s, found.disk_s, found.optimizer_s, found.checkpoint_s)
    assert sum(filter(None, (*parts, found.data_s, found.idle_s))) == pytest.approx(found.step_s)
    assert [(one.name, ms(one.s), one.times) for one in found.exposed] == [
        ("reduce_scatter of unit 'a'", 7, 0.5),
        ("all_gather of unit 'a'", 4, 0.5),
        ("read of states of unit 'a'", 2.5, 0.5),
    ]
    assert [(one.name, ms(one.s), one.times) for one in found.operators] == [
        ("outer", 3, 0.5),
        ("inner", (3 - 1 + 1 + 1) / 2, 1.5),
        ("before", 0.5, 0.5),
        ("deepest", 0.5, 0.5),
    ]


def test_on_a_gpu_the_kernels_tell(tmp_path: Path) -> None:
    def kernel(name: str, began: float, ended: float, stream: int = 7) -> dict[str, object]:
        return torch_event("kernel", name, began, ended, tid=stream, pid=0)

    def on_stream(name: str, began: float, ended: float, stream: int) -> dict[str, object]:
        return torch_event("gpu_user_annotation", name, began, ended, tid=stream, pid=0)

    gather, reduce = "dslaunch: all_gather of unit 'a'", "dslaunch: reduce_scatter of unit 'b'"
    spans = [
        span("data", "data", 0, 30),
        span("forward", "forward", 30, 32),
        span("wait", "wait for all_gather of unit 'a'", 31, 32),  # of the host, and not of the GPU
        span("optimizer", "optimizer", 50, 55),
    ]
    events = [
        kernel("gemm", 35, 55),
        kernel("gemm", 60, 70),
        kernel("ncclDevKernel_AllGather", 30, 50, 20),
        on_stream(gather, 29, 50, 20),
        kernel("ncclDevKernel_ReduceScatter", 50, 66, 20),
        on_stream(reduce, 50, 66, 20),
        on_stream(reduce, 50, 66, 21),
        torch_event("gpu_memcpy", "Memcpy DtoH", 72, 74, tid=30, pid=0),
        on_stream("dslaunch: optimizer", 80, 90, 7),
        kernel("adam", 80, 88),
        kernel("gemm", 95, 97, 8),
        kernel("ncclDevKernel_Other", 98, 99, 20),
    ]
    write_rank(tmp_path, 0, [(1, 0, 50, spans), (2, 50, 100, [])], torch=events)
    found = times(tmp_path)
    assert (found.on, ms(found.step_s)) == ("gpu", 50)
    assert ms(found.compute_s) == (20 + 10 + 2) / 2
    assert ms(found.optimizer_s) == 8 / 2
    assert ms(found.communication_s) == (36 + 1) / 2
    assert ms(found.exposed_s) == (5 + (60 - 55) + 1) / 2
    assert ms(found.data_s) == 15
    assert ms(found.idle_s) == (100 - (40 + 2 + 8 + 2 + 1)) / 2
    assert [(one.name, ms(one.s)) for one in found.exposed] == [
        ("all_gather of unit 'a'", 2.5),
        ("reduce_scatter of unit 'b'", 2.5),
        ("ncclDevKernel_Other", 0.5),
    ]
    assert [(one.name, ms(one.s)) for one in found.operators][:2] == [
        ("gemm", 16),
        ("ncclDevKernel_AllGather", 10),
    ]


def test_a_program_without_our_engine_is_told_by_torch(tmp_path: Path) -> None:
    events = [
        torch_event("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 0, 5),
        torch_event("cpu_op", "aten::mm", 10, 40),
        torch_event("user_annotation", "gloo:all_reduce", 30, 60, tid=5),
        torch_event("user_annotation", "Optimizer.step#AdamW.step", 70, 80),
        torch_event("cpu_op", "aten::add_", 72, 78),
    ]
    write_rank(tmp_path, 0, [(1, 0, 100, []), (2, 100, 200, [])], torch=events)
    found = times(tmp_path)
    assert [ms(one) for one in (found.compute_s, found.exposed_s, found.communication_s)] == [15, 10, 15]
    assert [ms(one) for one in (found.optimizer_s, found.data_s)] == [5, 2.5]


def test_what_is_printed_is_what_was_measured_and_comes_back_from_the_file(tmp_path: Path) -> None:
    on_cpu(tmp_path)
    write_rank(tmp_path, 1, [(1, 0, 100, [span("wait", "wait for all_gather of unit 'a'", 0, 50)])], torch=())
    other = times_of(read_rank(tmp_path, rank=1, host="b", clock=clock(), wanted=(1, 1)))
    assert other is not None
    head = json.loads(json.dumps(head_of([times(tmp_path), other], ["rank 2: gone"], clock_error_s=0.0002)))
    lines = lines_of(head)
    assert lines[:4] == [
        "where the time of steps 1-2 went:",
        "",
        "ms in a step     step  compute  comm  hidden  exposed  optimizer  data  disk  checkpoint  idle",
        "a: rank 0, cpu   80.0     33.0  25.0    56 %     11.0       10.5   9.0   2.5         8.0   6.0",
    ]
    assert " ".join(lines[4].split()) == "b: rank 1, cpu 100.0 0.0 50.0 0 % 50.0 - - 0.0 0.0 50.0"
    # the mean of 4 and 50, of the mean of 80 and 100
    row = "27.0 30.0 % 50.0 1 1 all_gather of unit 'a'"
    assert row in [" ".join(line.split()) for line in lines]
    assert lines[-3:] == ["the clocks of the hosts are brought together, to 0.200 ms", "", "rank 2: gone"]
    assert not any("b: rank 1" in line for line in lines_of(head, ranks=[range(1)]))


def test_a_mean_over_ranks_has_what_is_short_on_one_of_them(tmp_path: Path) -> None:
    waits = [span("wait", f"wait for all_gather of unit '{i}'", 2 * i, 2 * i + 2) for i in range(15)]
    waits.append(span("wait", "wait for all_gather of unit 'a'", 40, 41))  # the shortest
    write_rank(tmp_path, 0, [(1, 0, 100, waits)], torch=())
    write_rank(tmp_path, 1, [(1, 0, 100, [span("wait", "wait for all_gather of unit 'a'", 0, 50)])], torch=())
    found = [times_of(read_rank(tmp_path, rank=i, host="a", clock=clock(), wanted=(1, 1))) for i in range(2)]
    lines = lines_of(head_of([one for one in found if one], [], clock_error_s=0.0))
    rows = [" ".join(line.split()) for line in lines]
    assert "25.5 25.5 % 50.0 1 1 all_gather of unit 'a'" in rows
    assert len([row for row in rows if "all_gather" in row]) == 10


def test_a_rank_that_left_no_operators_counts_for_no_mean_of_them(tmp_path: Path) -> None:
    on_cpu(tmp_path)
    known = times(tmp_path)
    killed = known._replace(rank=1, operators=[], step_s=0.2)
    both, alone = (lines_of(head_of(one, [], clock_error_s=0.0)) for one in ([known, killed], [known]))
    rows = [line.split() for line in alone if line.endswith(" outer")]
    assert rows == [line.split() for line in both if line.endswith(" outer")]
    assert len(rows) == 1


def test_runs_of_moments() -> None:
    one = union([(5, 9), (0, 3), (2, 4), (7, 12), (20, 20)])
    assert one == [(0, 4), (5, 12)]
    assert common(one, [(3, 6), (11, 30)]) == [(3, 4), (5, 6), (11, 12)]
    assert without(one, [(-5, 1), (3, 6), (11, 30)]) == [(1, 3), (6, 11)]
    assert without([(50, 60)], [(n, n + 1) for n in range(0, 100, 2)]) == [
        (n, n + 1) for n in range(51, 60, 2)
    ]
    assert length(one) == 11
    assert common([], one) == without([], one) == []
