"""What ranks write of the steps that are traced."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import timeit
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dslaunch
from dslaunch.launcher.sync.host_clock import HostClock
from dslaunch.launcher.trace.rank_trace import RankTrace, read_rank
from dslaunch.launcher.trace.times import times_of
from dslaunch.runtime.comm.flight_recorder import FlightRecorder
from dslaunch.runtime.environment import TraceRequest, read_trace
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.tracing import tracer
from dslaunch.runtime.tracing.spans import MAX_SPANS, SPANS, Spans
from dslaunch.runtime.tracing.tracer import Tracer, mark_step
from dslaunch.shared import marks
from tests.runtime.models import make_config, make_model
from tests.runtime.ranks import Ranks

FIRST, LAST = 2, 3
SLEEP_S = 0.05


def begin(rank: int, folder: str, *, first: int = FIRST, last: int = LAST) -> Tracer:
    """Ask this process for these steps, as its environment would."""
    gc.collect()  # a profile that another test has given up looks as if it were still on
    tracer._PROCESS[:] = [Tracer(TraceRequest(first=first, last=last, path=f"{folder}/trace-{rank}"))]
    return tracer.process_tracer()


def forget() -> None:
    tracer._PROCESS.clear()
    SPANS.end()


def read(folder: Path, rank: int, *, first: int = FIRST, last: int = LAST) -> RankTrace:
    clock = HostClock()
    clock.add(sent_at=0.0, at=0.0, heard_at=0.0)
    return read_rank(folder, rank=rank, host="a", clock=clock, wanted=(first, last))


def train(rank: int, folder: str, stage: int, offload: dict[str, Any], accumulated: int) -> dict[str, Any]:
    """Four steps, with a wait for data before each, an evaluation and a save in the last that is traced."""
    begin(rank, folder)
    try:
        model = make_model()
        config = make_config(stage=stage, gradient_accumulation_steps=accumulated)
        config["zero_optimization"].update(offload)
        engine, *_ = dslaunch.initialize(model=model, config=config)
        took: dict[int, float] = {}
        began = time.monotonic()
        for step in range(1, 5):
            for _ in range(accumulated):
                time.sleep(SLEEP_S if rank == 0 else 0.0)  # its data come late, and the other rank waits
                loss = engine(torch.ones(6 // accumulated, 7)).square().mean()
                engine.backward(loss)
                engine.step()
            took[step], began = time.monotonic() - began, time.monotonic()
            if step == LAST - 1:
                with torch.no_grad():
                    engine(torch.ones(2, 7))
                engine.save_checkpoint(f"{folder}/saved")
        hooks = sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in engine.module.modules())
        units = [unit.name for unit in engine._model.units if unit.sub_buffers]
        engine.destroy()
        return {"units": units, "took": took, "hooks": hooks, "is_on": SPANS.is_on}
    finally:
        forget()


def names(trace: RankTrace, kind: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in trace.spans:
        if one.kind == kind:
            found[one.name] = found.get(one.name, 0) + 1
    return found


def test_every_unit_of_a_sharded_model_is_there_by_its_name(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks(train, str(tmp_path), 3, {}, 1, world_size=2)
    for rank in range(2):
        trace = read(tmp_path, rank)
        assert trace.problems == ()
        assert [one.number for one in trace.steps] == [FIRST, LAST]
        sent, units, updates = (names(trace, kind) for kind in ("communication", "unit", "update"))
        assert len(told[rank]["units"]) >= 4
        for unit in told[rank]["units"]:
            assert sent[f"all_gather of unit '{unit}'"] >= 2
            assert sent[f"reduce_scatter of unit '{unit}'"] == 2
            assert units[f"forward of {unit}"] >= 2
            assert units[f"backward of {unit}"] >= 2
            assert updates[f"update of unit '{unit}'"] == 2
        assert {f"wait for {name}" for name in sent} == names(trace, "wait").keys()
        assert [names(trace, kind) for kind in ("forward", "backward", "optimizer", "data")] == [
            {"forward": 2},
            {"backward": 2},
            {"optimizer": 2},
            {"data": 2},
        ]
        assert names(trace, "evaluation") == {"forward without gradients": 1}
        assert names(trace, "checkpoint") == {"save checkpoint global_step2": 1}
        assert any(one.name == "aten::addmm" for one in trace.torch)
        # Torch's clock and ours agree: an operator of a forward lies in it.
        forwards = [one for one in trace.spans if one.kind == "forward"]
        inner = [one for one in trace.torch if one.name == "aten::linear" and one.thread == trace.main_thread]
        slack = round(trace.clock_error_s * 1e9) + 200_000
        assert inner
        for one in inner:
            assert any(
                each.began - slack <= one.began and one.ended <= each.ended + slack
                for each in (*forwards, *(e for e in trace.spans if e.kind == "evaluation"))
            )
        # What the program measured itself is what the trace says.
        steps = [(one.ended - one.began) / 1e9 for one in trace.steps]
        assert steps[0] == pytest.approx(told[rank]["took"][FIRST], abs=0.05)
        times = times_of(trace)
        assert times is not None
        parts = [times.compute_s, times.exposed_s, times.optimizer_s, times.data_s, times.disk_s]
        whole = sum(one or 0.0 for one in (*parts, times.checkpoint_s, times.idle_s))
        assert whole == pytest.approx(times.step_s) == pytest.approx(sum(steps) / 2)
        assert (told[rank]["hooks"], told[rank]["is_on"]) == (0, False)
    late, waiting = times_of(read(tmp_path, 0)), times_of(read(tmp_path, 1))
    assert late is not None
    assert waiting is not None
    assert (late.data_s or 0) >= SLEEP_S > (waiting.data_s or 0)
    assert waiting.exposed_s >= 0.8 * SLEEP_S
    assert waiting.exposed[0].s >= 0.5 * SLEEP_S


def test_accumulated_micro_batches_are_one_step_and_disks_are_named(ranks: Ranks, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path / "disk")}
    (tmp_path / "disk").mkdir()
    told = ranks(train, str(tmp_path), 2, {"offload_optimizer": place}, 3, world_size=2)
    trace = read(tmp_path, 1)
    assert [one.number for one in trace.steps] == [FIRST, LAST]
    assert names(trace, "forward") == {"forward": 6}
    assert names(trace, "data") == {"data": 6}
    assert names(trace, "optimizer") == {"optimizer": 2}
    disk = names(trace, "disk")
    for unit in told[1]["units"]:
        assert disk[f"read states of unit '{unit}'"] >= 2
        assert disk[f"write states of unit '{unit}'"] == 2
        assert disk[f"write gradients of unit '{unit}'"] == 6
    assert names(trace, "disk wait").keys() == {
        f"wait for {verb} of {what}" for verb, _, what in (one.partition(" ") for one in disk)
    }


def mark(rank: int, folder: str) -> None:
    """A program of torch alone, that tells its steps; the last one that is asked for it never makes."""
    begin(rank, folder, first=1, last=4)
    try:
        for step in range(1, 4):
            torch.ones(8, 8) @ torch.ones(8, 8)
            dist.all_reduce(torch.ones(4))
            mark_step(step)
        tracer.process_tracer()._end_program()  # as at the end of the program
    finally:
        forget()


def test_steps_that_are_told_twice_or_not_each_are_not_mistaken_for_others(tmp_path: Path) -> None:
    try:
        begin(0, str(tmp_path), first=2, last=9)
        for step in (1, 1, 2, 2, 3, 13):
            mark_step(step)
    finally:
        forget()
    trace = read(tmp_path, 0, first=2, last=9)
    assert [one.number for one in trace.steps] == [2, 3]
    (problem,) = trace.problems
    assert (
        problem == "without steps 4-9: report(step=13) came next, and one for each step is needed from 3 on"
    )


def test_a_program_without_an_engine_marks_its_steps(ranks: Ranks, tmp_path: Path) -> None:
    ranks(mark, str(tmp_path), world_size=2)
    trace = read(tmp_path, 0, first=1, last=4)
    assert [one.number for one in trace.steps] == [2, 3]
    assert trace.problems == ("without steps 1,4: the program ended",)
    times = times_of(trace)
    assert times is not None
    assert {"aten::mm"} <= {one.name for one in times.operators}
    assert times.communication_s > 0
    assert times.data_s is None


def test_a_run_that_goes_on_behind_the_steps_says_so(tmp_path: Path) -> None:
    began = begin(0, str(tmp_path))
    try:
        began.enter(100)
        assert not began.is_armed
    finally:
        forget()
    assert read(tmp_path, 0).problems == ("without steps 2-3: step 100 came first",)


def test_a_run_that_goes_on_in_the_middle_of_the_steps_says_with_which(tmp_path: Path) -> None:
    try:
        began = begin(0, str(tmp_path))
        for step in range(FIRST + 1, LAST + 2):  # after a checkpoint
            began.enter(step)
            began.end_step(step)
    finally:
        forget()
    trace = read(tmp_path, 0)
    assert [one.number for one in trace.steps] == [3]
    assert trace.problems == ("without step 2: step 3 was the first that could be traced",)


def test_a_trace_ends_where_no_more_can_be_kept(tmp_path: Path) -> None:
    """Torch's profile in memory ends with it, however many steps were asked for."""
    try:
        began = begin(0, str(tmp_path), first=1, last=10**12 - 1)
        for step in (1, 2):
            began.enter(step)
            SPANS._num_left = 2 - step
            SPANS.add("data", "data", 1)
            began.end_step(step)
        assert not began.is_armed
    finally:
        forget()
    problems = read(tmp_path, 0, first=1, last=10**12 - 1).problems
    assert problems[0] == "without steps 3-999999999999: they are more than a trace can hold"


