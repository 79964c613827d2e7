"""Keys of monitors: where a training's numbers go."""

from __future__ import annotations

from .key import details, refused
from .value import BOOL, POSITIVE, TEXT

MONITOR = (
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
)
