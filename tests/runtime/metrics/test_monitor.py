"""What monitors hold after a run, read back from the files that they leave;
and the lines of the throughput.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.config.monitor import (
    CsvConfig,
    MonitorConfig,
    TensorBoardConfig,
    ThroughputConfig,
    WandbConfig,
)
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.metrics import monitor as monitor_module
from dslaunch.runtime.metrics.monitor import MonitorMaster, get_monitor_config
from dslaunch.runtime.metrics.throughput import ThroughputTimer
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks

STEPS = 3


def read_csv(folder: Path) -> dict[str, list[list[str]]]:
    """The rows of each file, by the file's name."""
    found = {}
    for path in folder.iterdir():
        with path.open(newline="", encoding="utf-8") as file:
            found[path.name] = list(csv.reader(file))
    return found


# ---- in the engine


def _train(rank: int, stage: int, folder: str, changes: dict[str, Any]) -> tuple[list[float], dict[str, int]]:
    """Return this rank's mean loss of each step, and the bytes that it sent."""
    torch.manual_seed(0)
    engine, *_ = dslaunch.initialize(
        model=make_model(),
        config=make_config(
            stage=stage,
            gradient_accumulation_steps=2,
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
            csv_monitor={"enabled": bool(folder), "output_path": folder, "job_name": "job"},
            **changes,
        ),
    )
    dtype = torch.float16 if engine.fp16_enabled() else torch.float32
    means = []
    for step in range(STEPS):
        losses = []
        for micro in batch(step).chunk(2):
            own = micro.chunk(engine.world_size)[rank].to(dtype)
            with torch.no_grad():
                loss_of(engine, own)
            loss = loss_of(engine, own)
            if step == 1:  # these two are one
                engine.scale(loss).backward()
            elif step == 2:  # as trainers do that divide by themselves
                engine.backward(loss / 2, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        means.append(sum(losses) / 2)
    engine.monitor.write_events([("Mine/on rank 0 only", torch.tensor(float(rank) + 0.5), 7)])
    engine.destroy()
    return means, engine.comm_bytes()


@pytest.mark.slow
def test_the_engine_writes_loss_lr_scale_and_times_over_samples(ranks: Ranks, tmp_path: Path) -> None:
    changes = {
        "fp16": {"enabled": True, "loss_scale_window": 2, "initial_scale_power": 4},
        "wall_clock_breakdown": True,
    }
    (means, bytes_sent), (_, _) = ranks(_train, 2, str(tmp_path), changes, world_size=2)
    found = read_csv(tmp_path / "job")
    times = [f"Train_Samples_elapsed_time_ms_{part}.csv" for part in ("backward", "forward", "step")]
    assert sorted(found) == [
        "Mine_on_rank_0_only.csv",
        *times,
        "Train_Samples_loss_scale.csv",
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
    ]
    assert found["Mine_on_rank_0_only.csv"] == [["step", "on rank 0 only"], ["7", "0.5"]]
    assert found["Train_Samples_lr.csv"] == [
        ["step", "lr"],
        *([str(12 * step), str(lr)] for step, lr in ((1, 0.0), (2, 0.0025), (3, 0.005))),
    ]
    # As with DeepSpeed it is doubled first in the third step for a window of two;
    # the value after the step is written.
    assert found["Train_Samples_loss_scale.csv"][0] == ["step", "loss_scale"]
    assert [row[1] for row in found["Train_Samples_loss_scale.csv"][1:]] == ["16.0", "16.0", "32.0"]
    head, *rows = found["Train_Samples_train_loss.csv"]
    assert head == ["step", "train_loss"]
    assert [row[0] for row in rows] == ["12", "24", "36"]
    for row, mean in zip(rows, means, strict=True):
        # loss_of() works in float32; a share is half of it, exactly, and the two are added with one rounding.
        assert abs(float(row[1]) - mean) <= 2**-24 * abs(mean)
    for name in times:
        assert all(float(value) > 0.0 for _, value in found[name][1:])
    # A monitor sends nothing.
    assert ranks(_train, 2, "", changes, world_size=2)[0][1] == bytes_sent


def _tensorboard(rank: int, folder: str) -> None:
    engine, *_ = dslaunch.initialize(
        model=make_model(),
        config=make_config(tensorboard={"enabled": True, "output_path": folder, "job_name": "job"}),
    )
    engine.backward(loss_of(engine, batch(0)))
    engine.step()
    assert engine.monitor.tb_monitor is not None
    engine.destroy()


@pytest.mark.slow
def test_tensorboard_reads_what_the_engine_wrote(ranks: Ranks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(_tensorboard, str(tmp_path), world_size=1)
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert events.Tags()["scalars"] == ["Train/Samples/train_loss", "Train/Samples/lr"]
    (lr,) = events.Scalars("Train/Samples/lr")
    assert (lr.step, lr.value) == (12, pytest.approx(0.01))
    (loss,) = events.Scalars("Train/Samples/train_loss")
    assert loss.value == pytest.approx(loss_of(make_model(), batch(0)).item(), rel=1e-6)


WANDB = """
import sys
from dslaunch.runtime.metrics.monitor import MonitorMaster, get_monitor_config
config = get_monitor_config({"wandb": {"enabled": True, "project": "all", "group": "us"}, "anything": 1})
monitor = MonitorMaster(config, rank=0)
lr, loss = "Train/Samples/lr", "Train/Samples/train_loss"
monitor.write_events([(lr, 0.25, 12), (loss, 2.5, 12), (lr, 0.125, 24)])
run = monitor.wandb_monitor.run
print("settings", run.project, run.group, run.offline)
monitor.write_events([("Train/Samples/lr", 0.0625, 36)])
print("summary", run.summary["Train/Samples/lr"], run.summary["Train/Samples/train_loss"])
monitor.close()
run.finish()
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_weights_and_biases_gets_a_run_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
    }
    done = subprocess.run(
        [sys.executable, "-c", WANDB], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "settings all us True" in done.stdout
    assert "summary 0.125 2.5\n" in done.stdout
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert all(part in written.read_bytes() for part in (b"Train/Samples/train_loss", b"0.125", b"0.0625"))


# ---- by themselves


def make(rank: int = 0, **sections: Any) -> MonitorMaster:
    return MonitorMaster(MonitorConfig(**sections), rank=rank)


def test_a_run_that_goes_on_appends_without_a_second_head(tmp_path: Path) -> None:
    config = CsvConfig(enabled=True, output_path=str(tmp_path))
    for samples in (1, 2):
        master = make(csv_monitor=config)
        master.write_events([("lr", samples / 4, samples)])
        master.close()
        master.write_events([("lr", 9, 9)])  # is dropped
    assert (tmp_path / "DeepSpeedJobName" / "lr.csv").read_bytes() == b"step,lr\r\n1,0.25\r\n2,0.5\r\n"


def test_other_ranks_open_nothing(tmp_path: Path) -> None:
    config = TensorBoardConfig(enabled=True, output_path=str(tmp_path / "new"))
    master = make(rank=1, tensorboard=config, csv_monitor=CsvConfig(enabled=False))
    master.write_events([("lr", 1.0, 1)])
    assert (master.enabled, master.is_writing, (tmp_path / "new").exists()) == (True, False, False)
    assert make(csv_monitor=CsvConfig(enabled=False)).enabled is False


@pytest.mark.parametrize(("package", "model"), [("tensorboard", TensorBoardConfig), ("wandb", WandbConfig)])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, model: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        make(**{package: model(enabled=True)})
    assert str(caught.value) == (
        f"{package}.enabled true needs the package {package}, which is not installed; run: "
        f"pip install {package}"
    )


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        make(csv_monitor=CsvConfig(enabled=True, output_path=str(tmp_path / "file"), job_name="job"))
    assert str(caught.value) == (
        f"csv_monitor.output_path '{tmp_path}/file': {tmp_path}/file/job cannot be made a folder: Not a "
        "directory; give another one"
    )


def test_the_monitors_of_a_ds_config_are_read_without_the_rest_of_it() -> None:
    config = get_monitor_config({"csv_monitor": {"enabled": True}, "wandb": {"enabled": False}, "other": 1})
    assert config.enabled
    assert config.csv_monitor == CsvConfig(enabled=True)
    assert get_monitor_config({}).enabled is False
    with pytest.raises(ConfigError, match=r"comet\.enabled true is not available"):
        get_monitor_config({"comet": {"enabled": True}})


# ---- the throughput


class Watch:
    """A clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("dslaunch.runtime.metrics.throughput.time.perf_counter", lambda: self.now_s)


def test_samples_per_second_are_those_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, lines = Watch(monkeypatch), list[str]()
    timer = ThroughputTimer(ThroughputConfig(), 8, steps_per_output=2, logging_fn=lines.append)
    assert timer.avg_samples_per_sec() == 0.0
    timer.update_epoch_count()
    for step in range(1, 7):
        if step == 5:
            timer.batch_size = 16
            timer.update_epoch_count()
        for micro in (1, 2):
            timer.start()
            watch.now_s += 0.25
            timer.start()  # goes on
            watch.now_s += 0.25
            timer.stop(global_step=micro == 2)
            timer.stop(global_step=True)  # nothing runs
            watch.now_s += 9.0  # is between
    # Steps 3 and 4 have 8 samples in a second, 5 and 6 have 16; the first two do not count.
    assert lines == [
        "step=4, epoch=1, micro_step=8, samples/s=8.0, on average=8.0",
        "step=6, epoch=2, micro_step=4, samples/s=16.0, on average=12.0",
    ]
    assert timer.avg_samples_per_sec() == 12.0
    assert (timer.epoch_count, timer.global_step_count) == (2, 6)


@pytest.mark.parametrize(
    ("enabled", "every", "expected"),
    [(None, None, 0.0), (None, 5, 8.0), (True, None, 8.0), (False, 5, 0.0)],
)
def test_it_measures_where_lines_are_wanted_or_the_section_says_so(
    monkeypatch: pytest.MonkeyPatch, enabled: bool | None, every: int | None, expected: float
) -> None:
    watch = Watch(monkeypatch)
    timer = ThroughputTimer(ThroughputConfig(enabled=enabled), 8, steps_per_output=every)
    for _ in range(3):
        timer.start()
        watch.now_s += 1.0
        timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == expected


def test_a_use_of_memory_is_not_promised() -> None:
    with pytest.raises(ConfigError, match="no use of memory is printed"):
        ThroughputTimer(ThroughputConfig(), 8, monitor_memory=True)


def _throughput(rank: int) -> tuple[str, float, dict[str, float]]:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(steps_per_print=2))
    engine.tput_timer.update_epoch_count()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for step in range(4):
            engine.backward(loss_of(engine, batch(step)))
            engine.step()
    engine.set_train_batch_size(24)
    assert engine.tput_timer.batch_size == 24
    return said.getvalue(), engine.tput_timer.avg_samples_per_sec(), engine.get_wall_clock_timers()


def test_the_engine_prints_its_throughput(ranks: Ranks) -> None:
    said, average, times = ranks(_throughput, world_size=1)[0]
    (line,) = re.findall(
        r"^step=4, epoch=1, micro_step=4, samples/s=([0-9.]+), on average=\1$", said, re.MULTILINE
    )
    assert float(line) == pytest.approx(average, abs=0.06)
    assert times == {}  # nothing is timed without wall_clock_breakdown


def _evaluated(rank: int) -> list[set[str]]:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(wall_clock_breakdown=True))
    engine.backward(loss_of(engine, batch(0)))
    engine.step()
    found = [set(engine.get_wall_clock_timers())]
    with torch.no_grad():
        loss_of(engine, batch(0))
    engine.step()
    return [*found, set(engine.get_wall_clock_timers())]


def test_a_forward_without_gradients_is_no_part_of_a_steps_times(ranks: Ranks) -> None:
    assert ranks(_evaluated, world_size=1)[0] == [{"fwd", "bwd", "step"}, {"step"}]
