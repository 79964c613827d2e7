"""Observers of a run: monitors, the log of collectives, the profile of floating-point
operations, the throughput.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from .keys.value import TEXTS, Bool, Count, Integer, Size, Text, ValueKind
from .section import Section

# Other spellings of a collective, in torch.distributed's and DeepSpeed's functions, and its name here.
_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
}
_OP_NAMES = tuple(dict.fromkeys(_OPS.values()))
OPS = ValueKind(
    words=f"a list of {', '.join(_OP_NAMES)}",
    accepts=lambda value: value == () or (TEXTS.accepts(value) and all(name in _OPS for name in value)),
    convert=lambda value: tuple(dict.fromkeys(_OPS[name] for name in value)),
)


class TensorBoardConfig(Section):
    """Event files of TensorBoard in `output_path`/`job_name`."""

    enabled: Bool = False
    """rank 0 writes loss, lr and more for TensorBoard; needs its package"""
    output_path: Text = ""
    """the folder in which job_name is one; the current one if left out"""
    job_name: Text = "DeepSpeedJobName"
    """"DeepSpeedJobName" if left out"""


class CsvConfig(Section):
    """A CSV file for each name in `output_path`/`job_name`."""

    enabled: Bool = False
    """rank 0 writes the same, a CSV file for each name"""
    output_path: Text = ""
    """as tensorboard.output_path"""
    job_name: Text = "DeepSpeedJobName"
    """as tensorboard.job_name"""


class WandbConfig(Section):
    """A run of Weights & Biases; `team` is its entity."""

    enabled: Bool = False
    """rank 0 logs the same to Weights & Biases; needs the package wandb"""
    group: Text | None = None
    """of the run"""
    team: Text | None = None
    """the run's entity"""
    project: Text = "deepspeed"
    """"deepspeed" if left out"""


class MonitorConfig(Section):
    """All monitors; None for those that a ds_config does not name."""

    tensorboard: TensorBoardConfig | None = None
    csv_monitor: CsvConfig | None = None
    wandb: WandbConfig | None = None

    @property
    def enabled(self) -> bool:
        """Whether any is on."""
        sections = (self.tensorboard, self.csv_monitor, self.wandb)
        return any(section is not None and section.enabled for section in sections)


class CommsLoggerConfig(Section):
    """Collectives that are timed; see comm/comms_log.py."""

    enabled: Bool = False
    """time the engine's collectives, each of which then blocks; engine.log_comm_summary() prints what they
    took"""
    verbose: Bool = False
    """rank 0 prints each of them"""
    prof_all: Bool = True
    """all of them, which is so if left out; false: those in prof_ops"""
    prof_ops: Annotated[tuple[str, ...], BeforeValidator(OPS.read)] = ()
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather"""
    debug: Bool = False
    """apart by what was sent"""


class FlopsProfilerConfig(Section):
    """The profile of one optimizer step; `profile_step` counts the steps before it, and none follows
    where it is below 0.
    """

    enabled: Bool = False
    """rank 0 prints floating-point operations, latency and parameters of each module, once"""
    profile_step: Integer = 1
    """after so many optimizer steps; 1 if left out. Below 0: never"""
    module_depth: Integer = -1
    """depth to which modules are listed; -1, which is all, if left out"""
    top_modules: Count = 1
    """so many classes of modules are named at each depth; 1 if left out"""
    detailed: Bool = True
    """false: without the list of modules"""
    output_file: Text | None = None
    """a file to write instead"""
    recompute_fwd_factor: Size = 0.0
    """share of the forward that the backward computes again, for the FLOPS of the backward; 0 if left out"""


class ThroughputConfig(Section):
    """`enabled` None: where steps_per_print asks for lines."""

    enabled: Bool | None = None
    """samples per second, printed every steps_per_print; if left out: where that is given"""
    synchronized: Bool = True
    """wait for the GPU before such a line; true if left out"""


class TimersConfig(Section):
    """DeepSpeed's section, with the one timer that it has."""

    throughput: ThroughputConfig = ThroughputConfig()
