"""A model as a list of layers, of which each rank holds those of its stage.

Names of parameters are "{number of the layer}.{name}", for tied layers "tied_modules.{key}.{name}". So names,
and with them checkpoints, do not depend on where the model is cut.

Source: DeepSpeed 0.19.8 runtime/pipe/module.py, `PipelineModule`: its arguments, attributes and cuts
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...shared.axes import ORDER, Axes, axes_of_job
from ..activation import checkpointing
from ..comm.agreement import agree
from ..comm.process_group import choose_device
from ..environment import computes_plainly, read_environment
from ..errors import ConfigError
from ..zero.parameters.early_parameter import early_of
from .cutting import PARAMETERS, cut
from .layers import LayerSpec, TiedLayerSpec, name_of
from .schedule import ONE_FORWARD_ONE_BACKWARD, Shape, chunks_of, shape_of
from .topology import Topology, axes_of

Layer = LayerSpec | Callable[..., Any]  # a module is callable, too

# For models of these classes DeepSpeed checkpoints layers of one class only.
_MEGATRON = ("GPTModelPipe", "GPT2ModelPipe")
_MEGATRON_LAYER = "ParallelTransformerLayerPipe"

_log = logging.getLogger("dslaunch")


class StagesModule(nn.Module):
    """The layers of this rank's stages. Each layer takes what the one before returns, a tensor or a tuple of
    tensors.
    """

    def __init__(  # noqa: PLR0913  (DeepSpeed's signature)
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Topology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = PARAMETERS,
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: str = ONE_FORWARD_ONE_BACKWARD,
        stages_per_rank: int | None = None,
    ) -> None:
        """Build the layers of this rank's stages, and move them to its device.

        `num_stages` ranks (times the tp of `dslaunch --mesh`, if given) hold one copy of the model together;
        `topology` describes this in more detail.
        `loss_fn(outputs, labels)` is applied on the last stage; without it the last layer's output is the
        loss. `seed_layers`: each layer is built, and run, with random numbers of its own, so that they do
        not depend on the cut. `partition_method`: "parameters" gives the stages about as many trained
        elements, "uniform" as many layers, "type:REGEX" as many layers of such a class.
        `dynamic_shape`: shapes between stages may change though those of the inputs do not.
        `schedule` is "1f1b", "gpipe", or, with several stages on each rank, "interleaved", "zero_bubble",
        "zbv" or "dualpipev".

        Order:  every rank must call this: it makes process groups
        Errors: RuntimeError without a process group, or for a number of stages that does not divide the
                ranks; ConfigError for what has no meaning
        """
        super().__init__()
        self.axes = _axes(num_stages, topology)
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = None if checkpointable_layers is None else list(checkpointable_layers)
        self.dynamic_shape = dynamic_shape
        self.num_stages = self.axes.pp
        # the plain run of `dslaunch numerics` has all layers on every rank
        is_whole = computes_plainly()
        self.shape: Shape = shape_of(
            ONE_FORWARD_ONE_BACKWARD if is_whole else schedule,
            num_ranks=1 if is_whole else self.num_stages,
            per_rank=None if is_whole else stages_per_rank,
        )
        self._layer_specs = list(layers)
        self._check_layers()
        if self.num_stages > 1 and not is_whole:
            _check_not_sharded(self._layer_specs)
        self._names = [name_of(layer) for layer in self._layer_specs]
        self._agree(schedule, partition_method)
        self._take_place(topology)
        self.parts = cut(
            partition_method,
            num_parts=self.shape.num_stages,
            names=self._names,
            num_trained=self._count() if partition_method.lower() == PARAMETERS else None,
        )
        self._check_shared()
        self.chunks = chunks_of(self.shape, 0 if is_whole else self.stage_id)
        self._local_start, self._local_stop = self.parts[self.chunks[0]], self.parts[self.chunks[0] + 1]
        self.micro_offset = 0
        self._offsets = dict.fromkeys(self.chunks, 0)  # micro batches that have passed, by stage
        self.curr_layer = self._local_start
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, list[str]] = {}
        self._funcs: dict[int, list[Callable[..., Any]]] = {}  # stage -> functions
        self._build()
        self._forget_others()
        if not any(
            one.is_meta for one in (*self.parameters(), *self.buffers())
        ):  # else initialize() moves it
            self.to(choose_device(read_environment()))

    def arrange(self, axes: Axes) -> None:
        """Let the ranks of each stage share sequences; the module was built as if each rank had its own data.

        Order:  every rank must call this: it makes process groups
        """
        self.axes = axes
        self._take_place(None)

    def _take_place(self, topology: Topology | None) -> None:
        """Find this rank's place along the axes, which the program may have given by a topology.

        Order: every rank must call this: the grid for programs that use DeepSpeed makes process groups
        """
        self.global_rank = dist.get_rank()
        self.stage_id = self.axes.coordinates(self.global_rank)["pp"]

    # ---- building

    def _agree(self, schedule: str, partition_method: str) -> None:
        """Errors: ConfigError, on all ranks, if they build different modules"""
        agree(
            {
                "topology": ",".join(f"{axis}={getattr(self.axes, axis)}" for axis in self.axes.order),
                "num_layers": len(self._names),
                "schedule": schedule,
                "stages_per_rank": self.shape.per_rank,
                "partition_method": partition_method,
                **{f"layer {number}": name for number, name in enumerate(self._names)},
            },
            what="PipelineModules",
            cure="build the same one on every rank",
        )

    def _check_layers(self) -> None:
        if not self._layer_specs:
            raise ConfigError("PipelineModule(layers=[]): there is no layer")
        for number, layer in enumerate(self._layer_specs):
            if not isinstance(layer, LayerSpec) and not callable(layer):
                raise ConfigError(
                    f"PipelineModule: layer {number} is {type(layer).__name__}; give LayerSpecs, modules or "
                    "functions"
                )
        kinds: dict[str, TiedLayerSpec] = {}
        for layer in self._layer_specs:
            if isinstance(layer, TiedLayerSpec):
                first = kinds.setdefault(layer.key, layer)
                if first.typename is not layer.typename:
                    raise ConfigError(
                        f"PipelineModule: the tied layers of key {layer.key!r} are {first!r} and {layer!r}; "
                        "one module serves all of them"
                    )

    def _check_shared(self) -> None:
        """Refuse a parameter in layers of several stages: it would become independent copies on different
        ranks.
        """
        first: dict[int, tuple[int, str]] = {}
        for number, layer in enumerate(self._layer_specs):
            for name, param in layer.named_parameters() if isinstance(layer, nn.Module) else ():
                other, _ = first.setdefault(id(param), (number, name))
                if self.stage_owner(other) != self.stage_owner(number):
                    raise ConfigError(
                        f"PipelineModule: layers {other} and {number} share the parameter '{name}', and lie "
                        "on different ranks; give both as TiedLayerSpec with one key, or cut the model so "
                        "that they lie on one"
                    )

    def _count(self) -> list[int]:
        """Return the number of trained elements of each layer; tied layers count at each use."""
        return [_num_trained(layer) for layer in self._layer_specs]

    def _build(self) -> None:
        tied: dict[str, nn.Module] = {}
        for stage in self.chunks:
            self._funcs[stage] = [
                self._build_layer(number, tied) for number in range(self.parts[stage], self.parts[stage + 1])
            ]
        for key in self.tied_keys:  # in one order on all ranks
            if key in tied:
                self.tied_modules[key] = tied[key]
                self._check_no_buffers(key)
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # programs ask

    def _build_layer(self, number: int, tied: dict[str, nn.Module]) -> Callable[..., Any]:
        layer = self._layer_specs[number]
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in tied:
                self._seed_layer(number)
                tied[layer.key] = layer.build()
                _check_tied(layer, tied[layer.key])
            self.tied_weight_attrs[layer.key] = layer.tied_weight_attr
            module = tied[layer.key]
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        if isinstance(layer, LayerSpec):
            self._seed_layer(number)
            layer = layer.build()
        if isinstance(layer, nn.Module):
            self.add_module(str(number), layer)
        return layer

    def _forget_others(self) -> None:
        """Drop layers that were given as modules and belong to other ranks, to free their memory."""
        own = {number for stage in self.chunks for number in range(self.parts[stage], self.parts[stage + 1])}
        self._layer_specs = [
            _elsewhere if isinstance(layer, nn.Module) and number not in own else layer
            for number, layer in enumerate(self._layer_specs)
        ]

    def _check_no_buffers(self, key: str) -> None:
        """Refuse buffers in tied layers: each stage would change its own copy, but a checkpoint
        stores one.
        """
        buffers = [name for name, _ in self.tied_modules[key].named_buffers()]
        if buffers and len(self.ranks_with(key)) > 1:
            raise ConfigError(
                f"PipelineModule: the tied layer '{key}' lies on several stages and has a buffer, "
                f"'{buffers[0]}', of which each stage would change its own copy; tie a layer without "
                "buffers, or cut the model so that all of its uses are on one stage"
            )

    def _seed_layer(self, number: int) -> None:
        if self.seed_layers:
            self._seed(self.base_seed + number)

    def _seed(self, seed: int) -> None:
        (self.seed_fn or _seed_all)(seed)

    # ---- what is where

    @property
    def tied_keys(self) -> tuple[str, ...]:
        """Return the keys of all tied layers of the model, in the order of their first uses."""
        specs = (layer for layer in self._layer_specs if isinstance(layer, TiedLayerSpec))
        return tuple(dict.fromkeys(layer.key for layer in specs))

    def ranks_with(self, key: str) -> tuple[int, ...]:
        """Return the places along the pipeline whose stages use this tied layer."""
        uses = [
            number
            for number, layer in enumerate(self._layer_specs)
            if isinstance(layer, TiedLayerSpec) and layer.key == key
        ]
        return tuple(sorted({self.stage_owner(number) for number in uses}))

    @property
    def forward_funcs(self) -> list[Callable[..., Any]]:
        """Return this rank's layers, in order."""
        return [func for stage in self.chunks for func in self._funcs[stage]]

    def stage_owner(self, layer_idx: int) -> int:
        """Return the place along the pipeline of the rank that has this layer.

        Errors: RuntimeError if there is no such layer
        """
        for stage in range(self.shape.num_stages):
            if self.parts[stage] <= layer_idx < self.parts[stage + 1]:
                return self.shape.owner(stage)
        raise RuntimeError(f"layer {layer_idx}: the model has {len(self._layer_specs)}")

    def set_checkpoint_interval(self, interval: int) -> None:
        """Keep, from now on, only the inputs of every `interval` layers; 0 keeps everything."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """Return more losses than the last stage's, by name; for subclasses."""
        return None

    def parameters_of(self, stage: int) -> tuple[nn.Parameter, ...]:
        """Return the parameters that one of this rank's stages uses."""
        params: dict[nn.Parameter, None] = {}
        for func in self._funcs[stage]:
            module = func if isinstance(func, nn.Module) else getattr(func, "args", (None,))[0]
            if isinstance(module, nn.Module):
                params |= dict.fromkeys(module.parameters())
        return tuple(params)

    # ---- running

    def forward(self, forward_input: Any) -> Any:
        """Run this rank's first stage."""
        return self.run_stage(self.chunks[0], forward_input)

    def run_stage(self, stage: int, inputs: Any) -> Any:
        """Run the layers of one of this rank's stages."""
        self._offsets[stage] += 1
        self.micro_offset = offset = self._offsets[stage]
        first, funcs = self.parts[stage], self._funcs[stage]

        def run(start: int, stop: int, *given: Any) -> Any:
            value = given[0] if len(given) == 1 else given
            for number, func in enumerate(funcs[start:stop], start=start):
                self.curr_layer = first + number
                if self.seed_layers:
                    self._seed(self.base_seed * (offset + 1) + self.curr_layer)
                value = func(value)
            return value

        every = self.activation_checkpoint_interval
        if not every:
            return run(0, len(funcs), inputs)
        value = inputs
        for start in range(0, len(funcs), every):
            stop = min(start + every, len(funcs))
            given = value if isinstance(value, tuple) else (value,)
            if torch.is_grad_enabled() and self._is_checkpointed(funcs[start:stop]):
                value = self.activation_checkpoint_func(partial(run, start, stop), *given)
            else:
                value = run(start, stop, *given)
        return value

    def _is_checkpointed(self, funcs: Sequence[Callable[..., Any]]) -> bool:
        names = [type(func).__name__ for func in funcs]
        is_reentrant = self.activation_checkpoint_func is not checkpointing.non_reentrant_checkpoint
        if type(self).__name__ in _MEGATRON and is_reentrant:
            return all(_MEGATRON_LAYER in name for name in names)
        if self.checkpointable_layers is not None:
            return all(name in self.checkpointable_layers for name in names)
        return any(
            isinstance(func, nn.Module) and next(func.parameters(), None) is not None for func in funcs
        )


