"""The numbers that are told of a run, and what each is called where it is shown.

The page, `dslaunch top`, Prometheus and the comparison of ranks take names, labels and units from here: a new
number is one row, and so is a new phase of a step. What measures them is in the runtime and on the nodes,
which do not know this file; a test compares the names, also with those in docs/design/events.md.
"""

from __future__ import annotations

from typing import NamedTuple

GAUGE, COUNTER = "gauge", "counter"


class Unit(NamedTuple):
    """`name` stands at the axis of a chart, whose numbers are divided by `scale`."""

    name: str = ""
    scale: float = 1.0


PLAIN = Unit()
TIME = Unit("s")
BYTES = Unit("GiB", float(1 << 30))
TRAFFIC = Unit("MiB/s", float(1 << 20))
SHARE = Unit("%", 0.01)
WATTS = Unit("W")
CELSIUS = Unit("°C")


class Family(NamedTuple):
    """Numbers of one name in Prometheus: base units, and `_total` behind what only grows, which is not in
    `name`.
    """

    name: str
    about: str
    kind: str = GAUGE


class Metric(NamedTuple):
    """One number. Names that end in `_s`, and `steps`, are sums since they were told last; of others the
    newest counts.

    `label` is the title of its chart over time, which stands in `section` of a page; without one there is no
    such chart. `part` is its name in the chart of what a rank's memory is made of. `series` is the label of
    Prometheus that tells it from others of its family. `column` is its title in the table of `dslaunch top`,
    and `gives_way` says how soon it is left out there. `of_gpus` makes one number of those of a host's GPUs.
    """

    label: str = ""
    unit: Unit = PLAIN
    section: str = "training"
    starts_at_zero: bool = False
    part: str = ""
    family: Family | None = None
    series: tuple[tuple[str, str], ...] = ()
    column: str = ""
    gives_way: int = 9
    of_gpus: str = "mean"


class Phase(NamedTuple):
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
PHASES = {
    "forward": Phase("forward", "forward", "f", "green", COMPUTING),
    "backward": Phase("backward", "backward", "b", "cyan", COMPUTING),
    "optimizer": Phase("optimizer", "optimizer", "o", "blue", COMPUTING),
    "comm": Phase(
        *("waiting for others", "waiting for other ranks and the network", "c", "yellow", WAITING),
        short="others",
        series="communication",
    ),
    "data": Phase("data", "waiting for data between two steps", "d", "red", DATA),
    "paused": Phase(
        *("saving, loading, evaluating", "saving, loading, evaluating", "p", "magenta", PAUSE), short="saving"
    ),
}
OTHER = "other"  # what no phase accounts for
OTHER_LABEL, OTHER_HELP, OTHER_LETTER = "other", "anything else", "-"


def names_of(*kinds: str) -> tuple[str, ...]:
    """The numbers of the phases of these kinds: `forward_s`."""
    return tuple(f"{name}_s" for name, phase in PHASES.items() if phase.kind in kinds)


_STEP_SECONDS = Family("dslaunch_step_seconds", "Seconds a step took, by phase, in the last interval.")
_MEMORY = Family("dslaunch_memory_bytes", "Memory of the device that the rank trains on, by kind.")
STEPS_FAMILY = Family("dslaunch_steps", "Steps that were told since the launcher began.", COUNTER)


def _memory(kind: str, part: str = "") -> Metric:
    return Metric(unit=BYTES, section="memory", part=part, family=_MEMORY, series=(("kind", kind),))


