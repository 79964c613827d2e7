"""`PipelineModule` as programs for DeepSpeed know it, and `pipeline()`, which makes one of a whole model.

Source: DeepSpeed 0.19.8 runtime/pipe/module.py, `PipelineModule` and `DualPipeVModule`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import nn

from ...errors import ConfigError
from ...pipeline.cutting import PARAMETERS
from ...pipeline.module import Layer, StagesModule
from ...pipeline.schedule import ONE_FORWARD_ONE_BACKWARD
from ...pipeline.topology import Topology
from .topology import PipelineParallelGrid, ProcessTopology, topology_of

# Names of DeepSpeed's module that this one lacks, and what to do instead.
_TIED = "a step sums the gradients of tied layers with all others; tied_comms says who shares them"
_FILES = "engine.save_checkpoint() and engine.load_checkpoint() know all layers, and write other files"
_ABSENT = {
    "allreduce_tied_weight_gradients": _TIED,
    "get_tied_weights_and_groups": _TIED,
    "ckpt_layer_path": _FILES,
    "ckpt_layer_path_list": _FILES,
    "ckpt_prefix": _FILES,
    "load_state_dir": _FILES,
    "save_state_dict": _FILES,
}


class PipelineModule(StagesModule):
    """The layers of this rank's stages. Each layer takes what the one before returns, a tensor or a tuple of
    tensors.
    """

    _grid: PipelineParallelGrid | None = None

    def _take_place(self, topology: Topology | None) -> None:
        super()._take_place(topology)
        if self._grid is not None:
            self._grid.close()
        self._topo = cast(ProcessTopology, topology or topology_of(self.axes))
        self._grid = PipelineParallelGrid(self._topo)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in _ABSENT:
                raise
            raise AttributeError(
                f"PipelineModule.{name}, which DeepSpeed has, is not here: {_ABSENT[name]}"
            ) from error

    @property
    def tied_comms(self) -> dict[str, dict[str, Any]]:
        """Return by key of a tied layer on several stages: their ranks at this place, and what is tied."""
        comms: dict[str, dict[str, Any]] = {}
        for key in self.tied_keys:
            places = self.ranks_with(key)
            if len(places) > 1 and self.stage_id in places:
                comms[key] = {
                    "ranks": [self.mpu().stage_to_global(place) for place in places],
                    "weight_attr": self.tied_weight_attrs[key],
                    "module": self.tied_modules[key],
                }
        return comms

    def partitions(self) -> list[int]:
        """Return the bounds of the stages, by number of the layer."""
        return self.parts

    def topology(self) -> ProcessTopology:
        """Return the topology of the job."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's place and groups."""
        if self._grid is None:
            raise AssertionError("a PipelineModule without a place")
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return over how many ranks the model is cut."""
        return self.num_stages


class DualPipeVModule(PipelineModule):
    """Two stages on each rank, which follow each other there and back, as in DualPipeV."""

    def __init__(self, layers: Iterable[Layer], num_stages: int | None = None, **options: Any) -> None:
        super().__init__(layers, num_stages, **{"schedule": "dualpipev", **options})


def pipeline(
    model: nn.Sequential,
    *,
    num_stages: int,
    loss_fn: Callable[..., Any] | None = None,
    partition_method: str = PARAMETERS,
    activation_checkpoint_interval: int = 0,
    schedule: str = ONE_FORWARD_ONE_BACKWARD,
    stages_per_rank: int | None = None,
) -> PipelineModule:
    """Cut a model that is there: each rank keeps the layers of its stages, whose parameters keep their names.

    A module that stands in several places of the Sequential is one tied layer.

    Order:  every rank must call this: it makes process groups
    Errors: as PipelineModule
    """
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"pipeline(model={type(model).__name__}): must be a torch.nn.Sequential, whose children are the "
            "layers; build others of LayerSpecs with PipelineModule"
        )
    return PipelineModule(
        model,
        num_stages,
        loss_fn=loss_fn,
        partition_method=partition_method,
        activation_checkpoint_interval=activation_checkpoint_interval,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
    )