def _axes(num_stages: int | None, topology: Topology | None) -> Axes:
    if num_stages is None and topology is None:
        raise RuntimeError("PipelineModule: give num_stages, or a topology")
    if not dist.is_initialized():
        raise RuntimeError(
            "PipelineModule needs the job's process group: call deepspeed.init_distributed() or "
            "dslaunch.init_distributed() before"
        )
    world_size = dist.get_world_size()
    if topology is not None:
        axes = axes_of(topology, world_size)
        if num_stages is not None and num_stages != axes.pp:
            raise RuntimeError(f"num_stages {num_stages} contradicts the topology, which has {axes.pp}")
        return axes
    if not isinstance(num_stages, int) or num_stages < 1 or world_size % num_stages:
        raise RuntimeError(f"num_stages {num_stages!r} does not divide the {world_size} ranks of the job")
    worker = read_environment()  # with the axes of dslaunch --mesh
    sizes = {axis: size for axis, size in worker.mesh if axis in ("sp", "tp")}
    try:
        return axes_of_job(world_size, pp=num_stages, **sizes, order=worker.mesh_order or ORDER)
    except ValueError as error:
        shown = ",".join(f"{axis}={size}" for axis, size in worker.mesh)
        raise RuntimeError(f"num_stages {num_stages} and dslaunch --mesh {shown}: {error}") from None