def test_the_first_step_is_traced_where_step_0_is_told_before_it(tmp_path: Path) -> None:
    try:
        begin(0, str(tmp_path), first=1, last=2)
        for step in range(3):
            mark_step(step)
    finally:
        forget()
    trace = read(tmp_path, 0, first=1, last=2)
    assert ([one.number for one in trace.steps], trace.problems) == ([1, 2], ())


def steps_with_a_profile_of_its_own(rank: int, folder: str, first: int, last: int) -> list[str]:
    """Four steps, a profile of the program's own from step `first` to `last`, and one operator in it."""
    begin(rank, folder)
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    try:
        for step in range(1, 5):
            if step == first:
                own.start()
            torch.ones(2, 2).mm(torch.ones(2, 2))
            mark_step(step)
            if step == last:
                own.stop()
        tracer.process_tracer()._end_program()
        return [one.name for one in own.events() if one.name == "aten::mm"]
    finally:
        forget()


@pytest.mark.parametrize(
    ("first", "last", "problem"),
    [
        (1, 4, "the program had a profile of its own under way"),
        (4, 4, ""),
        (3, 3, "the program began a profile of its own meanwhile"),
        (3, 4, "the program began a profile of its own meanwhile"),
    ],
)
def test_a_profile_of_the_program_s_own_goes_before(
    ranks: Ranks, tmp_path: Path, first: int, last: int, problem: str
) -> None:
    (found,) = ranks(steps_with_a_profile_of_its_own, str(tmp_path), first, last, world_size=1)
    assert len(found) == last - first + 1
    trace = read(tmp_path, 0)
    assert [one.number for one in trace.steps] == [2, 3]
    assert trace.problems == ((f"torch's operators are missing: {problem}",) if problem else ())
    assert ("aten::mm" in {one.name for one in trace.torch}) == (not problem)


