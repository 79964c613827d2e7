"""Where numbers of a training go: the monitors, and what measures."""

from __future__ import annotations

from .key import details, refused, used
from .value import BOOL, POSITIVE, TEXT

MONITOR = (
    used("tensorboard.enabled", "rank 0 writes loss, lr and more for TensorBoard; needs its package"),
    used("tensorboard.output_path", "the folder in which job_name is one; the current one if left out"),
    used("tensorboard.job_name", '"DeepSpeedJobName" if left out'),
    used("csv_monitor.enabled", "rank 0 writes the same, a CSV file for each name"),
    used("csv_monitor.output_path", "as tensorboard.output_path"),
    used("csv_monitor.job_name", "as tensorboard.job_name"),
    used("wandb.enabled", "rank 0 logs the same to Weights & Biases; needs the package wandb"),
    used("wandb.group", "of the run"),
    used("wandb.team", "the run's entity"),
    used("wandb.project", '"deepspeed" if left out'),
    refused("comet.enabled", note="use tensorboard, csv_monitor or wandb"),
    *details(
        "comet",
        samples_log_interval=POSITIVE,
        project=TEXT,
        workspace=TEXT,
        api_key=TEXT,
        experiment_name=TEXT,
        experiment_key=TEXT,
        online=BOOL,
        mode=TEXT,
    ),
    used(
        "comms_logger.enabled",
        "time the engine's collectives, each of which then blocks; engine.log_comm_summary() "
        "prints what they took",
    ),
    used("comms_logger.verbose", "rank 0 prints each of them"),
    used("comms_logger.prof_all", "all of them, which is so if left out; false: those in prof_ops"),
    used("comms_logger.prof_ops", "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather"),
    used("comms_logger.debug", "apart by what was sent"),
    used(
        "flops_profiler.enabled",
        "rank 0 prints floating-point operations, latency and parameters of each module, once",
    ),
    used("flops_profiler.profile_step", "after so many optimizer steps; 1 if left out. Below 0: never"),
    used("flops_profiler.module_depth", "depth to which modules are listed; -1, which is all, if left out"),
    used("flops_profiler.top_modules", "so many classes of modules are named at each depth; 1 if left out"),
    used("flops_profiler.detailed", "false: without the list of modules"),
    used("flops_profiler.output_file", "a file to write instead"),
    used(
        "flops_profiler.recompute_fwd_factor",
        "share of the forward that the backward computes again, for the FLOPS of the backward; 0 if left out",
    ),
    used(
        "timers.throughput.enabled",
        "samples per second, printed every steps_per_print; if left out: where that is given",
    ),
    used("timers.throughput.synchronized", "wait for the GPU before such a line; true if left out"),
)
