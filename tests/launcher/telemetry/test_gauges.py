"""What is known of a job now, as numbers with labels."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.run_state.metric_table import SPENT
from dslaunch.launcher.telemetry import gauges
from dslaunch.launcher.telemetry.gauges import Gauges, all_names, shown_name
from dslaunch.launcher.telemetry.telemetry import Telemetry
from dslaunch.launcher.wire.frames import Metrics

ORIGINS = (Origin("a", 0, 0, 0), Origin("b", 1, 1, 0))


@pytest.fixture
def telemetry() -> Telemetry:
    made = Telemetry()
    made.begin(
        {"name": "train", "user": "ada", "host": "login", "version": "1", "launcher": "ssh"}, interval_s=1
    )
    return made


@pytest.fixture
def shown(telemetry: Telemetry) -> Gauges:
    return Gauges(telemetry)


def rows(shown: Gauges) -> dict[str, Any]:
    """Each series as Prometheus writes it, but for quotes, with its value."""
    found = {}
    for family, samples in shown.families().items():
        assert shown_name(family) in all_names()
        for labels, value in samples:
            words = ",".join(f"{name}={labels[name]}" for name in sorted(labels))
            key = shown_name(family) + (f"{{{words}}}" if words else "")
            assert key not in found, "one series has one value"
            found[key] = value
    return found


def test_what_ranks_and_hosts_tell_has_names_and_units(telemetry: Telemetry, shown: Gauges) -> None:
    telemetry.begin_attempt(ORIGINS)
    row = {
        **{"step": 7, "steps": 2, "step_s": 1.0, "comm_s": 0.5, "loss": "nan", "lr": 0.1, "tokens": 4096},
        **{"mem_used": 100, "mem_parameters": 60, "accuracy": 0.5, "state": "saving", "skipped": 1},
    }
    gpu = {"util": 0.5, "mem_used": 10, "mem_total": 80, "power_w": 300, "temp_c": 60, "ecc": 2}
    host = {"cpu": 0.25, "net_in": 5, "gpus": [gpu, {"util": 0.0}]}
    for _ in range(2):
        telemetry.record("started", rank=0, host="a", pid=7)
        telemetry.take_metrics("a", Metrics(0.0, {"0": dict(row)}, host))
        telemetry.heard_output(0, 3)
        telemetry.flush()
    found = rows(shown)
    assert found.pop("dslaunch_job_start_time_seconds") > 1e9
    assert found.pop("dslaunch_host_last_numbers_timestamp_seconds{host=a}") > 1e9
    assert found.pop("dslaunch_loss{host=a,rank=0}") != 0.0
    assert 0.0 < found.pop("dslaunch_goodput_ratio") <= 1.0
    spent = {name: found.pop(f"dslaunch_job_seconds{{spent={name}}}") for name in SPENT}
    assert spent["useful"] == 1.0, "two steps; the second report has no later one"
    assert found == {
        "dslaunch_job_info{launch_host=login,launcher=ssh,name=train,user=ada,version=1}": 1,
        "dslaunch_attempts_total": 1,
        "dslaunch_workers": 2,
        "dslaunch_workers_running": 1,
        "dslaunch_tokens_total": 4096,
        "dslaunch_step{host=a,rank=0}": 7,
        "dslaunch_learning_rate{host=a,rank=0}": 0.1,
        "dslaunch_skipped_steps_total{host=a,rank=0}": 1,
        "dslaunch_steps_total{host=a,rank=0}": 4,
        "dslaunch_step_seconds{host=a,phase=whole,rank=0}": 0.5,
        "dslaunch_step_seconds{host=a,phase=communication,rank=0}": 0.25,
        "dslaunch_memory_bytes{host=a,kind=used,rank=0}": 100,
        "dslaunch_memory_bytes{host=a,kind=parameters,rank=0}": 60,
        "dslaunch_reported{host=a,name=accuracy,rank=0}": 0.5,
        "dslaunch_state{host=a,rank=0,state=saving}": 1,
        "dslaunch_output_lines_total{host=a,rank=0}": 6,
        "dslaunch_host_cpu_ratio{host=a}": 0.25,
        "dslaunch_host_network_bytes_per_second{direction=in,host=a}": 5,
        "dslaunch_gpu_utilization_ratio{gpu=0,host=a}": 0.5,
        "dslaunch_gpu_utilization_ratio{gpu=1,host=a}": 0,
        "dslaunch_gpu_memory_bytes{gpu=0,host=a,kind=used}": 10,
        "dslaunch_gpu_memory_bytes{gpu=0,host=a,kind=total}": 80,
        "dslaunch_gpu_power_watts{gpu=0,host=a}": 300,
        "dslaunch_gpu_temperature_celsius{gpu=0,host=a}": 60,
        "dslaunch_gpu_uncorrected_ecc_errors_total{gpu=0,host=a}": 2,
    }


def test_of_folded_ranks_there_are_least_mean_and_greatest(telemetry: Telemetry, shown: Gauges) -> None:
    telemetry.begin_attempt(ORIGINS)
    folded = {"loss": [1.0, 2.0, 4.0, 5, 6], "steps": [2, 2.0, 2, 0, 0], "comm_s": [0.0, 1.0, 3.0, 1, 2]}
    telemetry.take_metrics("a", Metrics(0.0, {"*": folded}, {}))
    telemetry.heard_output(0, 3)
    telemetry.flush()
    found = rows(shown)
    assert [found[f"dslaunch_loss{{host=a,stat={stat}}}"] for stat in ("min", "mean", "max")] == [1, 2, 4]
    assert found["dslaunch_step_seconds{host=a,phase=communication,stat=max}"] == 1.5
    assert found["dslaunch_steps_total{host=a,stat=mean}"] == 2
    assert found["dslaunch_output_lines_total{host=a}"] == 3


def test_hosts_and_ranks_that_leave_take_their_series_with_them(
    telemetry: Telemetry, shown: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry.begin_attempt(ORIGINS)
    for rank, host in enumerate("ab"):
        telemetry.take_metrics(host, Metrics(0.0, {str(rank): {"loss": 1.0, "steps": 1}}, {"cpu": 0.5}))
        telemetry.heard_output(rank, 1)
    telemetry.flush()
    telemetry.record("exited", rank=1, host="b", code=1, signal=0)
    telemetry.take_metrics("b", Metrics(0.0, {"1": {"loss": 2.0}}, {"cpu": 0.5}))
    telemetry.flush()
    assert "dslaunch_loss{host=b,rank=1}" not in rows(shown)
    telemetry.record("verdict", exit_code=1)
    telemetry.begin_attempt((ORIGINS[0], Origin("c", 1, 1, 0)))
    found = rows(shown)
    assert not [key for key in found if "host=b" in key or "loss" in key]
    assert found["dslaunch_steps_total{host=a,rank=0}"] == 1, "what only grows goes on"
    assert found["dslaunch_output_lines_total{host=a,rank=0}"] == 1
    assert found["dslaunch_host_cpu_ratio{host=a}"] == 0.5
    assert found["dslaunch_attempts_total"] == 2
    assert found["dslaunch_failed_attempts_total"] == 1
    now = gauges.time.monotonic() + gauges.STALE_S + 1
    monkeypatch.setattr(gauges.time, "monotonic", lambda: now)
    assert not [key for key in rows(shown) if key.startswith("dslaunch_host")], "a host that fell silent"


def test_what_only_grows_never_goes_back(telemetry: Telemetry, shown: Gauges) -> None:
    """A second attempt begins from a checkpoint, so its ranks tell less than those of the first did."""
    names = ("samples", "tokens", "skipped")
    seen = []
    for told in ([{"0": 100, "1": 90}, {"1": 100}, {"0": 200, "1": 200}], [{"0": 150, "1": 140}, {"0": 250}]):
        telemetry.begin_attempt(ORIGINS)
        for place, row in enumerate(told):
            if len(told) == 2 and place:
                telemetry.record("exited", rank=0, host="a", code=0, signal=0)  # its last numbers come after
            ranks = {rank: dict.fromkeys(names, number) for rank, number in row.items()}
            telemetry.take_metrics("a", Metrics(0.0, ranks, {}))
            telemetry.flush()
            found = rows(shown)
            seen.append(tuple(found.get(f"dslaunch_{name}_total") for name in names[:2]))
            skipped = found["dslaunch_skipped_steps_total{host=a,rank=0}"]
            assert skipped == seen[-1][0]
    # What is trained again counts again. What attempt 2 trained before its first word is not known.
    assert seen == [(number, number) for number in (100, 100, 200, 200, 300)]


def test_what_is_counted_of_other_events(telemetry: Telemetry, shown: Gauges) -> None:
    telemetry.begin_attempt(ORIGINS)
    telemetry.record("straggler", rank=1, host="b", cause="data", share=0.3, text="x")
    telemetry.record("straggler", rank=1, host="b", cause="data", share=0.3, text="x")
    telemetry.record("hang", rank=0, report="{}")
    telemetry.record("note", level=30, text="warning: x")
    telemetry.record("of another kind", level=[])
    found = rows(shown)
    assert found["dslaunch_stragglers_total{cause=data,host=b,rank=1}"] == 2
    assert found["dslaunch_hangs_total{host=a,rank=0}"] == 1
    assert found["dslaunch_notes_total{level=warning}"] == 1


def test_what_no_number_is_and_what_none_can_hold(telemetry: Telemetry, shown: Gauges) -> None:
    telemetry.begin_attempt(ORIGINS)
    telemetry.take_metrics("a", Metrics(0.0, {"0": {"steps": 2}}, {}))
    telemetry.flush()
    row = {"loss": 10**400, "lr": "fast", "a": "inf", "\ud800\n": 1.0, "steps": "nan", "samples": "nan"}
    telemetry.take_metrics(
        "a", Metrics(0.0, {"0": row}, {"cpu": None, "gpus": [1, None], "cores": "many", "load1": 10**400})
    )
    telemetry.flush()
    found = rows(shown)
    assert found["dslaunch_host_load1{host=a}"] == float("inf")
    assert "dslaunch_loss{host=a,rank=0}" not in found
    assert found["dslaunch_reported{host=a,name=a,rank=0}"] == float("inf")
    assert found["dslaunch_reported{host=a,name=?\n,rank=0}"] == 1.0
    assert "dslaunch_learning_rate{host=a,rank=0}" not in found
    assert "dslaunch_samples_total" not in found
    assert found["dslaunch_steps_total{host=a,rank=0}"] == 2
