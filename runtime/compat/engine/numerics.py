"""The engines of `dslaunch numerics`: those of `initialize()` with recordings, and those of plain torch."""

from __future__ import annotations

from ...engine.make_engine import Request, make_engine
from ...environment import NumericsRun, WorkerEnvironment
from ...numerics.make_plain import make_plain_engine
from ...numerics.plain_engines import PlainStages, PlainSteps
from ...numerics.recorded_engines import RecordedStages, RecordedSteps, with_stage_0
from ..pipeline.module import PipelineModule
from .engines import Engine, PipelineEngine
from .optimizer import DeepSpeedOptimizer


class RecordedEngine(Engine, RecordedSteps):
    """An `Engine` whose steps are recorded."""


class RecordedPipelineEngine(PipelineEngine, RecordedStages):
    """A `PipelineEngine` whose steps are recorded."""

    module: PipelineModule


class PlainEngine(Engine, PlainSteps):
    """An `Engine` in which every rank trains the whole model by torch alone."""


class PlainPipelineEngine(PipelineEngine, PlainStages):
    """A `PipelineEngine` in which every rank trains the whole model by torch alone."""

    module: PipelineModule


def make_compared_engine(
    request: Request, worker: WorkerEnvironment, run: NumericsRun
) -> Engine | PipelineEngine:
    """Return the engine of this run of a comparison.

    Order: every rank must call this
    """
    if run.is_plain:
        return make_plain_engine(
            request, worker, steps=PlainEngine, stages=PlainPipelineEngine, optimizers=DeepSpeedOptimizer
        )
    return make_engine(
        with_stage_0(request) if run.is_at_stage_0 else request,
        worker,
        steps=RecordedEngine,
        stages=RecordedPipelineEngine,
        optimizers=DeepSpeedOptimizer,
    )
