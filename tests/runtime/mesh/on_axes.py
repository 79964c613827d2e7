"""Jobs whose ranks lie along other axes than a ds_config can ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from dslaunch.runtime.config import Config, load_config
from dslaunch.runtime.engine import initialize
from dslaunch.runtime.mesh.axes import Axes


@contextmanager
def on_axes(axes: Axes) -> Iterator[None]:
    """Inside, initialize() makes engines for these axes, and batches for their data ranks."""

    def load(source: Any, **options: Any) -> Config:
        return load_config(source, **{**options, "world_size": axes.dp})

    with (
        patch.object(initialize, "axes_of_job", lambda world_size, tp: axes),
        patch.object(initialize, "load_config", load),
    ):
        yield