# What a rank tells, and what is made of it for the whole run (`_per_s`). Charts stand in this order.
RANK: dict[str, Metric] = {
    "step": Metric(family=Family("dslaunch_step", "Optimizer steps done, skipped ones too.")),
    "total_steps": Metric(),
    "samples": Metric(family=Family("dslaunch_samples", "Samples trained by the whole job.", COUNTER)),
    "tokens": Metric(family=Family("dslaunch_tokens", "Tokens trained by the whole job.", COUNTER)),
    "steps": Metric(family=STEPS_FAMILY),
    "loss": Metric("Loss", family=Family("dslaunch_loss", "Loss of the last step.")),
    "lr": Metric("Learning rate", family=Family("dslaunch_learning_rate", "Learning rate of the last step.")),
    "grad_norm": Metric(
        "Gradient norm", family=Family("dslaunch_gradient_norm", "Norm of the gradients of the last step.")
    ),
    "steps_per_s": Metric("Rate", Unit("steps/s"), starts_at_zero=True),
    "tokens_per_s": Metric("Tokens", Unit("tokens/s"), starts_at_zero=True),
    "samples_per_s": Metric("Samples", Unit("samples/s"), starts_at_zero=True),
    "loss_scale": Metric("Loss scale", family=Family("dslaunch_loss_scale", "Factor of the loss.")),
    "skipped": Metric(
        "Steps skipped so far",
        starts_at_zero=True,
        family=Family(
            "dslaunch_skipped_steps", "Steps skipped because of gradients without a value.", COUNTER
        ),
    ),
    "step_s": Metric(
        *("Time of a step", TIME, "times", True), family=_STEP_SECONDS, series=(("phase", "whole"),)
    ),
    "own_s": Metric("Of that, not waiting for others", TIME, "times", True),
    **{
        f"{name}_s": Metric(
            unit=TIME,
            section="times",
            family=_STEP_SECONDS,
            series=(("phase", one.series or name),),
        )
        for name, one in PHASES.items()
    },
    "mem_used": _memory("used")._replace(label="Memory in use", column="used", gives_way=8),
    "mem_peak": _memory("peak"),
    "mem_total": _memory("total"),
    "mem_parameters": _memory("parameters", "parameters"),
    "mem_gradients": _memory("gradients", "gradients"),
    "mem_optimizer": _memory("optimizer", "optimizer states"),
    "mem_activations": _memory("activations", "activations"),
    "mem_other": _memory("other", "other, by kind"),
    "lines_per_s": Metric("Lines of output, of all ranks", Unit("lines/s"), "output", True),
}
STATE_FAMILY = Family("dslaunch_state", "1 for what the rank does instead of training, such as saving.")
REPORTED_FAMILY = Family("dslaunch_reported", "What the program tells by dslaunch.report(), by name.")

_HOST_MEMORY = Family("dslaunch_host_memory_bytes", "Memory of the host, by kind.")
_NETWORK = Family("dslaunch_host_network_bytes_per_second", "Bytes a second over the network.")
_DISK = Family("dslaunch_host_disk_bytes_per_second", "Bytes a second of the disks.")


def _traffic(label: str, family: Family, direction: str) -> Metric:
    return Metric(label, TRAFFIC, family=family, series=(("direction", direction),))


HOST: dict[str, Metric] = {
    "cpu": Metric(
        "Processors in use",
        SHARE,
        family=Family("dslaunch_host_cpu_ratio", "Use of the host's processors, 0 to 1."),
        column="cpu",
        gives_way=6,
    ),
    "cores": Metric(family=Family("dslaunch_host_cores", "Processors of the host.")),
    "load1": Metric("Load, over a minute", family=Family("dslaunch_host_load1", "Load average of a minute.")),
    "mem_used": Metric("Memory in use", BYTES, family=_HOST_MEMORY, series=(("kind", "used"),)),
    "mem_total": Metric(unit=BYTES, family=_HOST_MEMORY, series=(("kind", "total"),)),
    "net_in": _traffic("Network, in", _NETWORK, "in"),
    "net_out": _traffic("Network, out", _NETWORK, "out"),
    "net_wait": Metric("Data wait for the network, of the time", SHARE),
    "disk_read": _traffic("Disks, read", _DISK, "read"),
    "disk_write": _traffic("Disks, written", _DISK, "write"),
}
_GPU_MEMORY = Family("dslaunch_gpu_memory_bytes", "Memory of the GPU, by kind.")
GPU: dict[str, Metric] = {
    "util": Metric(
        "GPUs in use, mean of a host",
        SHARE,
        family=Family("dslaunch_gpu_utilization_ratio", "Use of the GPU, 0 to 1."),
        column="gpu",
        gives_way=3,
    ),
    "mem_used": Metric(
        "GPU memory in use, the fullest of a host",
        BYTES,
        family=_GPU_MEMORY,
        series=(("kind", "used"),),
        of_gpus="max",
    ),
    "mem_total": Metric(unit=BYTES, family=_GPU_MEMORY, series=(("kind", "total"),), of_gpus="max"),
    "power_w": Metric(
        "GPU power, sum of a host",
        WATTS,
        family=Family("dslaunch_gpu_power_watts", "What the GPU draws."),
        column="power",
        gives_way=5,
        of_gpus="sum",
    ),
    "temp_c": Metric(
        "GPU temperature, the hottest of a host",
        CELSIUS,
        family=Family("dslaunch_gpu_temperature_celsius", "How warm the GPU is."),
        of_gpus="max",
    ),
    "ecc": Metric(
        family=Family("dslaunch_gpu_uncorrected_ecc_errors", "Errors of its memory since the boot.", COUNTER),
        of_gpus="sum",
    ),
}
GPU_PREFIX = "gpu_"  # of the number that is made of those of a host's GPUs
# What hosts have charts of.
OF_HOSTS = {
    name: one._replace(starts_at_zero=True)
    for name, one in (*HOST.items(), *((f"{GPU_PREFIX}{name}", one) for name, one in GPU.items()))
}