def mark_in_two_threads(rank: int, folder: str) -> None:
    begin(rank, folder)
    try:
        mark_step(1)
        other = threading.Thread(target=lambda: [mark_step(step) for step in range(2, 5)])
        other.start()
        other.join()
        tracer.process_tracer()._end_program()
    finally:
        forget()


def test_a_trace_that_ends_in_another_thread_than_it_began_is_without_operators(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(mark_in_two_threads, str(tmp_path), world_size=1)
    trace = read(tmp_path, 0)
    assert [one.number for one in trace.steps] == [2, 3]
    why = "the last step ended in another thread than the first"
    assert trace.problems == (f"torch's operators are missing: {why}",)


def test_a_program_without_torch_is_traced_without_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = begin(0, str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    try:
        for step in range(1, 4):
            began.end_step(step)
        assert "torch" not in sys.modules
    finally:
        forget()
    trace = read(tmp_path, 0)
    assert [one.number for one in trace.steps] == [2, 3]
    assert trace.problems == ("torch's operators are missing: the program had not loaded torch",)


def test_a_file_that_the_program_has_closed_ends_the_trace_and_not_the_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = begin(0, str(tmp_path))
    try:
        began.end_step(1)
        os.close(began._file)
        began.end_step(2)
        assert not began.is_armed
    finally:
        forget()
    assert "Bad file descriptor; this rank is traced no further" in capfd.readouterr().err


def test_a_place_that_takes_nothing_ends_the_trace_and_not_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = begin(0, str(tmp_path / "missing"))
    try:
        for step in range(1, 5):
            began.end_step(step)
        assert not began.is_armed
        assert not SPANS.is_on
    finally:
        forget()
    path = tmp_path / "missing" / "trace-0.spans"
    told = f"dslaunch: --trace: {path}: No such file or directory; this rank is traced no further\n"
    assert capfd.readouterr().err == told


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    began = begin(0, str(tmp_path), first=1, last=2)
    try:
        began.end_step(0)
        pid = os.fork()
        if not pid:
            began.end_step(1)
            began._end_program()
            os._exit(0)
        os.waitpid(pid, 0)
        began.end_step(1)
        began.end_step(2)
    finally:
        forget()
    lines = [json.loads(line) for line in (tmp_path / "trace-0.spans").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 1, 2, None]


def test_what_is_too_much_is_counted() -> None:
    spans = Spans()
    spans.begin()
    spans._num_left = 1
    spans.add("data", "one", 1)
    spans.add("data", "two", 1)
    assert ([one.name for one in spans.take()], spans.num_dropped) == (["one"], 1)
    assert MAX_SPANS > 1


def test_where_nothing_is_traced_a_collective_costs_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spans, "add", lambda *_, **__: pytest.fail("a span was made"))
    assert not SPANS.is_on
    with SPANS.span("disk", "x"):
        pass
    # A tenth of what one collective takes that sends nothing; it is 0.03 us.
    assert min(timeit.repeat("SPANS.is_on", globals={"SPANS": SPANS}, number=1000, repeat=5)) / 1000 < 5e-6


@pytest.mark.parametrize("steps", ["x", "0", "3-2", "-1", "1-", "1-2-3"])
def test_steps_that_are_none_are_refused(steps: str) -> None:
    with pytest.raises(ConfigError, match=r"DSLAUNCH_TRACE=.*must be steps as 10-12"):
        read_trace({"DSLAUNCH_TRACE": steps, "DSLAUNCH_TRACE_FILE": "/tmp/x"})


def test_steps_are_read_from_the_environment() -> None:
    assert read_trace({"DSLAUNCH_TRACE": "10"}) is None
    given = {"DSLAUNCH_TRACE": "10", "DSLAUNCH_TRACE_FILE": "/x"}
    assert read_trace(given) == TraceRequest(first=10, last=10, path="/x")
    assert read_trace({**given, "DSLAUNCH_TRACE": "3-5"}) == TraceRequest(first=3, last=5, path="/x")


def test_what_a_gpu_does_for_a_collective_has_its_name_in_torch_s_profile() -> None:
    SPANS.begin(has_gpu=True)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            FlightRecorder().begin("all_gather", "unit 'x'", nbytes=4, lane=0).start(lambda: None)
            with Tracer(None).phase("step", nullcontext()):
                pass
    finally:
        SPANS.end()
        SPANS.has_gpu = False
    names = {one.name for one in profile.events() or ()}
    assert {f"{marks.SPAN}all_gather of unit 'x'", f"{marks.SPAN}optimizer"} <= names
