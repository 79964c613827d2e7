"""The reported numbers of a run, with their names where they are shown.

The page, `dslaunch top`, Prometheus and the comparison of ranks take names, labels and units from here: a new
number is one row, and so is a new phase of a step. The code that measures them is in the runtime and on the
nodes, and does not know this file; a test compares the names, also with those in docs/design/events.md.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

GAUGE, COUNTER = "gauge", "counter"


class NumberUnit(NamedTuple):
    """`name` stands at the axis of a chart, whose numbers are divided by `scale`."""

    name: str = ""
    scale: float = 1.0


PLAIN = NumberUnit()
TIME = NumberUnit("s")
BYTES = NumberUnit("GiB", float(1 << 30))
TRAFFIC = NumberUnit("MiB/s", float(1 << 20))
SHARE = NumberUnit("%", 0.01)
WATTS = NumberUnit("W")
CELSIUS = NumberUnit("°C")


class Family(NamedTuple):
    """Numbers of one name in Prometheus: base units. `name` is without the `_total` of numbers that only
    grow.
    """

    name: str
    about: str
    kind: str = GAUGE


class Metric(NamedTuple):
    """One number. Names that end in `_s`, and `steps`, are sums since the last report; of others the newest
    counts.

    `label` is the title of its chart over time, which stands in `section` of a page; without one there is no
    such chart. `part` is its name in the chart of the parts of a rank's memory. `series` is the label of
    Prometheus that tells it from others of its family. `column` is its title in the table of `dslaunch top`,
    and `gives_way` says how soon it is left out there. `of_gpus` makes one number of those of a host's GPUs.
    """

    label: str = ""
    unit: NumberUnit = PLAIN
    family: Family | None = None
    series: tuple[str, str] | None = None
    section: str = "training"
    starts_at_zero: bool = False
    part: str = ""
    column: str = ""
    gives_way: int = 9
    of_gpus: str = "mean"


class StepPhase(NamedTuple):
    """A part of a step, `NAME_s` in events. `letter` and `color` are those of the bars of `dslaunch top`,
    `short` stands beside the letter there, and `help` in its help; `series` is its name in Prometheus.
    """

    label: str
    help: str
    letter: str
    color: str
    kind: str  # computing, waiting, data, pause
    short: str = ""
    series: str = ""


COMPUTING, WAITING, DATA, PAUSE = "computing", "waiting", "data", "pause"
_COMM_HELP, _PAUSED = "waiting for other ranks and the network", "saving, loading, evaluating"
PHASES = {
    "forward": StepPhase("forward", "forward", "f", "green", COMPUTING),
    "backward": StepPhase("backward", "backward", "b", "cyan", COMPUTING),
    "optimizer": StepPhase("optimizer", "optimizer", "o", "blue", COMPUTING),
    "comm": StepPhase("waiting for others", _COMM_HELP, "c", "yellow", WAITING, "others", "communication"),
    "data": StepPhase("data", "waiting for data between two steps", "d", "red", DATA),
    "paused": StepPhase(_PAUSED, _PAUSED, "p", "magenta", PAUSE, "saving"),
}
OTHER = "other"  # time that no phase accounts for
OTHER_LABEL, OTHER_HELP, OTHER_LETTER = "other", "anything else", "-"


@cache
def names_of(*kinds: str) -> tuple[str, ...]:
    """Return the numbers of the phases of these kinds: `forward_s`."""
    return tuple(f"{name}_s" for name, phase in PHASES.items() if phase.kind in kinds)


class SpentTime(NamedTuple):
    """One use of a job's time: its name in a list, and a sentence on it."""

    label: str
    help: str


# In the order of a job; the names are keys of the report, and labels of Prometheus.
SPENT = {
    "useful": SpentTime("steps that were kept", "Steps whose result the job kept, and evaluations."),
    "start": SpentTime("start", "From the beginning to the first step."),
    "restart": SpentTime("restarts", "From a failure to the next step, of all restarts."),
    "redone": SpentTime("steps done again", "Steps that a restart did again, and what a failure cut off."),
    "save": SpentTime("saves", "Waiting for checkpoints, between steps."),
    "hang": SpentTime("hangs", "Waiting in a collective that never ended, until the failure."),
    "end": SpentTime("end", "After the last step."),
}
SPENT_FAMILY = Family("dslaunch_job_seconds", "Seconds of the job, by what they were spent on.")
GOODPUT_FAMILY = Family("dslaunch_goodput_ratio", "Part of the job's time in steps that were kept, 0 to 1.")
_STEP_SECONDS = Family("dslaunch_step_seconds", "Seconds a step took, by phase, in the last interval.")
_MEMORY = Family("dslaunch_memory_bytes", "Memory of the device that the rank trains on, by kind.")
_STEP = Family("dslaunch_step", "Optimizer steps done, skipped ones too.")
_STEPS = Family("dslaunch_steps", "Steps that were told since the launcher began.", COUNTER)
_SAMPLES = Family("dslaunch_samples", "Samples trained by the whole job.", COUNTER)
_TOKENS = Family("dslaunch_tokens", "Tokens trained by the whole job.", COUNTER)
_SKIPPED = Family("dslaunch_skipped_steps", "Steps skipped because of gradients without a value.", COUNTER)
_LOSS = Family("dslaunch_loss", "Loss of the last step.")
_LR = Family("dslaunch_learning_rate", "Learning rate of the last step.")
_NORM = Family("dslaunch_gradient_norm", "Norm of the gradients of the last step.")
_SCALE = Family("dslaunch_loss_scale", "Factor of the loss.")
STATE_FAMILY = Family("dslaunch_state", "1 for what the rank does instead of training, such as saving.")
REPORTED_FAMILY = Family("dslaunch_reported", "What the program tells by dslaunch.report(), by name.")


