"""Destinations of an engine's numbers: TensorBoard, CSV files, Weights & Biases.

Source: DeepSpeed 0.19.8 monitor/: the same names, folders, files and x axis
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ..config.load import load_config
from ..config.monitor import CsvConfig, MonitorConfig, TensorBoardConfig, WandbConfig
from ..errors import ConfigError

Event = tuple[str, Any, int]  # name, a number or a tensor of one, and the samples trained so far


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorConfig:
    """Return the monitors of a ds_config, for a MonitorMaster without an engine;
    its other keys are not looked at.

    Errors: ConfigError with a line for each fault
    """
    names = ("tensorboard", "csv_monitor", "wandb", "comet")
    given = {name: param_dict[name] for name in names if name in param_dict}
    config = load_config({"train_batch_size": 1, **given}, world_size=1)
    return MonitorConfig(tensorboard=config.tensorboard, csv_monitor=config.csv_monitor, wandb=config.wandb)


class Monitor(Protocol):
    """One destination of events."""

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write them. Files have them at once; a run of W&B has them with the next
        samples, or when it ends.
        """

    def close(self) -> None:
        """Let go of files; write_events() must not be called any more."""


class TensorBoardMonitor:
    """Event files that `tensorboard --logdir` shows."""

    def __init__(self, config: TensorBoardConfig) -> None:
        """Make the folder.

        Errors: ConfigError without the package
        """
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # imported at need: it costs 0.5 s and a package

        folder = _folder("tensorboard", config.output_path, config.job_name)
        self.summary_writer: Any = SummaryWriter(log_dir=str(folder))

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Add a scalar for each."""
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, float(value), samples)
        self.summary_writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.summary_writer.close()


class CsvMonitor:
    """A file for each name, `/` and spaces being `_`: rows of samples and value.

    A run that goes on appends.
    """

    def __init__(self, config: CsvConfig) -> None:
        """Make the folder."""
        self.log_dir = _folder("csv_monitor", config.output_path, config.job_name)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Add a row for each; in an empty file, below a head: "step", which counts samples,
        and the end of the name.
        """
        for name, value, samples in event_list:
            path = self.log_dir / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, float(value)])

    def close(self) -> None:
        """Do nothing: no file is open between events."""


class WandbMonitor:
    """The process's run of Weights & Biases: the one that the program has begun,
    else a new one. wandb ends it.
    """

    def __init__(self, config: WandbConfig) -> None:
        """Begin the run.

        Errors: ConfigError without the package
        """
        _require("wandb")
        import wandb  # imported at need: it costs a second and a package

        self.run: Any = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Log the events, those of the same samples at once."""
        for samples, events in groupby(event_list, key=lambda event: event[2]):
            self.run.log({name: float(value) for name, value, _ in events}, step=samples)

    def close(self) -> None:
        """Leave the run open: the program may log to it, and wandb ends it with the program."""


class MonitorMaster:
    """All monitors that the ds_config switches on, on rank 0; on the other ranks none, and events are
    dropped.
    """

    def __init__(self, monitor_config: MonitorConfig, *, rank: int | None = None) -> None:
        """Open the monitors. `rank` None: that of the process group.

        Errors: ConfigError without a package that is needed, or if a folder cannot be made
        """
        self.enabled = monitor_config.enabled
        self.tb_monitor: TensorBoardMonitor | None = None
        self.csv_monitor: CsvMonitor | None = None
        self.wandb_monitor: WandbMonitor | None = None
        if (dist.get_rank() if rank is None else rank) != 0:
            return
        tensorboard, csv_monitor, wandb = (
            monitor_config.tensorboard,
            monitor_config.csv_monitor,
            monitor_config.wandb,
        )
        if tensorboard is not None and tensorboard.enabled:
            self.tb_monitor = TensorBoardMonitor(tensorboard)
        if csv_monitor is not None and csv_monitor.enabled:
            self.csv_monitor = CsvMonitor(csv_monitor)
        if wandb is not None and wandb.enabled:
            self.wandb_monitor = WandbMonitor(wandb)

    @property
    def is_writing(self) -> bool:
        """Whether events go anywhere on this rank."""
        return any(True for _ in self._open())

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write (name, value, samples) to each; on ranks other than 0, nowhere. Not a collective."""
        events = list(event_list)
        for monitor in self._open():
            monitor.write_events(events)

    def close(self) -> None:
        """Close all monitors; later events are dropped."""
        for monitor in self._open():
            monitor.close()
        self.tb_monitor = self.csv_monitor = self.wandb_monitor = None

    def _open(self) -> Iterable[Monitor]:
        monitors: tuple[Monitor | None, ...] = (self.tb_monitor, self.csv_monitor, self.wandb_monitor)
        return (monitor for monitor in monitors if monitor is not None)


def _require(package: str) -> None:
    """The package and its section have one name."""
    if find_spec(package) is None:
        raise ConfigError(
            f"{package}.enabled true needs the package {package}, which is not installed; run: "
            f"pip install {package}"
        )


def _folder(section: str, output_path: str, job_name: str) -> Path:
    folder = Path(output_path) / job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{section}.output_path {output_path!r}: {folder} cannot be made a folder: {error.strerror}; "
            "give another one"
        ) from error
    return folder
