"""What was timed of collectives, and what the table says of it."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.comm import comms_log
from dslaunch.runtime.config.monitor import CommsLoggerConfig
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import make_config, make_model, snapshot, train_engine
from tests.runtime.ranks import Ranks

STEPS = 2


def _logged(rank: int, stage: int, **settings: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return what was printed, the summary, and the trained parameters."""
    comms_log.reset_log()
    config = make_config(stage=stage, comms_logger={"enabled": True, **settings})
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            engine, *_ = dslaunch.initialize(model=make_model(), config=config)
            train_engine(engine, steps=STEPS)
            summary = engine.log_comm_summary(show_straggler=True, return_dict=True)
        assert summary is not None
        return (
            said.getvalue(),
            summary,
            {"params": snapshot(engine.module.named_parameters()), **engine.comm_bytes()},
        )
    finally:
        comms_log.process_log().config = CommsLoggerConfig()


def _all(rank: int, stage: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return _logged(rank, stage)


def _plain(rank: int, stage: int) -> dict[str, Any]:
    comms_log.reset_log()
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=stage))
    train_engine(engine, steps=STEPS)
    assert comms_log.process_log().rows() == []  # what is off times nothing
    return {"params": snapshot(engine.module.named_parameters()), **engine.comm_bytes()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_collective_is_timed_and_nothing_else_changes(ranks: Ranks, stage: int) -> None:
    (said, told, found), (second, told_second, _) = ranks(_all, stage, world_size=2)
    (plain, _) = ranks(_plain, stage, world_size=2)
    assert all(torch.equal(found["params"][name], value) for name, value in plain.pop("params").items())
    found.pop("params")
    assert found == plain  # as many bytes as without
    assert second == ""

    summary = told["summary"]
    assert {"broadcast", "all_gather"} | ({"reduce_scatter"} if stage else set()) <= set(summary)
    for name, sizes in summary.items():
        for nbytes, row in sizes.items():
            total_s = row["total_latency_ms"] / 1e3
            assert row["count"] >= 1
            assert row["avg_latency_ms"] == pytest.approx(row["total_latency_ms"] / row["count"])
            if nbytes is None:  # pickled
                assert row["tput_avg_gbps"] is None
                continue
            gbits = nbytes * row["count"] * 8 / 1e9
            assert row["tput_avg_gbps"] == pytest.approx(gbits / total_s)
            share = 1.0 if name == "broadcast" else 0.5  # (N-1)/N for two ranks
            assert row["busbw_avg_gbps"] == pytest.approx(share * gbits / total_s)
    # What was counted is what was timed: in the meter each rank sends half of every reduce_scatter.
    sent = sum(nbytes * row["count"] / 2 for nbytes, row in summary.get("reduce_scatter", {}).items())
    assert sent == plain.get("reduce_scatter", 0)

    other = told_second["straggler_analysis"]
    for name, sizes in told["straggler_analysis"].items():
        for nbytes, row in sizes.items():
            assert row["total_comm_lat_ms"] == pytest.approx(other[name][nbytes]["total_comm_lat_ms"])
            whole_ms = row["total_comm_lat_ms"] + row["total_straggler_ms"]
            assert whole_ms == pytest.approx(summary[name][nbytes]["total_latency_ms"])
            assert row["total_straggler_ms"] >= -1e-9
    assert told["metadata"]["world_size"] == 2
    assert re.search(
        r"^collective +message size +count +total ms +average ms +algbw Gbps +busbw Gbps$", said, re.M
    )
    for name, sizes in summary.items():
        assert len(re.findall(rf"^{name} +\S", said.split("of these, timed")[0], re.M)) == len(sizes)


def _chosen(rank: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return _logged(rank, 3, prof_all=False, prof_ops=["all_gather_into_tensor"], verbose=True, debug=True)


@pytest.mark.slow
def test_some_operations_apart_by_what_was_sent(ranks: Ranks) -> None:
    (said, told, _), _ = ranks(_chosen, world_size=2)
    assert told["summary"]
    assert all(name.startswith("all_gather of ") for name in told["summary"])
    assert sum(name.startswith("all_gather of unit 'blocks.") for name in told["summary"]) >= 2
    lines = re.findall(
        r"^comm op: all_gather of .+ \| time \(ms\): [0-9.]+ \| msg size: .+ \| algbw \(Gbps\): .+ "
        r"\| busbw \(Gbps\): .+$",
        said,
        re.M,
    )
    assert len(lines) == sum(row["count"] for sizes in told["summary"].values() for row in sizes.values())


def test_settings_can_be_changed_and_wrong_ones_are_refused() -> None:
    try:
        comms_log.configure(enabled=True, prof_all=False, prof_ops=["all_reduce"])
        assert comms_log.process_log().config == CommsLoggerConfig(
            enabled=True, prof_all=False, prof_ops=("all_reduce",)
        )
        assert comms_log.process_log().stopwatch("all_gather", "it", nbytes=4, sent_bytes=2) is None
        with pytest.raises(ConfigError) as caught:
            comms_log.configure(prof_ops=["barrier"])
        assert str(caught.value) == (
            'comm.configure(): comms_logger.prof_ops ["barrier"] is not a list of all_reduce, all_gather, '
            "reduce_scatter, all_to_all, broadcast, gather"
        )
        with pytest.raises(ConfigError, match="leave it out"):
            comms_log.configure(deepspeed_config={})
    finally:
        comms_log.process_log().config = CommsLoggerConfig()


def test_a_summary_of_nothing_says_why(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    told = comms_log.log_summary(return_dict=True)
    assert told is not None
    assert (told["summary"], told["straggler_analysis"]) == ({}, None)
    assert capsys.readouterr().out == "no collective has been timed; one process sends nothing\n"
    assert "comms_logger.enabled is not true in the ds_config" in caplog.text


def test_a_table_leaves_out_what_is_not_known() -> None:
    log = comms_log.CommsLog()
    log.add("gather", 0.002, nbytes=None, bus_bytes=None)
    log.add("all_reduce", 0.5, nbytes=1 << 20, bus_bytes=3 << 19)  # three quarters, twice, of four ranks
    log.add("all_reduce", 0.5, nbytes=1 << 20, bus_bytes=3 << 19)
    assert comms_log._table(log.rows()).splitlines() == [
        "collective  message size  count  total ms  average ms  algbw Gbps  busbw Gbps",
        "all_reduce      1.00 MiB      2   1000.00     500.000       0.017       0.025",
        "gather                 -      1      2.00       2.000           -           -",
    ]


def test_what_was_timed_can_be_asked_for_by_name_and_number() -> None:
    comms_log.reset_log()
    assert (comms_log.has_comm_data(), comms_log.get_comm_operation_count()) == (False, 0)
    for nbytes in (4, 4, 8):
        comms_log.process_log().add("all_gather", 0.1, nbytes=nbytes, bus_bytes=nbytes)
    assert (comms_log.has_comm_data(), comms_log.get_comm_operation_count()) == (True, 3)
    assert comms_log.get_logged_comm_ops() == ["all_gather"]
    comms_log.reset_log()
    assert comms_log.get_logged_comm_ops() == []
