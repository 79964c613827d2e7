"""What watches a run: monitors, the log of collectives, the profile of floating-point
operations, the throughput.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from .keys.value import TEXTS, Bool, Count, Integer, Kind, Size, Text
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
OPS = Kind(
    words=f"a list of {', '.join(_OP_NAMES)}",
    accepts=lambda value: value == () or (TEXTS.accepts(value) and all(name in _OPS for name in value)),
    convert=lambda value: tuple(dict.fromkeys(_OPS[name] for name in value)),
)


class TensorBoardConfig(Section):
    """Event files of TensorBoard in `output_path`/`job_name`."""

    enabled: Bool = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class CsvConfig(Section):
    """A CSV file for each name in `output_path`/`job_name`."""

    enabled: Bool = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class WandbConfig(Section):
    """A run of Weights & Biases; `team` is its entity."""

    enabled: Bool = False
    group: Text | None = None
    team: Text | None = None
    project: Text = "deepspeed"


class MonitorConfig(Section):
    """All monitors; None is what a ds_config does not name."""

    tensorboard: TensorBoardConfig | None = None
    csv_monitor: CsvConfig | None = None
    wandb: WandbConfig | None = None

    @property
    def enabled(self) -> bool:
        """Whether any is on."""
        sections = (self.tensorboard, self.csv_monitor, self.wandb)
        return any(section is not None and section.enabled for section in sections)


class CommsLoggerConfig(Section):
    """Which collectives are timed; see comm/comms_log.py."""

    enabled: Bool = False
    verbose: Bool = False
    prof_all: Bool = True
    prof_ops: Annotated[tuple[str, ...], BeforeValidator(OPS.read)] = ()
    debug: Bool = False


class FlopsProfilerConfig(Section):
    """The profile of one optimizer step; `profile_step` counts the steps before it, and none follows
    where it is below 0.
    """

    enabled: Bool = False
    recompute_fwd_factor: Size = 0.0
    profile_step: Integer = 1
    module_depth: Integer = -1
    top_modules: Count = 1
    detailed: Bool = True
    output_file: Text | None = None


class ThroughputConfig(Section):
    """`enabled` None: where steps_per_print asks for lines."""

    enabled: Bool | None = None
    synchronized: Bool = True


class TimersConfig(Section):
    """DeepSpeed's section, with the one timer that it has."""

    throughput: ThroughputConfig = ThroughputConfig()
