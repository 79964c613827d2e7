"""A model of which each rank along the axis tp holds a part: what an engine asks of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..config.tensor import TensorParallelConfig
from ..errors import ConfigError
from ..mesh.axes import SAMPLES
from ..mesh.cut import Cut
from ..mesh.domain import Domains
from ..mesh.parts import Parts
from .exchange import TensorAxis
from .lower import Division


class DividedModel:
    """A model of which this rank holds a part."""

    def __init__(
        self, module: nn.Module, axis: TensorAxis, division: Division, *, settings: TensorParallelConfig
    ) -> None:
        self._axis, self._division, self._settings = axis, division, settings
        self._num_forwards = 0
        cuts = {id(param): cut for param, cut in division.cuts}
        for one in module.modules():
            own = {name: cuts[id(param)] for name, param in one._parameters.items() if id(param) in cuts}
            if own:
                one.register_state_dict_pre_hook(_RefuseParts(self, own))  # type: ignore[no-untyped-call]

    def has(self, module: nn.Module) -> bool:
        """Whether the divided parameters of a module are this model's, and no copies of them."""
        own = {id(param) for param, _ in self._division.cuts}
        return any(id(param) in own for param in module._parameters.values())

    @property
    def size(self) -> int:
        """Over how many ranks it is divided."""
        return self._axis.size

    def again(self, settings: TensorParallelConfig) -> DividedModel:
        """Return it, for another engine after the one before.

        Errors: ConfigError if the ds_config would divide it differently
        """
        if settings != self._settings:
            raise ConfigError(
                "this model is divided over ranks already, by an initialize() before, and the ds_config's "
                "section tensor_parallel is another one now: give the same, or make the model anew and load "
                "a checkpoint of the engine before"
            )
        self._num_forwards = 0
        return self

    def join(self, domains: Domains) -> None:
        """Let its parameters have a domain of their own, and its layers a process group.

        Order: a collective
        """
        group = domains.copies_group
        self._axis.join(group)
        if not self._division.cuts:
            return
        dense = domains.dense.comm.mesh
        domains.add(
            "cut over tp",
            sharers=domains.axes.lines(SAMPLES),
            shard_size=dense.shard.size,
            states_by_chunk=dense.states_by_chunk,
            divisor=dense.divisor,
            params=[param for param, _ in self._division.cuts],
            parts=Parts(group, self._division.cuts),
        )

    def agree_on_random_numbers(self, device: torch.device) -> None:
        """Let ranks that compute one layer together draw the same numbers, as for dropout, from now on.

        Order: a collective
        """
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        told = self._axis.group.all_gather_objects(states, what="the states of random numbers")[0]
        torch.set_rng_state(told[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(told[1], device)

    def check_inputs(self, args: Any, kwargs: Any) -> None:
        """See that ranks that compute one layer together were given the same. Forwards 1, 2, 4, 8 and so on
        do so: in the end that costs nothing, and a loader that goes another way later is found, too.

        Order:  a collective in these forwards
        Errors: ConfigError that names the first tensor that differs
        """
        self._num_forwards += 1
        if self._num_forwards.bit_count() != 1:
            return
        leaves = tree_leaves_with_path((args, kwargs))
        own = {keystr(path): _digest(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}
        told = self._axis.group.all_gather_objects(own, what="what the model is given")
        first = dist.get_rank() - self._axis.index
        for place, other in enumerate(told):
            differing = [name for name in {**told[0], **other} if told[0].get(name) != other.get(name)]
            if differing:
                raise ConfigError(
                    f"ranks {first} and {first + place} compute the same layers together "
                    f"(tensor_parallel.autotp_size {self._axis.size}), and were given different inputs "
                    f"in forward {self._num_forwards}: {differing[0]} differs; give both the same samples: "
                    f"of {self._axis.size} ranks that are neighbours all load the same, as "
                    "engine.deepspeed_io() does, or a sampler with "
                    "num_replicas=engine.dp_world_size and rank=engine.get_data_parallel_rank()"
                )

    def successor(self, param: Any) -> Any:
        """Return what a parameter of before has become; anything else as it is."""
        return self._division.successors.get(id(param), param)

    def renew_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer that was made before have the parameters that there are now."""
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                group["params"] = [self.successor(param) for param in group["params"]]
        return optimizer

    def renew_parameters(self, given: Any) -> Any:
        """Return model_parameters with the parameters that there are now."""
        return None if given is None else list(self._renewed(given))

    def _renewed(self, given: Iterable[Any]) -> Iterator[Any]:
        for item in given:
            if isinstance(item, Mapping):
                listed = item["params"]
                params = [listed] if isinstance(listed, Tensor) else listed
                yield {**item, "params": list(self._renewed(params))}
            elif isinstance(item, tuple):
                name, param = item
                yield name, self.successor(param)
            else:
                yield self.successor(item)


def check_optimizer(optimizer: object) -> None:
    """See that an optimizer knows nothing of parameters that are about to be divided.

    Errors: ConfigError if it has taken steps
    """
    states = optimizer.state.values() if isinstance(optimizer, torch.optim.Optimizer) else ()
    if any(state.get("step", 1) for state in states if state):  # Adagrad's states begin with a 0
        raise ConfigError(
            f"the {type(optimizer).__name__} given to initialize() has taken steps with whole parameters, "
            "which tensor_parallel divides over ranks; give one without states, and load a checkpoint "
            "after initialize()"
        )


def earlier_division(module: nn.Module) -> DividedModel | None:
    """Return what a call of divide() before has made of this model, None for one that it has not divided.

    Errors: ConfigError for a copy of a divided model, or for two of them in one
    """
    found: DividedModel | None = None
    for name, one in module.named_modules():
        for hook in one._state_dict_pre_hooks.values():
            if not isinstance(hook, _RefuseParts) or not any(hook.parts_of(one)):
                continue
            if not hook.divided.has(one) or found not in (None, hook.divided):
                raise ConfigError(
                    f"module '{name}' has this rank's parts of parameters: it is a copy of a layer that "
                    "initialize() has divided over ranks, or of another model than the others; give the "
                    "model itself, or a copy that was made before initialize(), or inside of "
                    "dslaunch.zero.GatheredParameters(model.parameters()), where parameters are whole"
                )
            found = hook.divided
    return found


class _RefuseParts:
    """A hook of state_dict() of one module: a file with one rank's parts is of no use, and says so only when
    it is loaded.
    """

    def __init__(self, divided: DividedModel, cuts: Mapping[str, Cut]) -> None:
        self.divided, self._cuts = divided, cuts

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseParts:
        """A copy of a module has parts, too."""
        return self

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # the caller wants the parameters themselves
            return
        for name, param, cut in self.parts_of(module):
            raise ConfigError(
                f"state_dict() of the module would hold this rank's part of parameter '{prefix}{name}', "
                f"{tuple(param.shape)} of {cut.shape}, which is divided over ranks; call on all ranks "
                "engine.state_dict(), save_16bit_model() or save_checkpoint(), which have whole "
                "tensors"
            )

    def parts_of(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Cut]]:
        """Return the parameters of a module that are no whole tensors now."""
        for name, cut in self._cuts.items():
            param = dict(module._parameters).get(name)
            if param is not None and tuple(param.shape) != cut.shape:
                yield name, param, cut


def _digest(value: Tensor) -> tuple[tuple[int, ...], int]:
    whole = value.detach().cpu().contiguous()
    return tuple(whole.shape), crc32(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