def _elsewhere(*_: Any) -> NoReturn:
    """Stand-in for a module that lies on another rank."""
    raise AssertionError("a layer of another rank's stage was to run here")


def _check_not_sharded(layers: Iterable[Layer]) -> None:
    """Refuse parameters that zero.Init has sharded: ranks of other stages would hold parts of them."""
    probe = nn.Module()
    probe.register_parameter(
        "probe", nn.Parameter(torch.zeros(1, device="cpu"))
    )  # an open zero.Init shards this parameter
    given = [param for layer in layers if isinstance(layer, nn.Module) for param in layer.parameters()]
    if any(early_of(param) is not None for param in [*probe.parameters(), *given]):
        raise ConfigError(
            "PipelineModule with layers of zero.Init, which shards them over all ranks, where each stage has "
            "others: give LayerSpecs, which are built on the ranks of their stage alone, outside of zero.Init"
        )


def _num_trained(layer: Layer) -> int:
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=()):  # so that counting does not change the program's random state
            try:
                with torch.device("meta"):
                    built = layer.build()
            except Exception:  # a layer that cannot be built without real values
                built = layer.build()
    elif isinstance(layer, nn.Module):
        built = layer
    else:
        return 0
    return sum(param.numel() for param in built.parameters() if param.requires_grad)


def _check_tied(layer: TiedLayerSpec, module: nn.Module) -> None:
    """Check that the tied attribute is there: a parameter, or an attribute that gives one."""
    for name in layer.tied_weight_attr:
        attribute: Any = module
        for part in name.split("."):
            attribute = getattr(attribute, part, None)
        if not isinstance(attribute, Tensor):
            names = ", ".join(sorted(one for one, _ in module.named_parameters())) or "none"
            raise ConfigError(
                f"TiedLayerSpec({layer.key!r}, ..., tied_weight_attr={layer.tied_weight_attr}): {layer!r} "
                f"has no parameter {name!r}; it has {names}. All of them are tied: give "
                "tied_weight_attr=[] or one of these"
            )


def _seed_all(seed: int) -> None:
    random.seed(seed)
    try:
        import numpy as np
    except ImportError:
        pass
    else:
        np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