def _memory(kind: str, *, part: str = "", label: str = "", column: str = "") -> Metric:
    one = Metric(label, BYTES, _MEMORY, ("kind", kind), section="memory", column=column)
    return one._replace(part=part, gives_way=8)


# Numbers of a rank, and those made of them for the whole run (`_per_s`). Charts stand in this order.
RANK: dict[str, Metric] = {
    "step": Metric(family=_STEP),
    "total_steps": Metric(),
    "waiting": Metric(),
    "pause": Metric(),
    "samples": Metric(family=_SAMPLES),
    "tokens": Metric(family=_TOKENS),
    "steps": Metric(family=_STEPS),
    "loss": Metric("Loss", PLAIN, _LOSS),
    "lr": Metric("Learning rate", PLAIN, _LR),
    "grad_norm": Metric("Gradient norm", PLAIN, _NORM),
    "steps_per_s": Metric("Rate", NumberUnit("steps/s"), starts_at_zero=True),
    "tokens_per_s": Metric("Tokens", NumberUnit("tokens/s"), starts_at_zero=True),
    "samples_per_s": Metric("Samples", NumberUnit("samples/s"), starts_at_zero=True),
    "loss_scale": Metric("Loss scale", PLAIN, _SCALE),
    "skipped": Metric("Steps skipped so far", PLAIN, _SKIPPED, starts_at_zero=True),
    "step_s": Metric("Time of a step", TIME, _STEP_SECONDS, ("phase", "whole"), "times", True),
    "own_s": Metric("Of that, not waiting for others", TIME, None, None, "times", True),
    **{
        f"{name}_s": Metric("", TIME, _STEP_SECONDS, ("phase", one.series or name), "times")
        for name, one in PHASES.items()
    },
    "saving_s": Metric("", TIME, _STEP_SECONDS, ("phase", "saving"), "times"),
    "mem_used": _memory("used", label="Memory in use", column="used"),
    "mem_peak": _memory("peak"),
    "mem_total": _memory("total"),
    "mem_parameters": _memory("parameters", part="parameters"),
    "mem_gradients": _memory("gradients", part="gradients"),
    "mem_optimizer": _memory("optimizer", part="optimizer states"),
    "mem_activations": _memory("activations", part="activations"),
    "mem_other": _memory("other", part="other, by kind"),
    "lines_per_s": Metric("Lines of output, of all ranks", NumberUnit("lines/s"), None, None, "output", True),
}

_CPU = Family("dslaunch_host_cpu_ratio", "Use of the host's processors, 0 to 1.")
_CORES = Family("dslaunch_host_cores", "Processors of the host.")
_LOAD = Family("dslaunch_host_load1", "Load average of a minute.")
_HOST_MEMORY = Family("dslaunch_host_memory_bytes", "Memory of the host, by kind.")
_NETWORK = Family("dslaunch_host_network_bytes_per_second", "Bytes a second over the network.")
_DISK = Family("dslaunch_host_disk_bytes_per_second", "Bytes a second of the disks.")
HOST: dict[str, Metric] = {
    "cpu": Metric("Processors in use", SHARE, _CPU, column="cpu", gives_way=6),
    "cores": Metric(family=_CORES),
    "load1": Metric("Load, over a minute", PLAIN, _LOAD),
    "mem_used": Metric("Memory in use", BYTES, _HOST_MEMORY, ("kind", "used")),
    "mem_total": Metric("", BYTES, _HOST_MEMORY, ("kind", "total")),
    "net_in": Metric("Network, in", TRAFFIC, _NETWORK, ("direction", "in")),
    "net_out": Metric("Network, out", TRAFFIC, _NETWORK, ("direction", "out")),
    "net_wait": Metric("Data wait for the network, of the time", SHARE),
    "disk_read": Metric("Disks, read", TRAFFIC, _DISK, ("direction", "read")),
    "disk_write": Metric("Disks, written", TRAFFIC, _DISK, ("direction", "write")),
}

_UTIL = Family("dslaunch_gpu_utilization_ratio", "Use of the GPU, 0 to 1.")
_GPU_MEMORY = Family("dslaunch_gpu_memory_bytes", "Memory of the GPU, by kind.")
_POWER = Family("dslaunch_gpu_power_watts", "What the GPU draws.")
_TEMPERATURE = Family("dslaunch_gpu_temperature_celsius", "How warm the GPU is.")
_ECC = Family("dslaunch_gpu_uncorrected_ecc_errors", "Errors of its memory since the boot.", COUNTER)
_FULLEST, _HOTTEST = "GPU memory in use, the fullest of a host", "GPU temperature, the hottest of a host"
GPU: dict[str, Metric] = {
    "util": Metric("GPUs in use, mean of a host", SHARE, _UTIL, column="gpu", gives_way=3),
    "mem_used": Metric(_FULLEST, BYTES, _GPU_MEMORY, ("kind", "used"), of_gpus="max"),
    "mem_total": Metric("", BYTES, _GPU_MEMORY, ("kind", "total"), of_gpus="max"),
    "power_w": Metric(
        *("GPU power, sum of a host", WATTS, _POWER), column="power", gives_way=5, of_gpus="sum"
    ),
    "temp_c": Metric(_HOTTEST, CELSIUS, _TEMPERATURE, of_gpus="max"),
    "ecc": Metric(family=_ECC, of_gpus="sum"),
}
GPU_PREFIX = "gpu_"  # begins the number made of those of a host's GPUs
OF_GPUS = {f"{GPU_PREFIX}{name}": one for name, one in GPU.items()}
OF_HOSTS = {name: one._replace(starts_at_zero=True) for name, one in (HOST | OF_GPUS).items()}  # with charts
